"""The stream to a replica, seen from the primary: copies that are not wanted any more, and what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest

from psdist.security.tls import Credentials
from psdist.types import Replica, Shard, Slicing
from psdist.v1 import server_pb2 as pb
from psdist_server.core.replication import PrimaryReplication, ReplicaState
from psdist_server.store.replica_carriers import UpdateMemory
from psdist_server.store.stream_to_replica import Machine, StreamPrimary, StreamToReplica
from tests.support.replica import FakeReplica

ME, OTHER = Replica("server-0", 1), Replica("server-1", 1)


class Source:
    """Slices that are never quiescent."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[int] = asyncio.Queue()
        self.rooms = 0

    def when_quiescent(self, index: int, callback: Callable[[], None]) -> None:
        self.asked.put_nowait(index)

    def ship_waiting(self) -> None:
        self.rooms += 1


class Setup:
    """A stream, and machines that copy two shards to its replica."""

    def __init__(self) -> None:
        self.source, self.replica = Source(), FakeReplica()
        self.machines: dict[int, Machine] = {0: PrimaryReplication(0, 1, [0, 2]), 1: PrimaryReplication(1, 1, [1, 3])}
        for machine in self.machines.values():
            machine.adopt_map(Shard(ME, 1, filling=(OTHER,)), 0.0)
        network = SimpleNamespace(
            rng=Random(1),
            method=lambda *_: self.replica.open,
            hello=lambda _: pb.ReplicateRequest(),
            host=lambda _: "",
            carriers=(),
            credentials=Credentials(),
        )
        owner = SimpleNamespace(
            name="p",
            network=network,
            machines=self.machines,
            contents=self.source,
            opened=self.opened,
            memory=UpdateMemory(Slicing(4, 1), shared=False),
            lose=lambda _: None,
            ship_waiting=self.source.ship_waiting,
        )
        self.stream = StreamToReplica(cast(StreamPrimary, owner), OTHER)

    def opened(self, stream: StreamToReplica, machine: Machine, held: ReplicaState | None) -> None:
        machine.opened(OTHER, held, 0.0)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    made = Setup()
    async with asyncio.timeout(60):
        await made.replica.idle.wait()
    yield made
    made.stream.close()
    await asyncio.gather(made.stream.task, return_exceptions=True)


async def test_a_copy_of_a_shard_that_went_elsewhere_ends(setup: Setup) -> None:
    """It would go round and round, and the server would lose its lease."""
    setup.stream.copy(setup.machines.pop(0))
    setup.stream.copy(setup.machines[1])
    async with asyncio.timeout(60):
        assert await setup.source.asked.get() == 1


async def test_updates_that_waited_for_a_copy_go_on_when_its_stream_broke(setup: Setup) -> None:
    setup.stream.copy(setup.machines[0])
    async with asyncio.timeout(60):
        assert await setup.source.asked.get() == 0 and setup.source.rooms == 0
        await setup.replica.end()
    assert setup.source.rooms == 1 and setup.replica.opened == 2


async def test_a_stream_that_is_opened_again_while_it_opens_waits_for_nothing_of_the_first(setup: Setup) -> None:
    """A gRPC call that is cancelled before its first message was sent never says so."""
    hanging = asyncio.Event()

    async def write(data: bytes) -> None:
        hanging.set()
        await asyncio.get_running_loop().create_future()

    async with asyncio.timeout(60):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(setup.replica, "write", write)
            setup.stream.restart()
            await hanging.wait()
        setup.replica.idle.clear()
        setup.stream.restart()
        await setup.replica.idle.wait()
    assert setup.replica.opened == 3
