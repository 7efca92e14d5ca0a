"""Replica's end of a Replicate stream and its connections, driven by hand: accepted, refused and closed connections.
The next stream is served as usual."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import numpy as np
import pytest

from psdist.errors import InvalidArgumentError, LimitExceededError, PsdistError
from psdist.link import fd_passing
from psdist.link.frame_connection import PREFIX, FrameConnection
from psdist.types import Replica, Shard
from psdist.v1 import common_pb2 as cpb
from psdist.v1 import server_pb2 as pb
from psdist.wire import auth, limits, status
from psdist.wire.shm import PAGE, GradientArena
from tests.integration.server.test_two_copies import SIZE, TOKEN, A, B, Pair
from tests.support.channels import open_channel

METHOD = "/psdist.v1.ServerService/Replicate"
ARENA = 4 * SIZE
Request, Response = pb.ReplicateRequest, pb.ReplicateResponse


class Primary:
    """One stream, on which the test plays server A."""

    def __init__(self, channel: grpc.aio.Channel, stack: AsyncExitStack) -> None:
        self.call = channel.stream_stream(
            METHOD, request_serializer=Request.SerializeToString, response_deserializer=Response.FromString
        )(metadata=auth.metadata(TOKEN))
        stack.callback(self.call.cancel)
        self._stack = stack
        self.welcome = Response.Welcome()
        self.connection: socket.socket | None = None
        self.arena: GradientArena | None = None

    async def hello(self, **offer: Any) -> None:
        hello = Request.Hello(run_id="run", server_id=A.server_id, incarnation=1, epoch=1, parameters="p", **offer)
        await self.call.write(Request(hello=hello))
        answer = await self.call.read()
        assert answer.WhichOneof("kind") == "welcome"
        self.welcome = answer.welcome

    async def share(self) -> None:
        """Open the stream with an arena."""
        self.arena = GradientArena.create(ARENA, "float32")
        self._stack.callback(self.arena.detach)
        with fd_passing.listening() as (name, listener):
            handing = asyncio.create_task(fd_passing.accept_and_send(listener, self.arena.fd))
            await self.hello(socket=name, arena_elements=ARENA)
            self.connection = await handing
        self._stack.callback(self.connection.close)
        assert self.welcome.arena_nonce == self.arena.nonce and not self.welcome.port

    async def connect(self) -> None:
        """Open the stream with a TCP connection."""
        await self.hello(tcp=True)
        await self.dial(self.welcome.nonce)
        assert (await self.receive()).WhichOneof("kind") == "opened"

    async def dial(self, nonce: bytes) -> None:
        self.connection = socket.socket()
        self._stack.callback(self.connection.close)
        self.connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(self.connection, ("127.0.0.1", self.welcome.port))
        opening = pb.ShareRequest(open=pb.OpenConnection(nonce=nonce)).SerializeToString()
        await self.send_bytes(PREFIX.pack(len(opening), 0) + opening)

    async def send_bytes(self, data: bytes) -> None:
        assert self.connection is not None
        await asyncio.get_running_loop().sock_sendall(self.connection, data)

    async def send(self, payload: bytes = b"", *, offset: int = 0, **kind: Any) -> None:
        header = Request(shard=0, term=1, offset=offset, **kind).SerializeToString()
        await self.send_bytes(PREFIX.pack(len(header), len(payload)) + header + payload)

    async def receive(self) -> pb.ReplicateResponse:
        assert self.connection is not None
        data = b""
        async with asyncio.timeout(60):
            while len(data) < PREFIX.size or len(data) < PREFIX.size + PREFIX.unpack_from(data)[0]:
                wanted = PREFIX.size if len(data) < PREFIX.size else PREFIX.size + PREFIX.unpack_from(data)[0]
                part = await asyncio.get_running_loop().sock_recv(self.connection, wanted - len(data))
                if not part:
                    raise ConnectionError("the replica closed the connection")
                data += part
        return Response.FromString(data[PREFIX.size :])

    async def fill(self) -> None:
        """Fill the only slice with zeros, and wait until it is acknowledged."""
        await self.send(begin=Request.Begin(lsn=0))
        await self.send(np.zeros(SIZE, np.float32).tobytes(), state=Request.SliceState(slice=0, array=0, arrays=1))
        await self.send(end=Request.End())
        assert (await self.receive()).WhichOneof("kind") == "filled"

    async def refusal(self) -> PsdistError:
        """Return the error that ends the replica's stream."""
        async with asyncio.timeout(60):
            try:
                while await self.call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError as error:
                return status.from_call(error, "the replica")
        raise AssertionError("the stream ended without an error")


class Replicas:
    """Server B, which has the only shard's copy, and the streams of the test."""

    def __init__(self, pair: Pair, stack: AsyncExitStack) -> None:
        self.pair, self._stack = pair, stack
        self._channel = open_channel(pair.b.address)
        stack.push_async_callback(self._channel.close)

    def open(self) -> Primary:
        return Primary(self._channel, self._stack)

    async def weights(self) -> np.ndarray:
        """Return B's weights, after making it the primary."""
        await self.pair.b.host.adopt_map(self.pair.map_of(2, Shard(B, 2)))
        return await self.pair.b.pull()


@pytest.fixture
async def replicas() -> AsyncIterator[Replicas]:
    pair = Pair("shm", "tcp")
    async with AsyncExitStack() as stack:
        for server in (pair.a, pair.b):
            await server.start()
            stack.push_async_callback(server.close)
        await pair.b.host.adopt_map(pair.map_of(1, Shard(A, 1, (B,))))
        yield Replicas(pair, stack)


def update(lsn: int, index: int = 0) -> pb.ReplicateRequest.Update:
    return Request.Update(
        lsn=lsn, slice=index, version=lsn - 1, dtype=cpb.DTYPE_FLOAT32, has_gradient=True, lr_scale=1.0
    )


async def test_updates_in_the_arena_are_read_in_place_and_those_in_frames_too(replicas: Replicas) -> None:
    primary = replicas.open()
    await primary.share()
    assert primary.arena is not None
    await primary.fill()
    primary.arena.flat[SIZE : 2 * SIZE] = 1.0
    await primary.send(update=update(1), offset=PAGE + 4 * SIZE)
    assert (await primary.receive()).ack.lsn == 1
    await primary.send(np.full(SIZE, 2.0, np.float32).tobytes(), update=update(2))
    assert (await primary.receive()).ack.lsn == 2
    assert (await replicas.weights() == -3.0).all()


async def test_a_connection_ends_with_its_stream(replicas: Replicas) -> None:
    for open_with in (Primary.share, Primary.connect):
        primary = replicas.open()
        await open_with(primary)
        primary.call.cancel()
        with pytest.raises(ConnectionError):
            await primary.receive()


async def test_a_stream_ends_with_its_connection(replicas: Replicas) -> None:
    for open_with in (Primary.share, Primary.connect):
        primary = replicas.open()
        await open_with(primary)
        assert primary.connection is not None
        primary.connection.close()
        async with asyncio.timeout(60):
            assert await primary.call.read() is grpc.aio.EOF


#: Frames sent on a connection after the copy, and the errors that refuse them.
BAD: dict[str, tuple[dict[str, Any], bytes, type[PsdistError], str]] = {
    "another size": ({"update": update(1)}, bytes(4 * SIZE - 4), InvalidArgumentError, "has 16384 bytes"),
    "no such slice": ({"update": update(1, 7)}, bytes(4 * SIZE), InvalidArgumentError, "slice 7 of 1"),
    "a payload where none is": ({"end": Request.End()}, bytes(4), InvalidArgumentError, "which has none"),
    "an offset where none is": ({"end": Request.End(), "offset": PAGE}, b"", InvalidArgumentError, "which has none"),
    "behind the arena": (
        {"update": update(1), "offset": PAGE + 4 * (ARENA - SIZE + 1)}, b"", InvalidArgumentError, "is not in an arena",
    ),
    "before the arena": ({"update": update(1), "offset": 8}, b"", InvalidArgumentError, "is not in an arena"),
    "between elements": ({"update": update(1), "offset": PAGE + 2}, b"", InvalidArgumentError, "is not in an arena"),
    "in both places": (
        {"update": update(1), "offset": PAGE}, bytes(4 * SIZE), InvalidArgumentError, "beside one in the arena",
    ),
    "a gap": ({"update": update(3)}, bytes(4 * SIZE), InvalidArgumentError, "update 3 of shard 0 comes after 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_what_is_wrong_on_a_connection_ends_it_and_changes_nothing(replicas: Replicas, name: str) -> None:
    fields, payload, error, text = BAD[name]
    primary = replicas.open()
    await primary.share()
    await primary.fill()
    await primary.send(payload, **fields)
    refused = await primary.refusal()
    assert isinstance(refused, error) and text in refused.message
    again = replicas.open()
    await again.connect()
    assert [(held.lsn, held.complete) for held in again.welcome.held] == [(0, True)]
    await again.send(np.ones(SIZE, np.float32).tobytes(), update=update(1))
    assert (await again.receive()).ack.lsn == 1
    assert (await replicas.weights() == -1.0).all()


async def test_an_offset_without_an_arena_is_refused(replicas: Replicas) -> None:
    primary = replicas.open()
    await primary.connect()
    await primary.fill()
    await primary.send(update=update(1), offset=PAGE)
    assert "without an arena" in (await primary.refusal()).message


@pytest.mark.parametrize(
    ("header_bytes", "payload_bytes"), [(limits.SHARED_MESSAGE_BYTES + 1, 0), (8, limits.DATA_MESSAGE_BYTES + 1)]
)
async def test_a_frame_that_is_too_long_is_refused_before_it_comes(
    replicas: Replicas, header_bytes: int, payload_bytes: int
) -> None:
    primary = replicas.open()
    await primary.connect()
    await primary.send_bytes(PREFIX.pack(header_bytes, payload_bytes))
    assert isinstance(await primary.refusal(), LimitExceededError)


@pytest.mark.parametrize("open_with", [Primary.share, Primary.connect])
async def test_a_primary_that_stops_within_a_payload_is_cut_off(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch, open_with: Callable[[Primary], Awaitable[None]]
) -> None:
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.05)
    primary = replicas.open()
    await open_with(primary)
    header = Request(shard=0, term=1, update=update(1)).SerializeToString()
    await primary.send_bytes(PREFIX.pack(len(header), 4 * SIZE) + header + bytes(SIZE))
    refused = await primary.refusal()
    assert isinstance(refused, LimitExceededError) and "the rest of a frame did not arrive" in refused.message
    with pytest.raises(ConnectionError):
        await primary.receive()


async def test_a_primary_that_is_silent_between_frames_is_not(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.001)
    looked = asyncio.Semaphore(0)
    plain = FrameConnection._check_stall
    monkeypatch.setattr(FrameConnection, "_check_stall", lambda self, *seen: (plain(self, *seen), looked.release()))
    primary = replicas.open()
    await primary.connect()
    async with asyncio.timeout(60):
        for _ in range(10):
            await looked.acquire()
    monkeypatch.setattr(limits, "STALL_SECONDS", 60.0)
    await primary.fill()


async def test_what_is_no_message_is_refused(replicas: Replicas) -> None:
    primary = replicas.open()
    await primary.share()
    await primary.send_bytes(PREFIX.pack(3, 0) + b"\xff\xff\xff")
    assert isinstance(await primary.refusal(), InvalidArgumentError)


async def test_a_message_on_the_stream_beside_a_connection_is_refused(replicas: Replicas) -> None:
    primary = replicas.open()
    await primary.connect()
    await primary.call.write(Request(shard=0, term=1, begin=Request.Begin(lsn=0)))
    assert "must use the connection" in (await primary.refusal()).message


async def test_who_shows_another_nonce_is_not_let_in_and_the_stream_ends(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "NONCE_SECONDS", 0.2)
    primary = replicas.open()
    await primary.hello(tcp=True)
    await primary.dial(bytes(32))
    with pytest.raises(ConnectionError):
        await primary.receive()
    assert "no connection arrived" in (await primary.refusal()).message


async def test_messages_of_an_earlier_stream_do_not_count(replicas: Replicas) -> None:
    old, new = replicas.open(), replicas.open()
    await old.share()
    await new.share()
    await new.fill()
    await old.send(begin=Request.Begin(lsn=0))
    assert "has opened another stream" in (await old.refusal()).message


async def test_a_later_hello_of_another_server_is_refused(replicas: Replicas) -> None:
    primary = replicas.open()
    await primary.share()
    hello = Request.Hello(run_id="run", server_id=B.server_id, incarnation=1, epoch=1, parameters="p")
    await primary.send(hello=hello)
    assert "for the server and the parameters that opened it" in (await primary.refusal()).message


async def test_what_cannot_be_shared_goes_over_tcp_and_the_reason_is_told(replicas: Replicas) -> None:
    primary = replicas.open()
    await primary.hello(socket=f"psdist-{os.urandom(16).hex()}", arena_elements=ARENA, tcp=True)
    assert primary.welcome.port and "do not see the same /dev/shm" in primary.welcome.reason


@pytest.mark.parametrize("elements", [0, limits.KEPT_BYTES_MAX // 4 + 1])
async def test_an_arena_that_is_too_large_is_not_mapped(replicas: Replicas, elements: int) -> None:
    primary = replicas.open()
    await primary.hello(socket=f"psdist-{os.urandom(16).hex()}", arena_elements=elements)
    assert not primary.welcome.arena_nonce and "at most" in primary.welcome.reason


async def test_a_server_that_is_not_in_the_map_is_promised_nothing(replicas: Replicas) -> None:
    assert not replicas.pair.b.host.peers.is_live(Replica("server-7", 1))
    primary = replicas.open()
    hello = Request.Hello(run_id="run", server_id="server-7", incarnation=1, epoch=1, parameters="p", tcp=True)
    await primary.call.write(Request(hello=hello))
    assert "is not a live server" in (await primary.refusal()).message
