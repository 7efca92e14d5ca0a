"""TCP connection to one server: calls with payloads in frames (``psdist.link.frame_connection``).

A gradient is sent from its place in memory, slice by slice, as the server releases earlier ones. The connection writes
the lowest slice of all calls first. Weights sent as float32 are received straight into the memory of the call's target.
Each slice is answered separately.

Invariants: A call's memory is neither written nor, for gradients, read after the call. A push that fails while its
gradient may be queued therefore closes the connection.

``negotiated.calls`` implements calls, ``connecting`` knows which servers are connected, and ``delivery`` resends after
a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from psdist.client.core.routing import Route
from psdist.client.session.wait_tracker import Wait
from psdist.client.transport.grpc import messages
from psdist.client.transport.grpc.write_queue import WriteQueue
from psdist.client.transport.negotiated.calls import CallConnection, PendingCall, encode_pull
from psdist.client.transport.requests import PullRequest, PushRequest, Request
from psdist.client.transport.tcp.send_monitor import SendMonitor
from psdist.client.transport.transport import ServerLoss
from psdist.errors import InternalError, PsdistError, ServerUnreachableError
from psdist.types import Slicing
from psdist.v1 import server_pb2
from psdist.wire import convert, limits


class TcpCall(PendingCall):
    """Push or pull of ``slices`` in progress."""

    def __init__(self, wait: Wait, request: PushRequest | PullRequest, slices: Sequence[int]) -> None:
        super().__init__(wait)
        self.request = request
        #: Unanswered slices.
        self.left = set(slices)
        self._sent = 0
        self._taken = 0
        self._window = asyncio.Event()

    async def may_send(self, monitor: SendMonitor) -> None:
        """Wait until the server accepts one more payload, or the call has ended."""
        if self._is_window_full:
            monitor.hold()
            while self._is_window_full:
                self._window.clear()
                await self._window.wait()
            monitor.resume()
        self._sent += 1

    @property
    def _is_window_full(self) -> bool:
        return self._sent - self._taken >= limits.TCP_WINDOW_SLICES and not self.has_ended

    def on_taken(self, count: int) -> None:
        """Record that the server has released ``count`` payloads."""
        self._taken = count
        self._window.set()

    def end(self, result: server_pb2.ShareResponse | PsdistError) -> None:
        super().end(result)
        self._window.set()

    def memory_for(self, result: server_pb2.SliceResult, size: int, peer: str) -> NDArray[Any] | None:
        """Return a buffer for the weights of a slice, or None if the answer has no weights. Raises InternalError for a
        slice that was not requested, and for the wrong size."""
        index = result.slice
        if index not in self.left or index not in self.request.progress.pending:
            raise InternalError(f"{peer} answered slice {index}, which was not requested or was answered before")
        if self.request.target is not None:
            return self.request.target.memory_for(result, size, peer)
        if size:
            raise InternalError(f"{peer} sent {size} bytes of weights for slice {index}, which were not requested")
        return None

    def on_slice(self, result: server_pb2.SliceResult, values: NDArray[Any] | None, peer: str) -> None:
        """Record the answer of a slice. values: its weights, in the buffer of ``memory_for``."""
        if values is not None and self.request.target is not None:
            self.request.target.accept(result, values, peer)
            self.request.traffic.received += values.nbytes
        self.left.discard(result.slice)
        self.request.progress.answer(result.slice, result.version, result.staleness, result.ignored)
        self.wait.progress()


class TcpStream(CallConnection[TcpCall]):
    """Connection to one server. Usable once ``dial`` returns."""

    def __init__(self, call: Any, route: Route, slicing: Slicing, loss: ServerLoss) -> None:
        super().__init__(call, route, slicing, loss, has_payloads=True)
        self._writes = WriteQueue()
        #: Slice being received: its call, and the buffer of its payload.
        self._receiving: TcpCall | None = None
        self._values: NDArray[Any] | None = None

    # --- calls --------------------------------------------------------------------------------------------------------

    async def exchange(self, request: Request, route: Route, wait: Wait) -> None:
        """Make one call for the unanswered slices of ``route``. See ``Transport.exchange``."""
        assert isinstance(request, PushRequest | PullRequest), "initial values are sent over gRPC"
        slices = request.progress.unanswered(route.slices)
        call = TcpCall(wait, request, slices)
        if isinstance(request, PullRequest):
            encoded = encode_pull(request, route, request.progress.number, slices)
            encoded.pull.dtype = convert.dtype_to_proto(request.target.dtype)
            messages.name_held(encoded.pull.held, request.target, route, slices)
        else:
            encoded = self.encode_push(request, route, slices)
            messages.name_held(encoded.push.header.held, request.target, route, slices)
        monitor = SendMonitor(self.connection, wait)
        try:
            with self.sent(encoded, call):
                if isinstance(request, PushRequest) and not request.abstains:
                    await self._send_payloads(request, call, slices, monitor)
                    monitor.finish()
                await call.result()
        finally:
            monitor.stop()
            self._let_go(call)

    async def _send_payloads(
        self, push: PushRequest, call: TcpCall, slices: Sequence[int], monitor: SendMonitor
    ) -> None:
        """Send the gradient, unless the call ends first."""
        header = server_pb2.ShareRequest(call_id=call.call_id, slice=server_pb2.SliceHeader())
        for index in slices:
            await push.ready(index)
            await call.may_send(monitor)
            turn = await self._writes.acquire(index)
            try:
                await self.connection.drain()
                if call.has_ended:
                    return
                header.slice.slice = index
                self.connection.send(header.SerializeToString(), push.lasting_payload(index))
            finally:
                self._writes.release(turn)

    def _let_go(self, call: TcpCall) -> None:
        """Stop using the memory of a call that is over: it belongs to the user again."""
        if self._receiving is call:
            self._receiving, self._values = None, None
            self.connection.discard_payload()
        if call.left and isinstance(call.request, PushRequest) and self.connection.is_sending:
            self.break_off(ServerUnreachableError(f"a push to {self.peer} ended while its gradient was sent"))

    # --- connection callbacks -----------------------------------------------------------------------------------------

    def send(self, request: server_pb2.ShareRequest) -> None:
        self.connection.send_soon(request.SerializeToString())  # A push is sent with its first slice.

    def payload_buffer(self, response: server_pb2.ShareResponse, size: int) -> memoryview:
        self._receiving, self._values = None, None
        if response.WhichOneof("kind") != "slice":
            return super().payload_buffer(response, size)
        self._receiving = self.calls.get(response.call_id)
        if self._receiving is None:  # It was cancelled.
            return memoryview(bytearray(size))
        self._values = self._receiving.memory_for(response.slice, size, self.peer)
        return self._values.view("u1").data if self._values is not None else memoryview(b"")

    def on_response(self, response: server_pb2.ShareResponse) -> None:
        call, values = self._receiving, self._values
        self._receiving, self._values = None, None
        match response.WhichOneof("kind"):
            case "slice":
                if call is not None and response.call_id in self.calls:
                    call.on_slice(response.slice, values, self.peer)
                    if not call.left:
                        self.end_call(call, response)
            case "taken":
                if (pushing := self.calls.get(response.call_id)) is not None:
                    pushing.on_taken(response.taken)
            case _:
                super().on_response(response)
