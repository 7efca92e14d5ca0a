"""Fake replica at the far end of a primary's stream: records messages, answers on command. Also update memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio

from psdist.types import Slicing
from psdist.v1 import server_pb2 as pb
from psdist.wire import frames
from psdist_server.store.replica_carriers import UpdateMemory

#: Elements per slice, and number of slices, in ``update_memory``.
SLICE, SLICES = 4096, 4


@contextmanager
def update_memory() -> Iterator[UpdateMemory]:
    """Return memory with an arena that has a slot for each slice."""
    memory = UpdateMemory(Slicing(SLICE * SLICES, SLICE), shared=True)
    memory.arena()
    yield memory
    memory.close()


class FakeReplica:
    """Replica that accepts every stream, holding ``held`` of the shards.

    It also acts as the raw gRPC call: one stream at a time.
    """

    def __init__(self, *held: pb.ReplicateResponse.Held) -> None:
        welcome = pb.ReplicateResponse.Welcome(held=held)
        self._welcome = pb.ReplicateResponse(welcome=welcome).SerializeToString()
        self._answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.sent: asyncio.Queue[pb.ReplicateRequest] = asyncio.Queue()
        #: Number of streams opened.
        self.opened = 0
        #: Set when the primary has handled all answers and waits for another.
        self.idle = asyncio.Event()

    def open(self) -> FakeReplica:
        """Open a stream."""
        self.opened += 1
        self._answers = asyncio.Queue()
        self._answers.put_nowait(self._welcome)
        return self

    async def answer(self, response: pb.ReplicateResponse) -> None:
        """Send an answer, and wait until the primary has handled it."""
        await self.idle.wait()
        self.idle.clear()
        self._answers.put_nowait(response.SerializeToString())
        await self.idle.wait()

    async def end(self) -> None:
        """End the stream, and wait until the primary has opened another."""
        await self.idle.wait()
        self.idle.clear()
        self._answers.put_nowait(b"")
        await self.idle.wait()

    async def opened_again(self, count: int) -> None:
        """Wait until the primary has opened this many streams, and waits for answers."""
        while self.opened < count:
            self.idle.clear()
            await self.idle.wait()

    # --- the call -----------------------------------------------------------------------------------------------------

    async def write(self, data: bytes) -> None:
        """See grpc.aio."""
        self.sent.put_nowait(frames.parse(pb.ReplicateRequest, data))

    async def read(self) -> object:
        """See grpc.aio."""
        if self._answers.empty():
            self.idle.set()
        answer = await self._answers.get()
        if answer is None:
            raise asyncio.CancelledError
        return answer or grpc.aio.EOF

    def cancel(self) -> None:
        """See grpc.aio."""
        self.idle.clear()
        self._answers.put_nowait(None)
