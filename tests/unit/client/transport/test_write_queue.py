"""Write order of several callers to one server: the lowest slice goes first, and nobody waits for a stuck writer."""

from __future__ import annotations

import asyncio

import pytest

from psdist.client.transport import transport
from psdist.client.transport.transport import WriteQueue


async def write(turns: WriteQueue, slices: list[int], written: list[int]) -> None:
    for index in slices:
        turn = await turns.acquire(index)
        await asyncio.sleep(0)
        written.append(index)
        turns.release(turn)


async def test_lower_slices_are_written_first() -> None:
    ours, written = WriteQueue(), list[int]()
    await asyncio.gather(*(write(ours, slices, written) for slices in ([6, 7], [4, 5], [0, 1, 2])))
    assert written == [6, 0, 1, 2, 4, 5, 7]


async def test_a_writer_alone_does_not_wait() -> None:
    ours, written = WriteQueue(), list[int]()
    await write(ours, [3, 1, 2], written)
    assert written == [3, 1, 2]


async def test_nobody_waits_for_a_write_that_is_stuck() -> None:
    ours, written = WriteQueue(), list[int]()
    stuck = await ours.acquire(0)
    async with asyncio.timeout(60):
        await asyncio.gather(write(ours, [5, 6], written), write(ours, [1], written))
    assert written == [1, 5, 6]
    ours.release(stuck)
    await write(ours, [7], written)
    assert written[-1] == 7


@pytest.mark.parametrize("come", [False, True])
async def test_a_cancelled_writer_holds_nobody_up(come: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "PATIENCE_SECONDS", 60)
    ours, written = WriteQueue(), list[int]()
    first = await ours.acquire(0)
    cancelled = asyncio.create_task(write(ours, [1], written))
    other = asyncio.create_task(write(ours, [2], written))
    await asyncio.sleep(0)
    if come:
        ours.release(first)
    cancelled.cancel()
    if not come:
        ours.release(first)
    async with asyncio.timeout(60):
        await other
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    assert written == [2]
    assert await ours.acquire(9)
