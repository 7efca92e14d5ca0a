"""Registration of a member, and calls of programs outside the run."""

from __future__ import annotations

import asyncio
import socket
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
from psdist.wire.scheduler_connection import MemberConnection, scheduler_at
from tests.support.channels import serving


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
    made = Scheduler()
    async with serving(
        Credentials(), lambda server: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(made, server)
    ) as address:
        connection = MemberConnection(address, "a test", Credentials(), Random(1))
        yield made, connection
        await connection.close()


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


@pytest.mark.parametrize(
    ("wait_for_ready", "timeout", "code"),
    [(False, 60.0, grpc.StatusCode.UNAVAILABLE), (True, 0.3, grpc.StatusCode.DEADLINE_EXCEEDED)],
)
async def test_failed_attempts_to_connect_end_only_calls_that_do_not_wait(
    wait_for_ready: bool, timeout: float, code: grpc.StatusCode
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with scheduler_at(f"127.0.0.1:{unused.getsockname()[1]}", Credentials("token")) as call:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call("GetStatus", pb.GetStatusRequest(), timeout, wait_for_ready=wait_for_ready)
    assert raised.value.code() is code
