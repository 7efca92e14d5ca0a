"""Calls of one worker on a dedicated connection: common part of the shared-memory and TCP services.

A gRPC stream authenticates the connection. The worker then sends calls on it: pushes, pulls and cancellations. All
slices of a call are validated before any is accepted. While a call waits, the worker is sent the reason. The two
services carry the payloads (``worker_streams``).

Invariants: Calls are processed in order of arrival. A call with an invalid sender, header or list of slices is refused
before any slice is accepted; after that, each slice is accepted or refused by its shard. Limits on named slices bound
the memory that one connection can use. Calls end with the connection, but their contributions stay.

``parameter_store`` applies pushes, and ``service`` owns the streams.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from psdist.errors import (
    InvalidArgumentError,
    LimitExceededError,
    PsdistError,
    UnknownParametersError,
)
from psdist.link.frame_connection import FrameConnection, MessageReceiver
from psdist.types import Identity
from psdist.v1 import server_pb2
from psdist.wire import convert, limits, status
from psdist.wire.services import as_psdist_error
from psdist_server.server import ParameterServer
from psdist_server.store.parameter_store import ParameterStore
from psdist_server.store.rpc_call import Call, CallState, SliceAnswer, one_for_each

logger = logging.getLogger("psdist.server")


@dataclass
class StreamCall(Call):
    """Call of a connection."""

    call_id: int = 0
    stream: CallStream = field(kw_only=True)
    #: Number of slices that it named.
    named: int = 0
    answers: list[SliceAnswer] = field(default_factory=list)
    error: PsdistError | None = None
    #: Slices whose payloads arrive in later frames, and the versions that their gradients are based on.
    expected: deque[tuple[int, int]] = field(default_factory=deque)
    #: Number of released payloads, and how many of them the worker was notified of.
    released: int = 0
    acknowledged: int = 0
    timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        pass  # No queue of answers, nor slots for payloads.

    def fail(self, error: PsdistError) -> None:
        self.error = self.error or error
        if self.state is CallState.WAITING or self.expected:
            self._end()

    def asked_all(self) -> None:
        super().asked_all()
        if self.error is not None and self.state is CallState.WAITING:
            self._end()

    def release_payload(self) -> None:
        self.released += 1
        self.stream.payload_released(self)

    def _add_answer(self, answer: SliceAnswer) -> None:
        self.answers.append(answer)
        self.stream.slice_answered(self, answer)

    def _end(self) -> None:
        self.state = CallState.ENDED
        self.expected.clear()
        self.stream.call_ended(self)


class CallStream(MessageReceiver[server_pb2.ShareRequest]):
    """Unfinished calls of one worker on one connection.

    identity: identity of the worker when the stream was admitted.
    """

    message_type = server_pb2.ShareRequest

    def __init__(self, server: ParameterServer, identity: Identity, store: ParameterStore) -> None:
        self.store = store
        #: Without effect until ``connected`` replaces it.
        self.connection = FrameConnection(self)
        self.is_connected = False
        #: Done when the connection has ended. Result: the error that ended it, or None.
        self.over: asyncio.Future[PsdistError | None] = asyncio.get_running_loop().create_future()
        #: Calls that are not answered yet, or whose answer is not sent.
        self.calls: dict[int, StreamCall] = {}
        self._server = server
        self._identity = identity
        self._last_id = 0
        self._named = 0
        #: Identity admitted last. It needs no check while the map is the same.
        self.admitted = identity
        #: Admission of a call that waits for a map or for confirmations. Later calls wait, too.
        self._admitting: asyncio.Task[None] | None = None

    def fenced(self) -> None:
        """Stop sending: the worker is fenced."""

    # --- connection ---------------------------------------------------------------------------------------------------

    def connected(self, connection: FrameConnection) -> None:
        """Take over the connection. Frames arrive from now on."""
        self.connection, self.is_connected = connection, True
        self.store.readers.add(self)

    def send(self, response: server_pb2.ShareResponse) -> None:
        """Send a message."""
        self.connection.send(response.SerializeToString())

    def connection_ended(self, error: PsdistError | None) -> None:
        """See ``FrameReceiver``."""
        if not self.over.done():
            self.over.set_result(error)

    # --- payloads -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def push(self, call: StreamCall, push: server_pb2.SharedPush, bases: Sequence[int]) -> None:
        """Accept a push whose header and slices are valid, or expect its payloads. bases: base version of each
        slice."""

    def slice_answered(self, call: StreamCall, answer: SliceAnswer) -> None:
        """Handle the answer of one slice."""

    @abstractmethod
    def call_ended(self, call: StreamCall) -> None:
        """Report the result of a call to its worker, then call ``end_call``. All slices are answered, or the call
        failed."""

    def payload_released(self, call: StreamCall) -> None:
        """Handle the release of a push's payload."""

    # --- calls --------------------------------------------------------------------------------------------------------

    def on_message(self, request: server_pb2.ShareRequest) -> None:
        """Process a request. Raises InvalidArgumentError if the request names no call that could fail instead, and
        LimitExceededError for too many calls."""
        sender = self._identity
        self._server.admission.heard[sender.worker_id, sender.incarnation] = asyncio.get_running_loop().time()
        kind = request.WhichOneof("kind")
        if kind == "cancel":
            if (call := self.calls.get(request.call_id)) is not None:
                self.end_call(call)
            return
        if kind != "push" and kind != "pull":
            raise InvalidArgumentError("a request of an attached worker must be push, pull or cancel")
        if request.call_id <= self._last_id:
            raise InvalidArgumentError(f"call_id {request.call_id} does not come after {self._last_id}")
        if len(self.calls) >= limits.STREAM_CALLS_MAX:
            raise LimitExceededError(f"{len(self.calls)} calls of one worker are unfinished: read their answers")
        self._last_id = request.call_id
        is_push = kind == "push"
        wants_weights = not is_push or request.push.wants_weights
        claimed = request.push.header.identity if is_push else request.pull.identity
        call = StreamCall(self._identity, is_push, wants_weights, call_id=request.call_id, stream=self)
        self.calls[request.call_id] = call
        if self._is_admitted(claimed) and not (not is_push and self._needs_confirm(request.pull)):
            self._carry_out(call, request)
        else:
            self.connection.hold()
            self._admitting = asyncio.create_task(self._admit(call, claimed, request))

    def _is_admitted(self, sender: server_pb2.Identity) -> bool:
        """True if ``sender`` is the identity that was admitted last and the map has not changed."""
        before = self.admitted
        return (
            sender.epoch == before.epoch == self._server.admission.map.epoch
            and sender.incarnation == before.incarnation
            and sender.worker_id == before.worker_id
            and sender.parameters == before.parameters
            and sender.run_id == before.run_id
        )

    def _needs_confirm(self, pull: server_pb2.SharedPull) -> bool:
        return self.store.replicator.needs_confirm(pull.slices)

    async def _admit(self, call: StreamCall, sender: server_pb2.Identity, request: server_pb2.ShareRequest) -> None:
        """Execute a call once its sender is admitted, which may require a newer map, and the backups have confirmed
        that its slices may be read."""
        try:
            if not self._is_admitted(sender):
                await self._check_sender(sender)
            if not call.is_push and self._needs_confirm(request.pull):
                await self.store.replicator.confirm(request.pull.slices)
                self._server.admission.check_live(self.admitted)
        except Exception as error:  # Without this the worker would wait for an answer that never comes.
            self._refuse(call, as_psdist_error(error, "admitting a call", logger))
        else:
            if call.call_id in self.calls:  # Otherwise it was cancelled.
                self._carry_out(call, request)
        finally:
            self.connection.release()

    async def _check_sender(self, sender: server_pb2.Identity) -> None:
        identity, mine = convert.identity_from_proto(sender), self._identity
        sender_key = (identity.worker_id, identity.incarnation, identity.parameters)
        if sender_key != (mine.worker_id, mine.incarnation, mine.parameters):
            raise InvalidArgumentError("a stream is for the worker and the parameters that opened it")
        store = await self._server.admission.admit(identity)
        if store is not self.store:
            raise UnknownParametersError(f"this stream was not opened for these {identity.parameters!r}")
        self.admitted = identity

    @staticmethod
    def _refuse(call: StreamCall, error: PsdistError) -> None:
        call.fail(error)
        call.asked_all()

    def _carry_out(self, call: StreamCall, request: server_pb2.ShareRequest) -> None:
        call.identity = self.admitted
        try:
            self.store.check_installed()
            if call.is_push:
                push = request.push
                call.read_header(push.header)
                call.wanted.read_held(push.header.held, self.store.entry.generation)
                self.store.gradients.begin_push(call)
                self._check_slices(call, push.slices)
                self.push(call, push, one_for_each(push.base_versions, push.slices, "base_versions"))
            else:
                self._pull(call, request.pull)
        except Exception as error:  # Without this the worker would wait for an answer that never comes.
            call.fail(as_psdist_error(error, "executing a call", logger))
        if not call.expected:
            call.asked_all()
        if call.state is not CallState.ENDED:
            self._report_later(call)

    def _pull(self, call: StreamCall, pull: server_pb2.SharedPull) -> None:
        self.read_pull(call, pull)
        self._check_slices(call, pull.slices)
        for index in pull.slices:
            self.store.router.pull(call, index, pull.min_version)

    def read_pull(self, call: StreamCall, pull: server_pb2.SharedPull) -> None:
        """Read fields of a pull that depend on the service. Raises InvalidArgumentError for an unknown dtype."""

    def _check_slices(self, call: StreamCall, slices: Sequence[int]) -> None:
        """Raise an error unless this server has all slices of a call, they ascend, and they are not too many."""
        last = -1
        if not slices:
            raise InvalidArgumentError("a call must name a slice")
        # Counted over the whole set, because a shard that moves away leaves calls behind that name its slices.
        most = limits.SHARED_ROUNDS_MAX * self.store.dense.slicing.count
        if self._named + len(slices) > most:
            raise LimitExceededError(
                f"the unfinished calls of one worker name {self._named + len(slices)} slices, more than {most}: "
                "wait for their answers"
            )
        for index in slices:
            if index <= last:
                raise InvalidArgumentError(f"slice {index} came after slice {last}: name each once, in ascending order")
            self.store.router.check_slice(index, call.identity.epoch)
            last = index
        call.named = len(slices)
        self._named += call.named

    def _report_later(self, call: StreamCall) -> None:
        loop = asyncio.get_running_loop()
        call.timer = loop.call_later(limits.WAIT_REASON_SECONDS, self._report, call, len(call.answers))

    def _report(self, call: StreamCall, answered: int) -> None:
        """Send the reason why ``call`` waits, unless it made progress or the worker does not read its answers."""
        call.note_wait("")
        if len(call.answers) == answered and call.state is not CallState.ENDED:
            reason = call.note_wait(self._server.waiting_for(call) or _own_wait(call))
            if not self.connection.is_full:
                self.send(server_pb2.ShareResponse(call_id=call.call_id, waiting_for=reason))
        self._report_later(call)

    def end_call(self, call: StreamCall) -> None:
        """Remove ``call``: nothing answers it any more."""
        del self.calls[call.call_id]
        self._named -= call.named
        call.state = CallState.ENDED
        call.expected.clear()
        if call.timer is not None:
            call.timer.cancel()
        if call.outstanding:
            self._server.cancel_call(call)

    def end(self) -> None:
        """Close the connection and end its calls."""
        self.connection.abort()
        if self.is_connected:
            self.store.readers.remove(self)
        if self._admitting is not None:
            self._admitting.cancel()
        for call in list(self.calls.values()):
            self.end_call(call)


async def until_over(stream: CallStream, requests: AsyncIterator[bytes]) -> None:
    """Wait until the worker ends the gRPC stream or the connection. Raises the error of an invalid message on
    either."""
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
        raise InvalidArgumentError("the stream carries only the first request: send calls over the connection")


def error_response(call: StreamCall) -> server_pb2.ShareResponse:
    """Return the message that ends a failed call."""
    assert call.error is not None
    return server_pb2.ShareResponse(call_id=call.call_id, error=status.to_detail(call.error))


def _own_wait(call: StreamCall) -> str:
    return "for the rest of the request" if call.expected else "for this server to apply the update"
