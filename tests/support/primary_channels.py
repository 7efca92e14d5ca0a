"""A primary's end of a channel to a replica, driven by hand over each transport, with one interface."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import grpc.aio
import numpy as np

from psdist import optim
from psdist.consistency import BSP
from psdist.link.arenas import PAGE, GradientArena
from psdist.types import (
    ClusterMap,
    ParametersEntry,
    ParametersMember,
    ParametersSpec,
    Replica,
    ServerEntry,
    Shard,
    WorkerEntry,
)
from psdist.v1 import common_pb2 as cpb
from psdist.v1 import server_pb2 as pb
from psdist.wire import auth, status
from tests.support.frame_socket import PATIENCE_SECONDS, FrameSocket, offered
from tests.support.server_bench import TOKEN, ServerBench, opened_bench

#: Elements of the only slice, and of the arena.
SIZE = 4096
ARENA = 4 * SIZE
PRIMARY, REPLICA = Replica("server-0", 1), Replica("server-1", 1)
ONES = np.ones(SIZE, np.float32)
Request, Response = pb.ReplicateRequest, pb.ReplicateResponse


def map_of(epoch: int, shard: Shard) -> ClusterMap:
    """Return a map with one worker, and a parameter set of one shard."""
    servers = (ServerEntry("server-0", 1, "127.0.0.1:1"), ServerEntry("server-1", 1, ""))
    spec = ParametersSpec("p", optim.SGD(lr=1.0), BSP(), slice_elements=SIZE)
    entry = ParametersEntry(spec, SIZE, (shard,), (ParametersMember("worker-0", 1, 0),), ready=True)
    return ClusterMap("run", epoch, servers, (WorkerEntry("worker-0", 1, 0),), (entry,))


@asynccontextmanager
async def opened_replica() -> AsyncIterator[ServerBench]:
    """Start a server that has the copy of the only shard. The test plays its primary."""
    async with opened_bench(("shm", "tcp"), REPLICA) as bench:
        await bench.host.adopt_map(map_of(1, Shard(PRIMARY, 1, (REPLICA,))))
        yield bench


async def promoted(bench: ServerBench) -> np.ndarray:
    """Make the replica the primary. Returns its weights."""
    await bench.host.adopt_map(map_of(2, Shard(REPLICA, 2)))
    bench.epoch = 2
    return np.frombuffer(await bench.pull(), np.float32)


def update(lsn: int, index: int = 0) -> pb.ReplicateRequest.Update:
    """Return the update that makes this state, of one contribution."""
    return Request.Update(
        lsn=lsn, slice=index, version=lsn - 1, dtype=cpb.DTYPE_FLOAT32, has_gradient=True, lr_scale=1.0
    )


class PrimaryChannel:
    """One stream of server-0, and its transport."""

    name: ClassVar[str]
    is_framed = True

    def __init__(self, bench: ServerBench) -> None:
        self.bench = bench
        self.stream = bench.channel.stream_stream(
            "/psdist.v1.ServerService/Replicate",
            request_serializer=lambda given: given if isinstance(given, bytes) else given.SerializeToString(),
            response_deserializer=Response.FromString,
        )(metadata=auth.metadata(TOKEN))
        bench.closers.append(self.stream.cancel)
        self.welcome = Response.Welcome()
        self.connection: FrameSocket | None = None

    @property
    def socket(self) -> FrameSocket:
        """The connection, once it is open."""
        assert self.connection is not None
        return self.connection

    async def hello(self, server_id: str = PRIMARY.server_id, **offer: Any) -> None:
        """Send the first message. Raises the replica's refusal."""
        hello = Request.Hello(run_id="run", server_id=server_id, incarnation=1, epoch=1, parameters="p", **offer)
        await self.stream.write(Request(hello=hello))
        try:
            answer = await self.stream.read()
        except grpc.aio.AioRpcError as error:
            raise status.from_call(error, "the replica") from None
        assert answer.WhichOneof("kind") == "welcome"
        self.welcome = answer.welcome

    @abstractmethod
    async def open(self) -> None:
        """Open the stream and its transport."""

    def framed(self, message: Any, payload: bytes = b"") -> bytes:
        """Return the bytes of a message, with its payload."""
        return self.socket.framed(message, payload)

    def message(self, payload: bytes = b"", *, offset: int = 0, **kind: Any) -> bytes:
        """Return the bytes of a message about the shard."""
        return self.framed(Request(shard=0, term=1, offset=offset, **kind), payload)

    async def send_raw(self, data: bytes) -> None:
        """Send bytes."""
        await self.socket.send(data)

    async def send(self, payload: bytes = b"", **kind: Any) -> None:
        """Send a message about the shard."""
        await self.send_raw(self.message(payload, **kind))

    async def receive(self) -> pb.ReplicateResponse:
        """Return the next answer."""
        header, _ = await self.socket.frame()
        return Response.FromString(header)

    async def fill(self) -> None:
        """Fill the only slice with zeros, and wait until that is acknowledged."""
        await self.send(begin=Request.Begin(lsn=0))
        await self.send((0 * ONES).tobytes(), state=Request.SliceState(slice=0, array=0, arrays=1))
        await self.send(end=Request.End())
        assert (await self.receive()).WhichOneof("kind") == "filled"

    async def end(self) -> Exception | None:
        """Wait for the end of the stream. Returns the error that the replica gives for it."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await self.stream.read() is not grpc.aio.EOF:
                    pass
        except grpc.aio.AioRpcError as error:
            return status.from_call(error, "the replica")
        return None

    async def cancel_stream(self) -> None:
        """Cancel the gRPC stream."""
        self.stream.cancel()

    async def cut(self) -> None:
        """Close the connection."""
        self.socket.close()


class GrpcPrimary(PrimaryChannel):
    """Messages are on the stream itself."""

    name = "grpc"
    is_framed = False

    async def open(self) -> None:
        await self.hello()
        assert not self.welcome.port and not self.welcome.arena_nonce

    def framed(self, message: Any, payload: bytes = b"") -> bytes:
        header = message if isinstance(message, bytes) else message.SerializeToString()
        return header + (Request(payload=payload).SerializeToString() if payload else b"")

    async def send_raw(self, data: bytes) -> None:
        await self.stream.write(data)

    async def receive(self) -> pb.ReplicateResponse:
        async with asyncio.timeout(PATIENCE_SECONDS):
            answer = await self.stream.read()
        assert isinstance(answer, Response)
        return answer


class TcpPrimary(PrimaryChannel):
    """Payloads follow their headers."""

    name = "tcp"

    async def open(self) -> None:
        await self.hello(tcp=True)
        await self.dial(self.welcome.nonce)
        assert (await self.receive()).WhichOneof("kind") == "opened"

    async def dial(self, nonce: bytes) -> None:
        """Connect and show a nonce."""
        self.connection = await FrameSocket.dial(self.welcome.port)
        self.bench.closers.append(self.connection.close)
        await self.send_raw(self.framed(pb.ShareRequest(open=pb.OpenConnection(nonce=nonce))))


class ShmPrimary(PrimaryChannel):
    """Gradients are in an arena, or follow their headers."""

    name = "shm"

    def __init__(self, bench: ServerBench) -> None:
        super().__init__(bench)
        self.arena = GradientArena.create(ARENA, "float32")

    async def open(self) -> None:
        with offered(self.arena.fd) as offer:
            await self.hello(socket=offer.name, arena_elements=ARENA)
            self.connection = FrameSocket(await offer.taken())
        self.bench.closers.append(self.connection.close)
        assert self.welcome.arena_nonce == self.arena.nonce and not self.welcome.port

    @staticmethod
    def offset(element: int) -> int:
        """Return the place of an element in the arena's file."""
        return PAGE + 4 * element


PRIMARIES: tuple[type[PrimaryChannel], ...] = (GrpcPrimary, TcpPrimary, ShmPrimary)
