"""Outboxes (order, replacement, bounds and ends), and published maps as bytes."""

from __future__ import annotations

import asyncio

import pytest

from psdist.errors import ClosedError, FencedError, LimitExceededError
from psdist.types import ClusterMap, WorkerEntry
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire.scheduler_connection import FollowedMap
from psdist_scheduler.scheduler import UNREAD_MAX, Outbox, PublishedMap


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


# --- published maps ---------------------------------------------------------------------------------------------------


MAPS = [ClusterMap("run", epoch, workers=tuple(WorkerEntry(f"w{n}", 1, n) for n in range(epoch))) for epoch in range(4)]


def test_sessions_with_the_same_map_share_the_bytes_of_the_next() -> None:
    published = PublishedMap(MAPS[3])
    assert published.whole is published.whole
    assert published.since(MAPS[2]) is published.since(MAPS[2])
    for first in (0, 2):
        followed = FollowedMap()
        followed.apply(pb.SessionResponse.FromString(PublishedMap(MAPS[first]).whole))
        assert followed.apply(pb.SessionResponse.FromString(published.since(MAPS[first]))) == MAPS[3]


def test_a_difference_does_not_grow_with_the_run() -> None:
    workers = tuple(WorkerEntry(f"worker-{n}", 1, n) for n in range(1000))
    after = PublishedMap(ClusterMap("run", 8, workers=workers))
    assert len(after.whole) > 16_000
    assert len(after.since(ClusterMap("run", 7, workers=workers[:-1]))) < 40
