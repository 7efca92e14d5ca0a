"""One Share stream: calls to one server whose payloads lie in memory that both processes have mapped.

``attach`` opens it, and ``SharedStream.exchange`` carries one request to the server. Calls go over the socket on which
the memory files were exchanged (``psdist.wire.framed_socket``), several at once if need be. The gRPC stream
authenticates the attachment, and says why it ended.

Invariants: what is in the arena is not touched between a request and its answer. Only slices that the server has just
answered are read from its arena, at their own bounds. Weights that may change are read under the sequence lock: copied,
and copied again if the slice was written meanwhile. If that read gave a newer version than the server answered,
replicas may lack it, and the server is asked about it before it counts. When the socket or the gRPC stream ends, all
calls of the stream end at once, and it is not used again.

Not here: which servers are attached and why others are not (``attachment``), what is sent again after a break
(``data_path``).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple, Protocol

import grpc.aio
import numpy as np

from psdist.client.core.partition import Flat
from psdist.client.core.routing import Route
from psdist.client.session.cluster_view import again
from psdist.client.session.wait_tracker import Wait
from psdist.client.transport.buffer_pool import PullTarget
from psdist.client.transport.grpc import messages
from psdist.client.transport.requests import PullRequest, PushRequest, Request
from psdist.client.transport.transport import Loss, attempt_error
from psdist.compression import payloads
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import (
    InternalError,
    NotMemberError,
    PsdistError,
    ServerUnreachableError,
    SharingUnavailableError,
)
from psdist.types import ITEM_BYTES, Slicing
from psdist.v1 import server_pb2
from psdist.wire import fd_passing, frames, status
from psdist.wire.framed_socket import FramedSocket
from psdist.wire.shm import GradientArena, WeightsArena

#: A slice that is being written is looked at again so often before the loop goes on with other things for a while.
_SPINS: Final = 4
_SPIN_SECONDS: Final = 0.0005
#: After so many of these a slice that cannot be read is asked for again: it may be another server's.
_WAITS_MAX: Final = 2000
#: Where the socket closed, the stream is given so long to say why.
_REASON_SECONDS: Final = 2.0


async def attach(
    call: Any, attaching: server_pb2.Attach, arena: GradientArena, slicing: Slicing, loss: Loss, peer: str
) -> tuple[WeightsArena, socket.socket]:
    """Attaches on ``call``, a Share stream that was just opened; the server's weights arena, and the connection for
    calls, which the caller closes.

    attaching: the request, without the socket.
    Raises SharingUnavailableError, and what else the server refuses with.
    """
    with ExitStack() as opened:
        with fd_passing.listening() as (attaching.socket, listener):
            exchange = asyncio.ensure_future(_exchange(listener, arena, slicing, opened))
            answer = asyncio.ensure_future(_ask(call, attaching, peer))
            try:
                # The server says so if the exchange fails.
                ends: set[asyncio.Future[Any]] = {answer, loss}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    raise again(loss.result())
                attached = answer.result()
                # The server gave its file before it answered.
                ends = {exchange, loss}
                await asyncio.wait(ends, timeout=fd_passing.HANDOVER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if not exchange.done():
                    raise (
                        again(loss.result())
                        if loss.done()
                        else SharingUnavailableError(f"{peer} says that it gave its memory, and that did not come")
                    )
                weights, connection = exchange.result()
            finally:
                answer.cancel()
                exchange.cancel()
                await asyncio.gather(answer, exchange, return_exceptions=True)
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
        mine = os.dup(arena.fd)  # The arena may be renewed meanwhile, and the number be another file's.
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
    try:
        await call.write(server_pb2.ShareRequest(attach=attaching).SerializeToString())
        data = await call.read()
    except grpc.aio.AioRpcError as failure:
        if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise SharingUnavailableError(f"{peer} is of a version that cannot share memory") from None
        raise status.from_call(failure, peer) from None
    except asyncio.InvalidStateError:
        raise ServerUnreachableError(f"{peer} ended the stream while it was written to") from None
    if data is grpc.aio.EOF:
        raise ServerUnreachableError(f"{peer} ended the stream before it answered")
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


class SharedStream:
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
        self.incarnation = route.incarnation
        self.weights = weights
        #: Why no call can be made on it any more.
        self.broken: PsdistError | None = None
        self._peer = route.peer
        self._call = call
        self._arena = arena
        self._slicing = slicing
        self.stable = stable
        self._loss = loss
        self._last_id = 0
        #: Whether the last push asked for weights, its epoch and slices, and its request. The next one is mostly the
        #: same but for its numbers, and is made of it.
        self._pushed: tuple[tuple[bool, int, tuple[int, ...]], server_pb2.ShareRequest] | None = None
        #: Calls under way: what gets their answer, and the wait that it ends.
        self.calls: dict[int, tuple[asyncio.Future[server_pb2.ShareResponse | PsdistError], Wait]] = {}
        self.socket = FramedSocket(self._on_message, self._on_closed)
        self._reason_timer: asyncio.TimerHandle | None = None
        self._watcher = asyncio.create_task(self._watch(), name="psdist share")
        loss.add_done_callback(self._on_loss)

    async def open(self, connection: socket.socket) -> None:
        """Begins, on the connection that ``attach`` gave."""
        await self.socket.open(connection)

    @property
    def is_open(self) -> bool:
        """Whether calls can be made."""
        return self.broken is None

    def view(self, index: int) -> Flat:
        """The weights of a slice where they lie."""
        start, stop = self._slicing.bounds(index)
        return self.weights.weights[start:stop]

    # --- a call -------------------------------------------------------------------------------------------------------

    async def exchange(self, request: Request, route: Route, wait: Wait, owner: StreamOwner) -> None:
        """One call for the slices of ``route`` that are not answered. See ``Transport.exchange``."""
        assert isinstance(request, PushRequest | PullRequest), "initial values are sent over gRPC"
        slices = request.progress.unanswered(route.slices)
        if isinstance(request, PullRequest):
            encoded = _encode_pull(request, route, request.progress.number, slices)
        else:
            encoded = self._encode_push(request, route, slices)
        response = await self._call_server(encoded, wait)
        wait.progress()
        read = await self._read(request, response.answers, owner)
        if owner.is_replicated:
            await self._confirm(request, route, read, wait)
        for answer in read.values():
            request.progress.answer(answer.slice, answer.version, answer.staleness, answer.ignored)
        if request.progress.unanswered(slices):
            raise ServerUnreachableError(f"{self._peer} did not answer all slices")

    def _encode_push(self, push: PushRequest, route: Route, slices: tuple[int, ...]) -> server_pb2.ShareRequest:
        """The request, after the gradient is where the server will read it."""
        self._stage(push, slices)
        wants_weights = push.target is not None
        kind = (wants_weights, route.epoch, slices)
        if self._pushed is None or self._pushed[0] != kind:
            header = messages.push_header(push, route)
            shared = server_pb2.SharedPush(header=header, wants_weights=wants_weights, slices=slices)
            self._pushed = kind, server_pb2.ShareRequest(push=shared)
        request = self._pushed[1]
        messages.number_push(request.push.header, push)
        bases = [push.versions[index] for index in slices]
        request.push.base_versions[:] = bases if min(bases) != max(bases) else bases[:1]
        return request

    def _stage(self, push: PushRequest, slices: Sequence[int]) -> None:
        """Writes the gradient into the arena, unless it lies there."""
        if push.flat is None:
            return
        lies_there = push.flat.__array_interface__["data"][0] == self._arena.address
        for index in slices:
            start, stop = self._slicing.bounds(index)
            part = self._arena.part(start, stop)
            if not lies_there:
                encoded = push.codec.encode(push.flat[start:stop], part)
                if encoded is not part:  # No cast was needed.
                    part[...] = encoded
            push.traffic.sent += part.nbytes

    async def _call_server(self, request: server_pb2.ShareRequest, wait: Wait) -> server_pb2.ShareResponse:
        """Sends a request, and returns the message that ends its call. Raises why there is none."""
        if self.broken is not None:
            raise again(self.broken)
        self._last_id += 1
        request.call_id = call_id = self._last_id
        ended: asyncio.Future[server_pb2.ShareResponse | PsdistError] = asyncio.get_running_loop().create_future()
        self.calls[call_id] = ended, wait
        try:
            self.socket.send(request.SerializeToString())
            response = await ended
        finally:
            if self.calls.pop(call_id, None) is not None:  # Nobody waits for it any more.
                cancel = server_pb2.ShareRequest(call_id=call_id, cancel=server_pb2.SharedCancel())
                self.socket.send(cancel.SerializeToString())
        if isinstance(response, PsdistError):
            try:
                raise response
            finally:
                del response  # Its traceback holds this frame, and with it the call's arrays.
        return response

    # --- weights ------------------------------------------------------------------------------------------------------

    async def _read(
        self, request: PushRequest | PullRequest, answers: server_pb2.SharedAnswers, owner: StreamOwner
    ) -> dict[int, _ReadSlice]:
        """Reads the weights that were answered, if they were asked for. Returns what was answered, by slice."""
        slices, count = answers.slices, len(answers.slices)
        versions = answers.versions if len(answers.versions) != 1 else [answers.versions[0]] * count
        staleness = answers.staleness or [0] * count
        if len(versions) != count or len(staleness) != count:
            raise InternalError(f"{self._peer} answered with {len(versions)} versions for {count} slices")
        ignored = set(answers.ignored)
        read: dict[int, _ReadSlice] = {}
        target = request.target
        for index, answered, behind in zip(slices, versions, staleness, strict=True):
            version = answered
            if index not in request.progress.pending or index in read:
                raise InternalError(f"{self._peer} answered slice {index}, which is not asked for")
            if target is not None:
                request.traffic.received += self._slicing.size(index) * ITEM_BYTES[target.dtype]
                # The vector that shows all weights may show another server's since.
                if target.shared is None or not self.stable or not owner.shows(index, self.weights):
                    version = await self._copy(target, index, answered)
                if self.stable and int(self.weights.sequence[index]) != 2 * version:
                    # Since the answer: this worker slept for longer than its lease.
                    raise NotMemberError(f"{self._peer} went on from version {version} without this worker")
            read[index] = _ReadSlice(index, version, version > answered, behind, index in ignored)
        return read

    async def _confirm(self, request: Request, route: Route, read: Mapping[int, _ReadSlice], wait: Wait) -> None:
        """Returns when all replicas have acknowledged what was read: until then a version that is newer than the
        answer may be lost with its server. Raises why that cannot be known."""
        ahead = [answer for answer in read.values() if answer.is_ahead]
        for version in sorted({answer.version for answer in ahead}):
            slices = sorted(answer.slice for answer in ahead if answer.version == version)
            await self._call_server(_encode_pull(request, route, version, slices), wait)

    async def _copy(self, target: PullTarget, index: int, version: int) -> int:
        """Copies the weights of a slice into ``target``. Returns their version."""
        start, stop = self._slicing.bounds(index)
        part = target.target[start:stop]
        if self.stable:
            part[...] = self.view(index)
        else:
            version = await self.copy_moving(index, part)
        if target.dtype != "float32":  # As if they had been sent.
            payload = np.empty(part.size, NUMPY_DTYPES[target.dtype])
            payloads.narrow(part, payload)
            payloads.widen(payload, part)
        target.received.add(index)
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
        raise ServerUnreachableError(f"{self._peer} does not let slice {index} be read")

    # --- socket and stream --------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Waits for the end of the stream, which is the end of everything here."""
        try:
            data = await self._call.read()
            error: PsdistError = ServerUnreachableError(f"{self._peer} ended the stream")
            if data is not grpc.aio.EOF:
                error = InternalError(f"{self._peer} sent an answer on the stream after it was attached")
        except grpc.aio.AioRpcError as failure:
            error = attempt_error(status.from_call(failure, self._peer))
        except asyncio.CancelledError:
            error = ServerUnreachableError(f"the stream to {self._peer} was closed")
        self._break(error)

    def _on_closed(self, error: PsdistError | None) -> None:
        if error is not None:
            self._break(InternalError(f"what {self._peer} sent cannot be read: {error.message}"))
        else:
            # The server says why by the stream; but it may hang, or be gone.
            reason = ServerUnreachableError(f"{self._peer} closed the connection")
            self._reason_timer = asyncio.get_running_loop().call_later(_REASON_SECONDS, self._break, reason)

    def _on_message(self, data: bytes) -> None:
        response = frames.parse(server_pb2.ShareResponse, data)
        waiting = self.calls.get(response.call_id)
        if waiting is None:  # It was cancelled.
            return
        ended, wait = waiting
        match response.WhichOneof("kind"):
            case "waiting_for":
                wait.update_reason(response.waiting_for)
                return
            case "answers":
                result: server_pb2.ShareResponse | PsdistError = response
            case "error":
                result = attempt_error(status.from_detail(response.error))
            case kind:
                result = InternalError(f"{self._peer} answered a call with {kind}")
        del self.calls[response.call_id]
        if not ended.done():
            ended.set_result(result)

    def _on_loss(self, loss: Loss) -> None:
        self._break(loss.result())

    def _break(self, error: PsdistError) -> None:
        """No more calls; those under way end with ``error``."""
        if self.broken is not None:
            return
        self.broken = error
        self._loss.remove_done_callback(self._on_loss)
        if self._reason_timer is not None:
            self._reason_timer.cancel()
        for ended, _ in self.calls.values():
            if not ended.done():
                ended.set_result(again(error))
        self.calls.clear()
        self.socket.close()
        self._call.cancel()

    def close(self) -> None:
        """Ends the stream; the weights may still be read."""
        self._break(ServerUnreachableError(f"the stream to {self._peer} was closed"))
        self._watcher.cancel()

    async def ended(self) -> None:
        """Waits until nothing of it runs any more."""
        await asyncio.gather(self._watcher, return_exceptions=True)


def _encode_pull(request: Request, route: Route, version: int, slices: Sequence[int]) -> server_pb2.ShareRequest:
    """Asks for ``slices`` in ``version`` or a newer one."""
    identity = request.sender.identity(route.epoch)
    return server_pb2.ShareRequest(pull=server_pb2.SharedPull(identity=identity, min_version=version, slices=slices))
