"""Calls of a group that share memory have the results of the same calls made in turn, in any order of events."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.collectives.core import plans
from psdist.collectives.core.machine import CallLane
from psdist.collectives.core.plans import Plan
from psdist.collectives.group import AsyncWorkerGroup
from psdist.collectives.memory_order import MemoryOrder
from psdist.errors import ClosedError, InvalidArgumentError, WaitTimeoutError
from tests.support.collective_network import Call, CollectiveNetwork

#: Elements of the memory that all calls of a rank use.
ELEMENTS = 48


class Ranks:
    """Groups of all ranks of a simulated network."""

    def __init__(self, size: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._network = CollectiveNetwork(size, self._rng)
        self.groups = [self._group(rank, size) for rank in range(size)]

    def _group(self, rank: int, size: int) -> AsyncWorkerGroup:
        started: dict[int, Call] = {}

        def start(lane: CallLane, plan: Plan) -> int:
            call = self._network.start(rank, plan, lane)
            if call.error is not None:
                raise call.error
            started[call.call_id] = call
            return call.call_id

        async def result(call_id: int, call: str, timeout: float | None) -> None:
            while not started[call_id].has_ended:  # noqa: ASYNC110  # Turns of the loop are part of the schedule.
                await asyncio.sleep(0)
            if (error := started[call_id].error) is not None:
                raise error

        async def outlast() -> None:
            """Stand-in for a session whose run continues."""

        runner = SimpleNamespace(
            ranks=tuple(range(size)), start=start, result=result, error=None,
            end=lambda error: self._network.close(rank, error),
        )  # fmt: skip
        group_calls = SimpleNamespace(enter=lambda: None, leave=lambda _: None, preparing=nullcontext)
        waits = SimpleNamespace(open=_no_wait, group_calls=group_calls)
        session = SimpleNamespace(waits=waits, outlast_stop=outlast)
        former: Any = SimpleNamespace(_session=session)
        formed: Any = SimpleNamespace(runner=runner, rank=rank, epoch=1)
        return AsyncWorkerGroup(former, formed)

    async def run(self, programs: list[list[Callable[[AsyncWorkerGroup], Coroutine[Any, Any, Any]]]]) -> list[Any]:
        """Make all calls of all ranks without waiting for any. Returns their results and errors."""
        made: list[asyncio.Future[Any]] = []
        for group, program in zip(self.groups, programs, strict=True):
            made += [asyncio.ensure_future(call(group)) for call in program]
        for _ in range(20_000):
            if all(call.done() for call in made):
                return await asyncio.gather(*made, return_exceptions=True)
            for _ in range(self._rng.randrange(3)):
                await asyncio.sleep(0)
            if events := list(self._network._events()):
                self._rng.choice(events)()
            else:
                await asyncio.sleep(0)
        raise AssertionError("a call does not end")


@contextmanager
def _no_wait(reason: str) -> Any:
    yield None


class Step:
    """One call of all ranks, or a message from one to another: on parts of each rank's memory, drawn from a seed.

    Each rank uses parts of its own, so that other calls of it overlap.
    """

    def __init__(self, seed: int, size: int) -> None:
        rng = random.Random(seed)
        self.kind = rng.choice(["all_reduce", "in_place", "broadcast", "all_gather", "reduce_scatter", "send"])
        self.size, self.count = size, rng.choice([1, 3, 8])
        self.root = rng.randrange(size)
        self.source, self.target = rng.sample(range(size), 2)
        self.places = [(self._place(rng), self._place(rng), rng.choice([1, 2])) for _ in range(size)]

    def _place(self, rng: random.Random) -> int:
        return rng.randrange(ELEMENTS - 2 * 3 * self.count + 1)

    def _part(self, memory: Any, place: int, rows: int, stride: int) -> Any:
        part = memory[place : place + rows * self.count * stride : stride]
        return part.reshape(rows, -1) if rows > 1 else part

    def call(self, memory: Any, group: AsyncWorkerGroup) -> Coroutine[Any, Any, Any]:
        first, second, stride = self.places[group.rank]
        one, other = self._part(memory, first, 1, stride), self._part(memory, second, 1, stride)
        match self.kind:
            case "all_reduce":
                return group.all_reduce(one, out=other)
            case "in_place":
                return group.all_reduce(one, out=one)
            case "broadcast":
                return group.broadcast(one, self.root, out=other)
            case "all_gather":
                return group.all_gather(one, out=self._part(memory, second, self.size, 1))
            case "reduce_scatter":
                return group.reduce_scatter(self._part(memory, first, self.size, 1), out=other)
        if group.rank == self.source:
            return group.send(one, self.target)
        return group.recv(other, self.source) if group.rank == self.target else _nothing()

    def apply(self, memories: list[Any]) -> None:
        """Change the memories as the call does."""
        ranks = range(self.size)
        ones = [self._part(memories[rank], self.places[rank][0], 1, self.places[rank][2]) for rank in ranks]
        others = [self._part(memories[rank], self.places[rank][1], 1, self.places[rank][2]) for rank in ranks]
        given = [one.copy() for one in ones]
        wide = [self._part(memories[rank], self.places[rank][0], self.size, 1).copy() for rank in ranks]
        for rank in ranks:
            match self.kind:
                case "all_reduce":
                    others[rank][...] = sum(given)
                case "in_place":
                    ones[rank][...] = sum(given)
                case "broadcast":
                    others[rank][...] = given[self.root]
                case "all_gather":
                    self._part(memories[rank], self.places[rank][1], self.size, 1)[...] = np.stack(given)
                case "reduce_scatter":
                    others[rank][...] = sum(wide)[rank]
                case _ if rank == self.target:
                    others[rank][...] = given[self.source]


async def _nothing() -> None:
    """Take no part."""


@pytest.fixture(autouse=True, scope="module")
def small_parts() -> Any:
    """Arrays of some elements travel as large ones do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "PART_BYTES", 32)
        patch.setattr(plans, "EAGER_BYTES", 16)
        patch.setattr(plans, "EAGER_REDUCED_BYTES", 24)
        yield


@given(st.integers(2, 3), st.lists(st.integers(0, 1 << 30), min_size=1, max_size=8), st.integers(0, 1 << 30))
def test_calls_that_overlap_have_the_results_of_calls_in_turn(size: int, seeds: list[int], seed: int) -> None:
    steps = [Step(one, size) for one in seeds]
    rng = np.random.default_rng(seed)
    memories = [rng.integers(-9, 9, ELEMENTS) for _ in range(size)]
    wanted = [memory.copy() for memory in memories]
    for step in steps:
        step.apply(wanted)

    async def main() -> None:
        programs: list[Any] = [
            [lambda group, step=step, memory=memory: step.call(memory, group) for step in steps] for memory in memories
        ]
        results = await Ranks(size, seed).run(programs)
        assert not [one for one in results if isinstance(one, BaseException)], results

    asyncio.run(main())
    for rank in range(size):
        assert memories[rank].tolist() == wanted[rank].tolist(), [step.kind for step in steps]


async def test_ranks_exchange_small_arrays_in_place() -> None:
    memories = [np.full(3, rank) for rank in range(2)]

    def program(rank: int) -> list[Any]:
        memory, other = memories[rank], 1 - rank
        return [lambda group: group.send(memory, other), lambda group: group.recv(memory, other)]

    await Ranks(2, 1).run([program(0), program(1)])
    assert [memory.tolist() for memory in memories] == [[1, 1, 1], [0, 0, 0]]


async def test_a_call_that_waits_for_memory_has_a_time_limit() -> None:
    group, memory = Ranks(2, 1).groups[0], np.ones(3)
    first = asyncio.ensure_future(group.all_reduce(memory, out=memory))
    await asyncio.sleep(0)
    with pytest.raises(WaitTimeoutError, match=r"rank 0 reached the timeout of 0\.01 s, waiting for an earlier call"):
        await group.all_reduce(memory, out=memory, timeout=0.01)
    with pytest.raises(WaitTimeoutError):
        await first


async def test_a_call_that_is_given_up_before_its_turn_ends_the_group() -> None:
    group, memory = Ranks(2, 1).groups[0], np.ones(3)
    calls_ = [asyncio.ensure_future(group.all_reduce(memory, out=memory)) for _ in range(2)]
    await asyncio.sleep(0)
    calls_[1].cancel()
    with pytest.raises(ClosedError, match="rank 0 gave up a call"):
        await calls_[0]


async def test_a_refused_call_holds_up_no_others() -> None:
    async def wrong(group: AsyncWorkerGroup, memory: Any) -> None:
        with pytest.raises(InvalidArgumentError):
            await group.all_reduce(memory, "mean", out=memory)

    memories = [np.ones(3) for _ in range(2)]

    def program(memory: Any) -> list[Any]:
        summed = lambda group: group.all_reduce(memory, out=memory)  # noqa: E731
        return [summed, lambda group: wrong(group, memory), summed]

    await Ranks(2, 1).run([program(memory) for memory in memories])
    assert all(memory.tolist() == [4, 4, 4] for memory in memories)


async def test_a_lane_keeps_its_order_while_a_call_waits() -> None:
    begun: list[str] = []

    async def waiting(wait: Awaitable[None], _: float | None) -> None:
        await wait

    order = MemoryOrder(lambda span: span, waiting)

    async def call(lane: str, name: str, reads: list[Any], writes: list[Any], ended: Awaitable[bool]) -> None:
        async def made() -> None:
            begun.append(name)
            await ended

        await order.make(order.enter(lane, reads, writes), None, made)

    ends = [asyncio.Event() for _ in range(6)]
    made = [
        call("a", "first", [], [(0, 8)], ends[0].wait()),
        call("a", "waits", [(4, 6)], [], ends[1].wait()),
        call("a", "behind", [(20, 24)], [], ends[2].wait()),
        call("b", "elsewhere", [(20, 24)], [], ends[3].wait()),
        call("a", "last", [], [(22, 30)], ends[4].wait()),
    ]
    tasks = [asyncio.ensure_future(one) for one in made]
    await asyncio.sleep(0)
    assert begun == ["first", "elsewhere"]
    ends[0].set()
    for _ in range(9):
        await asyncio.sleep(0)
    assert begun == ["first", "elsewhere", "waits", "behind"], "the last one waits for the readers"
    for end in ends:
        end.set()
    await asyncio.gather(*tasks)
    assert begun[-1] == "last" and not order._turns and not order._waiting
