"""The host: the norm of a step, members that are no more, and idle cores."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import cast

import numpy as np
import psutil
import pytest

from psdist import SSP, optim
from psdist.errors import FencedError, InvalidArgumentError, StaleEpochError
from psdist.security.tls import Credentials
from psdist.types import (
    ClusterMap,
    Identity,
    ParametersEntry,
    ParametersMember,
    ParametersSpec,
    Replica,
    ServerEntry,
    Shard,
    Slicing,
    WorkerEntry,
)
from psdist_server.kernels.device_parameters import Lanes
from psdist_server.server import Cores, NormGatherer, ParameterServer, PeerServers, ServerRegistration
from psdist_server.store.gradients import NormBoard
from psdist_server.store.parameter_store import ParameterStore
from psdist_server.store.rpc_call import Call
from tests.support.host_device import HostDevice, needs_compiler


async def test_a_slice_that_is_aggregated_as_the_norm_becomes_known_is_not_forgotten() -> None:
    """After a promotion the squares of a step are known already, so each of its slices asks for the norm."""
    nobody = cast(PeerServers, None)  # All squares are known.
    exchange = NormGatherer(nobody, lambda: ClusterMap("run", 0))
    loop, told = asyncio.get_running_loop(), list[float]()

    def norm_known(step: int, norm: float) -> None:
        if not told:  # Another slice is aggregated before anything else happens.
            loop.call_soon(exchange.find, store, step)
        told.append(norm)

    norms = NormBoard()
    norms.merge(3, {0: 9.0, 1: 16.0})
    entry = SimpleNamespace(spec=SimpleNamespace(name="p"))
    dense = SimpleNamespace(slicing=Slicing(2, 1))
    made = SimpleNamespace(entry=entry, dense=dense, norms=norms, norm_known=norm_known)
    store = cast(ParameterStore, made)
    exchange.find(store, 3)
    for _ in range(5):
        await asyncio.wait({asyncio.ensure_future(asyncio.sleep(0))})
    assert told == [5.0, 5.0]


def _map(epoch: int, ready: bool, *workers: int) -> ClusterMap:
    spec = ParametersSpec("p", optim.SGD(lr=1.0), SSP(0), slice_elements=16)
    members = tuple(ParametersMember(f"worker-{rank}", 1, rank) for rank in workers)
    entry = ParametersEntry(spec, 16, (Shard(Replica("server-0", 1)),), members, ready=ready)
    live = tuple(WorkerEntry(f"worker-{rank}", 1, rank) for rank in workers)
    return ClusterMap("run", epoch, (ServerEntry("server-0", 1, "nowhere:1"),), live, (entry,))


async def test_a_read_that_waits_for_the_bound_is_refused_when_its_worker_is_expelled() -> None:
    """The end of its membership also ends its wait: it would be served weights that are too old."""
    host = ParameterServer(ServerRegistration("run", "server-0"), Credentials(), kernel_threads=1)
    await host.adopt_map(_map(1, False, 0, 1))
    zeros = np.zeros(16, np.float32)
    host.admission.store("p").install(0, memoryview(zeros).cast("B"), 1)
    await host.adopt_map(_map(2, True, 0, 1))
    identity = Identity("run", "worker-0", 1, 2, "p")
    store = await host.admission.admit(identity)
    push, pull = (Call(identity, is_push=is_push, wants_weights=not is_push) for is_push in (True, False))
    store.router.push(push, 0, 0, memoryview(zeros).cast("B"))
    async with asyncio.timeout(60):
        assert await push.next_answer() is not None
        store.router.pull(pull, 0, 0)
        assert "worker-1" in store.waiting_for(pull)
        await host.adopt_map(_map(3, True, 1))
        with pytest.raises(FencedError):
            await pull.next_answer()
    await host.close()


async def test_initial_values_for_a_ready_set_are_refused_by_the_age_of_the_senders_map() -> None:
    """A worker that was asked twice to upload may not have the map yet that says that its first upload counted."""
    host = ParameterServer(ServerRegistration("run", "server-0"), Credentials(), kernel_threads=1)
    await host.adopt_map(_map(1, False, 0))
    values = memoryview(np.ones(16, np.float32)).cast("B")
    store = host.admission.store("p")
    store.install(0, values, 1)
    await host.adopt_map(_map(2, True, 0))
    with pytest.raises(StaleEpochError, match="'p' is ready"):
        store.install(0, values, 1)
    with pytest.raises(InvalidArgumentError, match="'p' is ready"):
        store.install(0, values, 2)
    await host.close()


@needs_compiler
async def test_a_server_on_a_device_says_so() -> None:
    device = HostDevice()
    host = ParameterServer(ServerRegistration("run", "server-0"), Credentials(), kernel_threads=1, lanes=Lanes(device))
    assert (host.statistics().device, host.statistics().device_bytes) == (device.name, 0)
    await host.adopt_map(_map(1, False, 0, 1))
    host.admission.store("p").install(0, memoryview(np.zeros(16, np.float32)).cast("B"), 1)
    assert host.statistics().device_bytes == device.allocated > 0
    assert [(update.apply_seconds, update.parameters) for update in host.statistics().parameters] == [(0, "p")]
    await host.close()
    plain = ParameterServer(ServerRegistration("run", "server-0"), Credentials(), kernel_threads=1)
    assert (plain.statistics().device, plain.statistics().device_bytes) == ("", 0)
    await plain.close()


# --- idle cores -------------------------------------------------------------------------------------------------------


def test_a_period_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    now, percent = [10.0], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(psutil, "cpu_percent", lambda: percent[0])
    monkeypatch.setattr(psutil, "cpu_count", lambda: 8)
    cores = Cores()
    found = []
    for seconds, busy in ((0.1, 50.0), (0.2, 75.0), (0.1, 0.0), (0.5, 100.0)):
        now[0] += seconds
        percent[0] = busy
        found.append(cores.idle())
    assert found == [None, 2.0, 2.0, 0.0]


def test_the_usable_cores_are_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now, usable = [10.0], [4]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr("psdist_server.server.usable_cores", lambda: usable[0])
    monkeypatch.setattr(psutil, "cpu_percent", lambda: 0.0)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 8)
    cores = Cores()
    usable[0] = 2
    for seconds, counted in ((30.0, 4), (30.0, 2)):
        now[0] += seconds
        assert cores.idle() == cores.usable == counted
