"""The manifest of an attempt whose files are all written. Pure.

``attempt`` tracks the files; ``snapshot_io`` writes the manifest.
"""

from __future__ import annotations

from psdist.errors import SnapshotFailedError
from psdist.snapshots.format import Manifest, ParametersState
from psdist_scheduler.datasets.datasets import Datasets
from psdist_scheduler.events.cluster_state import ClusterSettings
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement.registry import ParameterSet
from psdist_scheduler.snapshots.attempt import Attempt, next_pushes


def make_manifest(
    attempt: Attempt, settings: ClusterSettings, members: Membership, datasets: Datasets, epoch: int
) -> Manifest:
    """Return the manifest. Raises InvalidArgumentError and SnapshotFailedError if the servers' reports are not a
    consistent snapshot."""
    return Manifest(
        run_id=settings.run_id,
        directory=attempt.directory,
        epoch=epoch,
        time=0.0,
        reason=attempt.due.reason,
        configuration={
            "workers": len(members.workers),
            "servers": len(members.servers),
            "replicas": settings.replicas,
            "policy": settings.policy.text,
        },
        parameters=tuple(_state(attempt, p) for p in attempt.parameters.values()),
        datasets=datasets.states(attempt.bound),
        states=attempt.uploads.files,
    )


def _state(attempt: Attempt, p: ParameterSet) -> ParametersState:
    parts = [attempt.written[p.name, number] for number in range(len(p.entry.shards))]
    names = {part.state_names for part in parts}
    if len(names) > 1:
        raise SnapshotFailedError(f"servers disagree on the optimizer's arrays of {p.name!r}: {sorted(names)}")
    versions = [version for part in parts for version in part.file.versions]
    step = attempt.steps.get(p.name)
    if step is not None and any(version != step for version in versions):
        raise SnapshotFailedError(
            f"slices of {p.name!r} were written at versions {min(versions)} to {max(versions)}, not at the cut's step "
            f"{step}"
        )
    return ParametersState(
        spec=p.entry.spec,
        layout=p.placed.layout,
        reference_workers=p.entry.reference_workers,
        state_names=parts[0].state_names,
        step=max(versions, default=0) if step is None else step,
        next=next_pushes(attempt, p.name, by_origin=False) if step is None else (),
        shards=tuple(part.file for part in parts),
        state_since=p.entry.state_since,
    )
