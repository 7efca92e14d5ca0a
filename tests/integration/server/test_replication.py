"""Two copies of each shard, real processes: a server is killed while workers train, and nothing of it is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from psdist import ASP, BSP, AsyncClient, AsyncParameters, optim
from psdist.launcher.embedded import EmbeddedCluster
from psdist.v1 import scheduler_pb2 as pb
from psdist.v1 import scheduler_pb2_grpc
from psdist.wire import auth

WORKERS, STEPS, KILLED_AT, SIZE = 2, 40, 12, 60_000
#: Limit of a wait, generous for a busy machine.
PATIENCE_SECONDS = 60


@pytest.fixture
def cluster() -> Iterator[EmbeddedCluster]:
    # A killed member is missed immediately. On a busy machine no other member may be, since that would change the
    # result.
    cluster = EmbeddedCluster(servers=3, replicas=2, failure_timeout=6.0)
    yield cluster
    cluster.close()


async def train(
    cluster: EmbeddedCluster,
    settings: dict[str, Any],
    transport: str,
    kill: bool,
    until: Callable[[], bool] = lambda: True,
) -> np.ndarray:
    """Train with a server killed on the way, and then until ``until`` holds. Returns the weights after all steps."""
    clients = [AsyncClient(cluster.address, cluster.token, rank=r, transport=transport) for r in range(WORKERS)]
    await asyncio.gather(*(client.connect() for client in clients))
    init = {"w": np.zeros(SIZE, np.float32)}
    name = f"{transport}-{kill}"
    handles = await asyncio.gather(
        *(client.parameters(name, init=init, slice_elements=4096, **settings) for client in clients)
    )
    await asyncio.gather(*(work(cluster, handle, rank, kill) for rank, handle in enumerate(handles)))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await asyncio.to_thread(until):
            await asyncio.gather(*(handle.push_pull({"w": np.zeros(SIZE, np.float32)}) for handle in handles))
    weights = (await handles[0].pull())["w"].copy()
    await asyncio.gather(*(client.close() for client in clients))
    return weights


async def work(cluster: EmbeddedCluster, handle: AsyncParameters, rank: int, kill: bool) -> None:
    rng = np.random.default_rng(rank)
    for step in range(STEPS):
        if kill and rank == 0 and step == KILLED_AT:
            cluster.processes[1].send_signal(signal.SIGKILL)  # The first one is the scheduler.
        await handle.push_pull({"w": gradient(rng)})


def gradient(rng: np.random.Generator) -> np.ndarray:
    """Return whole numbers: their sums do not depend on the order in which they are added."""
    return rng.integers(-8, 9, SIZE).astype(np.float32)


async def test_asp_applies_each_push_once_though_a_server_was_killed(cluster: EmbeddedCluster) -> None:
    settings = {"optimizer": optim.SGD(lr=1.0), "consistency": ASP()}
    weights = await train(cluster, settings, "grpc", kill=True)
    rngs = [np.random.default_rng(rank) for rank in range(WORKERS)]
    expected = -sum(gradient(rng) for rng in rngs for _ in range(STEPS))
    assert np.array_equal(weights, expected)


async def test_copies_are_filled_again_and_compared(cluster: EmbeddedCluster) -> None:
    settings = {"optimizer": optim.Adam(lr=0.01), "consistency": BSP()}
    await train(cluster, settings, "grpc", kill=True, until=lambda: are_whole_and_compared(status(cluster)))


def are_whole_and_compared(shown: pb.GetStatusResponse) -> bool:
    """True if each shard has its two copies again, and each copy was compared. Servers report that slightly later."""
    shards = [shard for parameters in shown.parameters for shard in parameters.entry.shards]
    whole = all(len(shard.backups) == 1 and not shard.filling for shard in shards)
    replicas = [
        replica
        for member in shown.members
        if member.state == "live"
        for parameters in member.statistics.parameters
        for replica in parameters.replicas
    ]
    return bool(shards) and whole and bool(replicas) and all(replica.digests > 0 for replica in replicas)


def status(cluster: EmbeddedCluster) -> pb.GetStatusResponse:
    with grpc.insecure_channel(cluster.address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return stub.GetStatus(pb.GetStatusRequest(), metadata=auth.metadata(cluster.token))
