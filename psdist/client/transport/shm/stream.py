"""One Share stream: calls to one server whose payloads lie in memory that both processes have mapped.

``attach`` opens it, and ``SharedStream.attempt`` carries one job out for one route. Calls go over the socket on which
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
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import grpc.aio
import numpy as np

from psdist.client.core.partition import Flat
from psdist.client.core.routing import Route
from psdist.client.session.cluster_view import again
from psdist.client.session.wait_tracker import Wait
from psdist.client.transport.requests import PullJob, PushJob, PushPullJob
from psdist.compression import payloads
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import (
    ClosedError,
    InternalError,
    NotMemberError,
    PsdistError,
    ServerUnreachableError,
    SharingUnavailableError,
    StaleEpochError,
)
from psdist.types import ITEM_BYTES, Slicing
from psdist.v1 import server_pb2
from psdist.wire import convert, fd_passing, frames, status
from psdist.wire.framed_socket import FramedSocket
from psdist.wire.shm import GradientArena, WeightsArena

if TYPE_CHECKING:
    from psdist.client.transport.data_path import Job

#: A slice that is being written is looked at again so often before the loop goes on with other things for a while.
_SPINS: Final = 4
_SPIN_SECONDS: Final = 0.0005
#: After so many of these a slice that cannot be read is asked for again: it may be another server's.
_WAITS_MAX: Final = 2000
#: Where the line ended, the stream is given so long to say why.
_REASON_SECONDS: Final = 2.0

Loss = asyncio.Future[PsdistError]


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
            raise SharingUnavailableError(f"{peer} did not see this worker's memory: it tells another nonce")
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


class _ReadSlice(NamedTuple):
    """A slice that was answered, and the version of the weights that were read then. ``is_ahead``: it is newer than the
    one that the server told of."""

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
        #: Kind of the last push, and its request: the next is mostly the same but for its numbers, and is made of it.
        self._pushed: tuple[tuple[type[PushJob], int, tuple[int, ...]], server_pb2.ShareRequest] | None = None
        #: Calls under way: what gets their answer, and the wait that it ends.
        self._calls: dict[int, tuple[asyncio.Future[server_pb2.ShareResponse | PsdistError], Wait]] = {}
        self._line = FramedSocket(self._hear, self._line_ended)
        self._giving_reason: asyncio.TimerHandle | None = None
        self._watcher = asyncio.create_task(self._watch(), name="psdist share")
        loss.add_done_callback(self._lost)

    async def open(self, connection: socket.socket) -> None:
        """Begins, on the connection that ``attach`` gave."""
        await self._line.open(connection)

    @property
    def is_open(self) -> bool:
        """Whether calls can be made."""
        return self.broken is None

    def view(self, index: int) -> Flat:
        """The weights of a slice where they lie."""
        start, stop = self._slicing.bounds(index)
        return self.weights.weights[start:stop]

    # --- a call -------------------------------------------------------------------------------------------------------

    async def attempt(self, job: Job, route: Route, wait: Wait) -> PsdistError | None:
        """One call for what is unanswered of ``route``. Returns why it broke if it is worth another attempt; raises
        what is not."""
        assert isinstance(job, PushJob | PullJob)
        slices = job.request.unanswered(route.slices)
        request = self._pull(job, route, slices) if isinstance(job, PullJob) else self._push(job, route, slices)
        response = await self._ask(request, wait)
        if isinstance(response, PsdistError):
            if isinstance(response, StaleEpochError | ServerUnreachableError | ClosedError):
                return response
            raise response
        wait.progress()
        try:
            taken = await self._take(job, response.answers)
            await self._confirm(job, route, taken, wait)
        except (StaleEpochError, ServerUnreachableError, ClosedError) as error:  # Broken while weights were read.
            return error
        for answer in taken.values():
            job.request.answer(answer.slice, answer.version, answer.staleness, answer.ignored)
        if job.request.unanswered(slices):
            return ServerUnreachableError(f"{self._peer} did not answer all slices")
        return None

    def _push(self, job: PushJob, route: Route, slices: tuple[int, ...]) -> server_pb2.ShareRequest:
        """The request, after the gradient is where the server will read it."""
        self._stage(job, slices)
        kind = (type(job), route.epoch, slices)
        if self._pushed is None or self._pushed[0] != kind:
            pull_dtype = convert.dtype_to_proto(job.pull_dtype) if isinstance(job, PushPullJob) else None
            push = server_pb2.SharedPush(
                header=job.header(route, pull_dtype), wants_weights=isinstance(job, PushPullJob), slices=slices
            )
            self._pushed = kind, server_pb2.ShareRequest(push=push)
        request = self._pushed[1]
        job.number(request.push.header)
        bases = [job.versions[index] for index in slices]
        request.push.base_versions[:] = bases if min(bases) != max(bases) else bases[:1]
        return request

    def _stage(self, job: PushJob, slices: Sequence[int]) -> None:
        if job.flat is None:
            return
        lies_there = job.flat.__array_interface__["data"][0] == self._arena.address
        for index in slices:
            start, stop = self._slicing.bounds(index)
            part = self._arena.part(start, stop)
            if not lies_there:
                encoded = job.codec.encode(job.flat[start:stop], part)
                if encoded is not part:  # no cast was needed
                    part[...] = encoded
            job.traffic.sent += part.nbytes

    def _pull(self, job: PullJob, route: Route, slices: Sequence[int]) -> server_pb2.ShareRequest:
        identity = job.sender.identity(route.epoch)
        pull = server_pb2.SharedPull(identity=identity, min_version=job.request.number, slices=slices)
        return server_pb2.ShareRequest(pull=pull)

    async def _ask(self, request: server_pb2.ShareRequest, wait: Wait) -> server_pb2.ShareResponse | PsdistError:
        """Sends a request; the message that ends its call, or why there is none."""
        if self.broken is not None:
            return self.broken
        self._last_id += 1
        request.call_id = call_id = self._last_id
        ended: asyncio.Future[server_pb2.ShareResponse | PsdistError] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = ended, wait
        try:
            self._line.send(request.SerializeToString())
            return await ended
        finally:
            if self._calls.pop(call_id, None) is not None:  # Nobody waits for it any more.
                cancel = server_pb2.ShareRequest(call_id=call_id, cancel=server_pb2.SharedCancel())
                self._line.send(cancel.SerializeToString())

    # --- weights ------------------------------------------------------------------------------------------------------

    async def _take(self, job: PushJob | PullJob, answers: server_pb2.SharedAnswers) -> dict[int, _ReadSlice]:
        """Reads the weights that were answered; what was, by slice."""
        slices, count = answers.slices, len(answers.slices)
        versions = answers.versions if len(answers.versions) != 1 else [answers.versions[0]] * count
        staleness = answers.staleness or [0] * count
        if len(versions) != count or len(staleness) != count:
            raise InternalError(f"{self._peer} told {len(versions)} versions of {count} slices")
        ignored = set(answers.ignored)
        taken: dict[int, _ReadSlice] = {}
        for index, told, behind in zip(slices, versions, staleness, strict=True):
            version = told
            if index not in job.request.pending or index in taken:
                raise InternalError(f"{self._peer} answered slice {index}, which is not asked for")
            if isinstance(job, PushPullJob | PullJob):
                job.traffic.received += self._slicing.size(index) * ITEM_BYTES[_pull_dtype(job)]
                if not (job.in_place and self.stable and self._is_shown(job, index)):
                    version = await self._copy(job, index, told)
                if self.stable and int(self.weights.sequence[index]) != 2 * version:
                    # Since the answer: this worker slept for longer than its lease.
                    raise NotMemberError(f"{self._peer} went on from version {version} without this worker")
            taken[index] = _ReadSlice(index, version, version > told, behind, index in ignored)
        return taken

    async def _confirm(self, job: PushJob | PullJob, route: Route, taken: Mapping[int, _ReadSlice], wait: Wait) -> None:
        """Returns when all replicas have acknowledged what was read: a version that is newer than the server told of
        may be lost with it until then, and never have been. Raises why that cannot be known."""
        if job.shared_memory is None or not job.shared_memory.is_replicated:
            return
        ahead = [answer for answer in taken.values() if answer.is_ahead]
        for version in sorted({answer.version for answer in ahead}):
            slices = sorted(answer.slice for answer in ahead if answer.version == version)
            pull = server_pb2.SharedPull(identity=job.sender.identity(route.epoch), min_version=version, slices=slices)
            response = await self._ask(server_pb2.ShareRequest(pull=pull), wait)
            if isinstance(response, PsdistError):
                raise again(response)

    def _is_shown(self, job: PushPullJob | PullJob, index: int) -> bool:
        """Whether the vector that shows all weights has this slice from here: it may be another server's since."""
        return job.shared_memory is not None and job.shared_memory.shows(index, self.weights)

    async def _copy(self, job: PushPullJob | PullJob, index: int, version: int) -> int:
        """Copies the weights of a slice into the job's target; their version."""
        assert job.target is not None
        start, stop = self._slicing.bounds(index)
        target, dtype = job.target[start:stop], _pull_dtype(job)
        if self.stable:
            target[...] = self.view(index)
        else:
            version = await self._copy_moving(index, target)
        if dtype != "float32":  # as if they had been sent
            payload = np.empty(target.size, NUMPY_DTYPES[dtype])
            payloads.narrow(target, payload)
            payloads.widen(payload, target)
        job.received.add(index)
        return version

    async def _copy_moving(self, index: int, target: Flat) -> int:
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

    # --- line and stream ----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Waits for the end of the stream, which is the end of everything here."""
        try:
            data = await self._call.read()
            error: PsdistError = ServerUnreachableError(f"{self._peer} ended the stream")
            if data is not grpc.aio.EOF:
                error = InternalError(f"{self._peer} sent an answer on the stream after it was attached")
        except grpc.aio.AioRpcError as failure:
            error = status.from_call(failure, self._peer)
        except asyncio.CancelledError:
            error = ClosedError(f"the stream to {self._peer} was closed")
        self._break(error)

    def _line_ended(self, error: PsdistError | None) -> None:
        if error is not None:
            self._break(InternalError(f"what {self._peer} sent cannot be read: {error.message}"))
        else:
            # The server says why by the stream; but it may hang, or be gone.
            reason = ServerUnreachableError(f"{self._peer} closed the connection")
            self._giving_reason = asyncio.get_running_loop().call_later(_REASON_SECONDS, self._break, reason)

    def _hear(self, data: bytes) -> None:
        response = frames.parse(server_pb2.ShareResponse, data)
        waiting = self._calls.get(response.call_id)
        if waiting is None:  # It was cancelled.
            return
        ended, wait = waiting
        match response.WhichOneof("kind"):
            case "waiting_for":
                wait.hear(response.waiting_for)
                return
            case "answers":
                result: server_pb2.ShareResponse | PsdistError = response
            case "error":
                result = status.from_detail(response.error)
            case kind:
                result = InternalError(f"{self._peer} answered a call with {kind}")
        del self._calls[response.call_id]
        if not ended.done():
            ended.set_result(result)

    def _lost(self, loss: Loss) -> None:
        self._break(loss.result())

    def _break(self, error: PsdistError) -> None:
        """No more calls; those under way end with ``error``."""
        if self.broken is not None:
            return
        self.broken = error
        self._loss.remove_done_callback(self._lost)
        if self._giving_reason is not None:
            self._giving_reason.cancel()
        for ended, _ in self._calls.values():
            if not ended.done():
                ended.set_result(again(error))
        self._calls.clear()
        self._line.close()
        self._call.cancel()

    def close(self) -> None:
        """Ends the stream; the weights may still be read."""
        self._break(ClosedError(f"the stream to {self._peer} was closed"))
        self._watcher.cancel()

    async def ended(self) -> None:
        """Waits until nothing of it runs any more."""
        await asyncio.gather(self._watcher, return_exceptions=True)


def _pull_dtype(job: PushPullJob | PullJob) -> str:
    return job.pull_dtype if isinstance(job, PushPullJob) else job.dtype
