"""Ablations of ordinary life: proof that the runs of ``ordinary`` detect faults.

They work like those of ``ablations``; ``hunt`` runs seeds until one catches the ablation. Those of the first part
restore former behaviour of psdist.
"""

from __future__ import annotations

from typing import Any

from psdist import ASP, BSP
from psdist.client import participation
from psdist.client.session import barriers, worker_alignment
from psdist.client.session.waits import Activities
from psdist.errors import WaitTimeoutError
from psdist.optim import SGD
from psdist_scheduler.decide import parameter_sets, run_end, waits
from psdist_scheduler.decide.cluster_state import ClusterSettings
from psdist_scheduler.decide.effects import Effect
from psdist_scheduler.decide.shard_placement import ReplicaManager
from psdist_scheduler.decide.snapshot_schedule import EndSnapshot, EndState
from psdist_scheduler.decide.snapshots import Snapshots
from tests.simulation import ordinary
from tests.simulation.ablations import Ablation, Put, noted_in, search
from tests.simulation.scripts import Handler

#: Number of seeds within which an ablation must be caught.
SEEDS = 300

ABLATIONS: dict[str, Ablation] = {}
_ablation = noted_in(ABLATIONS)


def hunt(name: str, seeds: int = SEEDS) -> tuple[int, str]:
    """See ``ablations.search``."""
    return search(ABLATIONS[name], ordinary, seeds)


_PEACE: dict[str, Any] = {"faults": (), "fault_count": 0, "storage_faults": 0.0, "busy_leases": 0.8, "lives": 40}
_BUSY: dict[str, Any] = {**_PEACE, "busy": 0.5, "workers": 2, "stops": (), "ends": 0}
_FROZEN: dict[str, Any] = {**_BUSY, "frozen": True, "cut": 0.0, "lease_seconds": 3.0, "worker_lease_seconds": 9.0}
_STOPS: dict[str, Any] = {
    **_PEACE, "workers": 3, "stops": ("all", "all"), "ends": 2, "stop_seconds": 1.0, "consistency": BSP(), "steps": 8,
    "think_seconds": 0.2, "barrier_every": 0, "worker_lease_seconds": 8.0,
}  # fmt: skip
_BARRIERS: dict[str, Any] = {**_PEACE, "workers": 2, "barrier_every": 1, "limited": 1.0, "steps": 8}
_EXPELLED: dict[str, Any] = {
    "busy": 0.5, "busy_leases": 1.6, "worker_lease_seconds": 3.0, "steps": 8, "cut": 0.05,
    "lives": 40, "workers": 3}  # fmt: skip
_ASP: dict[str, Any] = {"consistency": ASP(), "optimizer": SGD(lr=1.0)}


# --- busy workers -----------------------------------------------------------------------------------------------------


@_ablation("workers have a lease of their own", **_FROZEN)
def _one_lease(put: Put) -> None:
    put(ClusterSettings, "lease_of", lambda self, role: self.lease_seconds)


@_ablation("a push continues in the next incarnation", **_ASP, **_EXPELLED)
def _never_resumed(put: Put) -> None:
    put(participation.Participation, "_resume_push", lambda self, mine: None)


@_ablation("servers keep the duplicate tables of workers that were lost", **_ASP, **_EXPELLED)
def _nobody_departed(put: Put) -> None:
    put(parameter_sets.ParameterSet, "departed", lambda self, members: ())


# --- barriers ---------------------------------------------------------------------------------------------------------


@_ablation("an arrival that is withdrawn does not count", **_BARRIERS)
def _still_there(put: Put) -> None:
    async def give_up(self: Any, sentence: str) -> None:
        raise WaitTimeoutError(sentence)

    put(barriers.Barrier, "_give_up", give_up)
    put(waits.Barriers, "end_call", lambda self, call: None)


@_ablation("a barrier that was opened meanwhile lets its late worker pass", **_BARRIERS)
def _nobody_passed(put: Put) -> None:
    put(waits.Barriers, "_has_passed", lambda self, event, worker: False)


# --- the end of a run -------------------------------------------------------------------------------------------------


@_ablation("workers that end together agree on a step", **_STOPS)
def _each_for_itself(put: Put) -> None:
    step = run_end.CoordinatedShutdown._step

    def alone(self: Any, now: float) -> list[Any]:
        if self.phase in ("collecting", "asking") and self._stopping:
            self._enter(now, "idle")
            return self._let_leave({})
        return step(self, now)

    put(run_end.CoordinatedShutdown, "_step", alone)


@_ablation("no push is begun before the last cut", **{**_STOPS, "think_seconds": 0.005, "delay": (0.001, 0.03)})
def _not_held(put: Put) -> None:
    async def at_once(self: Any) -> None:
        """Let every push begin immediately."""

    put(worker_alignment.WorkerShutdown, "until_allowed", at_once)


@_ablation("what follows upon the last snapshot is not saved", **_STOPS)
def _not_final(put: Put) -> None:
    put(EndSnapshot, "on_attempt_ended", lambda self, attempt, commit: self.forget())


@_ablation("a busy worker says that it is to end, too", **{**_STOPS, "busy": 0.8, "workers": 2, "stop_seconds": 3.0})
def _does_not_look(put: Put) -> None:
    def on_command(self: Any, command: Any) -> None:
        self.is_asked = lambda: False
        told(self, command)

    told = worker_alignment.WorkerShutdown.on_command
    put(worker_alignment.WorkerShutdown, "on_command", on_command)


@_ablation("a script that loses its exit is notified again", **{**_STOPS, "lost_exits": 1.0})
def _told_once(put: Put) -> None:
    check = Handler.check

    def once(self: Any, *, reading: bool = False) -> None:
        if not self.raised:
            check(self, reading=reading)

    put(Handler, "check", once)
    put(Handler, "_signal_again", lambda self: None)


@_ablation("the last snapshot has pushes that servers have not told of", **{**_STOPS, **_ASP, "saves": 0.5})
def _as_told(put: Put) -> None:
    def save(self: Any, steps: dict[str, int]) -> Any:
        effects = for_the_end(self, steps)
        newest, wanted = self.catalog.newest, self.end_snapshot.state is EndState.WANTED
        if newest is not None and wanted and not self.schedule.has_trained(self.ready, newest.commit.steps):
            self.end_snapshot.set_taken(newest.commit)
        return effects

    for_the_end = Snapshots.save_for_the_end
    put(Snapshots, "save_for_the_end", save)


# --- deadlocks of workers ---------------------------------------------------------------------------------------------

_CIRCLES: dict[str, Any] = {
    **_EXPELLED, "consistency": BSP(), "own_loop": True, "end_barrier": True, "limited": 0.0,
    "stops": (), "ends": 0, "fault_count": 0,
}  # fmt: skip


@_ablation("workers that wait for each other are found", **_CIRCLES)
def _never_found(put: Put) -> None:
    put(waits, "_find_circle", lambda awaited: [])


@_ablation("a worker waits for others once its own push is sent", **{**_STOPS, "busy": 0.5})
def _before_it_is_sent(put: Put) -> None:
    def waits(self: Any, *, limited: bool, sent: Any = None, **what: Any) -> Any:
        return all_waits(self, limited=limited, **what)

    all_waits = Activities.waits
    put(Activities, "waits", waits)


@_ablation(
    "shards are moved from a server that ends when nothing else changes",
    **{**_STOPS, "drains": True, "servers": 2, "replicas": 1},
)
def _drains_unplanned(put: Put) -> None:
    known = ReplicaManager.plan

    def plan(self: ReplicaManager, epoch: int, now: float) -> list[Effect]:
        self._leaving = frozenset(server.replica for server in self._members.servers if server.draining)
        return known(self, epoch, now)

    put(ReplicaManager, "plan", plan)
