"""One parameter server in this process, which listens on real ports, with a cluster map made by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import numpy as np

from psdist import optim
from psdist.consistency import BSP
from psdist.link.connecting import TcpListener
from psdist.security.tls import Credentials
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
from psdist.v1 import server_pb2_grpc
from psdist.wire import auth, channels, status
from psdist_server.server import ParameterServer, ServerRegistration
from psdist_server.service import ServerService
from tests.support.channels import open_channel

TOKEN = "secret"
#: Three slices, the last of them shorter.
TOTAL, SLICE = 25, 10
COUNT = -(-TOTAL // SLICE)
INITIAL = np.linspace(-1, 1, TOTAL, dtype=np.float32)
GRADIENT = np.arange(TOTAL, dtype=np.float32)
#: The weights after one push of ``GRADIENT``.
STEPPED: np.ndarray = INITIAL - np.float32(0.5) * GRADIENT
SERVER = Replica("server-0", 1)


def entry(workers: int, *, ready: bool, **settings: object) -> ParametersEntry:
    """Return the parameter set "p". This server has all of it."""
    given: dict[str, Any] = {"optimizer": optim.SGD(lr=0.5), "consistency": BSP()} | settings
    spec = ParametersSpec("p", slice_elements=SLICE, **given)
    members = tuple(ParametersMember(f"worker-{rank}", 1, rank) for rank in range(workers))
    return ParametersEntry(spec, TOTAL, (Shard(SERVER),) * 2, members, ready=ready)


def cluster_map(epoch: int, what: ParametersEntry, live: int | None = None) -> ClusterMap:
    """Return a map in which the first ``live`` of the set's workers are members of the run; None means all."""
    members = what.members if live is None else what.members[:live]
    workers = tuple(WorkerEntry(m.worker_id, m.incarnation, m.rank) for m in members)
    return ClusterMap("run", epoch, (ServerEntry("server-0", 1, ""),), workers, (what,))


def cut(values: np.ndarray) -> list[np.ndarray]:
    """Return the slices of a vector."""
    return [values[start : start + SLICE] for start in range(0, len(values), SLICE)]


def payloads(values: np.ndarray) -> list[bytes]:
    """Return the bytes of each slice."""
    return [part.tobytes() for part in cut(values)]


async def refusal(call: Any) -> Exception:
    """Read a gRPC call to its end. Returns the typed error that ended it."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return status.from_call(error, "server")
    raise AssertionError("the call ended without an error")


class ServerBench:
    """A server, and calls over gRPC, which is the reference for other transports."""

    def __init__(self, host: ParameterServer, address: str, listener: TcpListener) -> None:
        self.host = host
        self.address = address
        self.channel = open_channel(address)
        self.listener = listener
        self.stub = server_pb2_grpc.ServerServiceStub(self.channel)
        self.epoch = 0
        #: Called at the end of the test.
        self.closers: list[Callable[[], object]] = []

    async def adopt(self, what: ParametersEntry, live: int | None = None) -> None:
        """Show the server the next map."""
        self.epoch += 1
        await self.host.adopt_map(cluster_map(self.epoch, what, live=live))

    async def create(self, workers: int = 1, **settings: object) -> None:
        """Create the parameter set with its initial values."""
        await self.adopt(entry(workers, ready=False, **settings))
        requests = [pb.InstallRequest(slice=i, payload=part) for i, part in enumerate(payloads(INITIAL))]
        requests[0].identity.CopyFrom(self.identity())
        await self.stub.Install(iter(requests), metadata=auth.metadata(TOKEN))
        await self.adopt(entry(workers, ready=True, **settings))

    def identity(self, worker: int = 0, **changes: Any) -> pb.Identity:
        """Return the identity of a worker that knows the newest map."""
        given = {"run_id": "run", "worker_id": f"worker-{worker}", "incarnation": 1, "epoch": self.epoch}
        return pb.Identity(**(given | {"parameters": "p"} | changes))

    def header(self, step: int, worker: int = 0, **changes: Any) -> pb.PushHeader:
        """Return the header of a push of float32."""
        raw = {"codec": cpb.CODEC_RAW, "dtype": cpb.DTYPE_FLOAT32, "pull_dtype": cpb.DTYPE_FLOAT32}
        return pb.PushHeader(**(raw | {"identity": self.identity(worker), "step": step} | changes))

    async def push_pull(self, header: pb.PushHeader, parts: Iterable[bytes], first: int = 0) -> np.ndarray:
        """Push slices from ``first`` on over gRPC. Returns their weights."""
        requests = [pb.PushPullRequest(slice=first + i, payload=part) for i, part in enumerate(parts)]
        requests[0].header.CopyFrom(header)
        answers = {}
        call = self.stub.PushPull(metadata=auth.metadata(TOKEN))
        try:
            for request in requests:
                # One slice up, one down: a write that fails hides the server's own status (grpc issue 36066).
                await call.write(request)
                if (answer := await call.read()) is grpc.aio.EOF:
                    break
                answers[answer.slice] = answer.payload
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
        except grpc.aio.AioRpcError as error:
            raise status.from_call(error, "server") from None
        return np.frombuffer(b"".join(answers[index] for index in sorted(answers)), np.float32)

    async def pull(self, identity: pb.Identity | None = None, dtype: cpb.DType = cpb.DTYPE_FLOAT32) -> bytes:
        """Return the server's weights, read over gRPC."""
        request = pb.PullRequest(identity=identity or self.identity(), dtype=dtype)
        try:
            parts = [answer async for answer in self.stub.Pull(request, metadata=auth.metadata(TOKEN))]
        except grpc.aio.AioRpcError as error:
            raise status.from_call(error, "server") from None
        return b"".join(part.payload for part in sorted(parts, key=lambda part: part.slice))

    async def turn(self) -> None:
        """Make one round trip: everything sent before it has reached the server's loop."""
        await self.stub.GetStatistics(pb.GetStatisticsRequest(), metadata=auth.metadata(TOKEN))

    async def holds_payloads(self) -> None:
        """Wait until the server holds a gradient for a step that is not complete."""
        while not self.host.statistics().parameters[0].bytes_held:
            await self.turn()


@asynccontextmanager
async def opened_bench(carriers: Collection[str] = (), server: Replica = SERVER) -> AsyncIterator[ServerBench]:
    """Start a server. carriers: transports of updates of other servers, besides gRPC."""
    registration = replace(ServerRegistration("run", server.server_id), lease_seconds=60.0)
    host = ParameterServer(registration, Credentials(TOKEN), kernel_threads=1, carriers=carriers)
    grpc_server = channels.make_server(Credentials(TOKEN))
    port = channels.bind(grpc_server, "127.0.0.1", 0, Credentials())
    listener = TcpListener()
    await listener.open("127.0.0.1")
    service = ServerService(host, listener)
    grpc_server.add_generic_rpc_handlers((service.handler(),))
    await grpc_server.start()
    bench = ServerBench(host, f"127.0.0.1:{port}", listener)
    try:
        yield bench
    finally:
        for close in reversed(bench.closers):
            close()
        service.disconnect()
        await bench.channel.close()
        await grpc_server.stop(0)
        await host.close()
