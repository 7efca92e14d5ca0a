"""The stream to a replica, seen from the primary: copies that are not wanted any more, and what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from psdist.types import Replica, Shard
from psdist.v1 import server_pb2 as pb
from psdist_server.core.replication import PrimaryReplication
from psdist_server.store.replica_stream import Link, Machine
from psdist_server.store.replicator import Replicator

ME, OTHER = Replica("server-0", 1), Replica("server-1", 1)


class Source:
    """Slices that always stand still."""

    def __init__(self) -> None:
        self.asked = 0
        self.rooms = 0

    def when_quiescent(self, index: int, callback: Callable[[], None]) -> None:
        self.asked += 1
        if self.asked > 100:
            raise RuntimeError("the copy never ends, and nothing else runs")
        callback()

    def ship_waiting(self) -> None:
        self.rooms += 1


class Setup:
    """A link whose stream does not get to stand, and a machine that copies a shard to it."""

    def __init__(self) -> None:
        self.source = Source()
        self.machine: Machine = PrimaryReplication(0, 1, [0, 1])
        self.machine.follow(Shard(ME, 1, filling=(OTHER,)), 0.0)
        self.machine.opened(OTHER, None, 0.0)
        network = SimpleNamespace(rng=Random(1), method=self.method, hello=lambda _: pb.ReplicateRequest())
        self.replicator = SimpleNamespace(name="p", network=network, machines={0: self.machine}, updates=self.source)
        self.link = Link(cast(Replicator, self.replicator), OTHER)

    def method(self, *_: Any) -> Any:
        """A stream on which nothing can be written."""
        write = asyncio.get_running_loop().create_future()
        hello = SimpleNamespace(write=lambda _: write, cancel=write.cancel)
        return lambda: hello


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    made = Setup()
    yield made
    made.link.close()
    await asyncio.gather(made.link.task, return_exceptions=True)


async def test_a_copy_of_a_shard_that_went_elsewhere_ends(setup: Setup) -> None:
    """It would go round and round, and the server would lose its lease."""
    setup.replicator.machines.clear()
    setup.link.copy(setup.machine)
    copying = asyncio.create_task(setup.link._copy_all(None))
    done, _ = await asyncio.wait({copying}, timeout=0.05)
    assert not done and setup.source.asked == 0
    copying.cancel()


async def test_updates_that_waited_for_a_copy_go_on_when_its_stream_broke(setup: Setup) -> None:
    setup.link._end()
    assert setup.source.rooms == 1 and not setup.machine.peers[OTHER].is_open
