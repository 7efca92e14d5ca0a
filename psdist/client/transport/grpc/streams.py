"""``GrpcTransport``: one stream per attempt. It is open to every server.

All handles of a client share it, so that concurrent calls to one server write in the order of their slices.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import grpc
import grpc.aio

from psdist.client.core.routing import Route
from psdist.client.session.wait_tracker import Wait
from psdist.client.transport.grpc import messages
from psdist.client.transport.grpc.send_progress import SendProgress
from psdist.client.transport.grpc.write_queue import WriteQueue
from psdist.client.transport.requests import Request
from psdist.client.transport.transport import ServerLoss, Transport, attempt_error
from psdist.errors import ClosedError, ServerUnreachableError, copy_error
from psdist.security import handshake, roles
from psdist.security.tls import Credentials
from psdist.security.tokens import Audience
from psdist.wire import auth, channels, limits, status

#: Text of grpc.aio, instead of the server's status, for a write after the server ended the stream (grpc issue 36066).
#: The next attempt receives that status, or succeeds.
_WRITE_FAILED: Final = "Internal error from Core"
#: Status codes of calls that the server did not answer.
_NO_ANSWER: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)
_SERVICE: Final = "/psdist.v1.ServerService/"


class GrpcTransport(Transport):
    """Channels to servers. credentials: of every call. silence_seconds: see ``channels.open_channel``."""

    name = "grpc"

    def __init__(
        self, credentials: Credentials, silence_seconds: Callable[[], float] = lambda: limits.KEEPALIVE_SECONDS
    ) -> None:
        self.credentials = credentials
        self._metadata = auth.metadata(credentials.token, Audience.SERVER)
        self._silence_seconds = silence_seconds
        self._methods: dict[tuple[str, str], Any] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._write_queues: defaultdict[str, WriteQueue] = defaultdict(WriteQueue)

    def open_stream(self, address: str, method: str) -> Any:
        """Start a call of a method of ServerService, with raw bytes in both directions."""
        known = self._methods.get((address, method))
        if known is None:
            known = self._methods[address, method] = self._channel(address).stream_stream(_SERVICE + method)
        return known(metadata=self._metadata)

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = channels.open_channel(
                address, self.credentials, silence_seconds=self._silence_seconds()
            )
        return channel

    async def call_server(self, address: str) -> None:
        """Make a short call, which every role may make, to check that the server answers at all.

        Raises ServerUnreachableError, TlsHandshakeError if certificates are the cause.
        """
        call = self._channel(address).unary_unary(roles.HEALTH_CHECK)
        try:
            await call(b"", metadata=self._metadata, timeout=self._silence_seconds())
        except grpc.aio.AioRpcError as failure:
            if failure.code() in _NO_ANSWER:
                await handshake.raise_cause(address, self.credentials)
                error = status.from_call(failure, f"the server at {address}")
                raise ServerUnreachableError(error.message) from None

    async def exchange(self, request: Request, route: Route, wait: Wait, loss: ServerLoss) -> None:
        """Run one stream to its end. See ``Transport.exchange``."""
        call = self.open_stream(route.address, messages.method_of(request))
        progress = SendProgress(wait)
        send = asyncio.create_task(_send(call, request, route, self._write_queues[route.address], progress))
        receive = asyncio.create_task(_receive(call, request, route, wait, progress))
        try:
            await _until_received(receive, send, loss)
        except grpc.aio.AioRpcError as failure:
            if failure.code() is grpc.StatusCode.INTERNAL and failure.details() == _WRITE_FAILED:
                raise ServerUnreachableError(f"{route.peer} ended the stream while it was written to") from None
            raise attempt_error(status.from_call(failure, route.peer)) from None
        finally:
            call.cancel()
            send.cancel()
            receive.cancel()
            await asyncio.gather(send, receive, return_exceptions=True)
        if request.progress.unanswered(route.slices):
            raise ServerUnreachableError(f"{route.peer} ended the stream before all slices were answered")

    async def close(self) -> None:
        """Close all channels."""
        opened = list(self._channels.values())
        self._channels.clear()
        self._methods.clear()
        for channel in opened:
            await channel.close()


async def _send(call: Any, request: Request, route: Route, queue: WriteQueue, progress: SendProgress) -> None:
    """Write all messages. If the stream breaks, its reader reports that."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for index, pack in messages.encode(request, route):
            await request.ready(index)
            message = pack()
            turn = await queue.acquire(index)
            try:
                await call.write(message)
            finally:
                queue.release(turn)
            progress.wrote(len(message))
        progress.finish()
        await call.done_writing()


async def _receive(call: Any, request: Request, route: Route, wait: Wait, progress: SendProgress) -> None:
    """Process answers until the stream ends."""
    async for data in call:
        news = messages.on_answer(request, route, data)
        if news.waiting_for:
            wait.update_reason(news.waiting_for)
        elif news.reading:
            progress.on_reading(news.reading)
        else:
            wait.progress()


async def _until_received(receive: asyncio.Task[None], send: asyncio.Task[None], loss: ServerLoss) -> None:
    """Wait until ``receive`` completes. Raises its error, an error of ``send``, or the loss."""
    waiting: set[asyncio.Future[Any]] = {receive, send, loss}
    while not receive.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if loss in done and not receive.done():
            raise copy_error(loss.result())
        if send in done and not send.cancelled():
            send.result()
    if receive.cancelled():  # The channel was closed.
        raise ClosedError("the client was closed before the call was answered")
    receive.result()
