"""Steps of workers that were all left out, so that nobody has continued, and states of wrong sizes: over groups in
memory."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from psdist.collectives.elastic import ElasticSteps, StepArrays
from psdist.errors import ClosedError, ExcludedError, LateWorkerError, LimitExceededError, WorkerLostError


class Meeting:
    """Calls of the two ranks of one group."""

    def __init__(self) -> None:
        self.ready = asyncio.Barrier(2)
        self.given: list[Any] = [None, None]
        self.sent: asyncio.Queue[Any] = asyncio.Queue()

    async def exchange(self, rank: int, array: Any) -> list[Any]:
        self.given[rank] = np.copy(array)
        await self.ready.wait()
        found = list(self.given)
        await self.ready.wait()
        return found


class Group:
    """One rank. fails: all calls of steps raise ExcludedError."""

    size = 2

    def __init__(self, meeting: Meeting, rank: int, *, fails: bool = False) -> None:
        self.meeting, self.rank, self.fails = meeting, rank, fails
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True

    async def joined(self) -> Any:
        return self

    async def all_gather(self, array: Any) -> NDArray[Any]:
        return np.stack(await self.meeting.exchange(self.rank, array))

    async def all_reduce(self, array: Any, out: Any = None) -> Any:
        if self.fails:
            raise ExcludedError("left out")
        total = sum(await self.meeting.exchange(self.rank, array))
        if out is not None:
            out[...] = total
        return total

    async def broadcast(self, array: Any, src: int, out: Any) -> None:
        out[...] = (await self.meeting.exchange(self.rank, array))[src]

    async def count_newcomers(self) -> int:
        return 0

    async def send(self, array: Any, dst: int) -> None:
        await self.meeting.sent.put(np.copy(array))

    async def recv(self, out: Any, src: int) -> Any:
        out[...] = await self.meeting.sent.get()
        return out


class Worker:
    """One rank, whose state is a number."""

    def __init__(self, rank: int, meetings: list[Meeting], step: int) -> None:
        self.state = np.array([float(rank)])
        groups = iter([Group(meetings[0], rank, fails=True), Group(meetings[1], rank)])

        async def join() -> Any:
            return next(groups)

        self.steps = ElasticSteps(join, self)
        self.rank, self.first = rank, step

    bytes_max = 1 << 30

    async def export(self) -> NDArray[np.uint8]:
        return self.state.view(np.uint8)

    async def load(self, data: NDArray[np.uint8]) -> None:
        self.state = data.copy().view(np.float64)

    async def run(self) -> tuple[float, float, float]:
        await self.steps.start()
        self.state, self.steps.step = np.array([float(self.rank)]), self.first
        given = np.array([10.0 + self.rank])
        out, buffer = np.empty(1), np.empty(1)
        await self.steps.reduce(StepArrays([given, given], [out, buffer], 1))
        return float(self.state[0]), float(out[0]), float(buffer[0])


async def test_workers_that_were_all_left_out_continue_from_the_one_that_is_ahead() -> None:
    meetings = [Meeting(), Meeting()]
    workers = [Worker(0, meetings, 7), Worker(1, meetings, 8)]
    results = await asyncio.gather(*(one.run() for one in workers))
    # State, gradient and buffer are those of rank 1: what rank 0 gives belongs to the state that it has replaced.
    assert results == [(1.0, 11.0, 11.0)] * 2
    assert [one.steps.step for one in workers] == [9, 9]


@pytest.mark.parametrize("announced", [-1, 9, 1 << 50])
async def test_a_state_of_another_size_than_expected_is_refused_before_it_is_received(announced: int) -> None:
    meeting = Meeting()
    workers = [Worker(rank, [meeting, meeting], 0) for rank in range(2)]
    joining, group = workers[0], Group(meeting, 0)
    joining.bytes_max = 8
    await meeting.sent.put(np.array([3, announced]))
    ahead = asyncio.create_task(meeting.exchange(1, [5, 5, False, False]))
    joining.steps._join = group.joined
    with pytest.raises(LimitExceededError, match=f"rank 1 announces a state of {announced} bytes.* at most 8"):
        await joining.steps.start()
    assert group.is_closed and joining.steps.step == 0, "the others would wait for it"
    await ahead


async def test_a_worker_that_cannot_load_the_state_ends_the_group() -> None:
    meeting = Meeting()
    workers = [Worker(rank, [meeting, meeting], 0) for rank in range(2)]
    joining, group = workers[0], Group(meeting, 0)

    async def load(_: NDArray[np.uint8]) -> None:
        raise ValueError("loaded state dict has a different number of parameter groups")

    joining.steps._join = group.joined
    joining.load = load
    for array in (np.array([3, 8]), np.zeros(8, np.uint8)):
        await meeting.sent.put(array)
    ahead = asyncio.create_task(meeting.exchange(1, [5, 5, False, False]))
    with pytest.raises(ValueError, match="number of parameter groups"):
        await joining.steps.start()
    assert group.is_closed and joining.steps.step == 0, "the others would wait for it"
    await ahead


async def test_the_training_is_closed_if_the_others_have_completed_it() -> None:
    meeting = Meeting()

    class Last(Group):
        """Group whose other member has finished it and has left."""

        async def barrier(self) -> None:
            raise WorkerLostError("rank 1 is gone", rank=1)

        async def reconfigure(self, *, admit: bool) -> Any:
            raise LateWorkerError("the other members have completed their work")

    steps = ElasticSteps(Last(meeting, 0).joined, Worker(0, [meeting, meeting], 0))
    steps._group = Last(meeting, 0)  # type: ignore[assignment]
    await steps.close()
    with pytest.raises(ClosedError):
        steps.group  # noqa: B018 - a property that raises
