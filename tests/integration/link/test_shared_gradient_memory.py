"""Parameter sets that take turns with the memory in which servers read their gradients.

Each update adds 1 to every weight for a mean gradient of -1, so the weights show all contributions.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import psdist
from psdist import AsyncClient, AsyncParameters
from psdist.client.transport import shm
from psdist.compression import Codec
from psdist.errors import InvalidArgumentError
from psdist.launcher.embedded import EmbeddedCluster
from tests.support.clients import connected
from tests.support.contributions import until_pushed

SIZE = 1 << 18
SGD = psdist.optim.SGD(lr=1.0)


async def opened(
    client: AsyncClient, *names: str, size: int = SIZE, compression: Codec | str | None = None
) -> list[AsyncParameters]:
    init = {"w": np.zeros(size, np.float32)}
    return [await client.parameters(name, init, SGD, compression=compression) for name in names]


async def turn(handle: AsyncParameters, value: float) -> np.ndarray:
    """Make one step whose gradient is written to the buffers. Returns the weights after it. Memory stays shared."""
    buffer = await handle.gradient_buffers()
    buffer["w"][...] = value
    weights = (await handle.push_pull(buffer))["w"]
    await handle.release_memory(shared=False)
    return weights


async def address(handle: AsyncParameters) -> int:
    """Return the address of the gradients."""
    return int((await handle.gradient_buffers())["w"].__array_interface__["data"][0])


@pytest.mark.parametrize("compression", [None, "bfloat16"])
async def test_sets_that_take_turns_have_the_weights_that_they_would_have_alone(
    cluster: EmbeddedCluster, compression: str | None
) -> None:
    async with connected(cluster, "auto") as (client,):
        names = [f"turns-{compression}-{number}" for number in range(3)]
        handles = await opened(client, *names, compression=compression)
        for handle in handles[1:]:
            await handle.share_gradient_memory(handles[0])
        for step in range(1, 4):
            for number, handle in enumerate(handles, 1):
                assert set((await turn(handle, -float(number))).tolist()) == {float(step * number)}
        assert [handle.statistics().transport for handle in handles] == ["shm"] * 3
        if compression is None:
            assert len({await address(handle) for handle in handles}) == 1


async def test_memory_is_kept_for_the_next_turn_until_it_is_released(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, "auto") as (client,):
        first, second = await opened(client, "kept-0", "kept-1")
        await second.share_gradient_memory(first)
        await second.pull()
        await turn(first, -3.0)
        assert set((await second.gradient_buffers())["w"].tolist()) == {-3.0}
        await second.release_memory()
        assert set((await first.gradient_buffers())["w"].tolist()) == {0.0}


async def test_what_a_given_up_push_left_is_not_changed_by_who_has_the_next_turn(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, "auto", "auto") as clients:
        names = ["given-up-0", "given-up-1"]
        (first, second), others = await asyncio.gather(*(opened(client, *names) for client in clients))
        await second.share_gradient_memory(first)
        await asyncio.gather(turn(first, -1.0), turn(others[0], -1.0))
        await asyncio.gather(turn(second, -1.0), turn(others[1], -1.0))
        before = await address(first)
        buffer = await first.gradient_buffers()
        buffer["w"][...] = -3.0
        pushing = asyncio.create_task(first.push(buffer))
        await until_pushed(clients[1], names[0])
        pushing.cancel()
        await asyncio.wait({pushing})
        # The servers read that gradient once the other worker has pushed. Later writes of the second worker do not
        # reach it.
        results = await asyncio.gather(turn(second, -5.0), turn(others[1], -1.0))
        assert set(results[0].tolist()) == set(results[1].tolist()) == {4.0}
        assert set((await turn(others[0], -1.0)).tolist()) == {3.0}
        await first.push({"w": np.full(SIZE, -3.0, np.float32)})  # already taken
        # Both share memory again, at the same place.
        results = await asyncio.gather(turn(first, -3.0), turn(others[0], -1.0))
        assert set(results[0].tolist()) == {5.0}
        assert await address(first) == await address(second) == before
        assert [one.statistics().transport for one in (first, second)] == ["shm", "shm"]


async def test_a_set_that_is_closed_leaves_the_memory_to_the_others(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, "auto") as (client,):
        first, second = await opened(client, "closed-0", "closed-1")
        await second.share_gradient_memory(first)
        await turn(first, -1.0)
        await turn(second, -1.0)
        streams = dict(second.participation.shared_memory.connections)
        await first.close()
        assert set((await turn(second, -1.0)).tolist()) == {2.0}
        assert second.participation.shared_memory.connections == streams and all(
            one.broken is None for one in streams.values()
        )


async def test_memory_of_its_own_again(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, "auto") as (client,):
        first, second = await opened(client, "apart-0", "apart-1")
        await second.share_gradient_memory(first)
        for handle in (first, second):
            await turn(handle, -1.0)
        (await first.gradient_buffers())["w"][...] = -7.0
        await second.share_gradient_memory(None)
        assert set((await turn(second, -2.0)).tolist()) == {3.0}
        assert await address(second) != await address(first)
        assert set((await first.gradient_buffers())["w"].tolist()) == {-7.0}
        assert set((await first.push_pull(await first.gradient_buffers()))["w"].tolist()) == {8.0}
        assert [one.statistics().transport for one in (first, second)] == ["shm", "shm"]


async def test_without_shared_memory_each_has_its_own(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, "tcp") as (client,):
        first, second = await opened(client, "tcp-0", "tcp-1")
        await second.share_gradient_memory(first)
        assert await address(first) != await address(second)
        assert set((await turn(second, -2.0)).tolist()) == {2.0}


async def test_sets_that_differ_cannot_take_turns(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, "auto") as (client,):
        (first,) = await opened(client, "differ-0")
        (longer,) = await opened(client, "differ-1", size=SIZE + 1)
        (narrow,) = await opened(client, "differ-2", compression="bfloat16")
        for other, what in ((longer, "262,145"), (narrow, "bfloat16")):
            await turn(other, -1.0)
            before = other.participation.shared_memory.connections.copy()
            with pytest.raises(InvalidArgumentError, match=what):
                await other.share_gradient_memory(first)
            assert other.participation.shared_memory.connections == before
            assert set((await turn(other, -1.0)).tolist()) == {2.0}


# --- servers that lose the memory -------------------------------------------------------------------------------------


async def test_what_is_written_after_one_is_closed_in_the_middle_of_a_push_is_not_its_gradient(
    cluster: EmbeddedCluster,
) -> None:
    async with connected(cluster, "auto", "auto") as clients:
        names = ["middle-0", "middle-1"]
        (first, second), others = await asyncio.gather(*(opened(client, *names) for client in clients))
        await second.share_gradient_memory(first)
        await asyncio.gather(turn(second, -1.0), turn(others[1], -1.0))
        buffer = await first.gradient_buffers()
        buffer["w"][...] = -3.0
        pushing = asyncio.create_task(first.push(buffer))
        await until_pushed(clients[1], names[0])
        await first.close()
        results = await asyncio.gather(turn(second, -5.0), turn(others[1], -1.0))
        assert set(results[0].tolist()) == {4.0}
        assert set((await turn(others[0], -1.0)).tolist()) == {2.0}
        pushing.cancel()
        await asyncio.wait({pushing})


async def test_who_only_reads_loses_nothing(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, "auto") as (client,):
        (trained,) = await opened(client, "only-read")
        await turn(trained, -1.0)
        async with AsyncClient(cluster.address, cluster.token, rank=1, transport="shm") as reader:
            read = await reader.parameters("only-read")
            await read.pull()
            read.participation.shared_memory.rejoin(read.participation.current.sender, read.participation.current.entry)
            assert set((await read.pull())["w"].tolist()) == {1.0} and read.statistics().transport == "shm"


async def test_memory_that_is_given_back_while_it_is_offered_is_offered_again(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(cluster, "auto") as (client,):
        first, second = await opened(client, "holes-0", "holes-1")
        await second.share_gradient_memory(first)
        await turn(first, -1.0)
        attach = shm.attach

        async def slow(*arguments: Any) -> Any:
            await first.participation.shared_memory.release_memory(shared=True)
            return await attach(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(shm, "attach", slow)
            await second.pull()
            assert second.statistics().transport != "shm"
        await second.pull()
        assert second.statistics().transport == "shm"
