"""Transports of a stream to a replica: the gRPC stream itself, or a negotiated connection.

The first hello lists the transports that this server can use, and the replica answers with its choice: a Unix socket,
over which it received the arena of gradients (``UpdateMemory``), or a TCP connection with a nonce. Both carry the
same frames (``psdist.link.frame_connection``). A payload that the replica can read in the arena is named by its offset;
others follow their header. The gRPC stream stays open beside the connection, and each ends with the other.

Invariants: No message is sent twice or over two transports: a stream keeps its transport to its end. Gradients in the
arena are referenced until the replica has acknowledged them; at the end the unacknowledged ones are ``lost``.

``replicator`` decides which messages are sent and how many gradients are stored, ``stream_to_replica`` opens streams,
and ``service`` is the other end.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import grpc.aio
import numpy as np
from numpy.typing import NDArray

from psdist.errors import (
    ServerUnreachableError,
    SharingUnavailableError,
    copy_error,
)
from psdist.link.arenas import PAGE, GradientArena, MemoryOffer, reason_of
from psdist.link.connecting import Link
from psdist.off_loop import off_loop
from psdist.security.tls import TlsFiles
from psdist.types import Slicing
from psdist.v1 import server_pb2 as pb
from psdist.wire import frames
from psdist.wire.limits import KEPT_BYTES_MAX
from psdist.wire.services import as_psdist_error
from psdist_server.kernels.arrays import Array, Gradient

logger = logging.getLogger("psdist.server")

#: Alignment of slots, in elements: a cache line.
_ALIGNMENT: Final = 16
#: Size of the write queue below which the next slice is copied.
COPY_AHEAD_BYTES: Final = 4 << 20
_NOTHING: Final = memoryview(b"")

Values = NDArray[Any]
#: Handler of a replica's answers.
OnResponse = Callable[[pb.ReplicateResponse], None]


class UpdateMemory:
    """Memory for the gradients of one parameter set that a primary sends to its replicas.

    shared: True if it may be shared with replicas on this host.

    It is an arena of slots, each large enough for a slice. A replica on this host maps the arena and reads gradients in
    place. A slot is free again when nothing references its array: not the machine that stores the update, nor the queue
    of a connection, nor a stream whose replica has not acknowledged it. The most recently freed slot is reused first,
    because it may still be in a cache.

    Invariants: The arena has at most KEPT_BYTES_MAX. Memory that a replica may still read is never written again: if a
    stream ends before its replica has acknowledged a gradient, that slot is lost (``lose``), and an arena that has lost
    half of its slots is replaced. Without a free slot, gradients get separate memory, which is copied when sent.
    """

    def __init__(self, slicing: Slicing, *, shared: bool) -> None:
        self._slot_elements = -(-slicing.slice_elements // _ALIGNMENT) * _ALIGNMENT
        # A slice has at most one update in progress.
        self._slots = min(KEPT_BYTES_MAX // (4 * self._slot_elements), slicing.count)
        self._shared = shared
        self._arena: GradientArena | None = None
        self._making = asyncio.Lock()
        self._free: list[int] = []
        self._lost: list[Gradient] = []
        #: Bytes reserved for updates in progress, by slice.
        self._reserved: dict[int, int] = {}
        self._slicing = slicing

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved for updates that have started and are not sent yet."""
        return sum(self._reserved.values())

    def reserve(self, index: int) -> Array:
        """Return memory for the gradient of the next update of slice ``index``."""
        gradient = self.take(self._slicing.size(index))
        self._reserved[index] = gradient.nbytes
        return gradient

    def cancel(self, indices: Iterable[int]) -> None:
        """End the reservations of these slices, whose updates are sent or dropped."""
        for index in indices:
            self._reserved.pop(index, None)

    def arena(self) -> GradientArena:
        """Return the arena, creating it if needed. Raises SharingUnavailableError."""
        if not self._shared or not self._slots:
            raise SharingUnavailableError("this server shares no memory with others")
        if self._arena is None:
            self._take(self._create())
        assert self._arena is not None
        return self._arena

    async def prepare(self) -> None:
        """Create the arena if needed, in a thread because its memory is cleared. Raises SharingUnavailableError."""
        if self._shared and self._slots and self._arena is None:
            async with self._making:
                if self._arena is None:
                    self._take(await off_loop(self._slots * self._slot_elements, self._create))

    def _create(self) -> GradientArena:
        try:
            return GradientArena.create(self._slots * self._slot_elements, "float32")
        except OSError as error:
            self._shared = False
            raise SharingUnavailableError(reason_of(error)) from None

    def _take(self, arena: GradientArena) -> None:
        self._arena, self._free = arena, list(range(self._slots))

    def take(self, elements: int) -> Array:
        """Return float32[elements] with arbitrary values: a free slot, or separate memory if there is none."""
        if self._arena is None or not self._free:
            return np.empty(elements, np.float32)
        slot, free = self._free.pop(), self._free
        start = slot * self._slot_elements
        # Arrays derived from this one reference it, and not the arena, because its base is not an array.
        whole: Array = np.frombuffer(self._arena.part(start, start + self._slot_elements).data, np.float32)
        weakref.finalize(whole, free.append, slot).atexit = False
        return whole[:elements]

    def offset_of(self, arena: GradientArena, gradient: Gradient) -> int:
        """Return a gradient's offset in the file of ``arena``, in bytes, or 0 if it is elsewhere."""
        if not arena.shareable:  # Detached: later writes reach no file.
            return 0
        offset = gradient.__array_interface__["data"][0] - arena.address
        return PAGE + offset if 0 <= offset < arena.flat.nbytes else 0

    def lose(self, gradients: Sequence[Gradient]) -> bool:
        """Give up gradients that may be read for an unlimited time. Returns True if the arena has lost half of its
        slots."""
        if self._arena is not None:
            self._lost += [one for one in gradients if self.offset_of(self._arena, one)]
        return 2 * len(self._lost) >= max(1, self._slots)

    def renew(self) -> None:
        """Replace this arena by a new one. The old one lives as long as its gradients do."""
        self.close()

    def close(self) -> None:
        """Free the arena. Its gradients stay readable as long as they are referenced."""
        if self._arena is not None:
            self._arena.detach()
        self._arena, self._free, self._lost = None, [], []


class Carrier(ABC):
    """Transport of one open stream. ``name`` is "shm", "tcp" or "grpc"."""

    name = ""

    @abstractmethod
    def send(self, message: pb.ReplicateRequest, payload: Values | None) -> None:
        """Queue a message. Its payload must not change."""

    @abstractmethod
    async def has_room(self) -> None:
        """Wait until the write queue is short."""

    @abstractmethod
    async def run(self, on_response: OnResponse) -> None:
        """Carry messages until the stream ends, and raise the reason."""

    def acknowledged(self, ack: pb.ReplicateResponse.Ack) -> None:  # noqa: B027 - others hold none
        """Release gradients up to this acknowledgement."""

    def close(self) -> None:  # noqa: B027 - the gRPC stream has an owner
        """Close the transport."""

    def unacknowledged(self) -> list[Values]:
        """Return gradients that the replica may still read after the transport was closed."""
        return []


async def read(call: Any, peer: str) -> pb.ReplicateResponse:
    """Return the next answer on a gRPC stream. Raises ServerUnreachableError at its end."""
    data = await call.read()
    if data is grpc.aio.EOF:
        raise ServerUnreachableError(f"{peer} ended the stream")
    return frames.parse(pb.ReplicateResponse, data)


class GrpcCarrier(Carrier):
    """gRPC stream. Messages are packed when written, so that waiting ones hold no second copy of their payloads."""

    name = "grpc"

    def __init__(self, call: Any, peer: str) -> None:
        self._call = call
        self._peer = peer
        self._out: deque[tuple[pb.ReplicateRequest, Values | None]] = deque()
        self._bytes_waiting = 0
        self._changed = asyncio.Event()
        self._written = asyncio.Event()

    def send(self, message: pb.ReplicateRequest, payload: Values | None) -> None:
        self._out.append((message, payload))
        self._bytes_waiting += payload.nbytes if payload is not None else 0
        self._changed.set()

    async def has_room(self) -> None:
        while self._bytes_waiting > COPY_AHEAD_BYTES:
            self._written.clear()
            await self._written.wait()

    async def run(self, on_response: OnResponse) -> None:
        writing = asyncio.create_task(self._write_all())
        reading = asyncio.create_task(self._read_all(on_response))
        try:
            ended, _ = await asyncio.wait({writing, reading}, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            writing.cancel()
            reading.cancel()
            await asyncio.gather(writing, reading, return_exceptions=True)

    async def _read_all(self, on_response: OnResponse) -> None:
        while True:
            on_response(await read(self._call, self._peer))

    async def _write_all(self) -> None:
        while True:
            while self._out:
                message, payload = self._out.popleft()
                await self._call.write(frames.pack(message, _bytes_of(payload)))
                self._bytes_waiting -= payload.nbytes if payload is not None else 0
                del payload
                self._written.set()
            self._changed.clear()
            await self._changed.wait()


class FrameCarrier(Link[pb.ReplicateResponse], Carrier):
    """Connection beside the gRPC stream. arena: the file that the replica has mapped; None if payloads follow their
    headers."""

    message_type = pb.ReplicateResponse

    def __init__(self, name: str, call: Any, peer: str, memory: UpdateMemory, arena: GradientArena | None) -> None:
        super().__init__(call, peer, has_payloads=True)
        self.name = name
        self._memory = memory
        self._arena = arena
        #: Unacknowledged gradients in the arena with their lsn, by shard and term.
        self._shown: dict[tuple[int, int], deque[tuple[int, Values]]] = {}
        self._on_response: OnResponse | None = None
        #: Answers received before ``run``.
        self._early: list[pb.ReplicateResponse] = []

    def send(self, message: pb.ReplicateRequest, payload: Values | None) -> None:
        if payload is not None and self._arena is not None and message.WhichOneof("kind") == "update":
            message.offset = self._memory.offset_of(self._arena, payload)
            if message.offset:
                shown = self._shown.setdefault((message.shard, message.term), deque())
                shown.append((message.update.lsn, payload))
                payload = None
        if payload is None:
            self.connection.send_soon(message.SerializeToString())
        else:
            self.connection.send(message.SerializeToString(), _bytes_of(payload))

    async def has_room(self) -> None:
        await self.connection.drain()

    def acknowledged(self, ack: pb.ReplicateResponse.Ack) -> None:
        shown = self._shown.get((ack.shard, ack.term))
        while shown and shown[0][0] <= ack.lsn:
            shown.popleft()

    async def run(self, on_response: OnResponse) -> None:
        early, self._early, self._on_response = self._early, [], on_response
        for response in early:
            on_response(response)
        await asyncio.wait({self.end})  # Waiting for the future itself would cancel it with this task.
        raise copy_error(self.end.result())

    def unacknowledged(self) -> list[Values]:
        return [gradient for queue in self._shown.values() for _, gradient in queue]

    def on_message(self, response: pb.ReplicateResponse) -> None:
        if self._on_response is None:
            self._early.append(response)
            return
        try:
            self._on_response(response)
        except Exception as error:  # Only a PsdistError ends the connection.
            raise as_psdist_error(error, "processing a replica's answer", logger) from None


@dataclass(slots=True)
class Offer:
    """Transports that a primary offers to one replica.

    tls: for TCP connections.
    refused: reasons why some did not work, by name.
    """

    peer: str
    host: str
    tls: TlsFiles | None
    memory: UpdateMemory
    carriers: Collection[str]
    refused: dict[str, str] = field(default_factory=dict)

    def allows(self, name: str) -> bool:
        """True if a transport should be tried."""
        return name in self.carriers and name not in self.refused


async def negotiate(call: Any, hello: pb.ReplicateRequest, offer: Offer) -> tuple[Carrier, pb.ReplicateResponse]:
    """Send the first hello of a stream. Return the chosen transport and the replica's welcome. Raises
    SharingUnavailableError or TcpUnavailableError if that transport failed; the caller then opens another stream
    without it."""
    async with AsyncExitStack() as stack:
        memory: MemoryOffer | None = None
        arena: GradientArena | None = None
        if offer.allows("shm"):
            try:
                await offer.memory.prepare()
                arena = offer.memory.arena()
                memory = await stack.enter_async_context(MemoryOffer(arena, "server"))
                hello.hello.socket, hello.hello.arena_elements = memory.name, arena.flat.size
            except SharingUnavailableError as error:
                offer.refused["shm"] = error.message
        hello.hello.tcp = offer.allows("tcp")
        await call.write(hello.SerializeToString())
        answer = await read(call, offer.peer)
        if answer.WhichOneof("kind") != "welcome":
            raise ServerUnreachableError(f"{offer.peer} did not answer hello with welcome")
        welcome = answer.welcome
        if memory is not None and welcome.arena_nonce:
            _, connected = await memory.taken(welcome.arena_nonce, offer.peer)
            shared = FrameCarrier("shm", call, offer.peer, offer.memory, arena)
            await shared.open(connected)
            return shared, answer
        if hello.hello.tcp and welcome.port:
            carrier = FrameCarrier("tcp", call, offer.peer, offer.memory, None)
            dialers = "servers connect to any port of each other"
            await carrier.dial(offer.host, welcome.port, welcome.nonce, tls=offer.tls, dialers=dialers)
            return carrier, answer
        return GrpcCarrier(call, offer.peer), answer


def _bytes_of(payload: Values | None) -> memoryview:
    return payload.view(np.uint8).data if payload is not None else _NOTHING
