"""A peer that speaks to a run by hand, and the run that must not notice it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio

import psdist
from psdist import errors
from psdist.launcher.embedded import EmbeddedCluster
from psdist.v1 import common_pb2 as common
from psdist.v1 import scheduler_pb2, scheduler_pb2_grpc, server_pb2, server_pb2_grpc
from psdist.wire import status
from tests.support.channels import open_channel

#: Three slices of 4096 elements or less, on two servers.
INIT = {"w": np.zeros((90, 99), np.float32), "b": np.zeros(90, np.float32)}
SGD = psdist.optim.SGD(lr=1.0)
_STEPS = 3


def gradient(value: float = -1.0) -> dict[str, np.ndarray]:
    """Return a gradient that adds 1 to every weight if ``value`` is -1, with the learning rate of 1."""
    return {name: np.full(part.shape, value, np.float32) for name, part in INIT.items()}


class Training:
    """A cluster of two servers and two workers that train without a pause."""

    def __init__(self, cluster: EmbeddedCluster, clients: list[psdist.AsyncClient]) -> None:
        self.cluster = cluster
        self.clients = clients
        self.handles: list[psdist.AsyncParameters] = []
        self._steps: list[asyncio.Task[None]] = []
        self._ending = False

    async def begin(self) -> None:
        """Create the parameters and start the steps."""
        self.handles = list(await asyncio.gather(*(client.parameters("model", INIT, SGD) for client in self.clients)))
        self._steps = [asyncio.create_task(self._train(handle)) for handle in self.handles]

    async def _train(self, handle: psdist.AsyncParameters) -> None:
        while not self._ending:
            check(await handle.push_pull(gradient()), handle.version)

    async def goes_on(self) -> None:
        """Wait until both workers have made some more steps, all of them right."""
        goals = [handle.step + _STEPS for handle in self.handles]
        async with asyncio.timeout(60):
            while any(handle.step < goal for handle, goal in zip(self.handles, goals, strict=True)):
                for task in self._steps:
                    if task.done():
                        task.result()
                await asyncio.sleep(0)
        assert all(handle.statistics().ignored == 0 for handle in self.handles)

    async def end(self) -> None:
        """Stop both workers after the same step."""
        self._ending = True
        for task in self._steps:  # One may wait at a step that the other no longer makes.
            task.cancel()
        await asyncio.gather(*self._steps, return_exceptions=True)

    async def join(self, **arguments: Any) -> psdist.AsyncClient:
        """Connect one more client."""
        named = {"scheduler": self.cluster.address, "token": self.cluster.token, "connect_timeout": 60.0}
        return await psdist.AsyncClient(**(named | arguments)).connect()


def check(weights: dict[str, np.ndarray], version: int) -> None:
    for values in weights.values():
        assert (values == version).all(), (version, values)


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def training() -> AsyncIterator[Training]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        cluster = await asyncio.to_thread(EmbeddedCluster, 2)
        named = {"scheduler": cluster.address, "token": cluster.token, "connect_timeout": 60.0}
        clients = [
            await psdist.AsyncClient(worker_id=f"trainer-{rank}", rank=rank, **named).connect() for rank in (0, 1)
        ]
    training = Training(cluster, clients)
    await training.begin()
    yield training
    await training.end()
    for client in clients:
        await client.close()
    await asyncio.to_thread(cluster.close)


class Peer:
    """Peer that calls the processes of a training by hand, as one of its workers or as a caller without a token."""

    def __init__(self, training: Training, metadata: tuple[tuple[str, str], ...]) -> None:
        self.training = training
        self.metadata = metadata
        self._channels: list[grpc.aio.Channel] = []

    def channel(self, address: str, message_bytes: int = 256 << 20) -> grpc.aio.Channel:
        """Return a channel that refuses nothing by itself."""
        self._channels.append(open_channel(address, message_bytes))
        return self._channels[-1]

    async def map(self) -> common.ClusterMap:
        """Return the cluster map."""
        stub = scheduler_pb2_grpc.SchedulerServiceStub(self.channel(self.training.cluster.address))
        return (await stub.GetClusterMap(scheduler_pb2.GetClusterMapRequest(), metadata=self.metadata)).map

    async def addresses(self) -> dict[str, str]:
        """Return the addresses of the scheduler and the servers."""
        servers = {server.server_id: server.address for server in (await self.map()).servers}
        return {"scheduler": self.training.cluster.address} | servers

    async def push_pull(self, identity: dict[str, Any], header: dict[str, Any], slice_: dict[str, Any]) -> None:
        """Send one slice, as worker 0's, to its server."""
        cluster = await self.map()
        entry = next(entry for entry in cluster.parameters if entry.spec.name == "model")
        client, index = self.training.clients[0], slice_.get("slice", 0)
        owner = entry.shards[index % len(entry.shards)].primary.server_id
        who = {"worker_id": client.worker_id, "incarnation": client.incarnation, "epoch": cluster.epoch}
        raw = {"codec": common.CODEC_RAW, "dtype": common.DTYPE_FLOAT32, "pull_dtype": common.DTYPE_FLOAT32}
        message = server_pb2.PushPullRequest(
            **({"slice": 0, "payload": bytes(4 * entry.spec.slice_elements)} | slice_),
            header=server_pb2.PushHeader(
                identity=server_pb2.Identity(**({"run_id": client.run_id, "parameters": "model"} | who | identity)),
                **(raw | {"step": 1 << 40} | header),
            ),
        )
        address = next(server.address for server in cluster.servers if server.server_id == owner)
        call = server_pb2_grpc.ServerServiceStub(self.channel(address)).PushPull(metadata=self.metadata)
        await call.write(message)
        await call.done_writing()
        await call.read()

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels:
            await channel.close()


async def refusal(awaitable: Awaitable[Any]) -> errors.PsdistError:
    """Return the error that a call by hand ends with."""
    async with asyncio.timeout(60):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await awaitable
    return status.from_call(caught.value, "peer")
