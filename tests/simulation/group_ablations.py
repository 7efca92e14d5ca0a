"""Ablations of groups: proof that the runs of ``groups`` detect faults."""

from __future__ import annotations

from typing import Any

import numpy as np

from psdist.collectives import mesh as meshes
from psdist.collectives.core import machine as machines
from psdist.collectives.core.machine import GroupMachine
from psdist.collectives.elastic import ElasticSteps
from psdist.collectives.frames import make_key
from psdist.collectives.mesh import Mesh
from psdist.errors import ClosedError, PsdistError
from psdist_scheduler.decide import formations
from psdist_scheduler.decide.formations import GroupFormations
from tests.simulation import groups
from tests.simulation.ablations import Ablation, Put, noted_in, search
from tests.simulation.group_options import END, TELLING

#: Number of seeds within which an ablation must be caught.
SEEDS = 300

ABLATIONS: dict[str, Ablation] = {}
_ablation = noted_in(ABLATIONS)

_KILLS: dict[str, Any] = {"faults": ("kill and start again",), "fault_count": 5, "think_seconds": 0.0}
_LIMITS: dict[str, Any] = {
    "faults": ("give up", "time limit"), "fault_count": 5, "think_seconds": 0.0, "steps": False,
}  # fmt: skip


def hunt(name: str, seeds: int = SEEDS) -> tuple[int, str]:
    """See ``ablations.search``."""
    return search(ABLATIONS[name], groups, seeds)


@_ablation("messages carry the epoch of their group", **_LIMITS)
def _no_epoch(put: Put) -> None:
    put(meshes, "make_key", lambda name, epoch, members: make_key(name, 1, members))


@_ablation("memory of failed calls is neither sent nor written to", **_LIMITS)
def _memory_is_used(put: Put) -> None:
    put(Mesh, "drop", lambda self, group: None)


@_ablation("a link that a failed call has closed is no loss of its rank", **_LIMITS)
def _link_is_rank(put: Put) -> None:
    def link_ended(self: Any, sender: Any, used: Any, reason: str) -> None:
        self._incoming.pop(sender, None)
        for key in used:
            if (group := self._groups.get(key)) is not None:
                group.on_lost(sender, reason)

    put(Mesh, "link_ended", link_ended)


@_ablation("members compare their steps after a loss", **_KILLS, steps=True)
def _steps_differ(put: Put) -> None:
    async def compare(self: Any, group: Any, results: Any) -> bool:
        if self._is_new:
            return bool(await known(self, group, results))
        await group.all_gather(np.array([self.step, self.step, bool(len(results)), False]))
        return False

    known = ElasticSteps._compare
    put(ElasticSteps, "_compare", compare)


@_ablation("a member that has completed a step gives its mean to the others", **_KILLS, steps=True)
def _mean_is_own(put: Put) -> None:
    async def receive(self: Any, group: Any, source: int, results: Any) -> None:
        given = results[0].copy()
        await known(self, group, source, results)
        results[0][...] = np.eye(1, len(given), group.rank)[0]  # The mean of this worker alone.

    known = ElasticSteps._receive_results
    put(ElasticSteps, "_receive_results", receive)


@_ablation("a worker that was left out takes the others' state", faults=("freeze",), fault_count=3, steps=True)
def _state_is_kept(put: Put) -> None:
    async def receive(self: Any, group: Any, source: int) -> None:
        has_begun, before = self.step > 0, await self._state.export()
        await known(self, group, source)
        if has_begun:
            await self._state.load(before)

    known = ElasticSteps._receive_state
    put(ElasticSteps, "_receive_state", receive)


@_ablation("calls are compared", faults=("other call",), fault_count=5, think_seconds=0.0, steps=False)
def _not_compared(put: Put) -> None:
    put(machines, "mismatch", lambda *_: None)


@_ablation("all ranks learn of a failure", **_LIMITS)
def _failure_is_kept(put: Put) -> None:
    put(GroupMachine, "_fail", lambda self, error: self._end(error))


@_ablation(
    "an end that a rank learns from another is passed on",
    faults=(TELLING,), fault_count=5, think_seconds=0.2, steps=False, workers=4, delay=(0.0005, 0.005),
)  # fmt: skip
def _end_is_kept(put: Put) -> None:
    def on_peer_failure(self: GroupMachine, peer: int, error: PsdistError, completed: int) -> Any:
        if not isinstance(error, ClosedError) and self.broken is None:
            self.lost.setdefault(peer, error)
            return self.on_failure(error)
        return known(self, peer, error, completed)

    known = GroupMachine.on_peer_failure
    put(GroupMachine, "on_peer_failure", on_peer_failure)


@_ablation("a successor waits for all live members", **_KILLS)
def _nobody_is_awaited(put: Put) -> None:
    put(GroupFormations, "_missing", lambda _1, _2, _3, former, _5: "" if former else "for somebody")


@_ablation(
    "another scheduler leaves out no live members of groups that it does not know",
    faults=("cut host off", "restart scheduler"), fault_count=8, fault_seconds=3.0, think_seconds=0.0, workers=2,
    size_min=1,
)  # fmt: skip
def _adopted_is_known(put: Put) -> None:
    put(formations._Formation, "is_adopted", property(lambda self: False, lambda self, value: None))


@_ablation("too few members take in new workers", **_KILLS | {"think_seconds": 0.01}, steps=True, workers=2, size_min=2)
def _few_stay_alone(put: Put) -> None:
    put(formations, "_takes_in", lambda former, needed: all(asking.event.admits for asking in former))


@_ablation("workers do not wait for others that have ended", faults=(END, "kill and start again"), fault_count=5)
def _ended_are_awaited(put: Put) -> None:
    put(GroupFormations, "_never_forms", lambda *_: None)
