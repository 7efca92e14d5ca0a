"""Ablations of runs that lose their record or their snapshots: proof that ``lost_runs`` detects faults.

They work like those of ``ablations``; ``hunt`` runs seeds until one catches the ablation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from psdist import BSP
from psdist.snapshots import reader
from psdist_scheduler import app, snapshot_io
from psdist_scheduler.decide import cluster, rollback
from psdist_scheduler.decide.member_admission import Lineage
from psdist_scheduler.decide.snapshot_catalog import Catalog
from psdist_scheduler.run_store import SqliteStore
from tests.simulation import lost_runs
from tests.simulation.ablations import Ablation, Put, noted_in, search

#: Number of seeds within which an ablation must be caught.
SEEDS = 100

ABLATIONS: dict[str, Ablation] = {}
_ablation = noted_in(ABLATIONS)


def hunt(name: str, seeds: int = SEEDS) -> tuple[int, str]:
    """See ``ablations.search``."""
    return search(ABLATIONS[name], lost_runs, seeds)


_QUIET: dict[str, Any] = {"faults": (), "fault_count": 0, "storage_faults": 0.0, "steps": 20, "lives": 40}
_STORE: dict[str, Any] = {
    **_QUIET, "lost": "store lost", "storage": False, "save_steps": 0, "save_seconds": 0.0, "saves": 0.0,
}  # fmt: skip
_SAVING: dict[str, Any] = {
    **_QUIET, "storage": True, "consistency": BSP(), "save_steps": 1, "save_seconds": 0.0, "keep_last": 3, "commits": 3,
    "pushes": 0,
}  # fmt: skip
_DAMAGED: dict[str, Any] = {**_SAVING, "lost": "servers lost, snapshots damaged", "how": "flipped shards", "newest": 1}


# --- the record -------------------------------------------------------------------------------------------------------


@_ablation("a member whose map is not on record is refused", **_STORE)
def _stranger_is_taken(put: Put) -> None:
    put(cluster.Cluster, "_check_lineage", lambda self, event: None)


@_ablation(
    "a member of a lost record is refused by a run that resumed", **{**_SAVING, "lost": "store lost", "commits": 1},
)  # fmt: skip
def _stranger_is_taken_back(put: Put) -> None:
    put(cluster.Cluster, "_check_lineage", lambda self, event: None)


@_ablation("an older store is recognized by its last epoch", **{**_STORE, "lost": "older store"})
def _known_is_enough(put: Put) -> None:
    missing = Lineage.missing

    def lenient(self: Any, event: Any, epoch: int) -> str:
        return "" if self.knows(event.scheduler_id) else missing(self, event, epoch)

    put(Lineage, "missing", lenient)


@_ablation("a new store remembers that the run was lost", **_STORE)
def _forgetful(put: Put) -> None:
    load = SqliteStore.load

    def load_run(self: Any) -> Any:
        stored = load(self)
        return replace(stored, run_lost="") if stored is not None else None

    put(SqliteStore, "load", load_run)


@_ablation("a scheduler that ends tells the members first", **_STORE)
def _ends_at_once(put: Put) -> None:
    put(app, "_FAREWELL_SECONDS", 0.0)


# --- the snapshots ----------------------------------------------------------------------------------------------------


@_ablation("a snapshot that cannot be loaded is given up for the one before", **_DAMAGED)
def _ends_with_the_newest(put: Put) -> None:
    def on_load_failed(self: Any, event: Any) -> Any:
        return self._fail({event.restore.directory: event.text})

    put(rollback.Rollback, "on_load_failed", on_load_failed)


@_ablation("a snapshot that cannot be loaded is not tried again", **_DAMAGED)
def _tried_for_ever(put: Put) -> None:
    give_up = Catalog.give_up

    def search_again(self: Any, directory: str, why: str) -> Any:
        give_up(self, directory, why)
        self.bad.clear()
        return self._read()

    put(Catalog, "give_up", search_again)


@_ablation("slices are compared with their digests", **_DAMAGED)
def _trusting(put: Put) -> None:
    put(reader.SliceReader, "_check", lambda *_: None)


@_ablation(
    "a run that is left without a readable snapshot ends",
    **{**_DAMAGED, "lost": "started again with its store, snapshots damaged", "how": "missing shards", "newest": 99},
)  # fmt: skip
def _nothing_was_skipped(put: Put) -> None:
    def on_read(self: Any, history: Any) -> None:
        read(self, history)
        self.unreadable = {}

    read = Catalog.on_read
    put(Catalog, "on_read", on_read)


@_ablation(
    "a run does not begin beside snapshots that cannot be read",
    **{**_DAMAGED, "lost": "started again, snapshots damaged", "how": "flipped manifest", "newest": 99},
)  # fmt: skip
def _begins_beside(put: Put) -> None:
    put(snapshot_io, "check_readable", lambda history, url: None)
