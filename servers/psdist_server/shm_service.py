"""The Share stream, by which a worker on this host pushes and pulls without sending payloads.

The only request on the stream attaches: the worker's gradient arena and this server's weights arena are exchanged
(``psdist.wire.fd_passing``). The socket over which that happened carries the calls (``psdist.wire.framed_socket``).
Each message on it is a call whose payloads lie in the arenas. All slices of a call go to the shard machines as soon as
it is read, and one message answers it when all of them are answered. Meanwhile the worker is sent the reason of the
wait.

Invariants: calls are taken in the order in which they came. A call with a wrong sender, header or list of slices is
refused before any slice is taken; after that each slice is taken or refused by its shard. The slices here bound what
one attachment can make this server hold. An attachment ends with its stream or its socket, whichever ends first. Its
calls then end too, but their contributions stay: the machines hold views of the arena, whose mapping lasts as long as
the views do.

Not here: what a push does (``parameter_store``), arenas as such (``psdist.wire.shm``).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from psdist.errors import (
    InternalError,
    InvalidArgumentError,
    LimitExceededError,
    PsdistError,
    SharingUnavailableError,
    UnknownParametersError,
)
from psdist.types import ITEM_BYTES, Identity
from psdist.v1 import common_pb2, server_pb2
from psdist.wire import convert, fd_passing, frames, limits, status
from psdist.wire.framed_socket import FramedSocket
from psdist.wire.shm import GradientArena
from psdist_server.server import ParameterServer
from psdist_server.store.parameter_store import ParameterStore
from psdist_server.store.rpc_call import Call, CallState, SliceAnswer


async def serve_share(
    server: ParameterServer, requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext
) -> AsyncIterator[server_pb2.ShareResponse]:
    """Serves one Share stream until it ends."""
    async for data in requests:
        stream, attached = await _attach(server, data)
        try:
            yield server_pb2.ShareResponse(attached=attached)
            await _until_over(stream, requests)
        finally:
            stream.end()
        break


async def _until_over(stream: _Stream, requests: AsyncIterator[bytes]) -> None:
    """Returns when the worker ended the stream or the socket. Raises the error of an invalid message on either."""
    disconnected = asyncio.create_task(_until_disconnected(requests))
    try:
        ends: set[asyncio.Future[Any]] = {disconnected, stream.over}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if stream.over.done() and (error := stream.over.result()) is not None:
            raise error
        if disconnected.done():
            disconnected.result()
    finally:
        disconnected.cancel()
        await asyncio.gather(disconnected, return_exceptions=True)


async def _until_disconnected(requests: AsyncIterator[bytes]) -> None:
    async for _ in requests:
        raise InvalidArgumentError("the only request of a Share stream is attach: calls go over the connection")


async def _attach(server: ParameterServer, data: bytes) -> tuple[_Stream, server_pb2.Attached]:
    """Carries out the first request of a stream: the attachment, and the answer."""
    request = frames.parse(server_pb2.ShareRequest, data)
    if request.WhichOneof("kind") != "attach" or request.call_id != 0:
        raise InvalidArgumentError("the first request of a Share stream must be attach, with call_id 0")
    attach = request.attach
    identity = convert.sender_from_proto(attach)
    store = await server.admission.admit(identity)
    # A worker that never pushes has an arena without elements.
    reads_only = attach.dtype == common_pb2.DTYPE_UNSPECIFIED
    dtype, elements = (
        ("float32", 0) if reads_only else (convert.payload_dtype_from_proto(attach.dtype), store.entry.total)
    )
    weights = store.dense.weights.arena
    if weights is None:
        raise SharingUnavailableError(store.dense.weights.arena_error)
    fd, connection = await fd_passing.connect(attach.socket)
    try:
        # In a thread, because mapping a large file takes longer than heartbeats may; once begun it closes ``fd``.
        opening = asyncio.get_running_loop().run_in_executor(None, GradientArena.open, fd, elements, dtype)
        arena = await asyncio.shield(opening)
        fd_passing.give(connection, weights.fd)
    except BaseException:
        connection.close()
        raise
    stream = _Stream(server, _Attachment(identity, store, arena, "" if reads_only else dtype))
    await stream.open(connection)
    return stream, server_pb2.Attached(nonce=arena.nonce, weights_nonce=weights.nonce)


@dataclass(frozen=True, slots=True)
class _Attachment:
    """The worker that attached, and what it shares."""

    identity: Identity
    store: ParameterStore
    arena: GradientArena
    #: Of its elements; "" where it has none.
    dtype: str


@dataclass
class _SharedCall(Call):
    """A call of an attachment: it keeps its answers until all are there."""

    call_id: int = 0
    #: How many slices it named.
    named: int = 0
    answers: list[SliceAnswer] = field(default_factory=list)
    error: PsdistError | None = None
    stream: _Stream | None = None
    timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        pass  # No queue of answers, nor slots for payloads.

    def fail(self, error: PsdistError) -> None:
        self.error = self.error or error
        if self.state is CallState.WAITING:
            self._end()

    def asked_all(self) -> None:
        super().asked_all()
        if self.error is not None and self.state is CallState.WAITING:
            self._end()

    def _add_answer(self, answer: SliceAnswer) -> None:
        self.answers.append(answer)

    def _end(self) -> None:
        self.state = CallState.ENDED
        if self.stream is not None:
            self.stream.call_ended(self)

    def response(self) -> server_pb2.ShareResponse:
        """The message that ends it."""
        if self.error is not None:
            return server_pb2.ShareResponse(call_id=self.call_id, error=status.to_detail(self.error))
        versions = [answer.version for answer in self.answers]
        staleness = [answer.staleness for answer in self.answers]
        answers = server_pb2.SharedAnswers(
            slices=[answer.index for answer in self.answers],
            versions=versions if min(versions) != max(versions) else versions[:1],
            ignored=[answer.index for answer in self.answers if answer.ignored],
            staleness=staleness if any(staleness) else (),
        )
        return server_pb2.ShareResponse(call_id=self.call_id, answers=answers)


class _Stream:
    """One attachment: its socket, and its calls under way."""

    def __init__(self, server: ParameterServer, attachment: _Attachment) -> None:
        self._server = server
        self._attachment = attachment
        #: Done when the socket ended, with the error if one ended it.
        self.over: asyncio.Future[PsdistError | None] = asyncio.get_running_loop().create_future()
        self._socket = FramedSocket(self._on_request, self.over.set_result, waits_for_reader=True)
        self._calls: dict[int, _SharedCall] = {}
        self._last_id = 0
        self._named = 0
        #: The identity that was admitted last; it needs no check again while the map is the same.
        self._admitted = attachment.identity
        #: Admits a call that has to wait for a map or for confirmations; those after it wait too.
        self._admitting: asyncio.Task[None] | None = None

    async def open(self, connection: socket.socket) -> None:
        """Begins to receive calls."""
        await self._socket.open(connection)
        self._attachment.store.shm_readers.add(self)

    @property
    def epoch(self) -> int:
        """The map by which the last call was made: the worker reads no slice that was moved before that map."""
        return self._admitted.epoch

    def _on_request(self, data: bytes) -> None:
        """Handles a request. Raises InvalidArgumentError for one that names no call that could fail with it."""
        request = frames.parse(server_pb2.ShareRequest, data)
        self._server.admission.heard(self._attachment.identity)
        kind = request.WhichOneof("kind")
        if kind == "cancel":
            if (call := self._calls.get(request.call_id)) is not None:
                self._end_call(call)
            return
        if kind != "push" and kind != "pull":
            raise InvalidArgumentError("a request of an attached worker must be push, pull or cancel")
        if request.call_id <= self._last_id:
            raise InvalidArgumentError(f"call_id {request.call_id} does not come after {self._last_id}")
        self._last_id = request.call_id
        is_push = kind == "push"
        wants_weights = not is_push or request.push.wants_weights
        sender = request.push.header.identity if is_push else request.pull.identity
        call = _SharedCall(self._attachment.identity, is_push, wants_weights, call_id=request.call_id, stream=self)
        self._calls[request.call_id] = call
        if self._is_admitted(sender) and not (not is_push and self._needs_confirm(request.pull)):
            self._carry_out(call, request)
        else:
            self._socket.hold()
            self._admitting = asyncio.create_task(self._admit(call, sender, request))

    def _is_admitted(self, sender: server_pb2.Identity) -> bool:
        """Whether ``sender`` is the identity that was admitted last, and the map is still the same."""
        before = self._admitted
        return (
            sender.epoch == before.epoch == self._server.admission.map.epoch
            and sender.incarnation == before.incarnation
            and sender.worker_id == before.worker_id
            and sender.parameters == before.parameters
            and sender.run_id == before.run_id
        )

    def _needs_confirm(self, pull: server_pb2.SharedPull) -> bool:
        return self._attachment.store.replicator.needs_confirm(pull.slices)

    async def _admit(self, call: _SharedCall, sender: server_pb2.Identity, request: server_pb2.ShareRequest) -> None:
        """Carries a call out once its sender is admitted, which may have to wait for a newer map, and once the backups
        have confirmed that its slices may be read."""
        try:
            if not self._is_admitted(sender):
                await self._check_sender(sender)
            if not call.is_push and self._needs_confirm(request.pull):
                await self._attachment.store.replicator.confirm(request.pull.slices)
                self._server.admission.check_live(self._admitted)
        except PsdistError as error:
            self._refuse(call, error)
        except Exception as error:  # Without this the worker would wait for an answer that never comes.
            self._refuse(call, InternalError(f"admitting the call failed: {error!r}"))
        else:
            if call.call_id in self._calls:  # Else it was cancelled meanwhile.
                self._carry_out(call, request)
        finally:
            self._socket.release()

    async def _check_sender(self, sender: server_pb2.Identity) -> None:
        identity, mine = convert.identity_from_proto(sender), self._attachment.identity
        sender_key = (identity.worker_id, identity.incarnation, identity.parameters)
        if sender_key != (mine.worker_id, mine.incarnation, mine.parameters):
            raise InvalidArgumentError("a Share stream is for the worker and the parameters that attached it")
        store = await self._server.admission.admit(identity)
        if store is not self._attachment.store:
            raise UnknownParametersError(f"{identity.parameters!r} are not those that this stream attached to")
        self._admitted = identity

    @staticmethod
    def _refuse(call: _SharedCall, error: PsdistError) -> None:
        call.fail(error)
        call.asked_all()

    def _carry_out(self, call: _SharedCall, request: server_pb2.ShareRequest) -> None:
        call.identify(self._admitted)
        try:
            self._attachment.store.check_installed()
            if call.is_push:
                self._push(call, request.push)
            else:
                self._pull(call, request.pull)
        except PsdistError as error:
            call.fail(error)
        except Exception as error:  # Without this the worker would wait for an answer that never comes.
            call.fail(InternalError(f"taking the call failed: {error!r}"))
        call.asked_all()
        if call.state is not CallState.ENDED:
            self._report_later(call)

    def _push(self, call: _SharedCall, push: server_pb2.SharedPush) -> None:
        store = self._attachment.store
        call.read_header(push.header)
        if call.dtype != self._attachment.dtype:
            held = self._attachment.dtype or "nothing"
            raise InvalidArgumentError(f"the gradient arena holds {held}, not {call.dtype}")
        store.gradients.check_norm(call)
        slices = self._check_slices(call, push.slices)
        bases = _one_for_each(push.base_versions, slices, "base_versions")
        slicing = store.dense.slicing
        counters = store.counters.of(call.identity.worker_id)
        for index, base in zip(slices, bases, strict=True):
            values = self._attachment.arena.part(*slicing.bounds(index))
            counters.push_bytes += 0 if call.abstain else values.nbytes
            store.router.push_shared(call, index, base, values)

    def _pull(self, call: _SharedCall, pull: server_pb2.SharedPull) -> None:
        for index in self._check_slices(call, pull.slices):
            self._attachment.store.router.pull(call, index, pull.min_version)

    def _check_slices(self, call: _SharedCall, slices: Sequence[int]) -> Sequence[int]:
        """The slices of a call, all of which are served here, before any is taken."""
        store, last = self._attachment.store, -1
        if not slices:
            raise InvalidArgumentError("a call must name a slice")
        most = limits.SHARED_ROUNDS_MAX * len(store.dense.indices)
        if self._named + len(slices) > most:
            raise LimitExceededError(
                f"the calls of one worker under way name {self._named + len(slices)} slices, more than {most}: "
                "wait for their answers"
            )
        for index in slices:
            if index <= last:
                raise InvalidArgumentError(f"slice {index} came after slice {last}: name each once, in ascending order")
            store.router.check_slice(index, call.identity.epoch)
            last = index
        call.named = len(slices)
        self._named += call.named
        return slices

    def call_ended(self, call: _SharedCall) -> None:
        """Sends the answers, or the error, of a call that ended."""
        if call.call_id in self._calls:
            self._count_pulled(call)
            self._end_call(call)
            self._socket.send(call.response().SerializeToString())

    def _count_pulled(self, call: _SharedCall) -> None:
        if call.wants_weights and call.error is None:
            slicing = self._attachment.store.dense.slicing
            elements = sum(slicing.size(answer.index) for answer in call.answers)
            counters = self._attachment.store.counters.of(call.identity.worker_id)
            counters.pull_bytes += elements * ITEM_BYTES[call.pull_dtype]

    def _report_later(self, call: _SharedCall) -> None:
        loop = asyncio.get_running_loop()
        call.timer = loop.call_later(limits.WAIT_REASON_SECONDS, self._report, call, len(call.answers))

    def _report(self, call: _SharedCall, answered: int) -> None:
        """Sends the reason why ``call`` waits, unless there was progress, or the worker does not read its answers."""
        call.note_wait("")
        if len(call.answers) == answered:
            reason = call.note_wait(self._server.waiting_for(call) or "for this server to apply the update")
            if not self._socket.is_full:
                report = server_pb2.ShareResponse(call_id=call.call_id, waiting_for=reason)
                self._socket.send(report.SerializeToString())
        self._report_later(call)

    def _end_call(self, call: _SharedCall) -> None:
        """Nothing answers ``call`` any more."""
        del self._calls[call.call_id]
        self._named -= call.named
        if call.timer is not None:
            call.timer.cancel()
        if call.outstanding:
            self._server.cancel_call(call)

    def end(self) -> None:
        """Ends the attachment and its calls."""
        self._attachment.store.shm_readers.remove(self)
        self._socket.close()
        if self._admitting is not None:
            self._admitting.cancel()
        for call in list(self._calls.values()):
            self._end_call(call)


def _one_for_each(values: Sequence[int], slices: Sequence[int], what: str) -> Sequence[int]:
    """``values``, or the only one of them as often as there are slices."""
    if len(values) == 1:
        return [values[0]] * len(slices)
    if len(values) != len(slices):
        raise InvalidArgumentError(f"{len(values)} {what} for {len(slices)} slices: send one for each, or one for all")
    return values
