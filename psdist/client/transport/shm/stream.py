"""One Share stream: calls to one server whose payloads lie in memory that both processes have mapped.

``attach`` opens it, and ``SharedStream.exchange`` carries one request to the server. Calls go over the socket on which
the memory files were exchanged (``psdist.wire.framed_socket``).

Invariants: what is in the arena is not touched between a request and its answer. Only slices that the server has just
answered are read from its arena, at their own bounds. Weights that may change are read under the sequence lock: copied,
and copied again if the slice was written meanwhile. If that read gave a newer version than the server answered,
replicas may lack it, and the server is asked about it before it counts.

Not here: calls as such (``negotiated.calls``), which servers are attached and why others are not (``attachment``), what
is sent again after a break (``data_path``).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from psdist.client.core.partition import Flat
from psdist.client.core.routing import Route
from psdist.client.session.wait_tracker import Wait
from psdist.client.transport.buffer_pool import PullTarget
from psdist.client.transport.negotiated.calls import CallConnection, PendingCall, ask, encode_pull
from psdist.client.transport.requests import PullRequest, PushRequest, Request
from psdist.client.transport.transport import Loss
from psdist.compression import payloads
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import (
    InternalError,
    NotMemberError,
    ServerUnreachableError,
    SharingUnavailableError,
    again,
)
from psdist.types import ITEM_BYTES, Slicing
from psdist.v1 import common_pb2, server_pb2
from psdist.wire import fd_passing, frames
from psdist.wire.framed_socket import FramedSocket
from psdist.wire.shm import GradientArena, WeightsArena

#: A slice that is being written is looked at again so often before the loop goes on with other things for a while.
_SPINS: Final = 4
_SPIN_SECONDS: Final = 0.0005
#: After so many of these a slice that cannot be read is asked for again: it may be another server's.
_WAITS_MAX: Final = 2000
#: Between slices of at least this many elements the event loop gets a turn.
_LARGE_SLICE: Final = 1 << 16


async def attach(
    call: Any, attaching: server_pb2.Attach, arena: GradientArena, slicing: Slicing, peer: str
) -> tuple[WeightsArena, socket.socket]:
    """Attaches on ``call``, a Share stream that was just opened; the server's weights arena, and the connection for
    calls, which the caller closes.

    attaching: the request, without the socket.
    Raises SharingUnavailableError, and what else the server refuses with.
    """
    with ExitStack() as opened:
        with fd_passing.listening() as (attaching.socket, listener):
            exchange = asyncio.ensure_future(_exchange(listener, arena, slicing, opened))
            try:
                attached = await _ask(call, attaching, peer)  # The server says so if the exchange fails.
                # The server gave its file before it answered.
                await asyncio.wait({exchange}, timeout=fd_passing.HANDOVER_SECONDS)
                if not exchange.done():
                    raise SharingUnavailableError(f"{peer} says that it gave its memory, and that did not come")
                weights, connection = exchange.result()
            finally:
                exchange.cancel()
                await asyncio.gather(exchange, return_exceptions=True)
        if attached.nonce != arena.nonce:
            raise SharingUnavailableError(f"{peer} did not map this worker's memory: it answered with another nonce")
        if attached.weights_nonce != weights.nonce:
            raise SharingUnavailableError(f"the memory that came over the socket is not that of {peer}")
        opened.pop_all()
        return weights, connection


async def _exchange(
    listener: socket.socket, arena: GradientArena, slicing: Slicing, opened: ExitStack
) -> tuple[WeightsArena, socket.socket]:
    try:
        mine = os.dup(arena.fd)  # The arena may be detached meanwhile, and its number be given to another file.
    except OSError as error:
        raise SharingUnavailableError(f"the memory is not shared any more: {error.strerror}") from None
    try:
        fd, connection = await fd_passing.exchange(listener, mine)
    finally:
        os.close(mine)
    opened.enter_context(connection)
    return WeightsArena.open(fd, slicing.count, slicing.total), connection


async def _ask(call: Any, attaching: server_pb2.Attach, peer: str) -> server_pb2.Attached:
    """Sends the first request; what the server says to it."""
    request = server_pb2.ShareRequest(attach=attaching).SerializeToString()
    data = await ask(call, request, peer, "shared memory", SharingUnavailableError)
    response = server_pb2.ShareResponse.FromString(data)
    if response.WhichOneof("kind") != "attached":
        raise InternalError(f"{peer} answered attach with {response.WhichOneof('kind')}")
    return response.attached


class StreamOwner(Protocol):
    """What a stream needs to know of the servers as a whole."""

    @property
    def is_replicated(self) -> bool:
        """Whether other servers have copies."""

    def shows(self, index: int, arena: WeightsArena) -> bool:
        """Whether the vector of all weights shows a slice as it is in ``arena``."""


class _ReadSlice(NamedTuple):
    """A slice that was answered, and the version of the weights that were read then. ``is_ahead``: it is newer than the
    version in the answer."""

    slice: int
    version: int
    is_ahead: bool
    staleness: int
    ignored: bool


class SharedStream(CallConnection[PendingCall]):
    """An attached stream.

    stable: weights stand still until this worker's next push, so that they are read without a lock.
    """

    def __init__(
        self,
        call: Any,
        route: Route,
        arena: GradientArena,
        weights: WeightsArena,
        slicing: Slicing,
        loss: Loss,
        stable: bool,
    ) -> None:
        super().__init__(call, route, slicing, loss)
        self.weights = weights
        self._arena = arena
        self.stable = stable
        self.socket = FramedSocket(self._on_message, self.connection_ended)

    async def open(self, connection: socket.socket) -> None:
        """Begins, on the connection that ``attach`` gave."""
        await self.socket.open(connection)

    def send(self, request: server_pb2.ShareRequest) -> None:
        self.socket.send(request.SerializeToString())

    def disconnect(self) -> None:
        self.socket.close()

    def _on_message(self, data: bytes) -> None:
        self.on_response(frames.parse(server_pb2.ShareResponse, data))

    def view(self, index: int) -> Flat:
        """The weights of a slice where they lie."""
        start, stop = self.slicing.bounds(index)
        return self.weights.weights[start:stop]

    # --- a call -------------------------------------------------------------------------------------------------------

    async def exchange(self, request: Request, route: Route, wait: Wait, owner: StreamOwner) -> None:
        """One call for the slices of ``route`` that are not answered. See ``Transport.exchange``."""
        assert isinstance(request, PushRequest | PullRequest), "initial values are sent over gRPC"
        slices = request.progress.unanswered(route.slices)
        if isinstance(request, PullRequest):
            encoded = encode_pull(request, route, request.progress.number, slices)
        else:
            await self._stage(request, slices)  # Before the server is told to read it.
            encoded = self.encode_push(request, route, slices)
            encoded.push.header.codec = common_pb2.CODEC_RAW  # Whatever codec made it, the arena has gradients.
            encoded.push.header.ClearField("difference")
        response = await self._call_server(encoded, wait)
        wait.progress()
        read = await self._read(request, response.answers, owner)
        if owner.is_replicated:
            await self._confirm(request, route, read, wait)
        for answer in read.values():
            request.progress.answer(answer.slice, answer.version, answer.staleness, answer.ignored)
        if request.progress.unanswered(slices):
            raise ServerUnreachableError(f"{self.peer} did not answer all slices")

    async def _stage(self, push: PushRequest, slices: Sequence[int]) -> None:
        """Writes the gradient into the arena, unless it lies there."""
        if push.abstains:
            return
        lies_there = push.flat is not None and push.flat.__array_interface__["data"][0] == self._arena.address
        for index in slices:
            await push.ready(index)
            start, stop = self.slicing.bounds(index)
            part = self._arena.part(start, stop)
            if not lies_there:
                push.write_decoded(index, part)
            push.traffic.sent += part.nbytes

    async def _call_server(self, request: server_pb2.ShareRequest, wait: Wait) -> server_pb2.ShareResponse:
        """Sends a request, and returns the message that ends its call. Raises why there is none."""
        call = PendingCall(wait)
        with self.sent(request, call):
            wait.sent()
            return await call.result()

    # --- weights ------------------------------------------------------------------------------------------------------

    async def _read(
        self, request: PushRequest | PullRequest, answers: server_pb2.SharedAnswers, owner: StreamOwner
    ) -> dict[int, _ReadSlice]:
        """Reads the weights that were answered, if they were asked for. Returns what was answered, by slice."""
        slices, count = answers.slices, len(answers.slices)
        versions = answers.versions if len(answers.versions) != 1 else [answers.versions[0]] * count
        staleness = answers.staleness or [0] * count
        if len(versions) != count or len(staleness) != count:
            raise InternalError(f"{self.peer} answered with {len(versions)} versions for {count} slices")
        ignored = set(answers.ignored)
        read: dict[int, _ReadSlice] = {}
        target = request.target
        for index, answered, behind in zip(slices, versions, staleness, strict=True):
            version = answered
            if index not in request.progress.pending or index in read:
                raise InternalError(f"{self.peer} answered slice {index}, which is not asked for")
            if target is not None:
                request.traffic.received += self.slicing.size(index) * ITEM_BYTES[target.dtype]
                # The vector that shows all weights may show another server's since.
                if target.shared is None or not self.stable or not owner.shows(index, self.weights):
                    version = await self._copy(target, index, answered)
                    if self.slicing.slice_elements >= _LARGE_SLICE:
                        await asyncio.sleep(0)  # All slices together may be gigabytes: let heartbeats run between them.
                if self.stable and int(self.weights.sequence[index]) != 2 * version:
                    # Since the answer: this worker slept for longer than its lease.
                    raise NotMemberError(f"{self.peer} went on from version {version} without this worker")
            read[index] = _ReadSlice(index, version, version > answered, behind, index in ignored)
        return read

    async def _confirm(self, request: Request, route: Route, read: Mapping[int, _ReadSlice], wait: Wait) -> None:
        """Returns when all replicas have acknowledged what was read: until then a version that is newer than the
        answer may be lost with its server. Raises why that cannot be known."""
        ahead = [answer for answer in read.values() if answer.is_ahead]
        for version in sorted({answer.version for answer in ahead}):
            slices = sorted(answer.slice for answer in ahead if answer.version == version)
            await self._call_server(encode_pull(request, route, version, slices), wait)

    async def _copy(self, target: PullTarget, index: int, version: int) -> int:
        """Copies the weights of a slice into ``target``. Returns their version."""
        part = target.part(index)
        if self.stable:
            part[...] = self.view(index)
        else:
            version = await self.copy_moving(index, part)
        if target.dtype != "float32":  # As if they had been sent.
            payload = np.empty(part.size, NUMPY_DTYPES[target.dtype])
            payloads.narrow(part, payload)
            payloads.widen(payload, part)
        target.replaced(index)
        return version

    async def copy_moving(self, index: int, target: Flat) -> int:
        """Copies weights that the server may be writing; the version that they are all of. Raises why the stream
        broke."""
        sequence, source = self.weights.sequence, self.view(index)
        for _ in range(_WAITS_MAX):
            for _ in range(_SPINS):
                before = int(sequence[index])
                if before % 2 == 0:
                    target[...] = source
                    if int(sequence[index]) == before:
                        return before // 2
            if self.broken is not None:
                raise again(self.broken)
            await asyncio.sleep(_SPIN_SECONDS)
        raise ServerUnreachableError(f"{self.peer} does not let slice {index} be read")
