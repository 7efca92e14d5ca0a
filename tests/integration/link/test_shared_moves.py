"""Shared memory over changes of the cluster map, when servers die or are drained, and arenas that are replaced while
they are offered. Training stays exact and shared, in-place reads stay unchanged, and no unused memory is kept.

Real scheduler and servers, with two copies of each shard. Each update adds 1 to every weight.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psdist
from psdist import AsyncParameters
from psdist.client.transport import shm
from psdist.client.transport.shm import ShmConnection
from psdist.consistency import Consistency
from psdist.launcher.embedded import EmbeddedCluster
from psdist.settings.config import TransportName
from tests.support.clients import connected, until

SIZE = 1 << 19
SGD = psdist.optim.SGD(lr=1.0)
_BSP = psdist.BSP()
GRADIENT = {"a": np.full(SIZE, -1.0, np.float32), "b": np.full(SIZE, -1.0, np.float32)}


@pytest.fixture
def cluster() -> Iterator[EmbeddedCluster]:
    """Cluster for a test that removes servers."""
    cluster = EmbeddedCluster(servers=3, replicas=2)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def whole() -> Iterator[EmbeddedCluster]:
    """Cluster for tests that do not change it, each with its own parameters."""
    cluster = EmbeddedCluster(servers=3, replicas=2)
    yield cluster
    cluster.close()


@asynccontextmanager
async def joined(
    cluster: EmbeddedCluster, *transports: TransportName, consistency: Consistency = _BSP, name: str = "p"
) -> AsyncIterator[list[AsyncParameters]]:
    async with connected(cluster, *transports) as clients:
        init = {name: np.zeros(SIZE, np.float32) for name in GRADIENT}
        yield await asyncio.gather(*(client.parameters(name, init, SGD, consistency) for client in clients))


async def step(handles: list[AsyncParameters], **arguments: Any) -> list[dict[str, np.ndarray]]:
    return list(await asyncio.gather(*(handle.push_pull(GRADIENT, **arguments) for handle in handles)))


def values(weights: dict[str, np.ndarray]) -> set[float]:
    return {value for array in weights.values() for value in np.unique(array).tolist()}


def epoch_of(handle: AsyncParameters) -> int:
    return handle.participation.delivery.view.cluster.epoch


def check_shared(handle: AsyncParameters, without: str) -> None:
    """Check that memory is shared with all servers but one, and that the weights are read in place."""
    transports = handle.statistics().transports
    assert without not in transports and set(transports.values()) == {"shm"}, transports
    shared = handle.participation.shared_memory.weights
    assert shared is not None


# Copies of the weights that the other case reads in place.
@pytest.mark.parametrize("copy", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_when_a_server_dies_training_goes_on_in_shared_memory(cluster: EmbeddedCluster, copy: bool) -> None:
    async with joined(cluster, "shm", "shm") as handles:
        await step(handles)
        lent = (await step(handles, copy=copy))[0]
        first = asyncio.create_task(handles[0].push_pull(GRADIENT, copy=copy))
        await until(lambda: any(stream.calls for stream in handles[0].participation.shared_memory.connections.values()))
        cluster.processes[2].kill()
        assert values(lent) == {2.0}
        second = await handles[1].push_pull(GRADIENT, copy=copy)
        assert values(await first) == values(second) == {3.0}
        for done in range(4, 8):
            results = await step(handles, copy=copy)
            assert all(values(result) == {done} for result in results)
        check_shared(handles[0], "server-1")
        shared = handles[0].participation.shared_memory.weights
        assert shared is not None and np.shares_memory(results[0]["a"], shared) == (not copy)


async def test_what_is_read_in_place_stays_as_it_is_when_its_server_dies_and_when_others_take_over(
    cluster: EmbeddedCluster,
) -> None:
    async with joined(cluster, "shm") as handles:
        await step(handles)
        lent = (await step(handles, copy=False))[0]
        epoch = epoch_of(handles[0])
        cluster.processes[1].kill()
        await until(lambda: epoch_of(handles[0]) > epoch)
        assert values(lent) == {2.0}
        # The vector is the same, in other servers' memory.
        assert values(await handles[0].pull(copy=False)) == values(lent) == {2.0}
        await step(handles)
        assert values(lent) == {3.0}


async def test_a_step_in_buckets_goes_on_when_a_server_dies_in_it(cluster: EmbeddedCluster) -> None:
    async with joined(cluster, "shm") as handles:
        (handle,) = handles
        await step(handles)
        lent = (await step(handles, copy=False))[0]
        early = await handle.push_pull_async({"a": GRADIENT["a"]})
        assert values(await early) == {3.0}
        epoch = epoch_of(handles[0])
        cluster.processes[3].kill()
        await until(lambda: epoch_of(handles[0]) > epoch)
        assert np.unique(lent["b"]).tolist() == [2.0] and values(await early) == {3.0}
        late = await handle.push_pull_async({"b": GRADIENT["b"]})
        assert values(await late) == values(await early) == {3.0}
        assert values((await step(handles, copy=False))[0]) == {4.0}
        check_shared(handle, "server-2")


async def test_a_drained_server_is_read_from_no_more(cluster: EmbeddedCluster) -> None:
    async with joined(cluster, "shm", "grpc") as handles:
        await step(handles)
        lent = (await step(handles, copy=False))[0]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "psdist.cli.main", "drain", "server-0"),
            env={**os.environ, "PSDIST_SCHEDULER": cluster.address, "PSDIST_TOKEN": cluster.token},
        )
        assert await process.wait() == 0
        assert values(lent) == {2.0}
        for done in range(3, 6):
            assert all(values(result) == {done} for result in await step(handles, copy=False))
        check_shared(handles[0], "server-0")


async def test_weights_that_replicas_do_not_have_yet_are_waited_for(
    whole: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(whole, "shm", "shm", consistency=psdist.ASP(), name="waited-for") as (reader, writer):
        await step([reader, writer])
        copy, ahead = ShmConnection.copy_moving, []

        async def copy_newer(stream: ShmConnection, index: int, target: np.ndarray) -> int:
            """Copy the memory as if the server had just written another version that is not acknowledged."""
            version = await copy(stream, index, target)
            ahead.append(version + 1)
            return version + 1

        monkeypatch.setattr(ShmConnection, "copy_moving", copy_newer)
        pulling = asyncio.create_task(reader.pull())
        slices = reader.participation.slicing.count
        await until(lambda: len(ahead) == slices)
        await asyncio.wait({pulling}, timeout=0.2)
        assert not pulling.done()
        monkeypatch.setattr(ShmConnection, "copy_moving", copy)
        await writer.push(GRADIENT)
        await pulling
        assert reader.version == 3


# --- arenas that are replaced, and the end of what is not used any more -----------------------------------------------


async def test_an_arena_that_is_replaced_while_it_is_offered_is_offered_anew(
    whole: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(whole, "auto", "grpc", name="replaced") as handles:
        shared_memory, attach, replaced = handles[0].participation.shared_memory, shm.attach, []

        async def slow(*arguments: Any) -> Any:
            attached = await attach(*arguments)
            if not replaced:
                replaced.append(arguments)
                await shared_memory.withdraw()  # as after another call's push that did not end well
            return attached

        monkeypatch.setattr(shm, "attach", slow)
        buffer = await handles[0].gradient_buffers()
        assert "withdrawn while it was offered" in str(handles[0].statistics().transports)
        assert not shared_memory.connections
        # By the file that they were given, servers would not read the values written now.
        for array in buffer.values():
            array[...] = -1.0
        results = await asyncio.gather(handles[0].push_pull(buffer), handles[1].push_pull(GRADIENT))
        assert values(results[0]) == {1.0} and handles[0].statistics().transport == "shm"


def mapped() -> list[str]:
    """Return the inode of each mapping of weights in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[4] for line in lines if "memfd:psdist-weights" in line]


async def test_what_was_shared_ends_with_its_last_user_without_the_garbage_collector(whole: EmbeddedCluster) -> None:
    others = set(mapped())  # An earlier test's, which may end at any time.

    def count() -> int:
        return sum(inode not in others for inode in mapped())

    async with joined(whole, "shm", name="ended") as handles:
        await step(handles, copy=False)
        gc.collect()
        gc.disable()
        try:
            shared_memory = handles[0].participation.shared_memory
            streams = [weakref.ref(stream) for stream in shared_memory.connections.values()]
            before = count()
            await shared_memory.withdraw()  # closes the streams; the next call opens others
            await step(handles, copy=False)
            assert [stream() for stream in streams] == [None] * len(streams) and count() == before > 0
            await handles[0].close()
            assert count() == 0
        finally:
            gc.enable()
