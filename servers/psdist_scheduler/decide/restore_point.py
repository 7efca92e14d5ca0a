"""Starting point of the run's parameter sets: nothing, or the snapshot that the run resumed from or rolled back to.
Pure.

A parameter set that is in the snapshot takes its slicing, step and values from there. No worker uploads any: each
server loads the shards whose primary it is, and reports them. The other settings are the workers', and
``notice`` names what differs from the snapshot. A parameter set with another name starts afresh, which ``notice``
reports as well.

With ``reset_optimizer`` the optimizer's state starts afresh too, once per run. Rolling back to a snapshot that the run
took itself resets nothing again. Snapshots that the run did not take itself have epochs before ``RestorePoint.began``.
Those that it took record in their settings whether a reset was requested.

Invariants: A parameter set is refused if it has other tensors, or settings that the values in the snapshot do not
allow. One with another name is refused before any set of the snapshot was requested. A shard counts as loaded only
after the primary of its current term has reported it.

Placing is done by ``parameter_sets``; ``snapshot_schedule`` decides when snapshots are taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from psdist.changes import changes
from psdist.consistency import BSP
from psdist.errors import LayoutMismatchError, PsdistError, SettingsMismatchError, StorageError
from psdist.snapshots.format import DatasetState, ParametersState
from psdist.types import DatasetSpec, Layout, ParametersEntry, ParametersSpec, Restore
from psdist_scheduler.decide.cluster_state import RestorePoint, group, name_some
from psdist_scheduler.decide.snapshot_events import CommitFound, Loaded

#: Longest wait in seconds, after a rollback, for as many servers as there were.
SERVERS_GRACE_SECONDS: Final = 10.0
#: Longest wait in seconds, after a rollback, for the workers that the run needs. Nobody knows whether a missing worker
#: had finished, and the present ones would have continued without it.
WORKERS_GRACE_SECONDS: Final = 60.0
_REMEDY: Final = "pass the saved settings, or start afresh under another --run-id or with another --storage-path"


class Resume:
    """The snapshot that this run starts from, and its loading.

    since: time of the rollback; None if the run did not roll back.
    found: the snapshot, once it is known.
    """

    def __init__(self, base: RestorePoint, since: float | None = None) -> None:
        self.base = base
        self.since = since
        self.found: CommitFound | None = None
        self._known = False
        #: True if it changed since ``take_change``.
        self.changed = False
        #: Why the run cannot continue, neither from here nor from a snapshot; None while it can.
        self.failed: PsdistError | None = None
        self._loaded: dict[str, dict[tuple[int, int], None]] = {}

    @property
    def unread(self) -> bool:
        """True if the run starts from a snapshot that was not read yet."""
        return self.base.restore is not None and not self._known

    def state(self, name: str) -> ParametersState | None:
        """Return the snapshot's state of this parameter set."""
        return self.found.manifest.state(name) if self.found is not None else None

    @property
    def incarnations(self) -> int:
        """Highest incarnation of a worker in the snapshot; 0 for none."""
        states = self.found.manifest.parameters if self.found is not None else ()
        return max((incarnation for state in states for _, incarnation, _ in state.next), default=0)

    def first_step(self, spec: ParametersSpec) -> int:
        """Return the first step of the members of a loaded parameter set."""
        state = self.state(spec.name)
        return state.step if state is not None and isinstance(spec.consistency, BSP) else 0

    def check(self, spec: ParametersSpec, layout: Layout, others: Iterable[str]) -> None:
        """Raise SettingsMismatchError or LayoutMismatchError if these settings cannot use the values of the snapshot.

        others: names of the parameter sets that were requested before.
        """
        state = self.state(spec.name)
        if self.found is None:
            return
        if state is None:
            if self.since is None and not any(self.state(name) for name in others):
                raise self._foreign(spec.name)
            return
        whose = f"{spec.name!r} as snapshot {self.found.commit.directory} has it"
        if state.layout != layout:
            difference = state.layout.difference(layout)
            raise LayoutMismatchError(f"layout differs from {whose}: {difference}; {_REMEDY}")
        if difference := _slicing_difference(state, spec):
            raise SettingsMismatchError(f"settings differ from {whose}: {difference}; {_REMEDY}")
        needing = [f"{change}" for change in changes(state.spec, spec) if change.needs_reset]
        if needing and not spec.reset_optimizer:
            raise SettingsMismatchError(
                f"settings differ from {whose}: {'; '.join(needing)}. The optimizer's state there is of no use with "
                "that: pass reset_optimizer=True to client.parameters(), or to DistributedOptimizer or offload of "
                "psdist.torch, on every worker, which resets the optimizer's state and keeps the snapshot's weights; "
                f"or {_REMEDY}"
            )

    def _foreign(self, name: str) -> SettingsMismatchError:
        """Return the error for a script that seems to be another than the one that took the snapshot.

        At its end nothing could be saved, because a snapshot contains all parameter sets of the one before.
        """
        assert self.found is not None
        there = name_some([repr(state.spec.name) for state in self.found.manifest.parameters])
        return SettingsMismatchError(
            f"the run resumes from snapshot {self.found.commit.directory}, which has {there} and not {name!r}: is this "
            "another script? Start it under another --run-id or with another --storage-path. A parameter set resumes "
            "under the name that it was saved by, and one that is new in this run is created after those of the "
            "snapshot"
        )

    def resets(self, spec: ParametersSpec) -> bool:
        """True if the optimizer's state is reset. Snapshots taken by this run were reset before, if that was
        requested."""
        state = self.state(spec.name)
        if state is None or self.found is None or not spec.reset_optimizer:
            return False
        is_done = self.found.manifest.epoch >= self.base.began and state.spec.reset_optimizer
        return not is_done or any(change.needs_reset for change in changes(state.spec, spec))

    def notice(self, entry: ParametersEntry) -> str:
        """Return what users should know about a parameter set in a resumed run; empty for nothing.

        This covers a name that is not in the snapshot, changed settings with their old and new values, and a reset of
        the optimizer's state.
        """
        state, restore = self.state(entry.spec.name), entry.restore
        if state is None and self.found is not None:
            there = name_some([repr(state.spec.name) for state in self.found.manifest.parameters])
            return (
                f"{entry.spec.name!r} is not in snapshot {self.found.commit.directory}, from which the run resumes, "
                f"and starts from the values that the script gives. The snapshot has {there}: a parameter set "
                "resumes under the name that it was saved by"
            )
        if state is None or restore is None:
            return ""
        others = "; ".join(f"{change}" for change in changes(state.spec, entry.spec))
        settings = f" with other settings: {others}" if others else ""
        reset = ", and the optimizer's state is reset (reset_optimizer=True)" if restore.weights_only else ""
        return (
            f"{entry.spec.name!r} resumes from snapshot {restore.directory}{settings}{reset}" if others or reset else ""
        )

    @property
    def datasets(self) -> tuple[DatasetState, ...]:
        """Positions of data sets in the snapshot."""
        return self.found.manifest.datasets if self.found is not None else ()

    def dataset(self, spec: DatasetSpec) -> DatasetState | None:
        """Return the saved state of a data set that is opened now. Raises SettingsMismatchError, and StorageError while
        the snapshot is not known."""
        if self.unread:
            raise StorageError(
                "the storage with the snapshot that the run starts from has not been read yet: try again"
            )
        state = next((state for state in self.datasets if state.spec.name == spec.name), None)
        if state is not None and self.found is not None and (difference := state.spec.difference(spec)):
            whose = f"as snapshot {self.found.commit.directory} has it"
            raise SettingsMismatchError(f"data set {spec.name!r} {whose} has other settings: {difference}; {_REMEDY}")
        return state

    def missing(self, entry: ParametersEntry) -> dict[str, list[int]]:
        """Return the shards that are not loaded, by the server that is to load them."""
        loaded = self._loaded.get(entry.spec.name, {})
        shards = enumerate(entry.shards)
        return group((shard.primary.server_id, n) for n, shard in shards if (n, shard.term) not in loaded)

    def on_loaded(self, event: Loaded, server: str, entry: ParametersEntry) -> bool:
        """Record the shards that a server has loaded. Returns True if all shards are loaded now."""
        if entry.restore is None or event.generation != entry.generation:
            return False
        known = self._loaded.setdefault(entry.spec.name, {})
        for number, term in zip(event.shards, event.terms, strict=False):
            shard = entry.shards[number] if 0 <= number < len(entry.shards) else None
            if shard is not None and shard.primary.server_id == server and shard.term == term and not shard.lost:
                known[number, term] = None
        return not self.missing(entry)

    def go_to(self, found: CommitFound, term: int, epoch: int, now: float | None) -> None:
        """Start all parameter sets from this snapshot.

        term: highest term that a shard had.
        epoch: the epoch that shows it.
        now: None if the run has not begun.
        """
        restore = Restore(found.commit.directory, bytes.fromhex(found.commit.manifest_digest))
        generation, began = self.base.generation + (now is not None), epoch if now is None else self.base.began
        self.base = RestorePoint(restore, generation, max(term + 1, self.base.term), epoch, began)
        self.found, self.since, self.changed, self._known = found, now, True, True
        self._loaded.clear()

    def fail(self, error: PsdistError) -> None:
        """End the run with this error at every member. The first error counts."""
        self.failed = self.failed or error

    def take_change(self) -> RestorePoint | None:
        """Return the base if it changed since the previous call."""
        changed, self.changed = self.changed, False
        return self.base if changed else None

    def is_of_this_course(self, found: CommitFound) -> bool:
        """True if this snapshot belongs to the run's current history, which did not give it up."""
        restore, commit = self.base.restore, found.commit
        return restore is None or commit.directory == restore.directory or commit.epoch >= self.base.epoch

    def read(self, found: CommitFound | None) -> None:
        """Record that the storage was read. found: the base's snapshot, or None if it no longer exists."""
        if self.unread:
            self.found, self._known = found, True


def _slicing_difference(state: ParametersState, spec: ParametersSpec) -> str:
    """Return why the snapshot's slices cannot be those of a parameter set with these settings; empty if they can."""
    saved = state.spec
    if spec.slice_elements not in (0, saved.slice_elements):
        return f"slice_elements is {spec.slice_elements}, not {saved.slice_elements}"
    if isinstance(spec.consistency, BSP) and state.version_min != state.step:
        return (
            f"consistency is {spec.consistency!r}, not {saved.consistency!r}, and slices are at versions "
            f"{state.version_min} to {state.step}, while BSP has all of them at one step"
        )
    return ""
