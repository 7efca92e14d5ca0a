"""Outboxes: order, replacement, bounds and ends."""

from __future__ import annotations

import asyncio

import pytest

from psdist.errors import ClosedError, FencedError, LimitExceededError
from psdist_scheduler.run.open_calls import UNREAD_MAX, Outbox


async def test_messages_come_in_order_and_the_newest_of_a_kind_counts() -> None:
    """Nothing overtakes: what was made by one map comes after it, and before the next."""
    box: Outbox[str] = Outbox()
    for message, kind in (("a", ""), ("old", "map"), ("1", "map"), ("b", ""), ("2", "map"), ("3", ""), ("4", "map")):
        box.put(message, kind)
    box.close()
    assert [message async for message in box] == ["a", "1", "b", "2", "3", "4"]


async def test_a_reader_is_woken() -> None:
    box: Outbox[str] = Outbox()
    reader = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.put("x")
    assert await reader == "x"


async def test_an_end_comes_after_the_messages() -> None:
    box: Outbox[str] = Outbox()
    box.put("x")
    box.close(FencedError("gone"))
    box.close()
    box.put("late")
    assert await box.take() == "x"
    with pytest.raises(FencedError):
        await box.take()


async def test_an_end_without_a_reason() -> None:
    box: Outbox[str] = Outbox()
    box.close()
    with pytest.raises(ClosedError):
        await box.take()


async def test_a_reader_that_does_not_read_is_ended() -> None:
    box: Outbox[int] = Outbox()
    for number in range(UNREAD_MAX + 10):
        box.put(number)
    received = []
    with pytest.raises(LimitExceededError):
        while True:
            received.append(await box.take())
    assert received == list(range(UNREAD_MAX))
