"""Transports of updates to a replica: payloads in the arena and in frames, and when slots are free again."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from psdist.errors import InternalError, InvalidArgumentError, ServerUnreachableError, SharingUnavailableError
from psdist.link.arenas import PAGE
from psdist.link.frame_connection import FrameConnection
from psdist.types import Slicing
from psdist.v1 import server_pb2 as pb
from psdist.wire.limits import KEPT_BYTES_MAX
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


# --- slots of the arena -----------------------------------------------------------------------------------------------


def offsets(memory: UpdateMemory, *gradients: np.ndarray) -> list[int]:
    return [memory.offset_of(memory.arena(), gradient) for gradient in gradients]


def test_slots_are_apart_and_what_has_none_has_memory_of_its_own(memory: UpdateMemory) -> None:
    gradients = [memory.take(SLICE) for _ in range(SLICES + 1)]
    assert sorted(offsets(memory, *gradients)) == [0, *(PAGE + 4 * SLICE * slot for slot in range(SLICES))]
    for number, gradient in enumerate(gradients):
        gradient[:] = number
    assert [gradient[0] for gradient in gradients] == list(range(SLICES + 1))


def test_a_slot_is_taken_again_when_nothing_refers_to_any_part_of_it(memory: UpdateMemory) -> None:
    gradient = memory.take(SLICE - 1)
    where = memory.offset_of(memory.arena(), gradient)
    part = memoryview(gradient.view(np.uint8)[8:]).cast("B")
    del gradient
    others = [memory.take(SLICE) for _ in range(SLICES)]
    assert where not in offsets(memory, *others)
    del part
    assert offsets(memory, memory.take(SLICE)) == [where]


def test_the_slot_that_became_free_last_is_taken_first(memory: UpdateMemory) -> None:
    one, other = memory.take(SLICE), memory.take(SLICE)
    (first,) = offsets(memory, one)
    del other, one
    assert offsets(memory, memory.take(SLICE)) == [first]


def test_what_may_still_be_read_is_never_written_to(memory: UpdateMemory) -> None:
    gradient, own = memory.take(SLICE), np.zeros(SLICE, np.float32)
    (where,) = offsets(memory, gradient)
    assert not memory.lose([gradient, own])
    del gradient
    gc.collect()
    assert where not in offsets(memory, *[memory.take(SLICE) for _ in range(SLICES)])


def test_an_arena_that_has_lost_half_of_its_slots_is_replaced(memory: UpdateMemory) -> None:
    before = memory.arena()
    lost = [memory.take(SLICE) for _ in range(2)]
    assert not memory.lose(lost[:1]) and memory.lose(lost[1:])
    memory.renew()
    assert memory.arena() is not before
    assert len(set(offsets(memory, *[memory.take(SLICE) for _ in range(SLICES)])) - {0}) <= SLICES
    # What is written to the old one now is in no file.
    assert memory.offset_of(before, lost[0]) == 0


def test_the_arena_is_bounded_and_made_when_it_is_asked_for() -> None:
    memory = UpdateMemory(Slicing(1 << 40, 1 << 18), shared=True)
    assert memory.take(4).base is None
    assert memory.arena().flat.nbytes == KEPT_BYTES_MAX
    memory.close()


def test_memory_that_is_not_to_be_shared_is_not() -> None:
    memory = UpdateMemory(Slicing(SLICE, SLICE), shared=False)
    with pytest.raises(SharingUnavailableError):
        memory.arena()
    assert memory.take(SLICE).size == SLICE
