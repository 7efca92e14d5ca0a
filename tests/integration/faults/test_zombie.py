"""A server that was frozen while another took over its shards, and a copy whose bytes differ from its primary's. Real
processes, real gRPC."""

from __future__ import annotations

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
from psdist.errors import ReplicaMismatchError
from psdist.launcher.embedded import EmbeddedCluster
from psdist.types import ClusterMap
from psdist.v1 import scheduler_pb2, scheduler_pb2_grpc
from psdist.wire import auth, convert

SLICE, SLICES = 4096, 12
ONES = np.ones(SLICE * SLICES, np.float32)


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
