"""Share stream: pushes and pulls of a worker on this host, without sending payloads.

The only request on the stream attaches: the worker's gradient arena and this server's weights arena are exchanged
(``psdist.link.fd_passing``). The socket used for the exchange carries the calls (``psdist.link.frame_connection``).
Each message on it is a call with payloads in the arenas. All slices of a call are passed to the shard machines when it
is read, and one message answers the call once all of them are answered.

Invariants: An attachment ends with its stream or its socket, whichever ends first. Its calls end too, but their
contributions stay: the machines hold views of the arena, and the mapping lasts as long as the views.

``call_stream`` implements calls, and ``psdist.link.arenas`` the arenas.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence

import grpc.aio

from psdist.errors import InvalidArgumentError, SharingUnavailableError
from psdist.link import fd_passing
from psdist.link.arenas import GradientArena, take_arena
from psdist.link.frame_connection import FrameConnection
from psdist.types import ITEM_BYTES, Identity
from psdist.v1 import common_pb2, server_pb2
from psdist.wire import convert, frames
from psdist_server.call_stream import CallStream, StreamCall, error_response, until_over
from psdist_server.server import ParameterServer
from psdist_server.store.parameter_store import ParameterStore


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
    with fd_passing.closed_on_error(connection):
        fd_passing.send_file(connection, weights.fd)
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
