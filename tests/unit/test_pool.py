"""The kernel pool: order, one telling for each piece of work, and a clean end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from psdist_server.pool import KernelPool


async def test_low_slices_are_updated_first() -> None:
    pool: KernelPool[int] = KernelPool(1)
    begun, release = threading.Event(), threading.Event()
    order: list[int] = []
    told = asyncio.Event()

    def hold() -> int:
        begun.set()
        release.wait()
        return -1

    def tell(result: int | None, error: BaseException | None) -> None:
        assert error is None and result is not None
        order.append(result)
        if len(order) == 5:
            told.set()

    pool.submit(0, hold, tell)
    await asyncio.to_thread(begun.wait)
    for priority in (3, 1, 2, 0):
        pool.submit(priority, lambda priority=priority: priority, tell)  # type: ignore[misc]
    release.set()
    await told.wait()
    pool.close()
    assert order == [-1, 0, 1, 2, 3]


async def test_everything_is_told_once_by_any_number_of_threads() -> None:
    pool: KernelPool[int] = KernelPool(4)
    results: list[int] = []
    all_told = asyncio.Event()

    def tell(result: int | None, error: BaseException | None) -> None:
        assert threading.current_thread() is threading.main_thread() and result is not None
        results.append(result)
        if len(results) == 500:
            all_told.set()

    for number in range(500):
        pool.submit(0, lambda number=number: number, tell)  # type: ignore[misc]
    await all_told.wait()
    pool.close()
    assert sorted(results) == list(range(500))


async def test_an_error_is_told_and_the_thread_goes_on() -> None:
    pool: KernelPool[int] = KernelPool(1)
    told: asyncio.Queue[tuple[int | None, BaseException | None]] = asyncio.Queue()

    def tell(result: int | None, error: BaseException | None) -> None:
        told.put_nowait((result, error))

    pool.submit(0, lambda: 1 // 0, tell)
    pool.submit(1, lambda: 7, tell)
    result, error = await told.get()
    assert result is None and isinstance(error, ZeroDivisionError)
    assert await told.get() == (7, None)
    pool.close()


async def test_closing_drops_what_has_not_begun() -> None:
    pool: KernelPool[None] = KernelPool(1)
    begun, release = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        release.wait()

    def fail(*_: object) -> None:
        pytest.fail("told after close")

    pool.submit(0, hold, fail)
    pool.submit(1, lambda: None, fail)
    await asyncio.to_thread(begun.wait)
    closing = threading.Thread(target=pool.close)
    closing.start()
    release.set()
    await asyncio.to_thread(closing.join)
    await asyncio.sleep(0)
    assert not any(thread.name.startswith("kernel-") for thread in threading.enumerate())
