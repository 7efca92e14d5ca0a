"""Groups whose members die, leave and are added, between clients of this process, with a real scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

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


async def test_a_group_of_members_that_the_scheduler_has_not_chosen(workers: Workers) -> None:
    first, second, third = workers.all
    members = [second.identity, third.identity, first.identity]
    groups = await asyncio.gather(*(one.enter_group("chosen", 7, members) for one in workers.all))
    assert [group.rank for group in groups] == [2, 0, 1] and groups[0].ranks == (1, 2, 0)
    sums = await asyncio.gather(*(group.all_gather([group.rank]) for group in groups))
    assert [one.reshape(-1).tolist() for one in sums] == [[0, 1, 2]] * SIZE
    assert groups[0].error is None
    # The next one, without a member, and with one that joins the run later.
    joining = ("worker-9", 1)
    members = [first.identity, second.identity, joining]
    waiting = [asyncio.ensure_future(one.enter_group("chosen", 8, members)) for one in (first, second)]
    groups = [*await asyncio.gather((await workers.add(9)).enter_group("chosen", 8, members), *waiting)]
    await workers.clients[SIZE].close()
    with pytest.raises(WorkerLostError, match="rank 2 is gone"):
        await groups[1].barrier()
    assert isinstance(groups[1].error, WorkerLostError)


async def test_members_that_make_no_group(workers: Workers) -> None:
    one = workers.all[0]
    for members in ([workers.all[1].identity], [one.identity, one.identity]):
        with pytest.raises(InvalidArgumentError, match=r"cannot have these members: .* \(worker-0, inc"):
            await one.enter_group("chosen", 1, members)
    with pytest.raises(InvalidArgumentError, match="epoch=0 is out of range: use a whole number from 1"):
        await one.enter_group("chosen", 0, [one.identity])
    with pytest.raises(WorkerLostError, match=r"worker-1 started again as incarnation \d+: group 'chosen' has its"):
        await one.enter_group("chosen", 2, [one.identity, ("worker-1", 0)])
    with pytest.raises(WaitTimeoutError, match=r"not formed within 0.05 s: gone \(incarnation 1\) is not in the run"):
        await one.enter_group("chosen", 3, [one.identity, ("gone", 1)], timeout=0.05)
    with pytest.raises(WaitTimeoutError, match=r"waiting for rank 1 to call barrier\(\)"):
        await one.enter_group("chosen", 4, [one.identity, workers.all[1].identity], timeout=0.05)
    (alone,) = await asyncio.gather(one.enter_group("chosen", 5, [one.identity]))
    assert (await alone.all_reduce([2.0])).tolist() == [2.0]
