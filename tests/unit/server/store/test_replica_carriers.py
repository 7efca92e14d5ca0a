"""Transports of updates to a replica: payloads in the arena and in frames, and gradients that may be read after the
end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from psdist.errors import InternalError, InvalidArgumentError, ServerUnreachableError
from psdist.link.frame_connection import FrameConnection
from psdist.v1 import server_pb2 as pb
from psdist_server.store.replica_carriers import FrameCarrier, UpdateMemory
from tests.support.replica import SLICE, SLICES, update_memory

Request, Response = pb.ReplicateRequest, pb.ReplicateResponse


class Sent:
    """In place of the connection."""

    def __init__(self) -> None:
        self.frames: list[tuple[pb.ReplicateRequest, int]] = []

    def send(self, header: bytes, payload: memoryview) -> None:
        self.frames.append((Request.FromString(header), payload.nbytes))

    def send_soon(self, header: bytes) -> None:
        self.send(header, memoryview(b""))

    def abort(self) -> None:
        pass


class Silent:
    """A gRPC stream on which nothing comes."""

    async def read(self) -> Any:
        await asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        pass


@pytest.fixture
def memory() -> Iterator[UpdateMemory]:
    with update_memory() as made:
        yield made


def opened(memory: UpdateMemory) -> tuple[FrameCarrier, Sent]:
    carrier, sent = FrameCarrier("shm", Silent(), "server-1", memory, memory.arena()), Sent()
    carrier.connection = cast(FrameConnection, sent)
    return carrier, sent


def update(lsn: int, shard: int = 0) -> pb.ReplicateRequest:
    return Request(shard=shard, term=1, update=Request.Update(lsn=lsn, has_gradient=True))


async def test_a_gradient_in_the_arena_is_kept_until_it_is_acknowledged(memory: UpdateMemory) -> None:
    carrier, sent = opened(memory)
    for lsn in range(1, SLICES + 1):
        carrier.send(update(lsn, lsn % 2), memory.take(SLICE))
    assert all(message.offset and not size for message, size in sent.frames)
    assert not memory.offset_of(memory.arena(), memory.take(SLICE))
    carrier.acknowledged(Response.Ack(shard=1, term=2, lsn=9))
    carrier.acknowledged(Response.Ack(shard=1, term=1, lsn=1))
    assert memory.offset_of(memory.arena(), memory.take(SLICE)) == sent.frames[0][0].offset
    carrier.acknowledged(Response.Ack(shard=1, term=1, lsn=3))
    carrier.acknowledged(Response.Ack(shard=0, term=1, lsn=4))
    assert carrier.unacknowledged() == []
    carrier.close()


async def test_what_is_not_acknowledged_at_the_end_may_still_be_read(memory: UpdateMemory) -> None:
    carrier, _ = opened(memory)
    carrier.send(update(1), memory.take(SLICE))
    carrier.send(update(2), memory.take(SLICE))
    carrier.acknowledged(Response.Ack(shard=0, term=1, lsn=1))
    carrier.close()
    assert len(carrier.unacknowledged()) == 1


async def test_what_is_not_in_the_arena_that_the_replica_has_follows_its_header(memory: UpdateMemory) -> None:
    carrier, sent = opened(memory)
    before = memory.take(SLICE)
    carrier.send(update(1), np.zeros(SLICE, np.float32))
    carrier.send(Request(state=Request.SliceState()), memory.take(SLICE))
    memory.renew()
    carrier.send(update(2), before)
    memory.arena()
    carrier.send(update(3), memory.take(SLICE))
    assert [(message.offset, size) for message, size in sent.frames] == [(0, 4 * SLICE)] * 4


async def test_answers_that_come_before_anybody_handles_them_are_handled_first(memory: UpdateMemory) -> None:
    carrier, _ = opened(memory)
    numbers: list[int] = []
    confirmed = asyncio.Event()

    def on_response(response: pb.ReplicateResponse) -> None:
        numbers.append(response.confirmed.number)
        confirmed.set()

    def answer(number: int) -> None:
        response = Response(confirmed=Response.Confirmed(number=number))
        assert carrier.begin_frame(response.SerializeToString(), 0).nbytes == 0
        carrier.end_frame()

    answer(1)
    running = asyncio.create_task(carrier.run(on_response))
    async with asyncio.timeout(60):
        await confirmed.wait()
    answer(2)
    carrier.connection_ended(None)
    with pytest.raises(ServerUnreachableError):
        await running
    assert numbers == [1, 2]


async def test_an_answer_that_cannot_be_handled_ends_with_a_typed_error(
    memory: UpdateMemory, caplog: pytest.LogCaptureFixture
) -> None:
    carrier, _ = opened(memory)

    def on_response(response: pb.ReplicateResponse) -> None:
        raise ValueError("invalid literal for int()")

    running = asyncio.create_task(carrier.run(on_response))
    await asyncio.sleep(0)
    carrier.begin_frame(Response(confirmed=Response.Confirmed(number=1)).SerializeToString(), 0)
    with pytest.raises(InternalError, match="processing a replica's answer failed"):
        carrier.end_frame()
    assert "invalid literal" in caplog.text
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_answer_has_no_payload(memory: UpdateMemory) -> None:
    carrier, _ = opened(memory)
    with pytest.raises(InvalidArgumentError):
        carrier.begin_frame(b"", 1)
