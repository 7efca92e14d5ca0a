"""The launcher's view of a run's snapshots: whether a directory has some, and whether a run can resume from them.

Read as plain JSON, because the launcher imports neither numpy nor a client of buckets. A directory that cannot be read
counts as one that a run can resume from: the scheduler reports what is wrong with it.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


def has_commits(storage: str) -> bool:
    """Return True if the storage is a directory with snapshots. A bucket is not checked: the launcher has no client for
    it."""
    with contextlib.suppress(OSError):
        return storage != "" and "://" not in storage and any(Path(storage, "commits").iterdir())
    return False


def holds_weights(storage: str) -> bool:
    """Return False if the newest snapshot has only averages and shared values, and no weights that servers trained.

    So it is for scripts whose weights are their own: ``psdist.torch.DistributedDataParallel``, ``psdist.jax.average``.
    """
    try:
        newest = max(Path(storage, "commits").iterdir())
        directory = json.loads(newest.read_bytes())["directory"]
        manifest = json.loads(Path(storage, "snapshots", directory, "manifest.json").read_bytes())
        return any(map(_is_trained, manifest["parameters"]))
    except (OSError, ValueError, LookupError, TypeError):
        return True


def _is_trained(parameters: Any) -> bool:
    optimizer = parameters["spec"]["optimizer"]
    rates = [optimizer["values"]["lr"], *(item["values"].get("lr", 0.0) for item in optimizer["overrides"])]
    return optimizer["kind"] != "mean" and any(rates)


def how_to_resume(storage: str, run_id: str) -> str:
    """Return the last line of an interrupted run's launcher: the use of its snapshots."""
    if holds_weights(storage):
        return f"snapshots are in {storage}; to resume: psdist run --run-id {run_id}, with the same arguments"
    return (
        f"the snapshots in {storage} have no weights, because this script keeps its own (DistributedDataParallel, "
        "psdist.jax.average): to resume, start it again from its own checkpoint"
    )
