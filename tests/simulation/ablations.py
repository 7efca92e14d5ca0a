"""Ablations: proof that the simulation detects faults. Each one disables one safeguard of production code.

``ABLATIONS`` lists them. ``hunt`` runs seeds until one catches the ablation, which must happen within ``SEEDS`` seeds.
An ablation sets the options that make its fault likely; all other options are drawn as usual.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from psdist import ASP, BSP, SSP
from psdist.client import participation
from psdist.client.session import membership, worker_session
from psdist.client.transport import creation
from psdist.client.transport.grpc import GrpcTransport
from psdist.client.transport.transport import PushRequest
from psdist.errors import ServerUnreachableError, StaleEpochError, StaleEstimateError, UnknownParametersError
from psdist.monitoring.worker_reports import ChangedCounts
from psdist.optim import SGD
from psdist.types import Shard
from psdist_scheduler import scheduler
from psdist_scheduler.decide import cluster as scheduler_cluster
from psdist_scheduler.decide import losses, shard_placement
from psdist_scheduler.decide.effects import Persist
from psdist_scheduler.decide.losses import DeferredLosses, MemberLosses
from psdist_scheduler.decide.members import Sessions
from psdist_server import server as parameter_server
from psdist_server.core import async_shard, bsp_shard, lags, replication, role_changes, shard
from psdist_server.core.shard import SliceRecord
from psdist_server.store import (
    applier,
    backup_shards,
    gradients,
    parameter_store,
    replicator,
    rpc_call,
    shard_router,
    stream_to_replica,
)
from tests.simulation import scenario
from tests.simulation.environment import running
from tests.simulation.options import CUT_OFF, HELD, Options

#: Number of seeds within which an ablation must be caught.
SEEDS = 400

Put = Callable[[Any, str, Any], None]


@dataclass(frozen=True)
class Ablation:
    """One safeguard, the way to disable it, and the options that provoke its fault."""

    name: str
    apply: Callable[[Put], None]
    focus: Callable[[Options], Options]


ABLATIONS: dict[str, Ablation] = {}


class Noted(Protocol):
    """Decorator factory returned by ``noted_in``."""

    def __call__(self, name: str, **focus: Any) -> Callable[[Callable[[Put], None]], Callable[[Put], None]]:
        """Register an ablation. focus: options of its runs."""


def noted_in(table: dict[str, Ablation]) -> Noted:
    """Return a decorator that registers ablations in ``table``."""

    def ablation(name: str, **focus: Any) -> Callable[[Callable[[Put], None]], Callable[[Put], None]]:
        def note(apply: Callable[[Put], None]) -> Callable[[Put], None]:
            table[name] = Ablation(name, apply, lambda options: replace(options, **focus))
            return apply

        return note

    return ablation


_ablation = noted_in(ABLATIONS)


@contextmanager
def applied(ablation: Ablation) -> Iterator[None]:
    """Disable the safeguard inside the ``with`` block."""
    undo: list[tuple[Any, str, Any, bool]] = []

    def put(owner: Any, attribute: str, value: Any) -> None:
        replaceable = hasattr(owner, attribute) or isinstance(value, property) or hasattr(builtins, attribute)
        assert replaceable, f"{owner} has no {attribute}: the ablation is stale"
        had = attribute in vars(owner)
        undo.append((owner, attribute, vars(owner).get(attribute), had))
        setattr(owner, attribute, value)

    ablation.apply(put)
    try:
        yield
    finally:
        for owner, attribute, value, had in reversed(undo):
            if had:
                setattr(owner, attribute, value)
            else:
                delattr(owner, attribute)


def search(ablation: Ablation, runs: Any, seeds: int) -> tuple[int, str]:
    """Return the number of seeds that it took to catch the ablation (0 if none did), and the violation found.

    runs: the module with ``run`` and ``draw`` of its kind.
    """
    with applied(ablation):
        for seed in range(seeds):
            result = runs.run(seed, ablation.focus(runs.draw(seed)))
            if result.violations:
                return seed + 1, result.violations[0]
    return 0, "not caught"


def hunt(name: str, seeds: int = SEEDS) -> tuple[int, str]:
    """See ``search``."""
    return search(ABLATIONS[name], scenario, seeds)


_CUTS: dict[str, Any] = {"cut": 0.3, "faults": ("break connections",), "fault_count": 5, "fault_seconds": 1.5}
_COPIES: dict[str, Any] = {"replicas": 2, "servers": 3, "workers": 3, "lives": 7}
_LOSSES: dict[str, Any] = {
    **_COPIES, "faults": ("kill server", "freeze server"), "fault_count": 4, "fault_seconds": 4.0,
}  # fmt: skip
_STALE: dict[str, Any] = {
    **_COPIES, "consistency": ASP(), "optimizer": SGD(lr=1.0), "fault_count": 4, "fault_seconds": 4.0,
    "think_seconds": 0.4, "steps": 6, "pulls": 0.5, "lease_seconds": 1.0, "reader": True, "slices": 1,
}  # fmt: skip


# --- exactly once -----------------------------------------------------------------------------------------------------


@_ablation("duplicate table, BSP", consistency=BSP(), workers=2, lives=6, **_CUTS)
def _no_duplicates_bsp(put: Put) -> None:
    pushed = bsp_shard.BspShard._pushed

    def again(self: Any, state: Any, event: Any, producer: Any) -> Any:
        if event.step < state.step:  # A repeat counts in the open step.
            event = replace(event, step=state.step)
        return pushed(self, state, event, producer)

    put(bsp_shard.BspShard, "_pushed", again)


@_ablation("duplicate table, SSP and ASP", consistency=ASP(), optimizer=SGD(lr=1.0), **_CUTS)
def _no_duplicates_async(put: Put) -> None:
    pushed = async_shard.AsyncShard._pushed

    def again(self: Any, state: Any, event: Any, producer: Any) -> Any:
        if event.step < self.producers[producer].sequence:
            state.queue.append(async_shard._Push(event, producer))
            return self._try_apply(state)
        return pushed(self, state, event, producer)

    put(async_shard.AsyncShard, "_pushed", again)


@_ablation("a push keeps its number", **_CUTS)
def _new_number(put: Put) -> None:
    make_header = PushRequest.header

    def header(push: Any, *args: Any) -> Any:
        made = make_header(push, *args)
        push.headers = getattr(push, "headers", 0) + 1
        made.step += push.headers > 4
        return made

    put(PushRequest, "header", header)


@_ablation("every slice is answered before a push returns", **_CUTS)
def _early_return(put: Put) -> None:
    exchange = GrpcTransport.exchange

    async def careless(self: Any, request: Any, route: Any, *args: Any) -> None:
        try:
            await exchange(self, request, route, *args)
        except (StaleEpochError, StaleEstimateError, ServerUnreachableError, UnknownParametersError):
            if not isinstance(request, PushRequest) or request.target is not None:
                raise
            for index in request.progress.unanswered(route.slices):
                request.progress.answer(index, 0)

    put(GrpcTransport, "exchange", careless)


@_ablation(
    "a dropped push is reported", faults=("freeze worker", "partition worker"), fault_count=4, workers=2, lives=6,
    think_seconds=0.1, steps=6,
)  # fmt: skip
def _untold_drop(put: Put) -> None:
    put(membership.DropCounter, "add", lambda *_: None)


# --- order and bounds -------------------------------------------------------------------------------------------------


@_ablation("contributions are added in rank order", consistency=BSP(), workers=4, lives=8)
def _any_order(put: Put) -> None:
    put(bsp_shard, "sorted", lambda items, key=None: list(items))


@_ablation("an update skips only what no worker has a gradient for", consistency=BSP(), workers=3, lives=7)
def _skipped_for_one(put: Put) -> None:
    put(gradients, "common", lambda parts: next((ranges for ranges in parts if ranges), ()))


@_ablation("skipped elements count the updates that they skip", consistency=BSP(), workers=2, lives=6)
def _no_lags(put: Put) -> None:
    put(lags.LagTable, "skip", lambda *_: None)


@_ablation("replicas skip the same elements", consistency=BSP(), workers=2, lives=6, servers=2, replicas=2)
def _replicas_skip_nothing(put: Put) -> None:
    put(backup_shards, "ranges_of", lambda *_: ())


@_ablation(
    "copies come with their lags", faults=("kill server",), fault_count=3, servers=3, replicas=2, workers=2, lives=6
)
def _copies_without_lags(put: Put) -> None:
    message: Any = stream_to_replica.state_message
    put(replicator, "state_message", lambda *arguments: message(*arguments[:-1], ()))


@_ablation("a step waits for every member", consistency=BSP(), workers=3, lives=7)
def _no_apply_gate(put: Put) -> None:
    put(bsp_shard.BspShard, "_is_complete", lambda _, state: bool(state.open))


@_ablation("the bound of SSP", consistency=SSP(0), optimizer=SGD(lr=1.0), workers=3, lives=7, bare_pushes=0.0)
def _no_read_gate(put: Put) -> None:
    put(async_shard.AsyncShard, "_clock_gate", lambda *_: "")


@_ablation("a first step is agreed on", consistency=BSP(), faults=("join worker",), fault_count=3, workers=2, lives=6)
def _no_agreement(put: Put) -> None:
    def propose(self: Any, member: Any) -> bool:
        return True

    put(shard_router.ShardRouter, "propose", propose)


@_ablation("weights are not read while they are written", consistency=ASP(), optimizer=SGD(lr=1.0), workers=4, lives=8)
def _torn_reads(put: Put) -> None:
    async def read(self: Any, wanted: Any) -> Any:
        return self._now(wanted, self._router.version(wanted.index))

    put(shard_router.SliceReads, "_read", read)


# --- lives and epochs -------------------------------------------------------------------------------------------------


@_ablation(
    "a life that is over changes nothing", faults=("partition worker from server", "break session of worker"),
    fault_count=8, fault_seconds=1.5, workers=2, lives=6, think_seconds=0.02, steps=6, slices=6, delay=(0.001, 0.03),
)  # fmt: skip
def _no_fence(put: Put) -> None:
    refusal = shard.ShardMachine._refusal

    def lenient(self: Any, event: Any) -> None:
        refusal(self, event)

    put(shard.ShardMachine, "_refusal", lenient)
    put(parameter_server.Admission, "check_live", lambda *_: None)
    put(rpc_call.CallTable, "fence", lambda *_: None)


@_ablation(
    "a read that waits ends with its membership", consistency=SSP(0), optimizer=SGD(lr=1.0), workers=3, lives=7,
    faults=("break session of worker",), fault_count=5, fault_seconds=1.5, pulls=0.5, bare_pushes=0.5,
)  # fmt: skip
def _no_end_of_reads(put: Put) -> None:
    put(rpc_call.CallTable, "fence", lambda *_: None)


@_ablation(
    "what is published is durable", faults=("kill scheduler",), fault_count=5, fault_seconds=1.5,
    disk_seconds=(0.02, 0.15),
)  # fmt: skip
def _publish_first(put: Put) -> None:
    async def run(self: Any) -> None:
        while True:
            await self._pending.wait()
            self._pending.clear()
            batch = self._take()
            for effect in batch:
                self._carry_out(effect)
            changes = [effect for effect in batch if isinstance(effect, Persist)]
            if changes:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._writer, self._store.write, scheduler.merge(changes))

    put(scheduler.Scheduler, "run", run)


@_ablation("an epoch is used once", faults=("kill scheduler",), fault_count=3, fault_seconds=1.5)
def _reused_epoch(put: Put) -> None:
    begin = scheduler_cluster.Cluster.__init__

    def forgetful(self: Any, settings: Any, stored: Any, now: float) -> None:
        begin(self, settings, stored, now)
        self.epoch = max(0, self.epoch - 2)  # One less would publish the last map again.

    put(scheduler_cluster.Cluster, "__init__", forgetful)


# --- silence that is not death ----------------------------------------------------------------------------------------

_SILENT: dict[str, Any] = {
    "faults": ("cut scheduler off",), "fault_count": 2, "fault_seconds": 1.5, "think_seconds": 0.4, "steps": 6,
    "servers": 3, "replicas": 2, "lease_seconds": 1.0, "worker_lease_seconds": 2.0,
}  # fmt: skip


@_ablation("a scheduler that nobody reaches suspects itself", **_SILENT)
def _no_self_suspicion(put: Put) -> None:
    put(Sessions, "somebody_beside", lambda *_: True)


@_ablation("who comes back after the scheduler was cut off has time", **_SILENT)
def _no_time_to_return(put: Put) -> None:
    put(Sessions, "_somebody_came", lambda self, now: setattr(self, "reached", now))


@_ablation("the end of a session after a silence is no death", **_SILENT)
def _every_end_is_death(put: Put) -> None:
    put(Sessions, "was_steady", lambda *_: True)


@_ablation("a session that breaks is no death", **{**_SILENT, "faults": ("break session of server",)})
def _broken_is_refused(put: Put) -> None:
    on_probed = MemberLosses.on_probed
    put(MemberLosses, "on_probed", lambda self, event, now: on_probed(self, replace(event, result="refused"), now))


@_ablation("the last copy of a shard is waited for", **{**_SILENT, "faults": ("pause all servers",), "replicas": 1})
def _no_patience(put: Put) -> None:
    put(DeferredLosses, "has_last_copy", lambda *_: False)


# --- copies -----------------------------------------------------------------------------------------------------------


@_ablation("a push is answered once copies have it", **_LOSSES, think_seconds=0.02, steps=6, delay=(0.001, 0.03))
def _early_answer(put: Put) -> None:
    update = replicator.Replicator.update

    def eager(self: Any, given: Any) -> list[object]:
        return [*update(self, given), replication.Replicated(given.index, given.lsn)]

    put(replicator.Replicator, "update", eager)


@_ablation(
    "a primary waits for a silent backup", **{**_COPIES, "workers": 4, "lives": 8}, think_seconds=0.01, steps=6,
    faults=("break connections and kill server",), fault_count=4, fault_seconds=1.5, delay=(0.001, 0.03),
)  # fmt: skip
def _impatient(put: Put) -> None:
    put(replication.Peer, "required", property(lambda self: (self.in_sync or self.filled) and self.is_open))


# A server that others can hear is expelled only after three leases.
@_ablation(
    "a replica refuses an old term",
    **{**_STALE, "steps": 24, "fault_seconds": 8.0, "fault_count": 12, "servers": 4},
    faults=("cut server and worker from scheduler",),
)  # fmt: skip
def _any_term(put: Put) -> None:
    put(backup_shards.BackupShards, "_check", staticmethod(lambda *_: None))


@_ablation("reads are confirmed", **_STALE, faults=("split off server and worker",))
def _unconfirmed(put: Put) -> None:
    put(replicator.Replicator, "needs_confirm", lambda *_: False)


@_ablation("only a complete copy is promoted", **_LOSSES, slices=6, delay=(0.001, 0.03))
def _hasty_promotion(put: Put) -> None:
    after_loss = shard_placement.after_loss

    def hasty(shard: Any, live: Any) -> Any:
        return after_loss(replace(shard, backups=(*shard.filling, *shard.backups), filling=()), live)

    put(shard_placement, "after_loss", hasty)


@_ablation("the duplicate table is promoted, BSP", consistency=BSP(), **{**_LOSSES, "cut": 0.3}, think_seconds=0.02)
def _forgotten_contributors(put: Put) -> None:
    _forget_tables(put)


@_ablation(
    "the duplicate table is promoted, SSP and ASP", consistency=ASP(), optimizer=SGD(lr=1.0),
    **{**_LOSSES, "cut": 0.3}, think_seconds=0.02,
)  # fmt: skip
def _forgotten_producers(put: Put) -> None:
    _forget_tables(put)


def _forget_tables(put: Put) -> None:
    make: Any = role_changes.make_shard

    def forgetful(*args: Any) -> Any:
        *others, records, departed = args
        bare = {index: SliceRecord(record.version) for index, record in (records or {}).items()}
        return make(*others, bare if records is not None else None, departed)

    put(parameter_store, "make_shard", forgetful)


@_ablation("the duplicate table travels with the update", **_COPIES)
def _bare_updates(put: Put) -> None:
    put(SliceRecord, "advance", lambda self, *_: setattr(self, "version", self.version + 1))


@_ablation(
    "the duplicate table travels with the copy of a slice", consistency=ASP(), optimizer=SGD(lr=1.0), **_LOSSES, steps=6
)
def _bare_copies(put: Put) -> None:
    state_message = stream_to_replica.state_message
    put(replicator, "state_message", lambda record, *rest: state_message(SliceRecord(record.version), *rest))


@_ablation("the factor on the learning rate travels with the update", **_COPIES)
def _bare_rates(put: Put) -> None:
    replica_update = applier._replica_update
    put(applier, "_replica_update", lambda job, lsn: replace(replica_update(job, lsn), lr_scale=1.0))


@_ablation("the hyperparameters that a push sets travel with the update", **_COPIES)
def _bare_settings(put: Put) -> None:
    replica_update = applier._replica_update
    put(applier, "_replica_update", lambda job, lsn: replace(replica_update(job, lsn), settings=()))


@_ablation(
    "a push that continues after a rejoin keeps its factor", faults=("freeze worker", "break session of worker"),
    fault_count=5, fault_seconds=1.5, think_seconds=0.1, steps=6,
)  # fmt: skip
def _forgotten_factor(put: Put) -> None:
    start = participation.Participation.start_incarnation

    async def forgetful(self: Any, mine: Any) -> None:
        await start(self, mine)
        self.options = replace(self.options, lr_factor=1.0)

    put(participation.Participation, "start_incarnation", forgetful)


@_ablation("a stream resumes from its replica's state", **_COPIES, **_CUTS)
def _blind_resume(put: Put) -> None:
    put(replication.PrimaryReplication, "_resumable", lambda self, peer, held: self.lsn)


@_ablation("updates of a shard come without a gap", **_COPIES, **_CUTS)
def _gaps(put: Put) -> None:
    update = replication.BackupReplication.update

    def lenient(self: Any, term: int, given: Any) -> Any:
        if given.lsn > self.lsn + 1:
            self.lsn = given.lsn - 1
        return update(self, term, given)

    put(replication.PrimaryReplication, "_resumable", lambda self, peer, held: self.lsn)
    put(replication.BackupReplication, "update", lenient)


@_ablation("a slice is copied while it is quiescent", consistency=ASP(), optimizer=SGD(lr=1.0), **_LOSSES, steps=6)
def _copy_at_once(put: Put) -> None:
    put(shard_router.SliceContents, "when_quiescent", lambda self, index, callback: callback())


@_ablation("a copy ends with its last slice", **_LOSSES, slices=6, steps=6, think_seconds=0.02)
def _early_end(put: Put) -> None:
    put(replication.PrimaryReplication, "next_copy", _skip_one(replication.PrimaryReplication.next_copy))
    put(replication.BackupReplication, "end", lambda self: setattr(self, "_copying", False))


def _skip_one(next_copy: Any) -> Any:
    def careless(self: Any, replica: Any) -> Any:
        peer = self.peers.get(replica)
        if peer is not None and len(peer.missing) == 1:
            peer.missing.clear()
        return next_copy(self, replica)

    return careless


@_ablation("a silent worker whose connection answers pings is awaited", **{**_SILENT, "faults": (HELD,), "cut": 0.0})
def _silence_is_death(put: Put) -> None:
    evidence = MemberLosses._evidence
    put(MemberLosses, "_evidence", lambda *arguments: replace(evidence(*arguments), answers=False))


# --- a worker that cannot reach a server ------------------------------------------------------------------------------

_CUT_OFF: dict[str, Any] = {
    "faults": (CUT_OFF,), "fault_count": 1, "fault_seconds": 1.5, "consistency": BSP(), "workers": 3, "lives": 7,
    "steps": 60, "think_seconds": 0.4, "worker_lease_seconds": 10.0,
}  # fmt: skip


@_ablation("a worker without a path to a server is expelled", **_CUT_OFF)
def _no_expulsion_without_a_path(put: Put) -> None:
    put(losses.UnreachableServers, "expelled", lambda self, now: [])


@_ablation("other workers are asked before one is expelled", **_CUT_OFF)
def _nobody_is_asked(put: Put) -> None:
    put(losses.UnreachableServers, "_ask", lambda self, server: [])


@_ablation("a worker joins when servers answer it", **_CUT_OFF)
def _joins_without_a_path(put: Put) -> None:
    async def joins(self: Any, name: str, incarnation: int) -> None:
        pass

    put(creation.ParametersCreator, "_until_servers_answer", joins)


@_ablation("a path that is back is reported", **_CUT_OFF)
def _path_stays_lost(put: Put) -> None:
    """Make a worker report forever a server that it could not reach once."""
    watch = worker_session.Reachability._watch

    async def for_ever(self: Any, server: Any, unreachable: Any) -> None:
        await watch(self, server, unreachable)
        self._unreachable[server] = unreachable
        unreachable.reason = unreachable.reason or "it was not reached once"

    put(worker_session.Reachability, "_watch", for_ever)


# --- heartbeats -------------------------------------------------------------------------------------------------------


@_ablation(
    "the first heartbeat of a session has all counts", faults=("kill scheduler", "break session of worker"),
    fault_count=4, fault_seconds=4.0, think_seconds=0.4, steps=20,
)  # fmt: skip
def _only_changes(put: Put) -> None:
    """Make all sessions of a process continue from the counts of the earlier ones."""
    made = dict[Any, Any]()

    def same(*, enabled: bool) -> Any:
        counts = ChangedCounts(enabled=enabled)
        return made.setdefault(running().current(), counts) if enabled else counts

    put(worker_session, "ChangedCounts", same)


# --- fillings ---------------------------------------------------------------------------------------------------------

_DOUBT: dict[str, Any] = {
    **_COPIES, "servers": 2, "consistency": BSP(), "faults": ("kill server", *3 * ("a filling is in doubt",)),
    "fault_count": 24, "fault_seconds": 12.0, "lease_seconds": 1.0, "think_seconds": 0.4, "steps": 40, "slices": 1,
    "slow": 0.0, "cut": 0.0,
}  # fmt: skip


@_ablation("a report on an earlier filling does not count", **_DOUBT)
def _any_filling(put: Put) -> None:
    put(Shard, "fill_of", lambda *_: 0)


@_ablation("a copy is resumed only from the state that it holds", **_DOUBT)
def _standing_lsn(put: Put) -> None:
    put(Shard, "fill_of", lambda *_: 0)

    def unnumbered(self: replicator.Replicator, index: int) -> int | None:
        machine = self._machine(index)
        return machine.lsn + 1 if machine is not None and machine.peers else None

    put(replicator.Replicator, "take_lsn", unnumbered)
