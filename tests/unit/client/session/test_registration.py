"""Joining a run: ``connect`` returns with a membership that lasts, or raises the scheduler's refusal.

``test_worker_session`` covers clients that find no scheduler, ``test_rejoin`` clients that rejoin.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import psdist
from psdist import errors
from psdist.client.session.membership import Registration
from psdist.v1 import scheduler_pb2 as pb
from tests.support.client_fakes import FakeScheduler, waits_for

REFUSALS = [
    errors.ProtocolMismatchError("protocol 3 is not 4"),
    errors.WrongRunError("another run"),
    errors.DuplicateMemberError("taken", member_id="worker-0", host="elsewhere", pid=1),
    errors.UnauthenticatedError("no token"),
    errors.LimitExceededError("4096 members are there already"),
]


async def test_it_returns_once_the_session_is_accepted(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check that the lease is complete by then: afterwards the script may be busy, so its loop must have nothing left
    to do."""
    monkeypatch.setenv("PSDIST_CONNECTED_FILE", str(tmp_path / "connected"))
    scheduler.accepting = asyncio.Event()
    client = psdist.AsyncClient(scheduler.address)
    connecting = asyncio.create_task(client.connect())
    await scheduler.hello.wait()
    await waits_for(client, "to accept the session")
    assert not connecting.done() and not (tmp_path / "connected").exists()
    scheduler.accepting.set()
    assert await connecting is client
    assert (tmp_path / "connected").exists()
    await client.close()
    assert (scheduler.sessions, len(scheduler.registrations), scheduler.left) == (1, 1, True)


async def test_no_session_in_time_is_no_membership(scheduler: FakeScheduler) -> None:
    scheduler.accepting = asyncio.Event()
    client = psdist.AsyncClient(scheduler.address, connect_timeout=2.0)
    with pytest.raises(errors.SchedulerUnreachableError, match=r"in 2 s .* registered this worker, but accepted no"):
        await client.connect()
    # It does not stay as a member that nobody uses.
    assert scheduler.left
    with pytest.raises(errors.ClosedError):
        await client.connect()


async def test_a_session_that_breaks_is_tried_again(scheduler: FakeScheduler) -> None:
    scheduler.session_error = errors.ServerUnreachableError("not yet")
    client = psdist.AsyncClient(scheduler.address)
    connecting = asyncio.create_task(client.connect())
    while scheduler.sessions < 3:  # noqa: ASYNC110 - yields, and no more
        await asyncio.sleep(0)
    assert not connecting.done()
    scheduler.session_error = None
    await connecting
    assert len(scheduler.registrations) == 1
    await client.close()


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: error.code)
async def test_a_refused_registration_is_a_typed_error(scheduler: FakeScheduler, error: errors.PsdistError) -> None:
    scheduler.register_errors = [error]
    with pytest.raises(type(error), match=error.message) as raised:
        await psdist.AsyncClient(scheduler.address).connect()
    assert raised.value.details == error.details
    assert (len(scheduler.registrations), scheduler.sessions, scheduler.left) == (1, 0, False)


@pytest.mark.parametrize("error", [REFUSALS[1], REFUSALS[3]], ids=lambda error: error.code)
async def test_a_refused_session_is_a_typed_error(scheduler: FakeScheduler, error: errors.PsdistError) -> None:
    scheduler.session_error = error
    with pytest.raises(type(error), match=error.message):
        await psdist.AsyncClient(scheduler.address).connect()
    assert scheduler.sessions >= 1  # Longer if gRPC lost the reason (grpc issue 36066).


async def test_a_life_that_is_over_before_its_session_is_followed_by_another(scheduler: FakeScheduler) -> None:
    scheduler.fenced = 2
    async with psdist.AsyncClient(scheduler.address) as client:
        assert client.incarnation == 2
        assert [request.member_id for request in scheduler.registrations] == ["", "worker-0"]


async def test_a_scheduler_that_comes_later_is_waited_for(scheduler: FakeScheduler) -> None:
    port = int(scheduler.address.rpartition(":")[2])
    await scheduler.stop()
    client = psdist.AsyncClient(scheduler.address)
    connecting = asyncio.create_task(client.connect())
    while client.session is None:  # noqa: ASYNC110 - yields, and no more
        await asyncio.sleep(0)
    await waits_for(client, "; last: ")
    await scheduler.start(port)
    await connecting
    await client.close()


async def test_the_scheduler_says_how_often_heartbeats_come() -> None:
    answer = pb.RegisterResponse(member_id="w", lease_seconds=30.0)
    assert Registration.from_response(answer).heartbeat_seconds == 7.5  # As an earlier release meant it.
    answer.heartbeat_seconds = 0.5
    assert Registration.from_response(answer).heartbeat_seconds == 0.5
