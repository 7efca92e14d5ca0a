"""Replica's end of Replicate streams: updates and copies of shards sent by other servers.

The first message, hello, lists the transports that the sender can use, and the answer names the one chosen: a Unix
socket beside an arena with the gradients if both run on one host, a TCP connection, or the gRPC stream itself
(``store.replica_carriers`` is the sender's end). Frames on a connection carry the same messages. A payload in a frame
is received into its own buffer; one in the arena is read in place by the kernel.

Invariants: Messages of a stream are processed in order of arrival; a hello that waits for a map delays those behind it.
The buffer of a payload is allocated once its slice and size are known to be valid. A connection and its gRPC stream end
together. A connection with a stalled frame or unread output is closed after ``limits.STALL_SECONDS``. Acknowledgements
made in one iteration of the event loop form one message.

``store.backup_shards`` processes the messages, and ``psdist.link.listening`` accepts connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final

import grpc.aio
import numpy as np

from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import InvalidArgumentError, PsdistError, SharingUnavailableError
from psdist.link.arenas import PAGE, GradientArena, take_arena
from psdist.link.frame_connection import FrameConnection, MessageReceiver
from psdist.link.listening import TcpListener
from psdist.types import ITEM_BYTES, Replica
from psdist.v1 import server_pb2 as pb
from psdist.wire import convert, frames, limits
from psdist.wire.frames import Frame
from psdist.wire.services import as_psdist_error
from psdist_server.server import ParameterServer
from psdist_server.store.parameter_store import ParameterStore

logger = logging.getLogger("psdist.server")

_NOTHING: Final = memoryview(b"")


class ReplicaService:
    """All streams from primaries to ``server``. listener: for TCP connections."""

    def __init__(self, server: ParameterServer, listener: TcpListener) -> None:
        self._server = server
        self._listener = listener
        self._streams: set[StreamFromPrimary] = set()

    async def serve(
        self, requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ReplicateResponse]:
        """Serve one stream. It is read in a separate task, since updates may wait for their kernel while the next ones
        arrive."""
        stream = StreamFromPrimary(self._server, self._listener)
        self._streams.add(stream)
        reader = asyncio.create_task(stream.read(requests))
        try:
            while (answer := await stream.answers.get()) is not None:
                if isinstance(answer, PsdistError):
                    raise answer
                yield answer
        finally:
            self._streams.discard(stream)
            reader.cancel()
            stream.close()

    def disconnect(self) -> None:
        """End all streams, which would keep the server running."""
        for stream in self._streams:
            stream.answers.put_nowait(None)


class StreamFromPrimary(MessageReceiver[pb.ReplicateRequest]):
    """One stream, and the connection beside it if there is one. The other end is ``StreamToReplica``."""

    message_type = pb.ReplicateRequest

    def __init__(self, server: ParameterServer, listener: TcpListener) -> None:
        #: Messages for the gRPC stream. None and errors end it.
        self.answers: asyncio.Queue[pb.ReplicateResponse | PsdistError | None] = asyncio.Queue()
        self._server = server
        self._listener = listener
        self._sender: Replica | None = None
        self._store: ParameterStore | None = None
        self._connection: FrameConnection | None = None
        self._arena: GradientArena | None = None
        #: Unsent acknowledgements, by shard.
        self._acks: dict[int, pb.ReplicateResponse] = {}
        #: Payload of the frame being received.
        self._payload = _NOTHING
        #: Admission of a newer hello on the connection.
        self._admitting: asyncio.Task[None] | None = None

    # --- gRPC stream --------------------------------------------------------------------------------------------------

    async def read(self, requests: AsyncIterator[bytes]) -> None:
        """Process the messages on the gRPC stream until it ends."""
        try:
            async for data in requests:
                frame = frames.unpack(pb.ReplicateRequest, data)
                if self._sender is None:
                    await self._open(frame.header)
                elif self._connection is not None:
                    raise InvalidArgumentError("a message on the stream, but messages must use the connection")
                elif frame.header.WhichOneof("kind") == "hello":
                    await self._admit(frame.header.hello)
                else:
                    self._handle(frame)
            self.answers.put_nowait(None)
        except Exception as error:  # ``serve`` raises it, and would wait forever otherwise.
            self.answers.put_nowait(as_psdist_error(error, "reading an update", logger))
        except asyncio.CancelledError:
            self.answers.put_nowait(None)
            raise

    async def _admit(self, hello: pb.ReplicateRequest.Hello) -> None:
        sender, store = await self._server.admission.admit_primary(hello)
        if self._sender is not None and (sender, store) != (self._sender, self._store):
            raise InvalidArgumentError("a stream is for the server and the parameters that opened it")
        self._sender, self._store = sender, store

    async def _open(self, message: pb.ReplicateRequest) -> None:
        """Process the first message: choose the transport of the others."""
        if message.WhichOneof("kind") != "hello":
            raise InvalidArgumentError("the first message of a Replicate stream must be hello")
        hello = message.hello
        await self._admit(hello)
        allowed, reasons = self._server.peers.carriers, []
        if hello.socket and "shm" in allowed:
            try:
                await self._share(hello)
            except SharingUnavailableError as error:
                reasons.append(f"no shm: {error.message}")
        elif hello.socket:
            reasons.append("no shm: it is disabled at the replica")
        if self._connection is not None and self._arena is not None:
            self._welcome(pb.ReplicateResponse.Welcome(arena_nonce=self._arena.nonce))
        elif hello.tcp and "tcp" in allowed and self._listener.port:
            await self._connect("; ".join(reasons))
        else:
            if hello.tcp:
                reasons.append("no tcp: the replica accepts no TCP connections")
            self._welcome(pb.ReplicateResponse.Welcome(reason="; ".join(reasons)))

    def _welcome(self, welcome: pb.ReplicateResponse.Welcome) -> None:
        assert self._sender is not None
        assert self._store is not None
        answer = self._store.backups.open_stream(self._sender, self.answer)
        answer.welcome.MergeFrom(welcome)
        self.answers.put_nowait(answer)

    async def _share(self, hello: pb.ReplicateRequest.Hello) -> None:
        """Take over the sender's arena and the socket it arrived on. Raises SharingUnavailableError."""
        if not 0 < hello.arena_elements * ITEM_BYTES["float32"] <= limits.KEPT_BYTES_MAX:
            raise SharingUnavailableError(
                f"an arena of {hello.arena_elements} elements: at most {limits.KEPT_BYTES_MAX} bytes are mapped"
            )
        arena, connected = await take_arena(hello.socket, hello.arena_elements, "float32")
        self._connection = FrameConnection(self, ends_stalls=True)
        await self._connection.open(connected)
        self._arena = arena

    async def _connect(self, reason: str) -> None:
        """Promise a TCP connection and wait for it. Raises TcpUnavailableError."""
        with self._listener.promise(self) as promise:
            self._welcome(pb.ReplicateResponse.Welcome(port=self._listener.port, nonce=promise.nonce, reason=reason))
            await promise.kept()

    def close(self) -> None:
        """Close the connection after the gRPC stream has ended."""
        if self._admitting is not None:
            self._admitting.cancel()
        if self._connection is not None:
            self._connection.abort()
        self._arena = None  # Pending updates still refer to its memory.

    # --- messages -----------------------------------------------------------------------------------------------------

    def answer(self, response: pb.ReplicateResponse) -> None:
        """Send an answer. Acknowledgements of one iteration of the event loop are merged, and keep their order with
        other answers."""
        if response.WhichOneof("kind") == "ack":
            if not self._acks:
                asyncio.get_running_loop().call_soon(self._send_acks)
            self._acks[response.ack.shard] = response
            return
        self._send_acks()
        self._send(response)

    def _send_acks(self) -> None:
        acks, self._acks = self._acks, {}
        for ack in acks.values():
            self._send(ack)

    def _send(self, response: pb.ReplicateResponse) -> None:
        if self._connection is not None:
            self._connection.send_soon(response.SerializeToString())
        else:
            self.answers.put_nowait(response)

    def _handle(self, frame: Frame[pb.ReplicateRequest]) -> None:
        assert self._sender is not None
        assert self._store is not None
        self._store.backups.on_message(self._sender, frame, self._store.entry, self.answer)

    # --- connection ---------------------------------------------------------------------------------------------------

    def connected(self, connection: FrameConnection) -> None:
        """See ``ConnectionReceiver``."""
        self._connection = connection
        self._send(pb.ReplicateResponse(opened=pb.Opened()))

    def payload_buffer(self, message: pb.ReplicateRequest, size: int) -> memoryview:
        """See ``MessageReceiver``."""
        self._payload = _NOTHING
        kind = message.WhichOneof("kind")
        if kind not in ("update", "state", "assign"):
            if size or message.offset:
                raise InvalidArgumentError(f"a payload of {size} bytes with {kind}, which has none")
            return _NOTHING
        index = getattr(message, kind).slice
        dtype = convert.dtype_from_proto(message.update.dtype) if kind == "update" else "float32"
        if message.offset:
            if size:
                raise InvalidArgumentError(f"a payload of {size} bytes beside one in the arena")
            self._payload = self._in_arena(index, message.offset)
        elif size:
            self._payload = self._memory_for(index, size, dtype)
            return self._payload
        return _NOTHING

    def _in_arena(self, index: int, offset: int) -> memoryview:
        """Return the payload at ``offset`` in the sender's arena. Raises InvalidArgumentError if it lies outside."""
        if self._arena is None:
            raise InvalidArgumentError(f"a payload at offset {offset}, without an arena")
        start, rest = divmod(offset - PAGE, ITEM_BYTES["float32"])
        stop = start + self._elements(index)
        if rest or start < 0 or stop > self._arena.flat.size:
            raise InvalidArgumentError(
                f"slice {index} at offset {offset} is not in an arena of {self._arena.flat.size} elements"
            )
        return self._arena.part(start, stop).view(np.uint8).data

    def _memory_for(self, index: int, size: int, dtype: str) -> memoryview:
        expected = self._elements(index) * ITEM_BYTES[dtype]
        if size != expected:
            raise InvalidArgumentError(f"slice {index} has {expected} bytes in {dtype}, not {size}", slice=index)
        return np.empty(self._elements(index), NUMPY_DTYPES[dtype]).view(np.uint8).data

    def _elements(self, index: int) -> int:
        assert self._store is not None
        slicing = self._store.dense.slicing
        if index >= slicing.count:
            raise InvalidArgumentError(f"slice {index} of {slicing.count}")
        return slicing.size(index)

    def on_message(self, message: pb.ReplicateRequest) -> None:
        """See ``MessageReceiver``."""
        payload, self._payload = self._payload, _NOTHING
        if message.WhichOneof("kind") == "hello":
            assert self._connection is not None
            self._connection.hold()
            self._admitting = asyncio.create_task(self._admit_later(self._connection, message.hello))
            return
        try:
            self._handle(Frame(message, payload))
        except Exception as error:  # Only a PsdistError ends the connection.
            raise as_psdist_error(error, "applying an update", logger) from None

    async def _admit_later(self, connection: FrameConnection, hello: pb.ReplicateRequest.Hello) -> None:
        try:
            await self._admit(hello)
        except Exception as error:  # Without an answer the sender would wait forever.
            self.connection_ended(as_psdist_error(error, "admitting a server", logger))
        else:
            connection.release()

    def connection_ended(self, error: PsdistError | None) -> None:
        """See ``FrameReceiver``."""
        self.answers.put_nowait(error)
