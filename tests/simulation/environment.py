"""Simulated environment: production code runs unchanged, except for everything that it gets from outside.

``install`` replaces clocks, random numbers, host names, process ids, channels, threads and shared memory in all loaded
modules of psdist. Each stand-in asks the running loop, so one installation serves all runs of a process. It is
permanent: a simulating process does nothing else.

The hooks installed here also report the servers' actions to the oracle and count the code paths that runs take.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

import psdist_scheduler.service  # noqa: F401
import psdist_server.server_session
import psdist_server.service  # noqa: F401
from psdist import machine
from psdist.link.arenas import WeightsArena
from psdist.link.peer_links import PeerListener
from psdist.security import tls
from psdist.security.tls import Credentials
from psdist.wire import channels, convert, status
from psdist.wire.scheduler_connection import FollowedMap
from psdist_scheduler import scheduler
from psdist_scheduler.decide import waits
from psdist_scheduler.decide.cluster import Cluster
from psdist_scheduler.decide.joins import Joins
from psdist_scheduler.decide.losses import DeferredLosses
from psdist_scheduler.decide.waits import Barriers
from psdist_server.core.async_shard import AsyncShard
from psdist_server.core.bsp_shard import BspShard
from psdist_server.core.replication import BackupReplication, PrimaryReplication
from psdist_server.core.shard import Forget, SlicePushed
from psdist_server.kernels.pool import KernelPool
from psdist_server.store.parameter_store import ParameterStore
from tests.simulation import heartbeats
from tests.simulation.loop import SimLoop
from tests.simulation.network import Network
from tests.simulation.oracle import Oracle
from tests.simulation.rpc import SimChannel

_PACKAGES = ("psdist", "psdist_server", "psdist_scheduler")
#: Modules that use the real processes of this machine even in a simulation: several processes compile kernels together.
_REAL = ("psdist.link.arenas", "psdist.link.processes", "psdist.compression.kernel_runtime")


class RunLoop(SimLoop):
    """Event loop of a run, with the state of the stand-ins. That state ends with the run."""

    def __init__(self, rng: random.Random, handle_seconds: float = 0.0) -> None:
        super().__init__(rng, handle_seconds)
        #: Cluster maps that were already parsed, by their message.
        self.maps: dict[bytes, Any] = {}
        self.sent_counts: heartbeats.Sent = {}

    network: Network
    #: Random numbers for production code.
    entropy: random.Random
    oracle: Oracle
    #: Random numbers for the duration of kernels.
    kernels: random.Random
    #: Called for each answer of a primary, with its store and the slice.
    answered: Callable[[ParameterStore, int], None]
    #: Called for each worker that the scheduler lets pass a barrier, and for each deadlock of workers that it reports.
    barrier_opened: Callable[[str, Any], None] = staticmethod(lambda name, arrival: None)
    deadlock_found: Callable[[Mapping[Any, Sequence[Any]]], None] = staticmethod(lambda waits: None)


def running() -> RunLoop:
    """Return the running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, RunLoop)
    return loop


class _Time:
    """Stand-in for the module ``time``."""

    def monotonic(self) -> float:
        return running().time()

    time = perf_counter = monotonic

    def perf_counter_ns(self) -> int:
        return int(running().time() * 1e9)

    monotonic_ns = time_ns = perf_counter_ns


class _Random:
    """Stand-in for the module ``random``."""

    def random(self) -> float:
        return running().entropy.random()

    def uniform(self, low: float, high: float) -> float:
        return running().entropy.uniform(low, high)

    def Random(self, *seed: Any) -> Any:
        return random.Random(*seed) if seed else random.Random(running().entropy.getrandbits(64))

    def __getattr__(self, name: str) -> Any:
        return getattr(random, name)


class _Os:
    """Stand-in for the module ``os``, for its process id."""

    def getpid(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class _Socket:
    """Stand-in for the module ``socket``, for its host name."""

    def gethostname(self) -> str:
        return running().current().host

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)


class _Psutil:
    """Stand-in for the module ``psutil``."""

    def Process(self, pid: int) -> _Psutil:
        return self

    def memory_info(self) -> _Psutil:
        return self

    def cpu_percent(self) -> float:
        return 50.0

    def cpu_count(self) -> int:
        return 2

    rss = 0


class InlinePool:
    """Stand-in for ``psdist_server.kernels.pool.KernelPool``. A kernel runs whole, at the beginning or at the end of
    its simulated time, and at most ``threads`` of them run together."""

    def __init__(self, threads: int) -> None:
        self.threads = self._free = threads
        self._loop = running()
        self._order = itertools.count()
        self._waiting: list[tuple[int, int, Any, Any, Any]] = []
        self._closed = False

    def submit(self, priority: int, run: Any, work: Any, told: Any) -> None:
        """See KernelPool."""
        heapq.heappush(self._waiting, (priority, next(self._order), run, work, told))
        self._loop.call_soon(self._begin)

    def close(self) -> None:
        """See KernelPool."""
        self._closed = True

    def _begin(self) -> None:
        if self._waiting and self._free and not self._closed:
            self._free -= 1
            _, _, run, work, told = heapq.heappop(self._waiting)
            rng = self._loop.kernels
            result = self._carry_out(run, work) if rng.random() < 0.5 else None
            self._loop.call_later(rng.random() * 0.004, self._end, run, work, told, result)

    def _carry_out(self, run: Any, work: Any) -> tuple[Any, BaseException | None]:
        try:
            return run([work])[0], None
        except Exception as error:
            return None, error

    def _end(self, run: Any, work: Any, told: Any, result: tuple[Any, BaseException | None] | None) -> None:
        if not self._closed:
            result = result or self._carry_out(run, work)
            self._free += 1
            self._loop.call_soon(told, work, *result)
            self._begin()


class InlineExecutor:
    """Stand-in for ThreadPoolExecutor: ``SimLoop.run_in_executor`` does the work."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no work is pending."""


def _open_channel(
    address: str,
    credentials: Credentials,
    message_bytes: int = 0,
    silence_seconds: float = 0.0,
    reconnect_seconds: float = 0.0,
) -> SimChannel:
    return SimChannel(running().network, address)


async def _no_cause(places: str, credentials: Credentials) -> None:
    """Stand-in for ``psdist.security.tls.raise_cause``, which makes a real connection."""


async def _probe(address: str, timeout: float) -> str:
    """Stand-in for ``psdist_scheduler.scheduler.probe``."""
    loop = running()
    result: asyncio.Future[str] = loop.create_future()
    loop.network.probe(loop.current(), address, lambda met: result.done() or result.set_result(met))
    met = await result
    loop.network.counts[f"probe: {met}"] += 1
    return met


class _MapReader:
    """``convert.map_from_proto`` that parses a map once for all nodes. The result is a frozen value, and parsing it
    costs as much as the rest of its publication."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def __call__(self, message: Any) -> Any:
        data, known = message.SerializeToString(deterministic=True), running().maps
        if data not in known:
            known[data] = self._read(message)
        return known[data]


def _no_arena(*args: Any, **kwargs: Any) -> Any:
    raise OSError(0, "simulated hosts share no memory")


def _watch(machine: Any) -> Any:
    """Wrap the machine's ``_pushed`` to report contributions to the oracle. It runs only for contributions that are not
    refused."""
    pushed = machine._pushed

    def watched(self: Any, state: Any, event: SlicePushed, producer: Any) -> Any:
        loop = running()
        loop.oracle.took(loop.current().name, event.worker_id, event.incarnation, self.members)
        return pushed(self, state, event, producer)

    return watched


def _watch_reply(reply: Any) -> Any:
    """Wrap ``ParameterStore._reply`` to report answers to the oracle."""

    def watched(self: ParameterStore, effect: Any) -> None:
        number, me = self.router.shard_of(effect.index), self.me
        machine = self.replicator.machines.get(number)
        if machine is not None:
            running().oracle.acts(self.entry.spec.name, number, machine.term, f"{me}/{me.incarnation}")
            running().answered(self, effect.index)
        reply(self, effect)

    return watched


def _watch_barriers(progress: Any) -> Any:
    """Wrap ``Barriers.progress`` to report the workers that pass a barrier to the run."""

    def watched(self: Barriers) -> Any:
        waiting = list(self.arrivals)
        effects = progress(self)
        still = list(self.arrivals)
        for name, arrival in waiting:
            if (name, arrival) not in still:
                running().barrier_opened(name, arrival)
        return effects

    return watched


def _watch_deadlocks(text: Any) -> Any:
    """Wrap the function that describes a deadlock of workers, to report the deadlock to the run."""

    def watched(waits: Any) -> str:
        running().deadlock_found(waits)
        named: str = text(waits)
        return named

    return watched


def _counted(function: Any, text: str, happened: Callable[[Any, Any], bool] = lambda args, result: True) -> Any:
    """Wrap ``function`` to count the calls for which ``happened`` is true, under ``text``."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if happened(args, result):
            running().network.counts[text] += 1
        return result

    return counted


def _told(to_detail: Any) -> Any:
    """Wrap ``status.to_detail``, which every error passes on its way to a peer."""

    def told(error: Any) -> Any:
        running().network.counts[f"told: {type(error).__name__}"] += 1
        return to_detail(error)

    return told


def _watch_maps(apply: Any) -> Any:
    """Wrap ``FollowedMap.apply`` to report its maps to the oracle."""

    def watched(self: FollowedMap, response: Any) -> Any:
        cluster = apply(self, response)
        running().oracle.followed(cluster)
        running().network.counts[f"followed: {response.WhichOneof('command')}"] += 1
        return cluster

    return watched


#: Code paths that a suite must have taken: owner, function, label to count, and condition.
_PATHS: tuple[tuple[Any, str, str, Callable[[Any, Any], bool]], ...] = (
    (PrimaryReplication, "start_copy", "a copy began", lambda args, result: True),
    (PrimaryReplication, "_resumable", "a stream resumed from the replica's state", lambda args, lsn: lsn is not None),
    (PrimaryReplication, "filled", "a copy was complete", lambda args, effects: True),
    (PrimaryReplication, "refused", "a primary heard that it is none", lambda args, result: True),
    (BackupReplication, "update", "an update came again", lambda args, verdict: verdict == "repeat"),
    (ParameterStore, "_become_primary", "promoted", lambda args, result: args[2] is not None),
    (ParameterStore, "_demote", "demoted", lambda args, result: True),
    (Joins, "_on_refused", "a first step was refused", lambda args, result: True),
    (Joins, "_reroute", "a join met a new primary", lambda args, result: True),
    (Cluster, "on_all", "workers joined together", lambda args, result: len(args[1]) > 1),
    (DeferredLosses, "defer", "a loss was put off", lambda args, result: bool(result[1])),
    (BspShard, "_pushed", "a contribution came again", lambda args, effects: _again(effects)),
    (AsyncShard, "_pushed", "a push came again", lambda args, effects: _again(effects)),
)


def _again(effects: Sequence[Any]) -> bool:
    """True if a machine rejected its whole input."""
    return bool(effects) and isinstance(effects[0], Forget)


async def _no_port(listener: PeerListener, scheduler: str, *, spans_hosts: bool, name: str = "") -> None:
    """Workers of a simulation accept no links of each other: the machine of collectives has a network of its own."""


def install() -> None:
    """Replace, permanently, everything that production code gets from outside."""
    put = setattr

    stands: dict[int, Any] = {id(time): _Time(), id(random): _Random(), id(os): _Os(), id(socket): _Socket()}
    stands |= {id(sys.modules["psutil"]): _Psutil(), id(random.Random): _Random().Random}
    stands |= {
        id(KernelPool): InlinePool,
        id(ThreadPoolExecutor): InlineExecutor,
        id(channels.open_channel): _open_channel,
        id(tls.raise_cause): _no_cause,
        id(scheduler.probe): _probe,
    }
    for module in [m for name, m in sorted(sys.modules.items()) if name.split(".")[0] in _PACKAGES]:
        for name, value in list(vars(module).items()):
            if id(value) in stands and module.__name__ not in _REAL:
                put(module, name, stands[id(value)])
    put(WeightsArena, "create", _no_arena)
    put(PeerListener, "open_towards", _no_port)
    put(machine, "keep_buffers", lambda **_: False)
    put(convert, "map_from_proto", _MapReader(convert.map_from_proto))
    for kind in (BspShard, AsyncShard):
        put(kind, "_pushed", _watch(kind))
    put(ParameterStore, "_reply", _watch_reply(ParameterStore._reply))
    put(Barriers, "progress", _watch_barriers(Barriers.progress))
    put(FollowedMap, "apply", _watch_maps(FollowedMap.apply))
    put(waits, "_text", _watch_deadlocks(waits._text))
    heartbeats.watch_sent(running)
    heartbeats.watch_kept(running)
    for owner, name, text, happened in _PATHS:
        put(owner, name, _counted(getattr(owner, name), text, happened))
    put(status, "to_detail", _told(status.to_detail))
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
