"""Weights sent from their place in memory: a worker receives a single version, even if others continue without it.
uvloop sends in place; asyncio's own loop of Python 3.11 copies."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import replace

import numpy as np
import uvloop

from psdist.link.connecting import TcpListener
from psdist.security.tls import Credentials
from psdist.types import Identity
from psdist.v1 import common_pb2 as cpb
from psdist.v1 import server_pb2 as pb
from psdist.wire import convert
from psdist_server.server import ParameterServer, ServerRegistration
from psdist_server.worker_streams import TcpCallStream
from tests.support.server_bench import TOKEN, cluster_map, entry

#: One slice, larger than the buffers of a connection.
TOTAL = 1 << 20
GRADIENT = np.ones(TOTAL, np.float32)
STEPPED = np.float32(-0.5)


class Bench:
    """A server with two workers of one large slice, which is zeros, and no gRPC."""

    def __init__(self) -> None:
        self.host = ParameterServer(ServerRegistration("run", "server-0"), Credentials(TOKEN), kernel_threads=1)
        self.listener = TcpListener()
        spec = replace(entry(2, ready=False).spec, slice_elements=TOTAL)
        self.entry = replace(entry(2, ready=False), spec=spec, total=TOTAL, shards=entry(2, ready=False).shards[:1])
        self.epoch = 0

    async def open(self) -> None:
        await self.listener.open("127.0.0.1")
        await self.follow(2)
        self.host.stores["p"].install(0, memoryview(bytes(4 * TOTAL)), self.epoch)
        self.entry = replace(self.entry, ready=True)
        await self.follow(2)

    async def follow(self, live: int, first: int = 0) -> None:
        """Install a new map, with ``live`` workers from number ``first`` on."""
        self.epoch += 1
        members = self.entry.members[first : first + live]
        await self.host.adopt_map(cluster_map(self.epoch, replace(self.entry, members=members)))

    async def close(self) -> None:
        self.listener.close()
        await self.host.close()


class Worker:
    """A worker's end of a connection."""

    def __init__(self, bench: Bench, number: int) -> None:
        self.bench = bench
        self.identity = Identity("run", f"worker-{number}", 1, bench.epoch, "p")
        self.stream = TcpCallStream(bench.host, self.identity, bench.host.stores["p"])
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.setblocking(False)

    async def connect(self) -> None:
        with self.bench.listener.promise(self.stream) as promise:
            await asyncio.get_running_loop().sock_connect(self.socket, ("127.0.0.1", self.bench.listener.port))
            await self.send(pb.ShareRequest(open=pb.OpenConnection(nonce=promise.nonce)))
            await promise.kept()
        assert (await self.header()).WhichOneof("kind") == "opened"
        server_end = self.stream.connection._transport.get_extra_info("socket")
        server_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    async def send(self, message: pb.ShareRequest, payload: bytes = b"") -> None:
        header = message.SerializeToString()
        data = struct.pack("<II", len(header), len(payload)) + header + payload
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def push(self, step: int) -> None:
        identity = convert.identity_to_proto(replace(self.identity, epoch=self.bench.epoch))
        header = pb.PushHeader(
            identity=identity, step=step, codec=cpb.CODEC_RAW, dtype=cpb.DTYPE_FLOAT32, pull_dtype=cpb.DTYPE_FLOAT32
        )
        push = pb.SharedPush(header=header, wants_weights=True, slices=[0], base_versions=[step])
        await self.send(pb.ShareRequest(call_id=step + 1, push=push))
        await self.send(pb.ShareRequest(call_id=step + 1, slice=pb.SliceHeader(slice=0)), GRADIENT.tobytes())

    async def header(self) -> pb.ShareResponse:
        """Return the header of the next frame."""
        size, _ = struct.unpack("<II", await self.receive(8))
        return pb.ShareResponse.FromString(await self.receive(size))

    async def receive(self, size: int) -> bytes:
        """Receive this many bytes, or all until the server closed the connection."""
        data = bytearray()
        async with asyncio.timeout(60):
            while len(data) < size:
                try:
                    part = await asyncio.get_running_loop().sock_recv(self.socket, size - len(data))
                except ConnectionResetError:
                    break
                if not part:
                    break
                data += part
        return bytes(data)

    def close(self) -> None:
        self.stream.end()
        self.socket.close()


async def a_fenced_worker_that_reads_late() -> None:
    bench = Bench()
    await bench.open()
    late, other = Worker(bench, 0), Worker(bench, 1)
    for worker in (late, other):
        await worker.connect()
        await worker.push(0)
    assert (await late.header()).slice.version == 1  # Only the server's weights hold the rest of the frame.
    assert (await other.header()).slice.version == 1
    assert await other.receive(4 * TOTAL) == np.full(TOTAL, STEPPED).tobytes()
    await bench.follow(1, first=1)
    await other.push(1)
    assert (await other.header()).slice.version == 2
    assert await other.receive(4 * TOTAL) == np.full(TOTAL, 2 * STEPPED).tobytes()
    received = await late.receive(4 * TOTAL)
    values = np.frombuffer(received[: len(received) // 4 * 4], np.float32)
    print(f"{len(received)} bytes came")
    assert 0 < len(values) < TOTAL // 2 and (values == STEPPED).all()
    late.close()
    other.close()
    await bench.close()


def test_a_fenced_worker_is_sent_nothing_of_what_others_go_on_to() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(a_fenced_worker_that_reads_late())
