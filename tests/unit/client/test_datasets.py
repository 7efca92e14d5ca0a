"""The client's side of leased data when the wire fails it: answers are lost, the scheduler is away, a life ends.

The scheduler's own state machine of data sets answers here, over real gRPC, through a service that can be made to fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

import psdist
from psdist import errors
from psdist.client.datasets import AsyncDataset
from psdist.types import DataPosition
from psdist.v1 import scheduler_pb2 as pb
from psdist.v1.common_pb2 import ClusterMap
from psdist.wire import convert, status
from psdist_scheduler import conversions
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_state import Member, RestorePoint
from psdist_scheduler.decide.leased_datasets import Datasets
from psdist_scheduler.decide.snapshot_catalog import Resume
from tests.support.client_fakes import FakeScheduler, FakeServer


class DataScheduler(FakeScheduler):
    """Scheduler that loses the answers of the next ``mute`` requests, and ignores the next ``deaf``."""

    mute = deaf = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.data = Datasets((), Resume(RestorePoint()))
        #: Reports on ended leases: their numbers, the next pushes at their end, and the current next pushes.
        self.told: list[tuple[list[int], list[dict[str, int]], dict[str, int]]] = []

    def void(self) -> None:
        """Give the worker's leases to others."""
        self.data.lose(lambda *_: False)

    async def _ask(self, request: Any, context: Any, what: Callable[[ev.Caller, Member], list[ef.Effect]]) -> Any:
        if request.incarnation < self.fenced:
            await status.abort(context, errors.FencedError(f"incarnation {request.incarnation} was silent"))
        if isinstance(request, pb.LeaseRangeRequest | pb.EndRangesRequest):
            done_at = [dict(at.next) for at in request.done_at]
            self.told.append((list(request.done), done_at, dict(request.now.next)))
        if self.deaf:
            self.deaf -= 1
            await status.abort(context, errors.ServerUnreachableError("the request was lost"))
        who = ev.Caller(request.run_id, request.worker_id, request.incarnation)
        try:
            effects = what(who, Member(who.member_id, "worker", who.incarnation))
        except errors.PsdistError as error:
            await status.abort(context, error)
        if self.mute:
            self.mute -= 1
            await status.abort(context, errors.ServerUnreachableError("the answer was lost"))
        return next(effect.value for effect in effects if isinstance(effect, ef.Answer))

    async def OpenDataset(self, request: Any, context: Any) -> Any:
        spec = convert.dataset_from_proto(request.spec)
        value = await self._ask(request, context, lambda who, _: self.data.open(ev.OpenDataset(1, who, spec)))
        return pb.OpenDatasetResponse(
            spec=request.spec, position=convert.make_message(pb.DatasetStatus, value).position
        )

    async def LeaseRange(self, request: Any, context: Any) -> AsyncIterator[Any]:
        done, held = tuple(request.done), tuple(request.held)
        value = await self._ask(
            request,
            context,
            lambda who, mine: self.data.lease(ev.LeaseRange(1, who, request.dataset, done, held=held), mine),
        )
        yield conversions.response(pb.LeaseRangeResponse, value, ClusterMap())

    async def EndRanges(self, request: Any, context: Any) -> Any:
        done, returned, used = tuple(request.done), tuple(request.returned), tuple(request.used)
        await self._ask(
            request,
            context,
            lambda who, mine: self.data.end(
                ev.EndRanges(1, who, request.dataset, done, returned=returned, used=used), mine
            ),
        )
        return pb.EndRangesResponse()

    async def GetDataPosition(self, request: Any, context: Any) -> Any:
        (standing,) = (convert.make_message(pb.DatasetStatus, standing) for standing in self.data.standings)
        return pb.GetDataPositionResponse(spec=standing.spec, position=standing.position, leased=standing.leased)


@pytest.fixture
async def scheduler() -> AsyncIterator[DataScheduler]:
    scheduler = DataScheduler([])
    await scheduler.start()
    yield scheduler
    await scheduler.stop()


@pytest.fixture
async def client(scheduler: DataScheduler) -> AsyncIterator[psdist.AsyncClient]:
    async with psdist.AsyncClient(scheduler.address, rank=0) as client:
        yield client


@pytest.fixture
async def data(client: psdist.AsyncClient) -> AsyncDataset:
    return await client.dataset("train", size=40, range_size=10, shuffle=False)


async def test_answers_and_requests_that_are_lost_cost_no_range(scheduler: DataScheduler, data: AsyncDataset) -> None:
    seen: list[int] = []
    async for indices in data:
        seen += indices.tolist()
        assert len(seen) <= 40, "a range was given twice"
        scheduler.mute, scheduler.deaf = 2, 1
    assert seen == list(range(40))
    scheduler.mute = scheduler.deaf = 0
    assert await data.position() == DataPosition(1)


async def test_what_is_done_is_told_again_until_it_is_heard(scheduler: DataScheduler, data: AsyncDataset) -> None:
    assert await data.next() is not None
    data.done()
    scheduler.mute = scheduler.deaf = 1
    assert await data.position() == DataPosition(0, ((0, 1),))


async def test_a_range_whose_answer_was_not_awaited_is_given_again(
    scheduler: DataScheduler, data: AsyncDataset
) -> None:
    scheduler.mute = 1_000_000
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await data.next()
    scheduler.mute = 0
    held = await data.next()
    assert held is not None and held.number == 0
    assert scheduler.data.standings[0].leased == 1


async def test_what_is_left_while_the_scheduler_is_away_is_given_back_later(
    scheduler: DataScheduler, data: AsyncDataset
) -> None:
    held = await data.next()
    assert held is not None
    scheduler.deaf = 1_000_000
    await data.leave(held)
    assert scheduler.data.standings[0].leased == 1
    scheduler.deaf = 0
    again = await data.next()
    assert again is not None and (again.number, again.attempt) == (0, 0)
    assert again.lease_id != held.lease_id


async def test_what_was_held_in_a_life_that_ended_is_not_reported(scheduler: DataScheduler, data: AsyncDataset) -> None:
    held = await data.next()
    data.done()
    scheduler.expel()
    scheduler.void()
    again = await data.next(held)
    assert again is not None and (again.number, again.attempt) == (0, 1)
    assert data.repeated == 1
    assert await data.position() == DataPosition(0, (), 1)


async def test_a_client_that_closes_says_what_is_done_and_what_is_not(
    scheduler: DataScheduler, client: psdist.AsyncClient, data: AsyncDataset
) -> None:
    for _ in range(2):
        assert await data.next() is not None
    data.done()
    await client.close()
    (standing,) = scheduler.data.standings
    assert (standing.position, standing.leased) == (DataPosition(0, ((1, 1),)), 0)


async def test_a_range_that_is_left_after_a_push_counts_as_repeated(scheduler: DataScheduler) -> None:
    server = await FakeServer("server-0").start()
    scheduler.servers = [server]
    async with psdist.AsyncClient(scheduler.address, rank=0) as client:
        data = await client.dataset("train", size=40, range_size=10, shuffle=False)
        ones = {"w": np.ones(4, np.float32)}
        weights = await client.parameters("p", ones, psdist.optim.SGD())
        for is_used, repeated in ((None, 0), (True, 1), (False, 1)):
            held = await data.next()
            assert held is not None and held.number == 0
            await data.leave(held, is_used)
            assert (await data.position()).repeated_ranges == data.repeated == repeated
        assert await data.next() is not None
        await weights.push(ones)
    (standing,) = scheduler.data.standings
    assert standing.position == DataPosition(0, (), 2) and standing.leased == 0
    await server.stop()


async def test_what_is_done_is_told_with_the_pushes_that_it_was_done_at(scheduler: DataScheduler) -> None:
    server = await FakeServer("server-0").start()
    scheduler.servers = [server]
    async with psdist.AsyncClient(scheduler.address, rank=0) as client:
        data = await client.dataset("train", size=40, range_size=10, shuffle=False)
        ranges = aiter(data)
        await anext(ranges)
        ones = {"w": np.ones(4, np.float32)}
        weights = await client.parameters("p", ones, psdist.optim.SGD())
        await weights.push(ones)
        await anext(ranges)
        await weights.push(ones)
        data.done()
        await weights.push(ones)
        scheduler.mute = 1  # A repeated answer is the same.
        assert await data.position() == DataPosition(0, ((0, 2),))
    assert scheduler.told == [([], [], {}), ([1], [{"p": 1}], {"p": 1}), *[([2], [{"p": 2}], {"p": 3})] * 2]
    await server.stop()
