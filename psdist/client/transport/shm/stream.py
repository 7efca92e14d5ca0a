"""Share stream: calls to one server whose payloads are in memory mapped by both processes.

``attach`` opens it, and ``SharedStream.exchange`` carries one request to the server. Calls use the socket on which the
memory files were exchanged (``psdist.link.frame_connection``).

Invariants: The content of the arena is not modified between a request and its answer. Only slices that the server has
just answered are read from its arena, within their bounds. Weights that may change are copied under the sequence lock:
the copy is repeated if the slice was written in between. If the copy has a newer version than the answer, replicas may
lack it, and the server must confirm it before it counts.

``negotiated.calls`` implements calls, ``attachment`` knows which servers are attached, and ``delivery`` resends after
a failure.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from psdist.client.core.flat_vector import Flat
from psdist.client.core.routing import Route
from psdist.client.session.wait_tracker import Wait
from psdist.client.transport.buffer_pool import PullTarget
from psdist.client.transport.negotiated.calls import CallConnection, PendingCall, ask, encode_pull
from psdist.client.transport.requests import PullRequest, PushRequest, Request
from psdist.client.transport.transport import ServerLoss
from psdist.compression import payloads
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import (
    InternalError,
    NotMemberError,
    ServerUnreachableError,
    SharingUnavailableError,
    copy_error,
)
from psdist.link import fd_passing
from psdist.types import ITEM_BYTES, Slicing
from psdist.v1 import common_pb2, server_pb2
from psdist.wire.shm import GradientArena, WeightsArena

#: Number of checks of a slice under write before the event loop gets a turn.
_SPINS: Final = 4
_SPIN_SECONDS: Final = 0.0005
#: Number of such turns before the slice is requested again: it may have moved to another server.
_WAITS_MAX: Final = 2000
#: Minimum elements of a slice after which the event loop gets a turn.
_LARGE_SLICE: Final = 1 << 16


async def attach(
    call: Any, attaching: server_pb2.Attach, arena: GradientArena, slicing: Slicing, peer: str
) -> tuple[WeightsArena, socket.socket]:
    """Attach on ``call``, a new Share stream. Return the server's weights arena, and the connection for calls, which
    the caller closes.

    attaching: the request, without the socket.

    Raises SharingUnavailableError, or the server's refusal.
    """
    with ExitStack() as opened:
        with fd_passing.listening() as (attaching.socket, listener):
            exchange = asyncio.ensure_future(_exchange(listener, arena, slicing, opened))
            try:
                attached = await _ask(call, attaching, peer)  # The server reports a failed exchange.
                # The server sent its file before its answer.
                await asyncio.wait({exchange}, timeout=fd_passing.HANDOVER_SECONDS)
                if not exchange.done():
                    raise SharingUnavailableError(f"{peer} reported that it sent its memory, which did not arrive")
                weights, connection = exchange.result()
            finally:
                exchange.cancel()
                await asyncio.gather(exchange, return_exceptions=True)
        if attached.nonce != arena.nonce:
            raise SharingUnavailableError(f"{peer} did not map this worker's memory: it answered with another nonce")
        if attached.weights_nonce != weights.nonce:
            raise SharingUnavailableError(f"the memory received over the socket does not belong to {peer}")
        opened.pop_all()
        return weights, connection


async def _exchange(
    listener: socket.socket, arena: GradientArena, slicing: Slicing, opened: ExitStack
) -> tuple[WeightsArena, socket.socket]:
    try:
        mine = os.dup(arena.fd)  # The arena may be detached and its descriptor number reused.
    except OSError as error:
        raise SharingUnavailableError(f"the memory is no longer shared: {error.strerror}") from None
    try:
        fd, connection = await fd_passing.swap_files(listener, mine)
    finally:
        os.close(mine)
    opened.enter_context(connection)
    return WeightsArena.open(fd, slicing.count, slicing.total), connection


async def _ask(call: Any, attaching: server_pb2.Attach, peer: str) -> server_pb2.Attached:
    """Send the first request and return the server's answer."""
    request = server_pb2.ShareRequest(attach=attaching).SerializeToString()
    data = await ask(call, request, peer, "shared memory", SharingUnavailableError)
    response = server_pb2.ShareResponse.FromString(data)
    if response.WhichOneof("kind") != "attached":
        raise InternalError(f"{peer} answered attach with {response.WhichOneof('kind')}")
    return response.attached


class StreamOwner(Protocol):
    """State of all servers together that a stream needs."""

    @property
    def is_replicated(self) -> bool:
        """True if other servers hold copies."""

    def shows(self, index: int, arena: WeightsArena) -> bool:
        """True if the vector of all weights shows a slice from ``arena``."""


class _ReadSlice(NamedTuple):
    """Answered slice. version: of the weights that were read. is_ahead: it is newer than the version in the answer."""

    slice: int
    version: int
    is_ahead: bool
    staleness: int
    ignored: bool


class SharedStream(CallConnection[PendingCall]):
    """Attached stream.

    stable: weights do not change until this worker's next push, so they are read without a lock.
    """

    def __init__(
        self,
        call: Any,
        route: Route,
        arena: GradientArena,
        weights: WeightsArena,
        slicing: Slicing,
        loss: ServerLoss,
        stable: bool,
    ) -> None:
        super().__init__(call, route, slicing, loss, has_payloads=False)
        self.weights = weights
        self._arena = arena
        self.stable = stable

    def view(self, index: int) -> Flat:
        """Return the weights of a slice in place."""
        start, stop = self.slicing.bounds(index)
        return self.weights.weights[start:stop]

    # --- calls --------------------------------------------------------------------------------------------------------

    async def exchange(self, request: Request, route: Route, wait: Wait, owner: StreamOwner) -> None:
        """Make one call for the unanswered slices of ``route``. See ``Transport.exchange``."""
        assert isinstance(request, PushRequest | PullRequest), "initial values are sent over gRPC"
        slices = request.progress.unanswered(route.slices)
        if isinstance(request, PullRequest):
            encoded = encode_pull(request, route, request.progress.number, slices)
        else:
            await self._stage(request, slices)  # Before asking the server to read it.
            encoded = self.encode_push(request, route, slices)
            encoded.push.header.codec = common_pb2.CODEC_RAW  # The arena holds decoded gradients.
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
        """Write the gradient into the arena, unless it is there already."""
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
        """Send a request and return the message that ends its call. Raises the error that ended it."""
        call = PendingCall(wait)
        with self.sent(request, call):
            wait.sent()
            return await call.result()

    # --- weights ------------------------------------------------------------------------------------------------------

    async def _read(
        self, request: PushRequest | PullRequest, answers: server_pb2.SharedAnswers, owner: StreamOwner
    ) -> dict[int, _ReadSlice]:
        """Read the answered weights if the request wants them. Return the answered slices."""
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
                raise InternalError(f"{self.peer} answered slice {index}, which was not requested")
            if target is not None:
                request.traffic.received += self.slicing.size(index) * ITEM_BYTES[target.dtype]
                # The vector of all weights may show another server by now.
                if target.shared is None or not self.stable or not owner.shows(index, self.weights):
                    version = await self._copy(target, index, answered)
                    if self.slicing.slice_elements >= _LARGE_SLICE:
                        await asyncio.sleep(0)  # Let heartbeats run: all slices together may be gigabytes.
                if self.stable and int(self.weights.sequence[index]) != 2 * version:
                    # Written since the answer: this worker slept for longer than its lease.
                    raise NotMemberError(f"{self.peer} continued from version {version} without this worker")
            read[index] = _ReadSlice(index, version, version > answered, behind, index in ignored)
        return read

    async def _confirm(self, request: Request, route: Route, read: Mapping[int, _ReadSlice], wait: Wait) -> None:
        """Wait until all replicas have acknowledged the versions that were read. Until then a version newer than the
        answer may be lost with its server. Raises the error if that cannot be known."""
        ahead = [answer for answer in read.values() if answer.is_ahead]
        for version in sorted({answer.version for answer in ahead}):
            slices = sorted(answer.slice for answer in ahead if answer.version == version)
            await self._call_server(encode_pull(request, route, version, slices), wait)

    async def _copy(self, target: PullTarget, index: int, version: int) -> int:
        """Copy the weights of a slice into ``target``. Return their version."""
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
        """Copy weights that the server may be writing. Return the version that all of them have. Raises the error that
        broke the stream."""
        sequence, source = self.weights.sequence, self.view(index)
        for _ in range(_WAITS_MAX):
            for _ in range(_SPINS):
                before = int(sequence[index])
                if before % 2 == 0:
                    target[...] = source
                    if int(sequence[index]) == before:
                        return before // 2
            if self.broken is not None:
                raise copy_error(self.broken)
            await asyncio.sleep(_SPIN_SECONDS)
        raise ServerUnreachableError(f"{self.peer} kept slice {index} locked for writing")
