"""The replicator: a primary's reactions to a replica's refusal, and its reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from random import Random
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from psdist import BSP, optim
from psdist.errors import LimitExceededError, PsdistError, StaleEpochError, StaleTermError
from psdist.security.tls import Credentials
from psdist.types import ParametersEntry, ParametersSpec, Replica, Shard
from psdist.v1 import server_pb2 as pb
from psdist.wire import status
from psdist_server.core.replication import ShardFenced
from psdist_server.kernels.arrays import DenseParameters
from psdist_server.store.gradients import NormBoard
from psdist_server.store.replicator import ReplicaReport, Replicator
from psdist_server.store.shard_router import SliceContents
from tests.support.replica import FakeReplica

P, B, C = Replica("server-0", 1), Replica("server-1", 1), Replica("server-2", 1)
SPEC = ParametersSpec("p", optim.SGD(lr=1.0), BSP(), slice_elements=4096)
ENTRY = ParametersEntry(spec=SPEC, total=2 * 4096, shards=(Shard(P, 3, (B,)), Shard(P, 3)), ready=True)


class Network:
    """All replicas can be reached, and have every shard as it is."""

    rng = Random(1)
    lease_seconds = 60.0
    carriers = ()
    credentials = Credentials()

    def __init__(self) -> None:
        self.reports = 0
        held = [pb.ReplicateResponse.Held(shard=number, term=3, complete=True) for number in range(2)]
        self.replicas = {replica: FakeReplica(*held) for replica in (B, C)}

    def hello(self, parameters: str) -> pb.ReplicateRequest:
        return pb.ReplicateRequest(hello=pb.ReplicateRequest.Hello(parameters=parameters))

    def method(self, replica: Replica, name: str) -> Callable[..., Any]:
        return self.replicas[replica].open

    def host(self, replica: Replica) -> str:
        return "host"

    def report(self) -> None:
        self.reports += 1


class Told:
    """The store, as far as it matters who serves its slices."""

    def __init__(self) -> None:
        self.fenced_shards: list[int] = []

    def run(self, effects: Iterable[object]) -> None:
        self.fenced_shards += [effect.number for effect in effects if isinstance(effect, ShardFenced)]

    def when_quiescent(self, index: int, callback: Callable[[], None]) -> None:
        """No slice is ever quiescent."""


class Primary:
    """The primary of two shards. The first one has a backup."""

    def __init__(self) -> None:
        self.network, self.told = Network(), Told()
        dense, contents = cast(DenseParameters, None), cast(SliceContents, self.told)
        fail = cast(Callable[[PsdistError], None], None)
        self.replicator = Replicator(ENTRY, self.network, dense, NormBoard(), contents, fail, self.told.run)
        for number in range(2):
            self.replicator.add(number, 3, [number])
        self.follow(*ENTRY.shards)

    def follow(self, *shards: Shard) -> None:
        self.entry = replace(ENTRY, shards=shards)
        self.replicator.adopt_map(self.entry)

    async def hear_refusal(self, error: PsdistError) -> None:
        refused = pb.ReplicateResponse.Refused(shard=0, term=3, error=status.to_detail(error))
        async with asyncio.timeout(60):
            await self.network.replicas[B].answer(pb.ReplicateResponse(refused=refused))


@pytest.fixture
async def primary() -> AsyncIterator[Primary]:
    made = Primary()
    yield made
    await made.replicator.close()


async def test_a_replica_that_knows_a_newer_primary_ends_the_service_of_the_shard(primary: Primary) -> None:
    with capture_logs() as lines:
        await primary.hear_refusal(StaleTermError("another", shard=0, term=4))
    assert primary.told.fenced_shards == [0]
    # No warning: it is how a shard gets over the loss of a server.
    assert [line["log_level"] for line in lines if line["event"] == "refused by a replica"] == ["info"]


async def test_a_replica_whose_map_is_older_does_not(primary: Primary) -> None:
    """It would stay out of service until something else makes a new map."""
    await primary.hear_refusal(StaleTermError("not yet", shard=0, term=2))
    async with asyncio.timeout(60):
        await primary.network.replicas[B].opened_again(2)
    assert primary.told.fenced_shards == []


async def test_a_replica_that_has_no_room_is_reported_with_its_reason(primary: Primary) -> None:
    assert primary.replicator.reports(primary.entry) == []
    await primary.hear_refusal(LimitExceededError("no room"))
    assert primary.told.fenced_shards == [] and primary.network.reports == 1
    assert primary.replicator.reports(primary.entry) == [ReplicaReport("unreachable", "p", 0, 3, B, "no room")]
    primary.follow(Shard(P, 3, (), (C,)), ENTRY.shards[1])
    assert primary.replicator.reports(primary.entry) == []


async def test_a_replica_hears_of_the_map_before_it_hears_of_what_the_map_says(primary: Primary) -> None:
    """Else it refuses what its own map does not say yet."""
    sent = primary.network.replicas[B].sent
    async with asyncio.timeout(60):
        before = [await sent.get() for _ in range(2)]
        primary.follow(ENTRY.shards[0], Shard(P, 3, (), (B,)))
        after = [await sent.get()]
        while after[-1].WhichOneof("kind") != "begin":
            after.append(await sent.get())
    assert {message.WhichOneof("kind") for message in before} == {"hello"}
    assert [(message.WhichOneof("kind"), message.shard) for message in after] == [("hello", 0), ("begin", 1)]


async def _asked_while(primary: Primary, happens: Callable[[], None]) -> None:
    """Asks for a confirmation of the first shard, and as it is about to be sent something else happens."""
    asking = asyncio.create_task(primary.replicator.confirm([0]))
    asyncio.get_running_loop().call_soon(happens)
    async with asyncio.timeout(60):
        with pytest.raises(StaleEpochError):
            await asking


async def test_who_waits_for_a_confirmation_is_told_that_the_shard_went_elsewhere(primary: Primary) -> None:
    await _asked_while(primary, lambda: primary.replicator.remove(0))


async def test_a_confirmation_by_one_that_has_no_role_any_more_does_not_count(primary: Primary) -> None:
    await _asked_while(primary, lambda: primary.follow(Shard(P, 3), ENTRY.shards[1]))
    primary.follow(*ENTRY.shards)
    asking = asyncio.create_task(primary.replicator.confirm([0]))
    await asyncio.wait({asking}, timeout=0.01)
    assert not asking.done()
    primary.follow(Shard(P, 3), ENTRY.shards[1])
    with pytest.raises(StaleEpochError):
        await asking
