"""Groups whose members die, leave and are added, between clients of this process, with a real scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from psdist import AsyncClient
from psdist.collectives.workers import AsyncCollectives
from psdist.errors import (
    InvalidArgumentError,
    InvalidNameError,
    WaitTimeoutError,
    WorkerLostError,
)
from psdist.launcher.embedded import EmbeddedCluster

SIZE = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    cluster = EmbeddedCluster(servers=1)
    yield cluster
    cluster.close()


class Workers:
    """Clients of one run, and their collectives."""

    def __init__(self, cluster: EmbeddedCluster) -> None:
        self._cluster = cluster
        self.clients: list[AsyncClient] = []
        self.all: list[AsyncCollectives] = []

    async def add(self, rank: int) -> AsyncCollectives:
        client = AsyncClient(self._cluster.address, self._cluster.token, rank=rank)
        await client.connect()
        self.clients.append(client)
        self.all.append(AsyncCollectives(client._opened()))
        return self.all[-1]


@pytest.fixture
async def workers(cluster: EmbeddedCluster) -> AsyncIterator[Workers]:
    workers = Workers(cluster)
    for rank in range(SIZE):
        await workers.add(rank)
    yield workers
    for client in workers.clients:
        await client.close()


async def test_survivors_of_a_plain_group_continue(workers: Workers) -> None:
    groups = [one.new_group(range(SIZE)) for one in workers.all]
    await asyncio.gather(*(group.barrier() for group in groups))
    waiting = asyncio.gather(*(group.barrier() for group in groups[:2]), return_exceptions=True)
    await workers.clients[2].close()
    assert all(isinstance(error, WorkerLostError) for error in await waiting)
    for epoch in (2, 3):
        groups = await asyncio.gather(*(group.reconfigure() for group in groups[:2]))
        assert [(group.ranks, group.epoch) for group in groups] == [((0, 1), epoch)] * 2
        sums = await asyncio.gather(*(group.all_reduce(np.full(9, 1 + group.rank)) for group in groups))
        assert [one[0] for one in sums] == [3, 3]


async def test_a_new_worker_is_taken_in_when_all_admit_it(workers: Workers) -> None:
    groups = await asyncio.gather(*(one.join_group("training", size=SIZE) for one in workers.all))
    joining = asyncio.ensure_future((await workers.add(SIZE)).join_group("training", size=SIZE))
    while not await groups[0].count_newcomers():
        assert not joining.done()
    groups = await asyncio.gather(*(group.reconfigure() for group in groups))
    assert not joining.done() and groups[0].size == SIZE
    groups = await asyncio.gather(*(group.reconfigure(admit=True) for group in groups))
    groups = [*groups, await joining]
    assert [group.rank for group in groups] == [0, 1, 2, 3]
    sums = await asyncio.gather(*(group.all_reduce([2.0]) for group in groups))
    assert [one.tolist() for one in sums] == [[8.0]] * 4


async def test_a_member_that_has_closed_the_group_is_not_waited_for(workers: Workers) -> None:
    groups = await asyncio.gather(*(one.join_group("closing", size=SIZE) for one in workers.all))
    await groups[1].close()
    left = await asyncio.gather(groups[0].reconfigure(), groups[2].reconfigure())
    assert [group.ranks for group in left] == [(0, 2)] * 2


async def test_a_slow_member_is_waited_for_and_named(workers: Workers) -> None:
    groups = await asyncio.gather(*(one.join_group("slow", size=SIZE) for one in workers.all))
    with pytest.raises(WaitTimeoutError, match=r"'slow' was not formed within 0.3 s: waiting for worker-1.*rank 1"):
        await groups[0].reconfigure(timeout=0.3)
    again = await asyncio.gather(*(group.reconfigure() for group in groups))
    assert [group.size for group in again] == [3, 3, 3]


async def test_too_few_workers_wait_for_others(workers: Workers) -> None:
    groups = await asyncio.gather(*(one.join_group("few", size=SIZE, size_min=3) for one in workers.all))
    await workers.clients[2].close()
    waiting = [asyncio.ensure_future(group.reconfigure(admit=True)) for group in groups[:2]]
    with pytest.raises(WaitTimeoutError, match="for 1 of 3 workers"):
        await groups[0].reconfigure(timeout=0.3)
    for call in waiting:
        call.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_wrong_arguments(workers: Workers) -> None:
    one = workers.all[0]
    for call, error, text in (
        (one.join_group("a b"), InvalidNameError, "group name"),
        (one.join_group(size=0), InvalidArgumentError, "size=0"),
        (one.join_group(size=2, size_min=3), InvalidArgumentError, "size=2 is out of range: .* from 3"),
        (one.join_group(silence=0), InvalidArgumentError, "silence=0 is out of range"),
        (one.join_group(timeout=-1), InvalidArgumentError, "timeout=-1 is out of range"),
        (one.new_group([0, 7]).reconfigure(), InvalidArgumentError, "never been in the run"),
    ):
        with pytest.raises(error, match=text):
            await call
