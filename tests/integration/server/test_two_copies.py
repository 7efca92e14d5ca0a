"""A primary and its backup over real gRPC, with cluster maps made by hand: their behaviour if their maps differ, and if
one of them has no room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from random import Random

import grpc.aio
import numpy as np
import pytest

from psdist import optim
from psdist.consistency import BSP
from psdist.errors import LimitExceededError, StaleEpochError
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
from psdist_server.kernels.arrays import DenseParameters
from psdist_server.server import ParameterServer, ServerRegistration
from psdist_server.service import ServerService
from psdist_server.store.replicator import ReplicaReport
from tests.support.channels import open_channel
from tests.support.chaos.proxy import HELD, Fault, FaultProxy

TOKEN, SIZE = "secret", 4096
A, B = Replica("server-0", 1), Replica("server-1", 1)
ONES = np.ones(SIZE, np.float32)
WORKER = ParametersMember("worker-0", 1, 0)
SPEC = ParametersSpec("p", optim.SGD(lr=1.0), BSP(), slice_elements=SIZE)


class Server:
    """One server on a free port, driven as by a worker."""

    def __init__(self, replica: Replica, carriers: Collection[str]) -> None:
        # No peer is slow here, not even on a busy machine.
        self.host = ParameterServer(
            ServerRegistration("run", replica.server_id, lease_seconds=60.0),
            Credentials(TOKEN),
            kernel_threads=1,
            carriers=carriers,
        )
        self.reported = asyncio.Event()
        self.host.report_to(self.reported.set, lambda report: None)
        self._listener = TcpListener()
        self._service = ServerService(self.host, self._listener)
        self._server = channels.make_server(Credentials(TOKEN))
        self.address = f"127.0.0.1:{channels.bind(self._server, '127.0.0.1', 0, Credentials())}"
        self._server.add_generic_rpc_handlers((self._service.handler(),))

    async def start(self) -> None:
        await self._listener.open("127.0.0.1")
        await self._server.start()
        self._channel = open_channel(self.address)
        self.stub = server_pb2_grpc.ServerServiceStub(self._channel)

    async def close(self) -> None:
        self._service.disconnect()
        await self._channel.close()
        await self._server.stop(0)
        await self.host.close()

    def identity(self) -> pb.Identity:
        epoch = self.host.admission.map.epoch
        return pb.Identity(run_id="run", worker_id="worker-0", incarnation=1, epoch=epoch, parameters="p")

    async def install(self) -> None:
        request = pb.InstallRequest(identity=self.identity(), slice=0, payload=(0 * ONES).tobytes())
        await self.stub.Install(iter([request]), metadata=auth.metadata(TOKEN))

    async def push(self, step: int) -> int:
        """Push ones. Returns the slice's version with them."""
        header = pb.PushHeader(identity=self.identity(), step=step, codec=cpb.CODEC_RAW, dtype=cpb.DTYPE_FLOAT32)
        request = pb.PushRequest(header=header, slice=0, payload=ONES.tobytes())
        try:
            versions: list[int] = [
                a.version async for a in self.stub.Push(iter([request]), metadata=auth.metadata(TOKEN))
            ]
        except grpc.aio.AioRpcError as error:
            raise status.from_call(error, "server") from None
        return versions[-1]

    async def pull(self) -> np.ndarray:
        request = pb.PullRequest(identity=self.identity(), dtype=cpb.DTYPE_FLOAT32)
        try:
            payloads = [a.payload async for a in self.stub.Pull(request, metadata=auth.metadata(TOKEN))]
        except grpc.aio.AioRpcError as error:
            raise status.from_call(error, "server") from None
        return np.frombuffer(payloads[-1], np.float32)


class Pair:
    """Two servers."""

    def __init__(self, *carriers: str) -> None:
        self.a, self.b = Server(A, carriers), Server(B, carriers)

    def map_of(self, epoch: int, shard: Shard, *, ready: bool = True) -> ClusterMap:
        servers = (ServerEntry("server-0", 1, self.a.address), ServerEntry("server-1", 1, self.b.address))
        entry = ParametersEntry(SPEC, SIZE, (shard,), (WORKER,), ready=ready)
        return ClusterMap("run", epoch, servers, (WorkerEntry("worker-0", 1, 0),), (entry,))

    async def show(self, epoch: int, shard: Shard, *, ready: bool = True) -> None:
        for server in (self.b, self.a):
            await server.host.adopt_map(self.map_of(epoch, shard, ready=ready))

    async def reports(self) -> list[ReplicaReport]:
        """Wait for the primary's reports."""
        async with asyncio.timeout(60):
            while not (found := self.a.host.reports()):
                self.a.reported.clear()
                await self.a.reported.wait()
        return found

    async def create(self) -> None:
        """Create the only shard, with A as its primary and B as its backup."""
        await self.show(1, Shard(A, 1, (), (B,)), ready=False)
        await self.a.install()
        assert [report.kind for report in await self.reports()] == ["filled"]
        await self.show(2, Shard(A, 1, (B,)))

    @property
    def carrier(self) -> str:
        """Return the transport of updates from A to B."""
        (shown,) = self.a.host.statistics().parameters[0].replicas
        return shown.carrier


@pytest.fixture(params=[("shm", "tcp"), ("tcp",), ()], ids=["shm", "tcp", "grpc"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    pair = Pair(*request.param)
    await pair.a.start()
    await pair.b.start()
    yield pair
    await pair.a.close()
    await pair.b.close()


async def test_one_that_does_not_know_that_it_was_replaced_takes_no_push_and_serves_no_read(pair: Pair) -> None:
    await pair.create()
    assert await pair.a.push(0) == 1
    assert (await pair.a.pull() == -1).all()
    await pair.b.host.adopt_map(pair.map_of(3, Shard(B, 2)))
    assert await pair.b.push(1) == 2
    with pytest.raises(StaleEpochError):
        await pair.a.pull()
    with pytest.raises(StaleEpochError):
        await pair.a.push(1)
    assert (await pair.b.pull() == -2).all()


async def test_a_push_to_one_that_was_replaced_is_refused_too_where_nobody_read_from_it_before(pair: Pair) -> None:
    await pair.create()
    await pair.b.host.adopt_map(pair.map_of(3, Shard(B, 2)))
    with pytest.raises(StaleEpochError):
        await pair.a.push(0)
    assert (await pair.b.pull() == 0).all()
    assert await pair.b.push(0) == 1


async def test_copies_have_the_same_bytes_whatever_carries_them(pair: Pair) -> None:
    await pair.create()
    assert pair.carrier == (*pair.a.host.peers.carriers, "grpc")[0]
    for step in range(70):  # They compare digests, too.
        assert await pair.a.push(step) == step + 1
    assert pair.a.host.statistics().parameters[0].replicas[0].digests >= 2
    await pair.b.host.adopt_map(pair.map_of(3, Shard(B, 2)))
    assert (await pair.b.pull() == -70).all()


async def test_streams_that_are_opened_again_in_the_middle_lose_and_repeat_nothing(pair: Pair) -> None:
    """Check reopened streams. Each time, everything under way is lost with the connection, and with shared memory the
    arena is replaced."""
    await pair.create()
    (stream,) = pair.a.host.stores["p"].replicator.streams.values()
    for step in range(60):
        push = asyncio.create_task(pair.a.push(step))
        for _ in range(step % 12):  # The stream can then end at any point of the push, and of its opening.
            await asyncio.sleep(0)
        stream.restart()
        async with asyncio.timeout(60):
            assert await push == step + 1
    await pair.b.host.adopt_map(pair.map_of(3, Shard(B, 2)))
    assert (await pair.b.pull() == -60).all()


def no_room(dense: DenseParameters, indices: range) -> None:
    raise LimitExceededError(f"{len(indices)} slices more have no room")


async def test_a_copy_that_has_no_room_is_reported_and_stops_nobody(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = pair.map_of(1, Shard(A, 1, (), (B,)), ready=False)
    with monkeypatch.context() as patch:
        patch.setattr(DenseParameters, "hold", no_room)
        await pair.b.host.adopt_map(begun)
    await pair.a.host.adopt_map(begun)
    await pair.a.install()
    (report,) = await pair.reports()
    assert (report.kind, report.replica) == ("unreachable", B) and "no room" in report.reason
    await pair.show(2, Shard(A, 1))
    assert await pair.a.push(0) == 1
    # It is retried later, when there is room.
    await pair.show(3, Shard(A, 1, (), (B,)))
    assert [report.kind for report in await pair.reports()] == ["filled"]


@pytest.mark.parametrize("pair", [()], ids=["grpc"], indirect=True)
async def test_a_backup_that_nothing_reaches_is_reported_after_a_lease_and_holds_up_until_the_map_drops_it(
    pair: Pair,
) -> None:
    host, port = pair.b.address.split(":")
    proxy = FaultProxy((host, int(port)), Random(1))
    pair.b.address = await proxy.start()
    await pair.create()
    assert await pair.a.push(0) == 1
    pair.a.host.peers.lease_seconds = 0.2
    proxy.fault = HELD
    push = asyncio.create_task(pair.a.push(1))
    async with asyncio.timeout(60):
        while not (found := pair.a.host.reports()):
            await asyncio.wait({push}, timeout=0.05)
    (report,) = found
    assert (report.kind, report.replica, push.done()) == ("unreachable", B, False)
    await pair.show(3, Shard(A, 1))
    assert await push == 2
    proxy.fault = Fault()
    await proxy.close()
