"""One barrier of one client: each arrival has a number, and one that is given up is withdrawn first.

A fake scheduler opens the barrier, withdraws or does not answer. Tests in ``tests/chaos`` check that no real process
hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import psdist
from psdist import errors
from psdist.client.session import barriers
from tests.support.client_fakes import FakeScheduler, waits_for

#: A time limit that expires when the test says so.
LONG = 600.0


class Limits:
    """Replacement of asyncio in ``barriers`` that lets a test end time limits."""

    Lock = asyncio.Lock

    def __init__(self) -> None:
        self._limits: list[asyncio.Timeout] = []

    def timeout(self, seconds: float | None) -> asyncio.Timeout:
        self._limits.append(asyncio.timeout(seconds))
        return self._limits[-1]

    def expire(self) -> None:
        """Let the newest time limit expire."""
        self._limits[-1].reschedule(0.0)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    limits = Limits()
    monkeypatch.setattr(barriers, "asyncio", limits)
    return limits


@pytest.fixture
async def client(scheduler: FakeScheduler) -> AsyncIterator[psdist.AsyncClient]:
    client = await psdist.AsyncClient(scheduler.address).connect()
    yield client
    await client.close()


def told(scheduler: FakeScheduler) -> list[tuple[str, int, bool]]:
    """Return name, number and kind of all messages about barriers."""
    assert {request.origin for request in scheduler.barriers} <= {1}
    return [(request.name, request.passed, request.withdraw) for request in scheduler.barriers]


async def has_arrived(scheduler: FakeScheduler, count: int = 1) -> None:
    """Wait until this many requests have arrived."""
    while len(scheduler.barriers) < count:  # noqa: ASYNC110 - yields, and no more
        await asyncio.sleep(0)


async def test_arrivals_are_numbered_by_name(scheduler: FakeScheduler, client: psdist.AsyncClient) -> None:
    scheduler.barrier.set()
    for name in ("a", "a", "b", "a"):
        await client.barrier(name)
    assert told(scheduler) == [("a", 0, False), ("a", 1, False), ("b", 0, False), ("a", 2, False)]


async def test_an_arrival_that_is_withdrawn_does_not_count(
    scheduler: FakeScheduler, client: psdist.AsyncClient, limits: Limits
) -> None:
    call = asyncio.create_task(client.barrier("a", timeout=LONG))
    await waits_for(client, "for nobody in particular")
    limits.expire()
    with pytest.raises(errors.WaitTimeoutError, match=r"^barrier 'a': waiting \d+ s for nobody in particular$"):
        await call
    scheduler.barrier.set()
    await client.barrier("a", timeout=LONG)
    assert told(scheduler) == [("a", 0, False), ("a", 0, True), ("a", 0, False)]


async def test_who_gives_up_too_late_has_passed(
    scheduler: FakeScheduler, client: psdist.AsyncClient, limits: Limits
) -> None:
    scheduler.had_opened = True
    call = asyncio.create_task(client.barrier("a", timeout=LONG))
    await has_arrived(scheduler)
    limits.expire()
    await call
    assert told(scheduler) == [("a", 0, False), ("a", 0, True)]
    scheduler.barrier.set()
    await client.barrier("a")
    assert told(scheduler)[-1] == ("a", 1, False)


async def test_where_nobody_answers_the_next_call_finds_out(
    scheduler: FakeScheduler, client: psdist.AsyncClient, limits: Limits
) -> None:
    scheduler.withdrawing = asyncio.Event()
    call = asyncio.create_task(client.barrier("a", timeout=LONG))
    for count in (1, 2):
        await has_arrived(scheduler, count)
        limits.expire()
    with pytest.raises(errors.WaitTimeoutError, match=r"not known \(the scheduler at .* does not answer\): the next"):
        await call
    # The others have passed meanwhile, and it passes immediately because of the number.
    scheduler.barrier.set()
    await client.barrier("a")
    await client.barrier("a")
    assert told(scheduler) == [("a", 0, False), ("a", 0, True), ("a", 0, False), ("a", 1, False)]


async def test_a_refused_withdrawal_is_no_certainty(
    scheduler: FakeScheduler, client: psdist.AsyncClient, limits: Limits
) -> None:
    scheduler.withdrawing = asyncio.Event()
    call = asyncio.create_task(client.barrier("a", timeout=LONG))
    await has_arrived(scheduler)
    limits.expire()
    await has_arrived(scheduler, 2)
    scheduler.register_errors = [errors.WrongRunError("another run")]
    scheduler.expel()
    scheduler.withdrawing.set()
    with pytest.raises(errors.WaitTimeoutError, match=r"not known \(another run\)"):
        await call


async def test_who_had_not_arrived_gives_up_at_once(scheduler: FakeScheduler, client: psdist.AsyncClient) -> None:
    """Check this while another call of this client is at the barrier, so that this one has nothing to withdraw."""
    first = asyncio.create_task(client.barrier("a"))
    await has_arrived(scheduler)
    async with asyncio.timeout(barriers.WITHDRAW_SECONDS / 2):
        with pytest.raises(errors.WaitTimeoutError, match=r"^barrier 'a': waiting \d+ s for the others at [^:]*$"):
            await client.barrier("a", timeout=1e-6)
    assert told(scheduler) == [("a", 0, False)]
    scheduler.barrier.set()
    await first


async def test_calls_from_several_tasks_take_turns(scheduler: FakeScheduler, client: psdist.AsyncClient) -> None:
    calls = [asyncio.create_task(client.barrier("a")) for _ in range(3)]
    await has_arrived(scheduler)
    assert not any(call.done() for call in calls)
    scheduler.barrier.set()
    await asyncio.gather(*calls)
    assert told(scheduler) == [("a", number, False) for number in range(3)]


async def test_a_call_that_is_cancelled_keeps_its_number(scheduler: FakeScheduler, client: psdist.AsyncClient) -> None:
    call = asyncio.create_task(client.barrier("a"))
    await has_arrived(scheduler)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    scheduler.barrier.set()
    await client.barrier("a")
    assert told(scheduler) == [("a", 0, False)] * 2


@pytest.mark.parametrize(("limit", "alone"), [(None, True), (None, False), (60.0, True)])
async def test_only_what_others_alone_can_end_is_told_as_a_wait(
    scheduler: FakeScheduler, client: psdist.AsyncClient, limit: float | None, alone: bool
) -> None:
    client.report_waits(lambda: alone)
    scheduler.barrier.set()
    await client.barrier("a", timeout=limit)
    assert scheduler.barriers[0].activity.call == (limit is None and alone)


async def test_an_expelled_client_that_does_not_rejoin_is_told(scheduler: FakeScheduler) -> None:
    client = await psdist.AsyncClient(scheduler.address, rejoin=False).connect()
    call = asyncio.create_task(client.barrier("a"))
    await has_arrived(scheduler)
    scheduler.expel()
    scheduler.barrier.set()
    with pytest.raises(errors.FencedError, match="barrier 'a' was not reached: "):
        await call
    await client.close()


async def test_a_withdrawal_is_made_in_the_next_life_too(
    scheduler: FakeScheduler, client: psdist.AsyncClient, limits: Limits
) -> None:
    """Check that the scheduler knows the arrival's number in the next life, since it does not depend on the
    incarnation."""
    scheduler.withdrawing = asyncio.Event()
    call = asyncio.create_task(client.barrier("a", timeout=LONG))
    await has_arrived(scheduler)
    limits.expire()
    await has_arrived(scheduler, 2)
    scheduler.expel()
    scheduler.withdrawing.set()
    with pytest.raises(errors.WaitTimeoutError, match=r"^barrier 'a': waiting \d+ s"):
        await call
    assert [(r.incarnation, r.withdraw) for r in scheduler.barriers] == [(1, False), (1, True), (2, True)]
    assert {(r.passed, r.origin) for r in scheduler.barriers} == {(0, 1)}


async def test_a_bad_name_is_refused_before_anything_is_said(
    scheduler: FakeScheduler, client: psdist.AsyncClient
) -> None:
    for name in ("", "a b", "x" * 1000):
        with pytest.raises(errors.InvalidNameError):
            await client.barrier(name)
    assert not scheduler.barriers


async def test_the_reason_of_the_wait_is_the_schedulers(scheduler: FakeScheduler, client: psdist.AsyncClient) -> None:
    call = asyncio.create_task(client.barrier("a"))
    await waits_for(client, "for nobody in particular")
    scheduler.barrier.set()
    await call
