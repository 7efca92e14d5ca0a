"""A replica that is lost while a stream to it is opened, and streams that are given up then: nobody waits, and nothing
stays open."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest
import uvloop

from psdist.link import connecting, processes
from psdist.link.arenas import GradientArena
from psdist.security.tls import Credentials
from psdist.types import Replica, Slicing
from psdist.v1 import server_pb2 as pb
from psdist.wire import frames
from psdist_server.store.replica_carriers import UpdateMemory
from psdist_server.store.stream_to_replica import StreamPrimary, StreamToReplica
from tests.support.silent_port import ports_by_stage

OTHER = Replica("server-1", 1)
LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


class Peer:
    """A replica that gets as far as ``stage``. It stands for the gRPC stream, too. port: where it says to connect."""

    def __init__(self, stage: str, port: int = 0) -> None:
        self._stage = stage
        self._port = port
        self._answered = False
        self.hello = asyncio.Event()
        self.ended = asyncio.Event()
        self.streams = 0
        #: The connection of a replica that takes the arena.
        self.connection: socket.socket | None = None

    def open(self) -> Peer:
        """A new stream. Only the first one gets anywhere."""
        self.streams += 1
        return self if self.streams == 1 else Peer("nothing")

    async def write(self, data: bytes) -> None:
        if self._stage == "nothing":
            await self.ended.wait()
        self._message = frames.parse(pb.ReplicateRequest, data)
        self.hello.set()

    async def read(self) -> Any:
        if self._stage in ("connect", "accept", "share") and not self._answered:
            self._answered = True
            welcome = await self._share() if self._stage == "share" else pb.ReplicateResponse.Welcome(port=self._port)
            return pb.ReplicateResponse(welcome=welcome).SerializeToString()
        await self.ended.wait()
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "Socket closed"
        )

    async def _share(self) -> pb.ReplicateResponse.Welcome:
        hello = self._message.hello
        fd, self.connection = await processes.receive_file(hello.socket)
        arena = GradientArena.open(fd, hello.arena_elements, "float32")
        return pb.ReplicateResponse.Welcome(arena_nonce=arena.nonce)

    def cancel(self) -> None:
        self.ended.set()


@contextmanager
def stream_to(peer: Peer, *carriers: str) -> Iterator[StreamToReplica]:
    """The primary's end of a stream to ``peer``."""
    memory = UpdateMemory(Slicing(4096, 4096), shared="shm" in carriers)
    network = SimpleNamespace(
        rng=Random(1),
        method=lambda *_: peer.open,
        hello=lambda _: pb.ReplicateRequest(),
        host=lambda _: "127.0.0.1",
        carriers=carriers,
        credentials=Credentials(),
    )
    owner = SimpleNamespace(
        name="p", network=network, machines={}, ship_waiting=lambda: None, memory=memory, lose=lambda _: None
    )
    try:
        yield StreamToReplica(cast(StreamPrimary, owner), OTHER)
    finally:
        memory.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time limit ends a wait here."""
    monkeypatch.setattr(connecting, "CONNECT_SECONDS", 3600.0)
    monkeypatch.setattr(processes, "HANDOVER_SECONDS", 3600.0)


@pytest.fixture
def ports() -> Iterator[dict[str, int]]:
    """The ports that the replica gives."""
    with ports_by_stage() as ports:
        yield ports


async def turns(count: int) -> None:
    """Lets the loop do so many rounds."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("stage", ["write", "connect", "accept"])
async def test_the_end_of_the_stream_ends_the_opening(ports: dict[str, int], stage: str) -> None:
    peer = Peer(stage, ports.get(stage, 0))
    with stream_to(peer, "tcp") as stream:
        await peer.hello.wait()
        await turns(100)
        assert peer.streams == 1
        peer.cancel()
        async with asyncio.timeout(60):
            while not stream.reason:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0)
        assert "Socket closed" in stream.reason
        stream.close()
        await asyncio.gather(stream.task, return_exceptions=True)


@pytest.mark.parametrize("stage", ["nothing", "write", "connect", "accept"])
@pytest.mark.parametrize("how", ["the map lacks the replica", "it is opened again"])
async def test_who_gives_a_stream_up_waits_for_nothing(ports: dict[str, int], stage: str, how: str) -> None:
    peer = Peer(stage, ports.get(stage, 0))
    with stream_to(peer, "tcp") as stream:
        await turns(100)
        if how == "it is opened again":
            stream.restart()
            async with asyncio.timeout(60):
                await peer.ended.wait()
            assert stream.reason in ("", "the stream was reopened")
        stream.close()
        async with asyncio.timeout(60):
            await asyncio.gather(stream.task, return_exceptions=True)
        assert peer.ended.is_set()


async def gives_up_after(rounds: int) -> bool:
    """Opens a stream with shared memory, and gives it up after ``rounds``; whether it was open by then."""
    peer = Peer("share")
    with stream_to(peer, "shm") as stream:
        await turns(rounds)
        was_open = stream.carrier_text == "shm"
        stream.close()
        await asyncio.gather(stream.task, return_exceptions=True)
        await turns(3)  # The loop closes its sockets.
        if peer.connection is not None:
            with peer.connection:
                peer.connection.settimeout(0)
                while peer.connection.recv(1 << 16):  # BlockingIOError: the primary's end is still open.
                    pass
    return was_open


@pytest.mark.parametrize("loop", LOOPS)
def test_no_socket_is_left_open_whenever_the_opening_is_given_up(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Not until a garbage collection, either."""
    gc.collect()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            was_open = [runner.run(gives_up_after(rounds)) for rounds in range(60)]
            assert was_open[-1] and not was_open[0]
    finally:
        gc.enable()
