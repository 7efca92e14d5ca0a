"""Streams of one worker's pushes and pulls: Connect over a dedicated TCP connection, and Share on this host.

The only request on a Connect stream identifies the worker; the answer is a port and a nonce
(``psdist.link.connecting``). The connection carries the same calls as a shared-memory connection, in frames
(``psdist.link.frame_connection``). The slices of a push follow it, each in a frame whose payload is received into its
own buffer, which the kernel reads in place. A slice is answered as soon as its consistency allows, with its weights as
the payload. Weights that do not change until this worker pushes again are sent from their place in memory; otherwise
the workers of a step share a copy.

Invariants: At most ``limits.TCP_WINDOW_SLICES`` payloads of each push are held. The worker learns when they are
released and sends no more before that. This server keeps reading, because a push may depend on data behind it on the
same connection. Answers are queued without their weights, so a slow reader costs no memory. The buffer of a payload is
allocated once its slice and size are known to be valid. A connection with a stalled frame or unread output is closed
after ``limits.STALL_SECONDS``.

A Share stream sends no payloads. The only request on it attaches: the worker's gradient arena and this server's weights
arena are exchanged (``psdist.link.processes``). The socket used for the exchange carries the calls
(``psdist.link.frame_connection``). Each message on it is a call with payloads in the arenas. All slices of a call are
passed to the shard machines when it is read, and one message answers the call once all of them are answered.

Its invariants: An attachment ends with its stream or its socket, whichever ends first. Its calls end too, but their
contributions stay: the machines hold views of the arena, and the mapping lasts as long as the views.

``call_stream`` implements calls, and ``psdist.link.arenas`` the arenas.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Final

import grpc.aio
import numpy as np

from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import (
    InvalidArgumentError,
    LimitExceededError,
    PsdistError,
    SharingUnavailableError,
    TcpUnavailableError,
)
from psdist.link import processes
from psdist.link.arenas import GradientArena, take_arena
from psdist.link.connecting import TcpListener
from psdist.link.frame_connection import FrameConnection
from psdist.types import ITEM_BYTES, Identity
from psdist.v1 import common_pb2, server_pb2
from psdist.wire import convert, frames, limits
from psdist.wire.services import as_psdist_error
from psdist_server.call_stream import CallStream, StreamCall, error_response, until_over
from psdist_server.kernels.arrays import Gradient
from psdist_server.server import ParameterServer
from psdist_server.store.parameter_store import ParameterStore
from psdist_server.store.rpc_call import CallState, SliceAnswer, fenced
from psdist_server.store.shard_router import Weights

logger = logging.getLogger("psdist.server")

_BYTES: Final = np.dtype(np.uint8)


async def serve_connect(
    server: ParameterServer, listener: TcpListener, requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext
) -> AsyncIterator[server_pb2.ConnectResponse]:
    """Serve one Connect stream until it ends."""
    async for data in requests:
        if not listener.port:
            raise TcpUnavailableError("this server accepts no TCP connections")
        identity = convert.sender_from_proto(frames.parse(server_pb2.ConnectRequest, data))
        store = await server.admission.admit(identity)
        stream = TcpCallStream(server, identity, store)
        try:
            with listener.promise(stream) as promise:
                yield server_pb2.ConnectResponse(port=listener.port, nonce=promise.nonce)
                await promise.kept()
            await until_over(stream, requests)
        finally:
            stream.end()
        break


class TcpCallStream(CallStream):
    """One connection, accepted by the listener."""

    def __init__(self, server: ParameterServer, identity: Identity, store: ParameterStore) -> None:
        super().__init__(server, identity, store)
        #: Gradient in the frame being received.
        self._values: Gradient | None = None
        #: Unsent answers in order; None marks the end of a call.
        self._answers: asyncio.Queue[tuple[StreamCall, SliceAnswer | None]] = asyncio.Queue()
        #: Number of those, with one that is being sent.
        self._unsent = 0
        self._sender: asyncio.Task[None] | None = None

    def connected(self, connection: FrameConnection) -> None:
        super().connected(connection)
        self._sender = asyncio.create_task(self._send_answers(connection))
        self.send(server_pb2.ShareResponse(opened=server_pb2.Opened()))

    def fenced(self) -> None:
        self.connection.abort()  # Queued payloads may refer to memory that other updates now overwrite.
        self.connection_ended(fenced(self._identity))

    # --- payloads -----------------------------------------------------------------------------------------------------

    def payload_buffer(self, request: server_pb2.ShareRequest, size: int) -> memoryview:
        if request.WhichOneof("kind") != "slice":
            return super().payload_buffer(request, size)
        call = self.calls.get(request.call_id)
        if call is None or call.state is CallState.ENDED:
            if request.call_id > self._last_id:
                raise InvalidArgumentError(
                    f"slice {request.slice.slice} is of call {request.call_id}, which has not started"
                )
            self._values = None
            return memoryview(bytearray(size))  # Sent before the worker knew that the call had ended.
        self._values = self._memory_for(call, request.slice.slice, size)
        return self._values.view(np.uint8).data

    def _memory_for(self, call: StreamCall, index: int, size: int) -> Gradient:
        """Return a buffer for the payload of a slice. Raises InvalidArgumentError unless the slice is the next one of
        its push and has the right size, and LimitExceededError if too many payloads are held."""
        if not call.expected or call.expected[0][0] != index:
            wanted = f"slice {call.expected[0][0]} is next" if call.expected else "all slices arrived"
            raise InvalidArgumentError(f"slice {index} of call {call.call_id} is unexpected: {wanted}")
        elements, dtype = self.store.dense.slicing.size(index), NUMPY_DTYPES[call.dtype]
        if call.is_encoded:
            self.store.gradients.check_size(index, size)
            elements, dtype = size, _BYTES
        elif size != elements * ITEM_BYTES[call.dtype]:
            raise InvalidArgumentError(
                f"slice {index} has {elements * ITEM_BYTES[call.dtype]} bytes in {call.dtype}, not {size}", slice=index
            )
        held = call.named - len(call.expected) - call.released
        if held >= limits.TCP_WINDOW_SLICES:
            raise LimitExceededError(
                f"{held} payloads of call {call.call_id} are held: send no more than {limits.TCP_WINDOW_SLICES} "
                "beyond the acknowledged ones"
            )
        return np.empty(elements, dtype)

    def on_message(self, request: server_pb2.ShareRequest) -> None:
        if request.WhichOneof("kind") != "slice":
            super().on_message(request)
            return
        values, self._values = self._values, None
        call = self.calls.get(request.call_id)
        if values is None or call is None or not call.expected:
            return  # The call has ended.
        index, base = call.expected.popleft()
        self._take(call, index, base, values)
        if not call.expected and call.state is CallState.ASKING:
            call.asked_all()

    def push(self, call: StreamCall, push: server_pb2.SharedPush, bases: Sequence[int]) -> None:
        if call.abstain:
            nothing = np.empty(0, NUMPY_DTYPES[call.dtype])
            for index, base in zip(push.slices, bases, strict=True):
                self.store.router.push_unchecked(call, index, base, nothing, is_shared=True)
        else:
            call.expected.extend(zip(push.slices, bases, strict=True))

    def read_pull(self, call: StreamCall, pull: server_pb2.SharedPull) -> None:
        call.wanted.dtype = convert.payload_dtype_from_proto(pull.dtype)
        call.wanted.read_held(pull.held, self.store.entry.generation)

    def _take(self, call: StreamCall, index: int, base: int, values: Gradient) -> None:
        """Process a slice of a push once all of its bytes are received. The worker may have been fenced since the push
        began."""
        try:
            self._server.admission.check_live(self._identity)
            if call.is_encoded:
                self.store.router.push(call, index, base, values.data)
                return
            self.store.router.check_slice(index, call.identity.epoch)
            self.store.router.push_unchecked(call, index, base, values, is_shared=False)
            self.store.counters.workers[call.identity.worker_id].push_bytes += values.nbytes
        except Exception as error:  # Without an answer the worker would wait forever.
            call.fail(as_psdist_error(error, "accepting a slice", logger))

    def slice_answered(self, call: StreamCall, answer: SliceAnswer) -> None:
        if not self._unsent and not self.connection.is_full and call.error is None and call.call_id in self.calls:
            weights = self.store.reads.in_place(answer, call) if call.wants_weights else Weights(answer.version, b"")
            if weights is not None:  # A small call would wait for the task's turn of the loop.
                self._send_weights(call, answer, weights)
                return
        self._queue(call, answer)

    def call_ended(self, call: StreamCall) -> None:
        if self._unsent or call.call_id not in self.calls:
            self._queue(call, None)
        else:
            self._end_answered(call)

    def _queue(self, call: StreamCall, answer: SliceAnswer | None) -> None:
        self._unsent += 1
        self._answers.put_nowait((call, answer))

    def payload_released(self, call: StreamCall) -> None:
        """Notify the worker, for several payloads at a time."""
        if call.expected and call.released - call.acknowledged >= limits.TCP_WINDOW_SLICES // 2:
            call.acknowledged = call.released
            self.send(server_pb2.ShareResponse(call_id=call.call_id, taken=call.released))

    def end(self) -> None:
        if self._sender is not None:
            self._sender.cancel()
        super().end()

    # --- answers ------------------------------------------------------------------------------------------------------

    async def _send_answers(self, connection: FrameConnection) -> None:
        try:
            while True:
                call, answer = await self._answers.get()
                await connection.drain()
                if call.call_id in self.calls:  # Otherwise it was cancelled.
                    if answer is None:
                        self._end_answered(call)
                    elif call.error is None:
                        await self._send_answer(call, answer)
                self._unsent -= 1
        except Exception as error:  # Without an answer the worker would wait forever.
            self.connection_ended(as_psdist_error(error, "sending an answer", logger))

    def _end_answered(self, call: StreamCall) -> None:
        self.end_call(call)
        if call.error is not None:
            self.send(error_response(call))

    async def _send_answer(self, call: StreamCall, answer: SliceAnswer) -> None:
        weights = Weights(answer.version, b"")
        if call.wants_weights:
            try:
                weights = await self.store.reads.lasting(answer, call)
            except PsdistError as error:
                call.error = call.error or error
                if call.state is not CallState.ENDED:
                    call.fail(error)
                return
        self._send_weights(call, answer, weights)

    def _send_weights(self, call: StreamCall, answer: SliceAnswer, weights: Weights) -> None:
        if call.wants_weights:
            self.store.counters.workers[call.identity.worker_id].pull_bytes += len(weights.payload)
        result = server_pb2.SliceResult(
            slice=answer.index,
            version=weights.version,
            ignored=answer.ignored,
            staleness=answer.staleness,
            differences=weights.differences,
        )
        response = server_pb2.ShareResponse(call_id=call.call_id, slice=result)
        self.connection.send(response.SerializeToString(), memoryview(weights.payload))


# --- shared memory ----------------------------------------------------------------------------------------------------


async def serve_share(
    server: ParameterServer, requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext
) -> AsyncIterator[server_pb2.ShareResponse]:
    """Serve one Share stream until it ends."""
    async for data in requests:
        stream, attached = await _attach(server, data)
        try:
            yield server_pb2.ShareResponse(attached=attached)
            await until_over(stream, requests)
        finally:
            stream.end()
        break


async def _attach(server: ParameterServer, data: bytes) -> tuple[ShmCallStream, server_pb2.Attached]:
    """Process the first request of a stream: attach, and return the answer."""
    request = frames.parse(server_pb2.ShareRequest, data)
    if request.WhichOneof("kind") != "attach" or request.call_id != 0:
        raise InvalidArgumentError("the first request of a Share stream must be attach, with call_id 0")
    attach = request.attach
    identity = convert.sender_from_proto(attach)
    store = await server.admission.admit(identity)
    # A worker that never pushes offers an arena without elements.
    reads_only = attach.dtype == common_pb2.DTYPE_UNSPECIFIED
    dtype, elements = (
        ("float32", 0) if reads_only else (convert.payload_dtype_from_proto(attach.dtype), store.entry.total)
    )
    weights = store.dense.weights.arena
    if weights is None:
        raise SharingUnavailableError(store.dense.weights.arena_error)
    arena, connection = await take_arena(attach.socket, elements, dtype)
    with processes.closed_on_error(connection):
        processes.send_file(connection, weights.fd)
    stream = ShmCallStream(server, identity, store, arena, "" if reads_only else dtype)
    await stream.open(connection)
    return stream, server_pb2.Attached(nonce=arena.nonce, weights_nonce=weights.nonce)


class ShmCallStream(CallStream):
    """One attachment and its socket.

    arena: the worker's gradients.
    dtype: dtype of its elements; "" if it has none.
    """

    def __init__(
        self, server: ParameterServer, identity: Identity, store: ParameterStore, arena: GradientArena, dtype: str
    ) -> None:
        super().__init__(server, identity, store)
        self._arena = arena
        self._dtype = dtype

    async def open(self, connected: socket.socket) -> None:
        """Start receiving calls."""
        connection = FrameConnection(self, has_payloads=False, waits_for_reader=True)
        await connection.open(connected)
        self.connected(connection)

    def push(self, call: StreamCall, push: server_pb2.SharedPush, bases: Sequence[int]) -> None:
        if call.is_encoded:
            raise InvalidArgumentError(
                "a gradient arena holds elements, not segments: write what these decode to, and send CODEC_RAW (1)"
            )
        if call.dtype != self._dtype:
            held = self._dtype or "nothing"
            raise InvalidArgumentError(f"the gradient arena holds {held}, not {call.dtype}")
        slicing, counters = self.store.dense.slicing, self.store.counters.workers[call.identity.worker_id]
        for index, base in zip(push.slices, bases, strict=True):
            start, stop = slicing.bounds(index)
            values = self._arena.flat[start:stop]
            counters.push_bytes += 0 if call.abstain else values.nbytes
            self.store.router.push_unchecked(call, index, base, values, is_shared=True)

    def call_ended(self, call: StreamCall) -> None:
        if call.call_id not in self.calls:
            return
        self.end_call(call)
        if call.error is not None:
            self.send(error_response(call))
            return
        if call.wants_weights:
            size = self.store.dense.slicing.size
            elements = sum([size(answer.index) for answer in call.answers])
            counters = self.store.counters.workers[call.identity.worker_id]
            counters.pull_bytes += elements * ITEM_BYTES[call.wanted.dtype]
        self.send(_answers(call))


def _answers(call: StreamCall) -> server_pb2.ShareResponse:
    """Return the message with all answers of a call."""
    versions = [answer.version for answer in call.answers]
    staleness = [answer.staleness for answer in call.answers]
    answers = server_pb2.SharedAnswers(
        slices=[answer.index for answer in call.answers],
        versions=versions if min(versions) != max(versions) else versions[:1],
        ignored=[answer.index for answer in call.answers if answer.ignored],
        staleness=staleness if any(staleness) else (),
    )
    return server_pb2.ShareResponse(call_id=call.call_id, answers=answers)
