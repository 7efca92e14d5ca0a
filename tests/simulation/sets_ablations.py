"""Ablations of runs with several parameter sets: proof that ``sets`` detects faults.

They work like those of ``ablations``; ``hunt`` runs seeds until one catches the ablation. Those of the second part
restore former defects of psdist.
"""

from __future__ import annotations

from typing import Any

from psdist.client.core.program_order import ProgramOrder
from psdist.client.session.worker_alignment import WorkerAlignment
from psdist_scheduler.decide.alignment import Alignment
from psdist_scheduler.decide.joins import Joins
from psdist_scheduler.decide.run_end import CoordinatedShutdown
from psdist_scheduler.decide.snapshot_schedule import SnapshotSchedule
from tests.simulation import sets
from tests.simulation.ablations import Ablation, Put, noted_in, search

#: Number of seeds within which an ablation must be caught.
SEEDS = 300

ABLATIONS: dict[str, Ablation] = {}
_ablation = noted_in(ABLATIONS)


def hunt(name: str, seeds: int = SEEDS) -> tuple[int, str]:
    """See ``ablations.search``."""
    return search(ABLATIONS[name], sets, seeds)


_PEACE: dict[str, Any] = {"faults": (), "fault_count": 0, "storage_faults": 0.0, "busy_leases": 0.8, "lives": 40}
_STOPS: dict[str, Any] = {
    **_PEACE, "workers": 2, "stops": ("all",), "ends": 1, "declares": True, "saves": 0.0, "worker_lease_seconds": 8.0,
}  # fmt: skip
_SAVES: dict[str, Any] = {**_PEACE, "stops": (), "ends": 0, "declares": True, "saves": 0.0, "steps": 8}
_KILLS: dict[str, Any] = {
    "faults": ("kill worker",), "fault_count": 3, "lives": 40, "workers": 3, "declares": True, "steps": 8,
    "storage_faults": 0.0, "saves": 0.0, "busy_leases": 0.8,
}  # fmt: skip
_EXPELLED: dict[str, Any] = {
    **_KILLS, "faults": (), "fault_count": 0, "busy": 0.5, "busy_leases": 1.6, "worker_lease_seconds": 3.0,
}  # fmt: skip
_SILENT: dict[str, Any] = {**_PEACE, **sets.SILENCES, "workers": 3}


# --- points at which workers are held ---------------------------------------------------------------------------------


@_ablation("workers that end are held where an iteration starts", **_STOPS)
def _each_set_by_itself(put: Put) -> None:
    put(CoordinatedShutdown, "_is_aligning", property(lambda self: False))


@_ablation("periodic snapshots are cut where an iteration starts", **_SAVES, save_steps=0, save_seconds=0.3)
def _cut_anywhere(put: Put) -> None:
    put(SnapshotSchedule, "align", lambda self, due, waiters, alignment: due)


@_ablation("all sets are joined together", **_KILLS)
def _joined_one_by_one(put: Put) -> None:
    join = Joins.join

    def alone(self: Any, p: Any, call: int, worker: Any) -> Any:
        alignment, self.alignment = self.alignment, _Nobody()
        try:
            return join(self, p, call, worker)
        finally:
            self.alignment = alignment

    put(Joins, "join", alone)


class _Nobody:
    """Stand-in for an alignment that never applies."""

    applies = False
    names = ()
    is_opened = True


@_ablation("workers run up to the chosen start before they are held", **_KILLS)
def _held_where_they_are(put: Put) -> None:
    put(Alignment, "_choose", lambda self: min(report.position for report in self._reports.values()))


@_ablation("the rest of an iteration that lost a push is skipped", **_EXPELLED)
def _never_skipped(put: Put) -> None:
    put(ProgramOrder, "drops_next", lambda self, name: False)


@_ablation("workers that return to empty sets join all of them together", **_SILENT)
def _returned_one_by_one(put: Put) -> None:
    def is_joined_together(self: Any, p: Any, call: int, worker: Any) -> bool:
        return self.alignment.applies and p.name in self.alignment.names

    put(Joins, "_is_joined_together", is_joined_together)


# --- defects that these runs have found -------------------------------------------------------------------------------


@_ablation("a start is reported also where its position was reported before", **_SAVES, save_steps=0, save_seconds=0.3)
def _position_only(put: Put) -> None:
    def report(self: Any) -> None:
        if self.order.position != self._reported[0]:
            self._report()

    put(WorkerAlignment, "_report_progress", report)


@_ablation("a worker that rejoins within an iteration skips its rest", **_EXPELLED, pulls=0.5)
def _place_kept(put: Put) -> None:
    put(ProgramOrder, "lose_place", lambda self: None)


@_ablation("no start is reported before all sets have entered", **_EXPELLED)
def _too_early(put: Put) -> None:
    standing: Any = vars(ProgramOrder)["standing"].fget

    def early(self: Any) -> Any:
        names, self._names = self._names, frozenset(self.sequences)
        try:
            return standing(self)
        finally:
            self._names = names

    put(ProgramOrder, "standing", property(early))
