"""Kernels by slice: where they run, whose results are reported, and when a shard has settled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import pytest

from psdist import ASP, BSP, optim
from psdist.types import ParametersEntry, ParametersSpec, Replica, Shard
from psdist_server.kernels.pool import KernelLauncher, KernelPool


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
