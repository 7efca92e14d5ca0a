"""A server that was frozen while another took over its shards, and a copy whose bytes differ from its primary's. Real
processes, real gRPC."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from subprocess import Popen
from typing import cast

import grpc.aio
import numpy as np
import pytest

from psdist import BSP, AsyncClient, AsyncParameters, optim
from psdist.errors import PsdistError, ReplicaMismatchError
from psdist.launcher.embedded import EmbeddedCluster
from psdist.types import ClusterMap
from psdist.v1 import common_pb2 as cpb
from psdist.v1 import scheduler_pb2, scheduler_pb2_grpc, server_pb2_grpc
from psdist.v1 import server_pb2 as pb
from psdist.wire import auth, convert, status
from tests.support.channels import open_channel

SLICE, SLICES = 4096, 12
ONES = np.ones(SLICE * SLICES, np.float32)
#: The zombie's gradient: it would stay visible forever.
POISON = np.full(SLICE, 1000.0, np.float32).tobytes()


@pytest.fixture
def cluster() -> Iterator[EmbeddedCluster]:
    cluster = EmbeddedCluster(servers=3, replicas=2, failure_timeout=3.0)
    yield cluster
    for child in cluster.processes:
        child.send_signal(signal.SIGCONT)
    cluster.close()


@pytest.fixture
async def client(cluster: EmbeddedCluster) -> AsyncIterator[AsyncClient]:
    client = AsyncClient(cluster.address, cluster.token, rank=0, transport="grpc")
    await client.connect()
    yield client
    await client.close()


async def created(client: AsyncClient) -> AsyncParameters:
    """Parameters from which each step subtracts its gradient."""
    return await client.parameters(
        "p", init={"w": ONES * 0}, optimizer=optim.SGD(lr=1.0), consistency=BSP(), slice_elements=SLICE
    )


async def map_of(cluster: EmbeddedCluster) -> ClusterMap:
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        request = scheduler_pb2.GetClusterMapRequest(run_id=cluster.run_id)
        response = await stub.GetClusterMap(request, metadata=auth.metadata(cluster.token))
        return convert.map_from_proto(response.map)


def process_of(cluster: EmbeddedCluster, server_id: str) -> Popen[bytes]:
    return next(child for child in cluster.processes if server_id in cast(list[str], child.args))


class Zombie:
    """The first server in the old map, and calls that reach it like those of a worker that knows no other map."""

    def __init__(self, cluster: EmbeddedCluster, known: ClusterMap, incarnation: int) -> None:
        self.server, (entry,) = known.servers[0], known.parameters
        self.process = process_of(cluster, self.server.server_id)
        shards = [
            number for number, shard in enumerate(entry.shards) if shard.primary.server_id == self.server.server_id
        ]
        self.slices = [index for index in range(SLICES) if index % len(entry.shards) in shards]
        self.channel = open_channel(self.server.address)
        self.stub = server_pb2_grpc.ServerServiceStub(self.channel)
        self.metadata = auth.metadata(cluster.token)
        self.identity = pb.Identity(
            run_id=known.run_id, worker_id="worker-0", incarnation=incarnation, epoch=known.epoch, parameters="p"
        )

    async def push(self, step: int) -> PsdistError | None:
        """Push poison. Returns the reason of the refusal."""
        header = pb.PushHeader(identity=self.identity, step=step, codec=cpb.CODEC_RAW, dtype=cpb.DTYPE_FLOAT32)
        requests = [pb.PushRequest(slice=index, payload=POISON) for index in self.slices]
        requests[0].header.CopyFrom(header)
        try:
            async for answer in self.stub.Push(iter(requests), metadata=self.metadata):
                if not answer.waiting_for:
                    return None
        except grpc.aio.AioRpcError as error:
            return status.from_call(error, "server")
        return None

    async def pull(self) -> PsdistError | None:
        """Pull. Returns the reason for which it does not report its weights."""
        request = pb.PullRequest(identity=self.identity, dtype=cpb.DTYPE_FLOAT32)
        try:
            async for answer in self.stub.Pull(request, metadata=self.metadata):
                if answer.payload:
                    return None
        except grpc.aio.AioRpcError as error:
            return status.from_call(error, "server")
        return None


@pytest.mark.long
async def test_a_server_that_stood_still_takes_no_push_and_serves_no_read(
    cluster: EmbeddedCluster, client: AsyncClient
) -> None:
    handle = await created(client)
    assert ((await handle.push_pull({"w": ONES}))["w"] == -1).all()
    zombie = Zombie(cluster, await map_of(cluster), client.incarnation)
    assert zombie.slices
    await zombie.channel.channel_ready()
    zombie.process.send_signal(signal.SIGSTOP)
    # They wait in its socket while others continue without it, and are the first messages that it reads when it thaws.
    calls = [asyncio.create_task(call) for call in (zombie.push(1), zombie.pull())]
    assert ((await handle.push_pull({"w": ONES}))["w"] == -2).all()
    assert not any(call.done() for call in calls)
    zombie.process.send_signal(signal.SIGCONT)
    refusals = await asyncio.gather(*calls)
    assert all(isinstance(refusal, PsdistError) for refusal in refusals), refusals
    assert ((await handle.pull())["w"] == -2).all()
    assert ((await handle.push_pull({"w": ONES}))["w"] == -3).all()
    await zombie.channel.close()


def spoil(process: Popen[bytes]) -> None:
    """Change the first weight of each slice in a server's memory."""
    mapped = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    arena = next(line.split() for line in mapped if re.search(r"rw-s.*memfd:psdist-weights", line))
    start, stop = (int(address, 16) for address in arena[0].split("-"))
    weights = stop - start - 4 * len(ONES)
    weights -= weights % 4096
    with Path(f"/proc/{process.pid}/mem").open("r+b", buffering=0) as memory:
        for index in range(SLICES):
            memory.seek(start + weights + 4 * SLICE * index)
            memory.write(np.float32(77.0).tobytes())


@pytest.mark.long
async def test_copies_with_other_bytes_stop_the_shard_at_primary_and_backup(
    cluster: EmbeddedCluster, client: AsyncClient
) -> None:
    handle = await created(client)
    await handle.push_pull({"w": ONES})
    known = await map_of(cluster)
    backups = [shard.backups[0].server_id for shard in known.parameters[0].shards]
    spoil(process_of(cluster, backups[0]))
    with pytest.raises(ReplicaMismatchError, match="other bytes"):
        for _ in range(200):
            await handle.push_pull({"w": ONES})
