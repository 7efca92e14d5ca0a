"""Reports of a server's reading to a worker that asked for them: held, resumed and complete."""

from __future__ import annotations

import asyncio

import pytest

from psdist.v1 import server_pb2 as pb
from psdist.wire import limits
from psdist_server.store.rpc_call import PayloadSlots


class HeldSlots:
    """Slots that are all taken, and their reports."""

    def __init__(self) -> None:
        self.seen: asyncio.Queue[int] = asyncio.Queue()
        self.slots = PayloadSlots(self.seen.put_nowait)
        self.slots.is_reported = True

    async def fill(self) -> None:
        for _ in range(limits.HELD_SLICES_MAX):
            await self.slots.acquire()


@pytest.fixture
async def held() -> HeldSlots:
    found = HeldSlots()
    await found.fill()
    return found


async def test_a_worker_is_notified_that_its_slices_are_held_and_then_released(held: HeldSlots) -> None:
    acquiring = asyncio.create_task(held.slots.acquire())
    assert await held.seen.get() == pb.READING_HELD
    held.slots.release()
    await acquiring
    assert await held.seen.get() == pb.READING_RESUMED


async def test_a_slot_that_is_released_soon_is_not_worth_a_report(
    held: HeldSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HELD_REPORT_SECONDS", 3600.0)
    acquiring = asyncio.create_task(held.slots.acquire())
    await asyncio.sleep(0)
    held.slots.release()
    await acquiring
    assert held.seen.empty()


async def test_a_cancelled_reader_reports_nothing_more(held: HeldSlots) -> None:
    acquiring = asyncio.create_task(held.slots.acquire())
    await asyncio.sleep(0)
    acquiring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acquiring
    later = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(2 * limits.HELD_REPORT_SECONDS, later.set_result, None)
    await later
    assert held.seen.empty()


@pytest.mark.parametrize(("asked", "more", "reports"), [(True, 0, 0), (False, 1, 0), (True, 1, 1)])
async def test_the_end_of_a_large_push_is_reported_to_a_worker_that_asked(
    held: HeldSlots, asked: bool, more: int, reports: int
) -> None:
    held.slots.is_reported = asked
    held.slots.received_bytes = limits.DELIVERED_BYTES + more
    held.slots.end()
    assert held.seen.qsize() == reports


async def test_a_worker_that_did_not_ask_gets_no_report(held: HeldSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HELD_REPORT_SECONDS", 0.0)
    held.slots.is_reported = False
    acquiring = asyncio.create_task(held.slots.acquire())
    await asyncio.wait({acquiring}, timeout=0.01)
    held.slots.release()
    await acquiring
    assert held.seen.empty()
