"""ServerService over grpc.aio: reads frames, checks the sender, and passes slices to the parameter stores.

A request is checked in this order before a payload is read: run, token (by the interceptor), epoch known, worker and
incarnation, epoch current, parameter set. Slices travel as raw frames (``psdist.wire.frames``), so their methods are
registered without protobuf's serializers.

Replicate streams carry updates and copies of shards from other servers. The first message, hello, lists the transports
that the sender can use, and the answer names the one chosen: a Unix socket beside an arena with the gradients if both
run on one host, a TCP connection, or the gRPC stream itself (``store.replica_carriers`` is the sender's end). Frames on
a connection carry the same messages. A payload in a frame is received into its own buffer; one in the arena is read in
place by the kernel.

Invariants: Messages of a stream are processed in order of arrival; a hello that waits for a map delays those behind it.
The buffer of a payload is allocated once its slice and size are known to be valid. A connection and its gRPC stream end
together. A connection with a stalled frame or unread output is closed after ``limits.STALL_SECONDS``. Acknowledgements
made in one iteration of the event loop form one message.

``store.backup_shards`` processes the messages, and ``psdist.link.connecting`` accepts connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Final

import grpc
import grpc.aio
import numpy as np

from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import InvalidArgumentError, PsdistError, SharingUnavailableError
from psdist.link import processes
from psdist.link.arenas import PAGE, GradientArena, take_arena
from psdist.link.connecting import TcpListener
from psdist.link.frame_connection import FrameConnection, MessageReceiver
from psdist.types import ITEM_BYTES, Identity, Replica
from psdist.v1 import server_pb2
from psdist.v1 import server_pb2 as pb
from psdist.wire import convert, frames, limits
from psdist.wire.frames import Frame
from psdist.wire.services import Handler, as_psdist_error, service_handler
from psdist_server.server import ParameterServer
from psdist_server.store.parameter_store import ParameterStore
from psdist_server.store.rpc_call import Call, SliceAnswer
from psdist_server.worker_streams import serve_connect, serve_share

logger = logging.getLogger("psdist.server")

SERVICE: Final = server_pb2.DESCRIPTOR.services_by_name["ServerService"]
_NORMS_PER_MESSAGE: Final = 1 << 17
#: Sender of a call whose first message has not been read.
_NOBODY: Final = Identity(run_id="", worker_id="", incarnation=0, epoch=0, parameters="")

#: Messages with payloads are already serialized, since protobuf would copy the payload once more.
Message = server_pb2.PushPullResponse | server_pb2.PushResponse | server_pb2.PullResponse | bytes
PushMessage = type[server_pb2.PushPullRequest] | type[server_pb2.PushRequest]


class ServerService:
    """Dispatches the calls of workers and other servers to ``server``. listener: accepts TCP connections; they are
    refused if it is not open."""

    def __init__(self, server: ParameterServer, listener: TcpListener | None = None) -> None:
        self._server = server
        self._listener = listener or TcpListener()
        self._admission = server.admission
        self._replicas = ReplicaService(server, self._listener)

    def handler(self, on_caller: Callable[[str], None] = lambda _: None) -> grpc.GenericRpcHandler:
        """Return the handler to register with a grpc server. on_caller: see ``service_handler``."""
        processes.sweep()
        handlers: dict[str, Handler] = {
            "GetStatistics": self._get_statistics,
            "Install": self._install,
            "PushPull": partial(self._push, server_pb2.PushPullRequest),
            "Push": partial(self._push, server_pb2.PushRequest),
            "Pull": self._pull,
            "Share": partial(serve_share, self._server),
            "Connect": partial(serve_connect, self._server, self._listener),
            "Replicate": self._replicas.serve,
            "FetchNorms": self._fetch_norms,
        }
        return service_handler(SERVICE, handlers, logger, on_caller, self._admission.map.run_id)

    async def _push(
        self, message_type: PushMessage, requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext
    ) -> AsyncIterator[Message]:
        """Serve PushPull or Push, by the type of its requests. A separate task reads slices while answers are written,
        so both directions are busy at the same time."""
        call = Call(_NOBODY, is_push=True, wants_weights=message_type is server_pb2.PushPullRequest)
        reader = asyncio.create_task(self._read_pushes(call, message_type, requests))
        store: ParameterStore | None = None
        try:
            async for answer in self._answers(call):
                if isinstance(answer, str):
                    yield server_pb2.PushPullResponse(waiting_for=answer)
                elif not isinstance(answer, SliceAnswer):
                    response = server_pb2.PushPullResponse if call.wants_weights else server_pb2.PushResponse
                    yield response(reading=answer)
                elif call.wants_weights:
                    store = store or self._admission.store(call.identity.parameters)
                    yield await store.reads.encode(answer, call)
                else:
                    yield server_pb2.PushResponse(
                        slice=answer.index, version=answer.version, ignored=answer.ignored, staleness=answer.staleness
                    )
        finally:
            reader.cancel()
            self._server.cancel_call(call)

    async def _read_pushes(self, call: Call, message_type: PushMessage, requests: AsyncIterator[bytes]) -> None:
        try:
            store: ParameterStore | None = None
            last = -1
            await call.slots.acquire()
            async for data in requests:
                frame = frames.unpack(message_type, data)
                if store is None:
                    store = await self._open_push(call, frame.header)
                elif frame.header.HasField("header"):
                    raise _second("header")
                sender = call.identity
                self._admission.heard[sender.worker_id, sender.incarnation] = asyncio.get_running_loop().time()
                call.slots.received_bytes += len(data)
                last = _check_ascending(frame.header.slice, last)
                written = frame.header.written if frame.header.HasField("written") else None
                store.router.push(call, frame.header.slice, frame.header.base_version, frame.payload, written)
                await call.slots.acquire()
            call.slots.end()
            call.asked_all()
        except Exception as error:  # The stream raises it; otherwise it would wait for a reader that has ended.
            call.fail(as_psdist_error(error, "reading a push", logger))

    async def _open_push(
        self, call: Call, message: server_pb2.PushPullRequest | server_pb2.PushRequest
    ) -> ParameterStore:
        if not message.HasField("header"):
            raise InvalidArgumentError(
                f"{message.DESCRIPTOR.name} without a header: the first message of a stream must name the sender and "
                "the step"
            )
        identity = convert.sender_from_proto(message.header)
        call.identity = identity
        store = await self._admission.admit(identity)
        store.check_installed()
        call.read_header(message.header)
        call.slots.is_reported = message.header.reports_reading
        call.wanted.read_held(message.header.held, store.entry.generation)
        store.gradients.begin_push(call)
        return store

    async def _pull(self, request: server_pb2.PullRequest, _: grpc.aio.ServicerContext) -> AsyncIterator[Message]:
        identity = convert.sender_from_proto(request)
        store = await self._admission.admit(identity)
        store.check_installed()
        call = Call(identity, is_push=False, wants_weights=True)
        call.wanted.dtype = convert.payload_dtype_from_proto(request.dtype)
        call.wanted.read_held(request.held, store.entry.generation)
        last = -1
        try:
            slices = request.slices or store.router.indices
            if store.replicator.needs_confirm(slices):
                await store.replicator.confirm(slices)
                self._admission.check_live(call.identity)
            for index in slices:
                last = _check_ascending(index, last)
                store.router.pull(call, index, request.min_version)
            call.asked_all()
            async for answer in self._answers(call):
                if isinstance(answer, str):
                    yield server_pb2.PullResponse(waiting_for=answer)
                    continue
                assert isinstance(answer, SliceAnswer), "only pushes have reports of reading"
                weights = await store.reads.read(answer.index, call)
                store.counters.workers[call.identity.worker_id].pull_bytes += len(weights.payload)
                header = server_pb2.PullResponse(
                    slice=answer.index, version=weights.version, differences=weights.differences
                )
                yield frames.pack(header, weights.payload)
        finally:
            self._server.cancel_call(call)

    async def _answers(self, call: Call) -> AsyncIterator[SliceAnswer | server_pb2.Reading | str]:
        """Yield the answers of a call and reports of its reading, and between them the reasons why it is waiting."""
        while True:
            try:
                answer = await call.next_answer()
            except TimeoutError:
                yield call.note_wait(self._server.waiting_for(call)) or "for the rest of the request"
                continue
            if answer is None:
                return
            yield answer

    async def _install(self, requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext) -> server_pb2.InstallResponse:
        store: ParameterStore | None = None
        identity = None
        count = 0
        async for data in requests:
            frame = frames.unpack(server_pb2.InstallRequest, data)
            if store is None or identity is None:
                identity = convert.sender_from_proto(frame.header)
                store = await self._admission.admit(identity)
            elif frame.header.HasField("identity"):
                raise _second("identity")
            # The sender may have been fenced meanwhile, and another worker may be uploading values.
            self._admission.check_live(identity)
            store.install(frame.header.slice, frame.payload, identity.epoch)
            count += 1
        return server_pb2.InstallResponse(slices=count)

    async def _fetch_norms(
        self, request: server_pb2.FetchNormsRequest, _: grpc.aio.ServicerContext
    ) -> AsyncIterator[server_pb2.FetchNormsResponse]:
        store = await self._admission.admit_server(request.run_id, request.epoch, request.parameters)
        while not store.aggregation.is_complete(request.step):
            await store.norms.wait()
        squares = sorted(store.norms.known(request.step).items())
        for start in range(0, len(squares), _NORMS_PER_MESSAGE):
            part = squares[start : start + _NORMS_PER_MESSAGE]
            yield server_pb2.FetchNormsResponse(slices=[i for i, _ in part], squares=[value for _, value in part])

    def disconnect(self) -> None:
        """End the streams of other servers, which would delay the server's exit, and refuse further TCP connections."""
        self._listener.close()
        self._replicas.disconnect()

    async def _get_statistics(self, *_: object) -> server_pb2.GetStatisticsResponse:
        return self._server.statistics()


def _second(what: str) -> InvalidArgumentError:
    """Return the error for a message that would change a stream's sender or push midway."""
    return InvalidArgumentError(f"a later message of the stream has a second {what}: only the first may have one")


def _check_ascending(index: int, last: int) -> int:
    if index <= last:
        raise InvalidArgumentError(f"slice {index} came after slice {last}: name each slice once, in ascending order")
    return index


# --- streams of other servers -----------------------------------------------------------------------------------------


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
