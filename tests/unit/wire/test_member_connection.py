"""Registration of a member, and its session requests: heartbeats, and reports in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import grpc
import grpc.aio
import pytest

from psdist import addresses
from psdist.errors import PsdistError, ServerUnreachableError
from psdist.security.tls import Credentials
from psdist.v1 import scheduler_pb2 as pb
from psdist.v1 import scheduler_pb2_grpc
from psdist.wire import channels
from psdist.wire.member_connection import MemberConnection, SessionRequests


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Scheduler that ends registrations with ``endings``, a list of statuses, and accepts those after them."""

    def __init__(self, *endings: grpc.StatusCode) -> None:
        self.endings = list(endings)
        self.answer = pb.RegisterResponse(member_id="worker-0")
        self.hold = asyncio.Event()
        self.asked = asyncio.Event()

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        self.asked.set()
        if self.endings:
            await context.abort(self.endings.pop(0), "ended by the transport")
        await self.hold.wait()
        return self.answer


@pytest.fixture
async def scheduler() -> AsyncIterator[tuple[Scheduler, MemberConnection]]:
    made, server = Scheduler(), channels.make_server(Credentials())
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(made, server)
    address = f"127.0.0.1:{channels.bind(server, '127.0.0.1', 0, Credentials())}"
    await server.start()
    connection = MemberConnection(address, "a test", Credentials(), Random(1))
    yield made, connection
    await connection.close()
    await server.stop(None)


async def test_a_registration_that_the_transport_ended_is_tried_again(
    scheduler: tuple[Scheduler, MemberConnection],
) -> None:
    """Check that it retries, as it must if too many members connect at the same time."""
    made, connection = scheduler
    made.endings = [grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE]
    made.hold.set()
    failures: list[PsdistError] = []
    answer = await connection.register(pb.RegisterRequest(), 60.0, (ServerUnreachableError,), failures.append)
    assert answer.member_id == "worker-0"
    assert [type(failure) for failure in failures] == [ServerUnreachableError, ServerUnreachableError]


async def test_a_worker_of_a_large_run_pings_servers_within_the_lease_and_the_scheduler_less_often(
    scheduler: tuple[Scheduler, MemberConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, connection = scheduler
    made.hold.set()
    made.answer = pb.RegisterResponse(member_id="worker-0", silence_seconds=3.0, heartbeat_seconds=6.0)
    opened: list[float] = []
    open_channel = channels.open_channel

    def note(address: str, credentials: Credentials, size: int, silence: float, reconnect: float) -> grpc.aio.Channel:
        opened.append(silence)
        return open_channel(address, credentials, size, silence, reconnect)

    monkeypatch.setattr(channels, "open_channel", note)
    for _ in range(3):
        await connection.register_once(pb.RegisterRequest())
    assert opened == [2.0, 6.0], "before the registration, and after it"
    assert connection.silence_seconds == 3.0


async def test_a_name_that_does_not_resolve_yet_is_looked_up_again(
    scheduler: tuple[Scheduler, MemberConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, connection = scheduler
    made.hold.set()
    outcomes: list[OSError | None] = [OSError(0, "Name or service not known"), TimeoutError(), None]

    async def look_up(host: str) -> tuple[str, ...]:
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome
        return (host,)

    monkeypatch.setattr(addresses, "look_up", look_up)
    failures: list[PsdistError] = []
    answer = await connection.register(pb.RegisterRequest(), 60.0, (ServerUnreachableError,), failures.append)
    assert answer.member_id == "worker-0" and not outcomes
    assert "does not resolve: Name or service not known" in failures[0].message
    assert "no answer from the resolver" in failures[1].message


async def test_a_client_that_closes_while_it_registers_does_not_try_again(
    scheduler: tuple[Scheduler, MemberConnection],
) -> None:
    made, connection = scheduler
    failures: list[PsdistError] = []
    registering = asyncio.create_task(
        connection.register(pb.RegisterRequest(), 60.0, (ServerUnreachableError,), failures.append)
    )
    async with asyncio.timeout(60):
        await made.asked.wait()
        await connection.close()
        await asyncio.wait({registering})
    assert registering.cancelled() and not failures


async def test_a_slow_write_of_a_report_is_not_cut_off_by_the_next_heartbeat() -> None:
    """Check a slow write. If it were cut off, the stream would end without an error, and with it this member's
    heartbeats."""
    session = SessionRequests()
    requests = session.stream("server-0", 1, lambda: pb.SessionRequest.Heartbeat(epoch=3), 0.02)
    assert (await anext(requests)).hello.member_id == "server-0"
    assert (await anext(requests)).heartbeat.epoch == 3
    session.send(pb.SessionRequest(join_answer=pb.SessionRequest.JoinAnswer(proposal_id=7)))
    assert (await anext(requests)).join_answer.proposal_id == 7
    with pytest.raises(TimeoutError):  # And no CancelledError.
        async with asyncio.timeout(0.1):
            await asyncio.Event().wait()
    assert (await anext(requests)).HasField("heartbeat")
    await requests.aclose()


@pytest.mark.parametrize("is_closed", [True, False])
async def test_a_stream_that_gRPC_stops_reading_ends_without_an_error_once_it_is_closed(is_closed: bool) -> None:
    """Check that the stream raises nothing: gRPC logs any exception, with a traceback."""
    session, read = SessionRequests(), []

    async def consume() -> None:
        async for request in session.stream("worker-0", 1, pb.SessionRequest.Heartbeat, 60.0):
            read.append(request)
            waits.set()

    waits = asyncio.Event()
    consuming = asyncio.create_task(consume())
    async with asyncio.timeout(60):
        while len(read) < 2:  # The hello and a heartbeat: then it waits for a report.
            waits.clear()
            await waits.wait()
        consuming.cancel()  # As the session does: the call is cancelled first.
        if is_closed:
            session.close()
        await asyncio.wait({consuming})
    assert consuming.cancelled() is not is_closed and len(read) == 2
