"""TCP transport: a connection from one handle to each server that it needs.

A Connect stream returns the port, and stays open as long as the connection. The host is that of the server's address. A
firewall may block the port; then gRPC is used. If gRPC is encrypted, so is the connection. Calls have their payloads in
frames (``psdist.link.frame_connection``).

A gradient is sent from its place in memory, slice by slice, as the server releases earlier ones. The connection writes
the lowest slice of all calls first. Weights sent as float32 are received straight into the memory of the call's target.
Each slice is answered separately.

Invariants: A call's memory is neither written nor, for gradients, read after the call. A push that fails while its
gradient may be queued therefore closes the connection.

``negotiation`` implements calls and decides which servers are asked, and ``delivery`` resends after a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from numpy.typing import NDArray

from psdist.addresses import parse_address
from psdist.client.core.routing import Route
from psdist.client.session.waits import Wait
from psdist.client.transport.negotiation import CallConnection, NegotiatedTransport, PendingCall, ask, encode_pull
from psdist.client.transport.transport import PullRequest, PushRequest, Request, ServerLoss, WriteQueue, write_held
from psdist.errors import InternalError, PsdistError, ServerUnreachableError, TcpUnavailableError
from psdist.link.frame_connection import FrameConnection, unacknowledged_bytes
from psdist.types import Slicing
from psdist.v1 import server_pb2
from psdist.wire import convert, limits

#: First and longest interval between two polls.
_POLL_SECONDS: Final = 0.001
_LONGEST_POLL_SECONDS: Final = 0.02


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
        return self._sent - self._taken >= limits.TCP_WINDOW_SLICES and not self.ended.done()

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


class SendMonitor:
    """Tells sending from waiting within a push, and reports the progress to its wait. ``stop`` ends it.

    A worker stops at the window of the server until that releases earlier slices, for which it needs the other workers'
    gradients. If this counted as sending, all workers of a run with one slow link would seem to send slowly. So a push
    is *sending* while its connection holds bytes that the server's kernel has not acknowledged. At the window it is
    *held up* as soon as they are acknowledged. The same holds for the last slices, which are sent once they are
    acknowledged.

    The kernel reports no acknowledgement, so the number of bytes is polled: early at first, so that the time by which
    this is late is no longer than the sending was.
    """

    def __init__(self, connection: FrameConnection, wait: Wait) -> None:
        self._connection = connection
        self._wait = wait
        self._timer: asyncio.TimerHandle | None = None

    def hold(self) -> None:
        """Report that the push is held up, once its bytes so far are delivered."""
        self._poll(self._wait.held_up, _POLL_SECONDS)

    def resume(self) -> None:
        """Report that the push may send again."""
        self.stop()
        self._wait.resumed()

    def finish(self) -> None:
        """Report that the push is sent, once its bytes are delivered."""
        self._poll(self._wait.sent, _POLL_SECONDS)

    def stop(self) -> None:
        """Report nothing more, unless asked to again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _poll(self, delivered: Callable[[], None], seconds: float) -> None:
        if unacknowledged_bytes(self._connection) <= limits.DELIVERED_BYTES:
            self._timer = None
            delivered()
            return
        following = min(2 * seconds, _LONGEST_POLL_SECONDS)
        self._timer = asyncio.get_running_loop().call_later(seconds, self._poll, delivered, following)


class TcpConnection(CallConnection[TcpCall]):
    """Connection to one server. Usable once ``dial`` returns."""

    def __init__(self, call: Any, route: Route, slicing: Slicing, loss: ServerLoss) -> None:
        super().__init__(call, route, slicing, loss, has_payloads=True)
        self._writes = WriteQueue()
        #: Slice being received: its call, and the buffer of its payload.
        self._receiving: TcpCall | None = None
        self._values: NDArray[Any] | None = None

    # --- calls --------------------------------------------------------------------------------------------------------

    async def exchange(self, request: Request, route: Route, wait: Wait, loss: ServerLoss) -> None:
        assert isinstance(request, PushRequest | PullRequest), "initial values are sent over gRPC"
        slices = request.progress.unanswered(route.slices)
        call = TcpCall(wait, request, slices)
        if isinstance(request, PullRequest):
            encoded = encode_pull(request, route, request.progress.number, slices)
            encoded.pull.dtype = convert.dtype_to_proto(request.target.dtype)
            write_held(encoded.pull.held, request, route, slices)
        else:
            encoded = self.encode_push(request, route, slices)
            write_held(encoded.push.header.held, request, route, slices)
        monitor = SendMonitor(self.connection, wait)
        self.start(encoded, call)
        try:
            if isinstance(request, PushRequest) and not request.abstains:
                await self._send_payloads(request, call, slices, monitor)
                monitor.finish()
            await call.result()
        finally:
            self.finish(call)
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
                if call.ended.done():
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

    def on_message(self, response: server_pb2.ShareResponse) -> None:
        call, values = self._receiving, self._values
        self._receiving, self._values = None, None
        match response.WhichOneof("kind"):
            case "slice":
                if call is not None and response.call_id in self.calls:
                    call.on_slice(response.slice, values, self.peer)
                    if not call.left:
                        self.calls.pop(call.call_id).end(response)
            case "taken":
                if (pushing := self.calls.get(response.call_id)) is not None:
                    pushing.on_taken(response.taken)
            case _:
                super().on_message(response)


class TcpTransport(NegotiatedTransport[TcpConnection]):
    """TCP connections of one handle. Arguments as for ``NegotiatedTransport``."""

    name = "tcp"
    method = "Connect"
    unavailable = TcpUnavailableError
    #: A minute of training over gRPC is little; a port that a firewall drops costs each attempt a few packets.
    retry_seconds = 60.0

    async def _connect(self, call: Any, epoch: int, route: Route) -> TcpConnection:
        request = server_pb2.ConnectRequest(identity=self._sender.identity(epoch))
        data = await ask(call, request.SerializeToString(), route.peer, "TCP connections", self.unavailable)
        answer = server_pb2.ConnectResponse.FromString(data)
        loss = self._view.loss_of(route.server_id, route.incarnation)
        connection = TcpConnection(call, route, self._entry.slicing, loss)
        host = parse_address(route.address)[0]
        tls, dialers = self._grpc.credentials.tls, "workers connect to any port of servers"
        await connection.dial(host, answer.port, answer.nonce, tls=tls, dialers=dialers)
        return connection
