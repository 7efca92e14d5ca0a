"""Calls to one server on a dedicated connection: common part of the shared-memory and TCP transports.

Several calls may use a connection concurrently. They have ascending numbers. Each ends once, with its answers or with
an error.

Invariants: When the link ends, all calls end immediately. A call that nobody waits for any more is cancelled at the
server.

``psdist.link.dialing`` is the connection and its gRPC stream, ``shm`` and ``tcp`` carry the payloads, and
``connections`` decides which servers to connect to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import grpc.aio

from psdist.client.core.routing import Route
from psdist.client.session.wait_tracker import Wait
from psdist.client.transport.grpc import messages
from psdist.client.transport.requests import PushRequest, Request
from psdist.client.transport.transport import ServerLoss, attempt_error
from psdist.errors import InternalError, PsdistError, ServerUnreachableError, copy_error
from psdist.link.dialing import Link
from psdist.types import Slicing
from psdist.v1 import server_pb2
from psdist.wire import status


class PendingCall:
    """Unfinished call."""

    def __init__(self, wait: Wait) -> None:
        self.wait = wait
        self.call_id = 0
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._result: server_pb2.ShareResponse | PsdistError | None = None

    @property
    def has_ended(self) -> bool:
        """True if there is a result, or nobody waits for it any more."""
        return self._ended.done()

    def end(self, result: server_pb2.ShareResponse | PsdistError) -> None:
        """End the call, unless it has ended."""
        if not self._ended.done():
            self._result = result
            self._ended.set_result(None)

    async def result(self) -> server_pb2.ShareResponse:
        """Wait for the message that ends the call. Raises the error that ended it."""
        await self._ended
        # An error's traceback refers to frames that refer to this object. Break the cycle, which would keep the call's
        # memory.
        result, self._result = self._result, None
        assert result is not None
        if isinstance(result, PsdistError):
            try:
                raise result
            finally:
                del result
        return result


CallT = TypeVar("CallT", bound=PendingCall)


class CallConnection(Link[server_pb2.ShareResponse], Generic[CallT]):
    """Connection to the server of ``route``.

    call: the gRPC stream that authenticated it.
    loss: ends it.
    has_payloads: see ``FrameConnection``.
    """

    message_type = server_pb2.ShareResponse

    def __init__(self, call: Any, route: Route, slicing: Slicing, loss: ServerLoss, *, has_payloads: bool) -> None:
        super().__init__(call, route.peer, has_payloads=has_payloads)
        self.incarnation = route.incarnation
        #: Unfinished calls, by number.
        self.calls: dict[int, CallT] = {}
        self.slicing = slicing
        self._loss = loss
        self._last_id = 0
        #: Latest push: whether it asked for weights, its epoch and slices, and its request. The next push usually
        #: differs only in numbers and reuses the message.
        self._pushed: tuple[tuple[bool, int, tuple[int, ...]], server_pb2.ShareRequest] | None = None
        loss.add_done_callback(self._on_loss)

    @property
    def is_open(self) -> bool:
        """True if calls can be made."""
        return self.broken is None

    def send(self, request: server_pb2.ShareRequest) -> None:
        """Send a message. Does nothing after the end."""
        self.connection.send(request.SerializeToString())

    # --- calls --------------------------------------------------------------------------------------------------------

    @contextmanager
    def sent(self, request: server_pb2.ShareRequest, call: CallT) -> Iterator[None]:
        """Send a request as a call, and cancel it if it has not ended by the end of the block. Raises the reason if the
        connection has ended."""
        if self.broken is not None:
            raise copy_error(self.broken)
        self._last_id += 1
        request.call_id = call.call_id = self._last_id
        self.calls[call.call_id] = call
        try:
            self.send(request)
            yield
        finally:
            if self.calls.pop(call.call_id, None) is not None:  # Nobody waits for it any more.
                self.send(server_pb2.ShareRequest(call_id=call.call_id, cancel=server_pb2.SharedCancel()))

    def encode_push(self, push: PushRequest, route: Route, slices: tuple[int, ...]) -> server_pb2.ShareRequest:
        """Return the request of a push, without payloads."""
        wants_weights = push.target is not None
        kind = (wants_weights, route.epoch, slices)
        if self._pushed is None or self._pushed[0] != kind:
            header = messages.push_header(push, route)
            shared = server_pb2.SharedPush(header=header, wants_weights=wants_weights, slices=slices)
            self._pushed = kind, server_pb2.ShareRequest(push=shared)
        request = self._pushed[1]
        messages.number_push(request.push.header, push, slices)
        bases = [push.versions[index] for index in slices]
        request.push.base_versions[:] = bases if min(bases) != max(bases) else bases[:1]
        return request

    def on_response(self, response: server_pb2.ShareResponse) -> None:
        """Process a message: progress of a call, or its end."""
        call = self.calls.get(response.call_id)
        if call is None:  # It was cancelled.
            return
        match response.WhichOneof("kind"):
            case "waiting_for":
                call.wait.update_reason(response.waiting_for)
            case "answers":
                self.end_call(call, response)
            case "error":
                self.end_call(call, attempt_error(status.from_detail(response.error)))
            case kind:
                self.end_call(call, InternalError(f"{self.peer} answered a call with {kind}"))

    def end_call(self, call: CallT, result: server_pb2.ShareResponse | PsdistError) -> None:
        """End a call that the server has answered."""
        del self.calls[call.call_id]
        call.end(result)

    # --- closing ------------------------------------------------------------------------------------------------------

    def error_of(self, failure: grpc.aio.AioRpcError) -> PsdistError:
        return attempt_error(super().error_of(failure))

    def _on_loss(self, loss: ServerLoss) -> None:
        self.break_off(loss.result())

    def break_off(self, error: PsdistError) -> None:
        """Close the connection and end the unfinished calls with ``error``."""
        super().break_off(error)
        self._loss.remove_done_callback(self._on_loss)
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.end(copy_error(error))


def encode_pull(request: Request, route: Route, version: int, slices: Sequence[int]) -> server_pb2.ShareRequest:
    """Return the request for ``slices`` in ``version`` or newer."""
    identity = request.sender.identity(route.epoch)
    return server_pb2.ShareRequest(pull=server_pb2.SharedPull(identity=identity, min_version=version, slices=slices))


async def ask(call: Any, request: bytes, peer: str, what: str, unavailable: type[PsdistError]) -> bytes:
    """Send the first request of a new stream and return the server's answer.

    what: feature that the request needs, for messages.
    Raises ``unavailable`` if the server lacks the feature, or the server's refusal.
    """
    try:
        await call.write(request)
        data = await call.read()
    except grpc.aio.AioRpcError as failure:
        if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise unavailable(f"{peer} runs a version without {what}") from None
        raise status.from_call(failure, peer) from None
    except asyncio.InvalidStateError:
        raise ServerUnreachableError(f"{peer} ended the stream while it was written to") from None
    if data is grpc.aio.EOF:
        raise ServerUnreachableError(f"{peer} ended the stream before it answered")
    answer: bytes = data
    return answer
