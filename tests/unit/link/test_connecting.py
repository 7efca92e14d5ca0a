"""The dialing end of a link: the gRPC stream and the connection end together, with one reason."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from psdist.errors import InternalError, PsdistError, ServerUnreachableError, TcpUnavailableError
from psdist.link import connecting
from psdist.link.frame_connection import PREFIX
from psdist.v1 import server_pb2 as pb
from tests.support.link_ends import ServerLink, SilentStream


def framed(message: pb.ShareResponse) -> bytes:
    header = message.SerializeToString()
    return PREFIX.pack(len(header), 0) + header


@asynccontextmanager
async def shared() -> AsyncIterator[tuple[ServerLink, SilentStream, socket.socket]]:
    """An open link over a Unix socket, its stream, and the peer's socket."""
    mine, other = socket.socketpair()
    mine.setblocking(False)
    other.setblocking(False)
    stream = SilentStream()
    link = ServerLink(stream)
    await link.open(mine)
    with other:
        yield link, stream, other
        link.close()
        await link.ended()


async def reason(link: ServerLink) -> PsdistError:
    """Wait for the end of a link, and return the reason."""
    async with asyncio.timeout(60):
        await asyncio.wait({link.end})
    assert link.broken is link.end.result()
    return link.end.result()


async def test_the_end_of_the_stream_ends_the_connection() -> None:
    async with shared() as (link, stream, other):
        stream.outcome.set_result(grpc.aio.EOF)
        error = await reason(link)
        assert isinstance(error, ServerUnreachableError) and error.message == "server-0 ended the stream"
        assert await asyncio.get_running_loop().sock_recv(other, 1) == b""


async def test_a_second_answer_on_the_stream_is_a_defect() -> None:
    async with shared() as (link, stream, _):
        stream.outcome.set_result(b"")
        assert "a second answer" in (await reason(link)).message


async def test_the_stream_gives_the_reason_for_the_end_of_the_connection() -> None:
    async with shared() as (link, stream, other):
        other.close()
        await asyncio.sleep(0)
        failure = grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "Socket closed"
        )
        stream.outcome.set_exception(failure)
        assert "Socket closed" in (await reason(link)).message
        assert stream.is_cancelled


async def test_a_stream_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "_REASON_SECONDS", 0.0)
    async with shared() as (link, stream, other):
        other.close()
        error = await reason(link)
        assert isinstance(error, ServerUnreachableError) and error.message == "server-0 closed the connection"
        assert stream.is_cancelled


async def test_an_invalid_message_ends_the_link() -> None:
    async with shared() as (link, stream, other):
        good = pb.ShareResponse(call_id=1, waiting_for="others")
        await asyncio.get_running_loop().sock_sendall(other, framed(good) + PREFIX.pack(2, 0) + b"\xff\xff")
        error = await reason(link)
        assert isinstance(error, InternalError) and "sent an invalid message" in error.message
        assert link.responses == [good] and stream.is_cancelled


async def accepting(data: bytes) -> tuple[asyncio.Server, int]:
    """A port that answers each connection with ``data``, and closes it if there is none."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(data)
        if data:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def test_dialing_waits_until_the_peer_accepts() -> None:
    server, port = await accepting(framed(pb.ShareResponse(opened=pb.Opened())))
    link = ServerLink(SilentStream())
    async with server:
        await link.dial("127.0.0.1", port, bytes(32), tls=None, dialers="tests connect")
        assert link.broken is None and not link.responses
        link.close()
        await link.ended()


async def test_a_connection_that_closes_before_it_is_accepted_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy may accept connections for a server that it cannot reach."""
    monkeypatch.setattr(connecting, "_REASON_SECONDS", 0.0)
    server, port = await accepting(b"")
    link = ServerLink(SilentStream())
    async with server:
        with pytest.raises(TcpUnavailableError, match="server-0 closed the connection"):
            await link.dial("127.0.0.1", port, bytes(32), tls=None, dialers="tests connect")
        assert link.broken is not None
        await link.ended()


async def test_time_in_which_this_process_does_not_run_is_not_the_peers() -> None:
    answered = asyncio.Event()
    async with connecting.time_limit(1.0):
        await asyncio.sleep(0)  # The limit has begun.
        until = time.monotonic() + 1.5
        while time.monotonic() < until:  # As code that holds the interpreter.
            pass
        asyncio.get_running_loop().call_later(0.01, answered.set)
        await answered.wait()
    with pytest.raises(TimeoutError):
        async with connecting.time_limit(0.05):
            await asyncio.Event().wait()
