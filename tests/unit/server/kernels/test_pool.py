"""The kernel pool and its launcher: order, one telling for each piece of work, and a clean end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import pytest

from psdist import ASP, BSP, optim
from psdist.types import ParametersEntry, ParametersSpec, Replica, Shard
from psdist_server.kernels.pool import BATCH_MAX, KernelLauncher, KernelPool

Told = asyncio.Queue[tuple[int, int | None, BaseException | None]]


class Work:
    """Work for a pool: numbers, squared. It holds its first thread until it is released."""

    def __init__(self) -> None:
        self.begun, self.release = threading.Event(), threading.Event()
        self.batches: list[list[int]] = []
        self.told: Told = asyncio.Queue()

    def run(self, numbers: Sequence[int]) -> list[int]:
        self.begun.set()
        self.release.wait()
        self.batches.append(list(numbers))
        if 13 in numbers:
            raise ValueError("thirteen")
        return [number**2 for number in numbers]

    def tell(self, number: int, square: int | None, error: BaseException | None) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.told.put_nowait((number, square, error))


async def test_low_slices_are_updated_first() -> None:
    pool = KernelPool(1)
    work = Work()
    pool.submit(0, work.run, 99, work.tell)
    await asyncio.to_thread(work.begun.wait)
    for priority in (3, 1, 2, 0):
        pool.submit(priority, work.run, priority, work.tell)
    work.release.set()
    assert [(await work.told.get())[:2] for _ in range(5)] == [(99, 9801), (0, 0), (1, 1), (2, 4), (3, 9)]
    pool.close()


async def test_where_many_wait_several_are_taken_at_once() -> None:
    pool = KernelPool(1)
    work = Work()
    pool.submit(0, work.run, 0, work.tell)
    await asyncio.to_thread(work.begun.wait)
    for number in range(100, 200):
        pool.submit(number, work.run, number, work.tell)
    work.release.set()
    assert [(await work.told.get())[0] for _ in range(101)] == [0, *range(100, 200)]
    pool.close()
    assert max(map(len, work.batches)) == BATCH_MAX and len(work.batches[-1]) == 1


async def test_what_is_run_differently_is_not_mixed() -> None:
    pool = KernelPool(1)
    one, other = Work(), Work()
    other.release.set()
    pool.submit(0, one.run, 0, one.tell)
    await asyncio.to_thread(one.begun.wait)
    for number in range(40):
        work = (one, other)[number % 2]
        pool.submit(number, work.run, number, work.tell)
    one.release.set()
    assert sorted([(await one.told.get())[0] for _ in range(21)]) == sorted([0, *range(0, 40, 2)])
    assert [(await other.told.get())[0] for _ in range(20)] == list(range(1, 40, 2))
    pool.close()


async def test_everything_is_told_once_by_any_number_of_threads() -> None:
    pool = KernelPool(4)
    work = Work()
    work.release.set()
    for number in range(1000, 1500):
        pool.submit(0, work.run, number, work.tell)
    told = [await work.told.get() for _ in range(500)]
    pool.close()
    assert sorted(told) == [(number, number**2, None) for number in range(1000, 1500)] and work.told.empty()


async def test_an_error_is_told_and_the_thread_goes_on() -> None:
    pool = KernelPool(1)
    work = Work()
    work.release.set()
    pool.submit(0, work.run, 13, work.tell)
    number, result, error = await work.told.get()
    assert number == 13 and result is None and isinstance(error, ValueError)
    pool.submit(1, work.run, 7, work.tell)
    assert await work.told.get() == (7, 49, None)
    pool.close()


async def test_closing_drops_what_has_not_begun() -> None:
    pool = KernelPool(1)
    work = Work()

    def fail(*_: object) -> None:
        pytest.fail("told after close")

    pool.submit(0, work.run, 0, fail)
    await asyncio.to_thread(work.begun.wait)
    pool.submit(1, work.run, 1, fail)
    closing = threading.Thread(target=pool.close)
    closing.start()
    work.release.set()
    await asyncio.to_thread(closing.join)
    await asyncio.sleep(0)
    assert not any(thread.name.startswith("kernel-") for thread in threading.enumerate())


# --- kernels by slice -------------------------------------------------------------------------------------------------


class Pool:
    """Kernels end when the test says so."""

    def __init__(self) -> None:
        self.ends: list[Callable[[], None]] = []
        self.priorities: list[int] = []

    def submit(self, priority: int, run: Any, work: Any, done: Callable[..., None]) -> None:
        self.priorities.append(priority)
        self.ends.append(lambda: done(work, run([work])[0], None))


def launcher(pool: Pool, *, inline: bool) -> tuple[KernelLauncher, list[str]]:
    failures: list[str] = []
    spec = ParametersSpec("p", optim.SGD(lr=1.0), BSP() if inline else ASP(), slice_elements=4096)
    entry = ParametersEntry(spec, 4 * 4096, (Shard(Replica("server-0", 1)),) * 2)
    made = KernelLauncher(entry, cast(KernelPool, pool), lambda what, error: failures.append(what))
    return made, failures


def double(works: Sequence[tuple[int, int]]) -> list[int]:
    return [2 * number for _, number in works]


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    yield Pool()


def test_small_slices_are_updated_at_once(pool: Pool) -> None:
    kernels, _ = launcher(pool, inline=True)
    done: list[tuple[int, int]] = []
    kernels.submit(0, double, 4, lambda work, result: done.append((work, result)))
    assert done == [(4, 8)] and not pool.ends


def test_a_kernel_that_fails_is_reported_with_its_slice(pool: Pool) -> None:
    kernels, failures = launcher(pool, inline=True)
    kernels.submit(3, lambda works: 1 // 0, None, lambda *_: failures.append("done"))
    assert failures == ["the update of slice 3"]


async def test_a_shard_settles_with_its_last_kernel_and_not_with_those_of_others(pool: Pool) -> None:
    kernels, _ = launcher(pool, inline=False)
    for index in (0, 2, 1):
        kernels.submit(index, double, 1, lambda *_: None)
    settled = asyncio.create_task(kernels.settled(0))
    for end in pool.ends[:2]:
        await asyncio.wait({settled}, timeout=0)
        assert not settled.done()
        end()
    async with asyncio.timeout(60):
        await settled
    everything = asyncio.create_task(kernels.all_settled())
    await asyncio.wait({everything}, timeout=0)
    assert not everything.done()
    pool.ends[2]()
    async with asyncio.timeout(60):
        await everything


async def test_the_result_of_a_slice_that_was_discarded_is_not_reported(pool: Pool) -> None:
    kernels, _ = launcher(pool, inline=False)
    done: list[int] = []
    kernels.submit(0, double, 1, lambda work, result: done.append(result))
    kernels.discard([0])
    pool.ends[0]()
    assert not done
    await kernels.settled(0)
    kernels.readmit([0])
    kernels.submit(0, double, 2, lambda work, result: done.append(result))
    pool.ends[1]()
    assert done == [4]


async def test_what_comes_last_has_a_higher_number_than_all_slices(pool: Pool) -> None:
    kernels, _ = launcher(pool, inline=False)
    kernels.submit(0, double, 1, lambda *_: None, last=True)
    kernels.submit(3, double, 1, lambda *_: None)
    assert pool.priorities[0] > pool.priorities[1] == 3
