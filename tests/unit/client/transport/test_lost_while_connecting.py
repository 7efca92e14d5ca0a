"""Loss of a server while a connection to it is being opened: the attempt ends immediately, at every stage."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any, cast

import grpc.aio
import pytest

from psdist.client.session.waits import WaitTracker
from psdist.client.transport.grpc import GrpcTransport
from psdist.client.transport.negotiation import NegotiatedTransport
from psdist.client.transport.shm import ShmTransport
from psdist.client.transport.tcp import TcpTransport
from psdist.link import connecting, processes
from psdist.security.tls import Credentials
from psdist.v1 import server_pb2 as pb
from tests.support.client_fakes import ENTRY, ROUTE, SENDER, view_of_server
from tests.support.silent_port import ports_by_stage


class Call:
    """gRPC stream of a server that is killed once it has done ``stage``. port: the port to which it tells the client to
    connect."""

    def __init__(self, stage: str, port: int) -> None:
        self._stage = stage
        self._port = port
        self._answered = False
        self.ended = asyncio.Event()

    async def write(self, _: bytes) -> None:
        if self._stage == "nothing":
            await self.ended.wait()

    async def read(self) -> Any:
        if self._stage in ("connect", "accept") and not self._answered:
            self._answered = True
            return pb.ConnectResponse(port=self._port, nonce=bytes(32)).SerializeToString()
        await self.ended.wait()
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "Socket closed"
        )

    def cancel(self) -> None:
        self.ended.set()


class Setup:
    """A transport, and its server."""

    def __init__(self, name: str, stage: str, port: int, *, required: bool = False) -> None:
        self.call = Call(stage, port)
        self.credentials = Credentials()
        self.view = view_of_server()
        grpc_transport = cast(GrpcTransport, self)
        self.transport: NegotiatedTransport[Any]
        arguments = (self.view, WaitTracker(), grpc_transport, SENDER, ENTRY)
        if name == "tcp":
            self.transport = TcpTransport(*arguments, required=required)
        else:
            self.transport = ShmTransport(*arguments, "float32", required=required, member=True, stable=True)

    def open_stream(self, address: str, method: str) -> Call:
        """Open a stream, in place of gRPC."""
        return self.call

    async def prepare_and(self, lose: Any) -> None:
        """Open a connection. ``lose`` is called while it waits."""
        preparing = asyncio.create_task(self.transport.prepare([ROUTE]))
        try:
            for _ in range(100):
                await asyncio.sleep(0)
            assert not preparing.done()
            lose()
            async with asyncio.timeout(60):
                await preparing
        finally:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)
            await self.transport.close()

    def lose(self) -> None:
        """Let the scheduler report that the server is gone."""
        self.view.on_server_lost("server-0", "it was killed")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable time limits of waits."""
    monkeypatch.setattr(connecting, "CONNECT_SECONDS", 3600.0)
    monkeypatch.setattr(processes, "HANDOVER_SECONDS", 3600.0)


@pytest.fixture
def ports() -> Iterator[dict[str, int]]:
    """Ports that the server names."""
    with ports_by_stage() as ports:
        yield ports


STAGES = [
    ("tcp", "nothing"),
    ("tcp", "write"),
    ("tcp", "connect"),
    ("tcp", "accept"),
    ("shm", "nothing"),
    ("shm", "write"),
]


@pytest.mark.parametrize(("name", "stage"), STAGES)
async def test_the_loss_of_a_server_ends_it(ports: dict[str, int], name: str, stage: str) -> None:
    setup = Setup(name, stage, ports.get(stage, 0))
    await setup.prepare_and(setup.lose)
    assert "server-0 is gone: it was killed" in setup.transport.why_closed("server-0")
    assert setup.call.ended.is_set()


@pytest.mark.parametrize(("name", "stage"), [case for case in STAGES if case[1] != "nothing"])
async def test_the_end_of_the_stream_ends_it(ports: dict[str, int], name: str, stage: str) -> None:
    setup = Setup(name, stage, ports.get(stage, 0))
    await setup.prepare_and(setup.call.cancel)
    assert "Socket closed" in setup.transport.why_closed("server-0")


async def test_a_server_that_was_just_killed_is_no_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a server whose port refuses before the end of its stream is known. A run that requires the TCP transport
    continues."""
    monkeypatch.setattr(connecting, "_REFUSED_SECONDS", 3600.0)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        setup = Setup("tcp", "connect", closed.getsockname()[1], required=True)
        await setup.prepare_and(setup.lose)
    assert "server-0 is gone" in setup.transport.why_closed("server-0")
