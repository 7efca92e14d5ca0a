"""Servers that refused a connection are asked again, while calls use another transport."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from psdist.client.core.routing import Route
from psdist.client.session.waits import WaitTracker
from psdist.client.transport.grpc import GrpcTransport
from psdist.client.transport.tcp import TcpConnection, TcpTransport
from psdist.errors import PsdistError, TcpUnavailableError
from psdist.types import ClusterMap, ParametersEntry, Replica, ServerEntry, Shard
from tests.support.client_fakes import ENTRY, ROUTE, SENDER, view_of_server

REFUSAL = TcpUnavailableError("no connection to 127.0.0.1:1: Connection refused")


class Stream:
    """Connection that a server agreed to."""

    incarnation = 1
    broken = None

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True

    async def ended(self) -> None:
        assert self.is_closed


class Asking(TcpTransport):
    """Transport whose server gives the next of ``answers`` once it ``may_answer``. It is asked again immediately."""

    retry_seconds = 0.0

    def __init__(self, *answers: PsdistError | Stream) -> None:
        super().__init__(view_of_server(), WaitTracker(), cast(GrpcTransport, self), SENDER, ENTRY, required=False)
        self.answers = list(answers)
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def open_stream(self, address: str, method: str) -> Any:
        """Open a stream, in place of gRPC."""
        return self

    def cancel(self) -> None:
        """Cancel it."""

    async def _connect(self, call: Any, epoch: int, route: Route) -> TcpConnection:
        await self.may_answer.wait()
        answer = self.answers.pop(0)
        if isinstance(answer, PsdistError):
            raise answer
        return cast(TcpConnection, answer)

    async def until_answered(self) -> None:
        """Wait until the negotiation that is under way has ended."""
        await asyncio.wait(self._asked_again.values())


async def test_calls_do_not_wait_for_a_server_that_refused_and_use_it_once_it_agrees() -> None:
    stream = Stream()
    transport = Asking(REFUSAL, REFUSAL, stream)
    await transport.prepare([ROUTE])
    assert REFUSAL.message in transport.why_closed("server-0")
    transport.may_answer.clear()
    for _ in range(2):
        assert not transport.is_missing(ROUTE), "it is asked beside the calls"
        async with asyncio.timeout(60):
            await transport.prepare([ROUTE])
    transport.may_answer.set()
    await transport.until_answered()
    assert not transport.is_missing(ROUTE), "it refused again"
    assert REFUSAL.message in transport.why_closed("server-0")
    assert not transport.is_missing(ROUTE)
    await transport.until_answered()
    assert transport.is_missing(ROUTE)
    await transport.prepare([ROUTE])
    assert transport.connection(ROUTE) is not None
    assert not transport.why_closed("server-0")
    await transport.close()


async def test_a_server_is_not_asked_again_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Asking, "retry_seconds", 3600.0)
    transport = Asking(REFUSAL)
    await transport.prepare([ROUTE])
    assert not transport.is_missing(ROUTE)
    assert not transport._asked_again
    await transport.close()


async def test_nothing_is_left_of_a_negotiation_that_nobody_needs() -> None:
    for has_answered in [False, True]:
        for end in ["close", "rejoin", "loss of the shard"]:
            stream = Stream()
            transport = Asking(REFUSAL, stream)
            await transport.prepare([ROUTE])
            transport.may_answer.clear()
            assert not transport.is_missing(ROUTE)
            (again,) = transport._asked_again.values()
            if has_answered:
                transport.may_answer.set()
                await transport.until_answered()
            if end == "close":
                await transport.close()
            elif end == "rejoin":
                transport.rejoin(SENDER, ENTRY)
            else:
                other = ParametersEntry(ENTRY.spec, 4096, (Shard(Replica("server-1", 1), 2),), ())
                servers = (ServerEntry("server-1", 1, "127.0.0.1:2"),)
                transport._view.on_map(ClusterMap("run", 2, servers, (), (other,)))
                assert transport.connection(ROUTE) is None
            await asyncio.wait([again])
            assert not transport._asked_again
            assert stream.is_closed if has_answered else again.cancelled()
            await transport.close()
