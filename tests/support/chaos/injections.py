"""The faults of a chaos run: the injection, the promised reaction, and the repair of each.

An injection chooses its target by the run's random numbers, injects the fault, records the time, waits for the promised
reaction, and restores everything: all members, all copies. When it returns, its effects are over. A broken promise
raises an error, or adds a sentence to the report.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from psdist.addresses import parse_address
from psdist.errors import InternalError
from psdist.settings.exit_codes import INFRASTRUCTURE
from psdist.types import Replica
from tests.support.chaos import faults, fills
from tests.support.chaos.cluster import Reach
from tests.support.chaos.live_run import LiveRun
from tests.support.chaos.proxy import BLACKHOLE, HALF_OPEN, Fault

_END_SECONDS: Final = 30.0
#: Time limit for status to name a path that is cut.
_NAMED_SECONDS: Final = 10.0
#: Time limit for training to continue over gRPC.
_FALL_BACK_SECONDS: Final = 20.0
#: Time limit for a copy to be filled by a server that can be struck.
_FILL_SECONDS: Final = 20.0
#: Longest wait of a strike for a source that does not hold a last copy.
_SOURCE_SECONDS: Final = 2.0
_FILL_POLL_SECONDS: Final = 0.01
#: Time limit for a frozen server to be expelled.
_EXPEL_SECONDS: Final = 60.0
#: The longest time that the end of a killed process may take.
_REAP_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Injection:
    """A kind of fault.

    reach: how its servers must be reachable.
    expels: True if it makes the scheduler expel workers. Then pushes may be dropped, and the weights are not those of
        an undisturbed run.
    ends_the_run: True if the run must end because of it.
    slices: of the counting parameter set. With more slices than shards a copy can be partly filled.
    dense: elements of the parameter set that is trained with Adam, if the run has it.
    needs_dense: True if the run has that set even if its bytes are not compared.
    """

    what: str
    inject: Callable[[LiveRun], Awaitable[None]]
    reach: Reach = Reach.DIRECT
    expels: bool = False
    ends_the_run: bool = False
    slices: int = 12
    dense: int = 200_000
    needs_dense: bool = False


@dataclass(frozen=True, slots=True)
class Struck:
    """A server that was killed, or that is frozen."""

    name: str
    replica: Replica
    moment: float
    is_frozen: bool


# --- killed -----------------------------------------------------------------------------------------------------------


async def _server_kill(run: LiveRun) -> None:
    name = _some_server(run)
    moment = _signal(run, "server-kill", name, faults.kill)
    await run.cluster.ended(name, _REAP_SECONDS)
    await run.wait_resumed(moment, range(run.settings.workers))
    run.cluster.launch(name)
    await run.wait_recovered(since=moment)


async def _server_lost(run: LiveRun) -> None:
    """Kill a server with the only copy. Every worker must end by itself and report the loss."""
    name = _some_server(run)
    moment = _signal(run, "server-lost", name, faults.kill)
    await run.cluster.ended(name, _REAP_SECONDS)
    for rank in range(run.settings.workers):
        status = await run.cluster.ended(f"worker-{rank}", _END_SECONDS)
        errors = run.read()[rank].errors
        if status != INFRASTRUCTURE or not errors or not errors[-1].startswith("server_lost "):
            run.report.problems.append(f"worker-{rank} ended with {status}: {errors or 'no typed error'}")
        run.report.ended += [f"worker-{rank}, {time.monotonic() - moment:.2f} s later: {text}" for text in errors[-1:]]
    status_now = await run.cluster.fetch()
    news = [event.text for event in status_now.events] if status_now is not None else []
    run.report.ended += [f"scheduler: {text}" for text in news if name in text][-2:]


async def _worker_kill(run: LiveRun) -> None:
    rank = _some_worker(run)
    moment = _signal(run, "worker-kill", f"worker-{rank}", faults.kill)
    await run.cluster.ended(f"worker-{rank}", _REAP_SECONDS)
    await run.wait_resumed(moment, _others(run, rank))
    run.cluster.launch(f"worker-{rank}")
    await run.wait_recovered(since=moment)


async def _scheduler_kill(run: LiveRun) -> None:
    before = await run.cluster.fetch()
    _signal(run, "scheduler-kill", "scheduler", faults.kill)
    await run.cluster.ended("scheduler", _REAP_SECONDS)
    await asyncio.sleep(run.settings.down_seconds)
    back = time.monotonic()
    run.cluster.launch("scheduler")
    await run.cluster.scheduler_up()
    await run.wait_recovered(since=back)
    after = await run.cluster.fetch()
    if before is not None and after is not None and after.epoch < before.epoch:
        run.report.problems.append(f"the epoch went back from {before.epoch} to {after.epoch}")


# --- frozen -----------------------------------------------------------------------------------------------------------


async def _server_freeze(run: LiveRun) -> None:
    name = _some_server(run)
    moment = _signal(run, "server-freeze", name, faults.freeze)
    await run.wait_resumed(moment, range(run.settings.workers))
    await asyncio.sleep(run.rng.random() * run.settings.down_seconds)
    faults.thaw(run.cluster.processes[name].pid)
    await _zombie(run, name)
    await run.wait_recovered(since=time.monotonic())


async def _zombie(run: LiveRun, name: str) -> None:
    """Wait for the end of a replaced server that came back. It must end by itself, and is restarted."""
    status = await run.cluster.ended(name, _END_SECONDS)
    if status != INFRASTRUCTURE:
        run.report.problems.append(f"the replaced {name} ended with {status}, not {INFRASTRUCTURE}")
    run.cluster.launch(name)


async def _worker_freeze(run: LiveRun) -> None:
    rank = _some_worker(run)
    name = f"worker-{rank}"
    moment = _signal(run, "worker-freeze", name, faults.freeze)
    await run.wait_resumed(moment, _others(run, rank))
    await asyncio.sleep(run.settings.lease_seconds * run.rng.random())
    back = time.monotonic()
    faults.thaw(run.cluster.processes[name].pid)
    await run.wait_recovered(since=back)


# --- struck again while copies are filled -----------------------------------------------------------------------------


async def _server_refill(run: LiveRun) -> None:
    """Strike a server, and another one while a copy is being filled. Each is killed or frozen, at random."""
    first = _strike(run, run.rng.choice(await _expendable(run, ())), is_frozen=run.rng.random() < 0.5)
    # The first one comes back during the second strike, as under a launcher: copies are filled there, too.
    _, second = await asyncio.gather(_come_back(run, first), _strike_during_fill(run, first))
    await _come_back(run, second)
    # With more servers than two strikes need, the next ones need not wait until these have started.
    starting = max(0, run.settings.servers - run.settings.replicas - 1)
    await run.wait_recovered(since=time.monotonic(), starting=starting)


def _strike(
    run: LiveRun,
    replica: Replica,
    *,
    is_frozen: bool,
    moment: float | None = None,
    fill_role: fills.Role | None = None,
) -> Struck:
    """Kill or freeze a server, and record the fault.

    moment: monotonic seconds at which the server stopped, if it has already stopped.
    """
    name, moment = replica.server_id, time.monotonic() if moment is None else moment
    (faults.freeze if is_frozen else faults.kill)(run.cluster.processes[name].pid)
    run.record_fault("server-freeze" if is_frozen else "server-kill", name, moment, fill_role)
    return Struck(name, replica, moment, is_frozen)


async def _strike_during_fill(run: LiveRun, first: Struck) -> Struck:
    """Strike a server that takes part in a filling, once one can be struck without losing a shard. A source often has
    the last copy, so half of the strikes wait for one that does not. If no server can be struck for _FILL_SECONDS,
    strike one that takes part in no filling."""
    begin, prefers_source = time.monotonic(), run.rng.random() < 0.5
    while (waited := time.monotonic() - begin) < _FILL_SECONDS:
        run.restart_servers()
        found = fills.chances(await run.entries(), [first.replica])
        if prefers_source:
            sources = [chance for chance in found if chance.role == "source"]
            found = sources if sources or waited < _SOURCE_SECONDS else found
        if found and (struck := await _hit(run, run.rng.choice(found), first)) is not None:
            return struck
        await asyncio.sleep(_FILL_POLL_SECONDS)
    victim = run.rng.choice(await _expendable(run, [first.replica]))
    return _strike(run, victim, is_frozen=run.rng.random() < 0.5)


async def _hit(run: LiveRun, chance: fills.Chance, first: Struck) -> Struck | None:
    """Stop a server, and fetch the map again. If its filling had already completed, the server continues.

    A stopped server neither sends nor receives, so the filling cannot complete after the answer.
    """
    pid, moment = run.cluster.processes[chance.server.server_id].pid, time.monotonic()
    faults.freeze(pid)
    entries = await run.entries()
    if chance.fill in fills.fills_of(entries) and fills.is_expendable(entries, chance.server, [first.replica]):
        return _strike(run, chance.server, is_frozen=run.rng.random() < 0.5, moment=moment, fill_role=chance.role)
    faults.thaw(pid)
    return None


async def _come_back(run: LiveRun, struck: Struck) -> None:
    """Restart a killed server. A frozen one is expelled first; then it continues, or is killed."""
    if struck.is_frozen:
        await run.wait_until(f"{struck.name} expelled", _EXPEL_SECONDS, lambda: _is_expelled(run, struck.replica))
        if run.rng.random() < 0.5:
            faults.thaw(run.cluster.processes[struck.name].pid)
            await _zombie(run, struck.name)
            return
        faults.kill(run.cluster.processes[struck.name].pid)
    await run.cluster.ended(struck.name, _REAP_SECONDS)
    run.cluster.launch(struck.name)


async def _is_expelled(run: LiveRun, replica: Replica) -> bool:
    status = await run.cluster.fetch()
    return status is not None and not any(
        member.member_id == replica.server_id and member.incarnation == replica.incarnation and member.state == "live"
        for member in status.members
    )


async def _expendable(run: LiveRun, gone: Collection[Replica]) -> list[Replica]:
    """Return the servers that can be struck without losing a shard, sorted by name."""
    entries = await run.entries()
    holders = {replica for entry in entries for shard in entry.shards for replica in shard.replicas} - set(gone)
    found = [replica for replica in holders if fills.is_expendable(entries, replica, gone)]
    if not found:
        raise InternalError("every server holds the last copy of a shard")
    return sorted(found, key=lambda replica: replica.server_id)


# --- busy -------------------------------------------------------------------------------------------------------------


async def _worker_busy(run: LiveRun) -> None:
    """Make each worker hold its interpreter once, at a random moment, so that some do at the same time."""
    run.record_fault("worker-busy", "all workers", time.monotonic())
    pauses = sorted((run.settings.down_seconds * run.rng.random(), rank) for rank in range(run.settings.workers))
    begin = time.monotonic()
    for pause, rank in pauses:
        await asyncio.sleep(max(0.0, begin + pause - time.monotonic()))
        os.kill(run.cluster.processes[f"worker-{rank}"].pid, signal.SIGUSR1)
    await asyncio.sleep(run.settings.down_seconds)
    await run.wait_recovered(since=time.monotonic())


# --- disconnected -----------------------------------------------------------------------------------------------------


async def _partition(run: LiveRun, direction: faults.Direction) -> None:
    """Disconnect a server for longer than its lease. It is replaced, and is a zombie when it comes back."""
    name = _some_server(run)
    number, network = int(name.rpartition("-")[2]), run.cluster.network
    assert network is not None
    moment = time.monotonic()
    network.disconnect(number, direction)
    run.record_fault(f"partition-{direction}", name, moment)
    try:
        await run.wait_resumed(moment, range(run.settings.workers))
        await asyncio.sleep(run.rng.random() * run.settings.down_seconds)
    finally:
        network.heal(number)
    await _zombie(run, name)
    await run.wait_recovered(since=time.monotonic())


async def _path_cut(run: LiveRun) -> None:
    """Drop the packets between one worker and one server. ``psdist status`` must name both within 10 s. The others must
    continue training, at the latest when the worker is expelled. It rejoins when the path is restored."""
    rank, name, moment = _cut_some_path(run)
    network = run.cluster.network
    assert network is not None
    try:
        await run.wait_until(
            f"worker-{rank} and {name} named in status", _NAMED_SECONDS, lambda: _is_named(run, rank, name)
        )
        run.report.named.append(time.monotonic() - moment)
        await run.wait_resumed(time.monotonic(), _others(run, rank))
        await asyncio.sleep(run.rng.random() * run.settings.down_seconds)
        await run.wait_resumed(time.monotonic(), _others(run, rank))
    finally:
        network.heal(run.cluster.host_of_worker(rank))
        network.heal(int(name.rpartition("-")[2]))
    await run.wait_recovered(since=time.monotonic())


async def _tcp_cut(run: LiveRun) -> None:
    """Drop the packets between one worker and one server, except gRPC's. Training must continue over gRPC."""
    status = await run.cluster.fetch()
    addresses = {member.member_id: member.address for member in status.members} if status is not None else {}
    used = {one.transport for member in status.members for one in member.connections} if status is not None else set()
    if "tcp" not in used:
        run.report.problems.append(f"workers use {', '.join(sorted(used)) or 'nothing'}: run this with --transport tcp")
    rank, name, moment = _cut_some_path(run, addresses)
    network = run.cluster.network
    assert network is not None
    try:
        await run.wait_resumed(time.monotonic() + _FALL_BACK_SECONDS, range(run.settings.workers))
        if any(f"worker-{rank} to reach" in text for text in (await _waits(run))):
            run.report.problems.append(f"status says that worker-{rank} cannot reach {name}; it can, over gRPC")
    finally:
        network.heal(run.cluster.host_of_worker(rank))
        network.heal(int(name.rpartition("-")[2]))
    await run.wait_recovered(since=moment)


async def _path_cut_briefly(run: LiveRun) -> None:
    """Cut the path for so short a time that no worker is expelled."""
    rank, name, _ = _cut_some_path(run)
    network = run.cluster.network
    assert network is not None
    try:
        await asyncio.sleep(0.5 + run.rng.random() * run.settings.down_seconds)
    finally:
        network.heal(run.cluster.host_of_worker(rank))
        network.heal(int(name.rpartition("-")[2]))
    await run.wait_recovered(since=time.monotonic())


def _cut_some_path(run: LiveRun, addresses: Mapping[str, str] | None = None) -> tuple[int, str, float]:
    """Cut the path between a random worker and a random server. Returns the worker's rank, the server's name and the
    time.

    addresses: of servers, if gRPC's port stays reachable.
    """
    rank, name, network = _some_worker(run), _some_server(run), run.cluster.network
    assert network is not None
    directions: tuple[faults.Direction, ...] = ("both", "both", "in", "out")
    direction, moment = run.rng.choice(directions), time.monotonic()
    port = parse_address(addresses[name])[1] if addresses is not None else 0
    network.cut(run.cluster.host_of_worker(rank), int(name.rpartition("-")[2]), direction, port)
    run.record_fault(f"path-cut-{direction}", f"worker-{rank}", moment)
    return rank, name, moment


async def _is_named(run: LiveRun, rank: int, server: str) -> bool:
    return any(f"worker-{rank} to reach {server}" in text for text in await _waits(run))


async def _waits(run: LiveRun) -> list[str]:
    status = await run.cluster.fetch()
    return list(status.waiting_for) if status is not None else []


async def _scheduler_cut(run: LiveRun) -> None:
    """Disconnect a server from the scheduler only. It is replaced while workers could still reach it."""
    name = _some_server(run)
    proxy = run.cluster.proxies[name].scheduler
    moment = time.monotonic()
    proxy.fault = BLACKHOLE
    run.record_fault("proxy-scheduler", name, moment)
    await asyncio.sleep(run.settings.lease_seconds + run.rng.random() * run.settings.down_seconds)
    await run.wait_resumed(time.monotonic(), range(run.settings.workers))
    proxy.fault = Fault()
    await _zombie(run, name)
    await run.wait_recovered(since=time.monotonic())


async def _data_fault(run: LiveRun, kind: str, fault: Fault | None) -> None:
    """Disturb the connections to a server for a while. That alone must not make the scheduler replace it."""
    name = _some_server(run)
    proxy = run.cluster.proxies[name].data
    moment = time.monotonic()
    run.record_fault(kind, name, moment)
    if fault is None:
        proxy.reset()
    else:
        proxy.fault = fault
        await asyncio.sleep(run.rng.random() * run.settings.down_seconds)
        proxy.fault = Fault()
    await run.wait_recovered(since=time.monotonic())


# --- parts ------------------------------------------------------------------------------------------------------------


def _signal(run: LiveRun, kind: str, name: str, send: Callable[[int], None]) -> float:
    moment = time.monotonic()
    send(run.cluster.processes[name].pid)
    run.record_fault(kind, name, moment)
    return moment


def _some_server(run: LiveRun) -> str:
    return f"server-{run.rng.randrange(run.settings.servers)}"


def _some_worker(run: LiveRun) -> int:
    return run.rng.randrange(run.settings.workers)


def _others(run: LiveRun, rank: int) -> list[int]:
    return [other for other in range(run.settings.workers) if other != rank]


def _data(what: str, kind: str, fault: Fault | None) -> Injection:
    return Injection(what, lambda run: _data_fault(run, kind, fault), Reach.PROXY)


def _disconnect(what: str, direction: faults.Direction) -> Injection:
    return Injection(what, lambda run: _partition(run, direction), Reach.NAMESPACE)


FAULTS: Final[dict[str, Injection]] = {
    "server-kill": Injection("SIGKILL of a server, which is restarted", _server_kill),
    "server-lost": Injection("SIGKILL of a server that holds the only copy", _server_lost, ends_the_run=True),
    "server-freeze": Injection("SIGSTOP of a server until it is replaced, then SIGCONT", _server_freeze),
    "server-refill": Injection(
        "SIGKILL or SIGSTOP of a server, and of another one while a copy is being filled",
        _server_refill,
        slices=48,
        needs_dense=True,
    ),
    "worker-kill": Injection("SIGKILL of a worker, which is restarted", _worker_kill, expels=True),
    "worker-freeze": Injection("SIGSTOP of a worker until it is fenced, then SIGCONT", _worker_freeze, expels=True),
    "worker-busy": Injection("every worker holds its interpreter, so that no other thread of it runs", _worker_busy),
    "scheduler-kill": Injection("SIGKILL of the scheduler, which is restarted later", _scheduler_kill),
    "partition": _disconnect("a server is disconnected from all others", "both"),
    "partition-in": _disconnect("a server cannot be reached, but reaches the others", "in"),
    "partition-out": _disconnect("a server reaches no other, but can be reached", "out"),
    "path-cut": Injection(
        "a worker cannot reach a server, until it is expelled", _path_cut, Reach.NAMESPACE, expels=True
    ),
    "tcp-cut": Injection(
        "a worker reaches a server by gRPC, but not the port of the TCP transport", _tcp_cut, Reach.NAMESPACE
    ),
    "path-cut-brief": Injection("a worker cannot reach a server for seconds", _path_cut_briefly, Reach.NAMESPACE),
    "proxy-scheduler": Injection("a server loses only its connection to the scheduler", _scheduler_cut, Reach.PROXY),
    "proxy-reset": _data("all connections to a server are reset", "proxy-reset", None),
    "proxy-blackhole": _data("a server accepts connections, and no byte passes", "proxy-blackhole", BLACKHOLE),
    "proxy-half-open": _data("the answers of a server are dropped", "proxy-half-open", HALF_OPEN),
    "proxy-slow": _data(
        "a server is far away: latency, jitter, low bandwidth",
        "proxy-slow",
        Fault(latency_seconds=0.05, jitter_seconds=0.05, bytes_per_second=4e6),
    ),
    "proxy-break": _data("connections to a server break after some bytes", "proxy-break", Fault(reset_after=300_000)),
}
