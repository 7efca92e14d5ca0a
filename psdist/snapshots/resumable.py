"""The launcher's view of a run's snapshots: checks for any in a directory, and for one with weights to resume from.

It reads plain JSON, because the launcher imports neither numpy nor an object-store client. A run counts as resumable if
its snapshots cannot be read: then the scheduler reports the problem.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


def has_commits(storage: str) -> bool:
    """Return True if the storage is a directory with snapshots. Buckets count as empty: the launcher cannot list
    them."""
    with contextlib.suppress(OSError):
        return storage != "" and "://" not in storage and any(Path(storage, "commits").iterdir())
    return False


def holds_weights(storage: str) -> bool:
    """Return False if the newest snapshot has only averages and shared values, but no weights that servers trained.

    Scripts that keep their own weights have such snapshots: those with ``psdist.torch.DistributedDataParallel`` or
    ``psdist.jax.average``.
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
    """Return the launcher's last line about an interrupted run: how to resume it."""
    if holds_weights(storage):
        return f"snapshots are in {storage}; to resume: psdist run --run-id {run_id}, with the same arguments"
    return (
        f"the snapshots in {storage} have no weights, because this script keeps its own (DistributedDataParallel, "
        "psdist.jax.average): to resume, start it again from its own checkpoint"
    )
