"""gRPC transport: one stream per attempt, with one message per payload. It is open to every server.

All handles of a client share it, so that concurrent calls to one server write in the order of their slices
(``WriteQueue``). On the wire a stream of one message equals a unary request, so all methods are streams here.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import grpc
import grpc.aio

from psdist.client.core.routing import Route
from psdist.client.session.waits import Wait
from psdist.client.transport.transport import (
    Connection,
    InstallRequest,
    PullRequest,
    PushRequest,
    Request,
    ServerLoss,
    Transport,
    WriteQueue,
    attempt_error,
    write_held,
)
from psdist.errors import ClosedError, InternalError, ServerUnreachableError, copy_error
from psdist.security import roles, tls
from psdist.security.tls import Credentials
from psdist.security.tokens import Audience
from psdist.v1 import server_pb2 as pb
from psdist.wire import auth, channels, convert, frames, limits, status

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


class SendProgress:
    """Tells sending from waiting within a push, and reports the progress to its wait.

    A server reads no further slices of a worker until earlier ones are updated, for which it needs the other workers'
    gradients. If this counted as sending, all workers of a run with one slow link would seem to send slowly. The worker
    cannot see it: a full stream looks like a slow link, and the last bytes of a push are in buffers once it is written.
    So the server reports its reading (``Reading`` of server.proto). A push is *held up* while the server does not read,
    and *sent* once the server has read all of it. A push of a few bytes is sent as soon as it is written.
    """

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self._bytes = 0

    def wrote(self, size: int) -> None:
        """Record a written message."""
        self._bytes += size

    def finish(self) -> None:
        """Record that all messages are written."""
        if self._bytes <= limits.DELIVERED_BYTES:
            self._wait.sent()

    def on_reading(self, reading: int) -> None:
        """Process a report of the server; unknown ones say nothing."""
        match reading:
            case pb.READING_HELD:
                self._wait.held_up()
            case pb.READING_RESUMED:
                self._wait.resumed()
            case pb.READING_COMPLETE:
                self._wait.sent()


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

    def connection(self, server: Route, /) -> Connection:
        return self

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
                await tls.raise_cause(address, self.credentials)
                error = status.from_call(failure, f"the server at {address}")
                raise ServerUnreachableError(error.message) from None

    async def exchange(self, request: Request, route: Route, wait: Wait, loss: ServerLoss) -> None:
        """Run one stream to its end. See ``Connection.exchange``."""
        call = self.open_stream(route.address, _method_of(request))
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
        for index, pack in _encode(request, route):
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
        news = _on_answer(request, route, data)
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


# --- messages ---------------------------------------------------------------------------------------------------------


def _method_of(request: Request) -> str:
    """Return the method of ServerService for ``request``."""
    match request:
        case PushRequest():
            return "Push" if request.target is None else "PushPull"
        case PullRequest():
            return "Pull"
        case InstallRequest():
            return "Install"
    raise InternalError(f"no method carries {type(request).__name__}")


def _encode(request: Request, route: Route) -> Iterator[tuple[int, Callable[[], bytes]]]:
    """Yield the messages for the unanswered slices of ``route``: each message's slice, and a function that builds the
    message once the slice is ready."""
    match request:
        case PushRequest():
            yield from _encode_push(request, route)
        case PullRequest():
            message = pb.PullRequest(
                identity=request.sender.identity(route.epoch),
                dtype=convert.dtype_to_proto(request.target.dtype),
                min_version=request.progress.number,
                slices=request.progress.unanswered(route.slices),
            )
            write_held(message.held, request, route, message.slices)
            yield 0, message.SerializeToString
        case InstallRequest():
            # A server with only some of the slices does not answer, so all of them are resent after a failure.
            identity: pb.Identity | None = request.sender.identity(route.epoch)
            for index in route.slices:
                install = pb.InstallRequest(identity=identity, slice=index)
                yield index, partial(_pack, install, request, index)
                identity = None


def _encode_push(push: PushRequest, route: Route) -> Iterator[tuple[int, Callable[[], bytes]]]:
    """Yield one message per slice. The first contains the header."""
    message_type = pb.PushRequest if push.target is None else pb.PushPullRequest
    slices = push.progress.unanswered(route.slices)
    first = push.header(route, slices)
    first.reports_reading = True
    write_held(first.held, push, route, slices)
    header: pb.PushHeader | None = first
    written = push.progress.options.written
    for index in slices:
        message = message_type(header=header, slice=index, base_version=push.versions[index])
        if written is not None and (ranges := written.in_slice(push.slicing, index)) is not None:
            message.written.CopyFrom(pb.Written(**ranges._asdict()))
        yield index, partial(_pack, message, push, index)
        header = None


def _pack(message: Any, request: PushRequest | InstallRequest, index: int) -> bytes:
    return frames.pack(message, request.payload(index))


class _StreamNews(NamedTuple):
    """News in a message that answers no slice; without any the message is an answer.

    waiting_for: reason of a wait.
    reading: the server's reading of the push, a ``Reading``.
    """

    waiting_for: str = ""
    reading: int = 0


def _on_answer(request: Request, route: Route, data: bytes) -> _StreamNews:
    """Process one message of the route's server. Return its news if it answers no slice."""
    match request:
        case PushRequest(target=None):
            ack = pb.PushResponse.FromString(data)
            if not (ack.waiting_for or ack.reading):
                request.progress.answer(ack.slice, ack.version, ack.staleness, ack.ignored)
            return _StreamNews(ack.waiting_for, ack.reading)
        case PushRequest():
            pushed = frames.unpack(pb.PushPullResponse, data)
            answer = pushed.header
            if not (answer.waiting_for or answer.reading):
                _write_weights(request, _result(answer), pushed.payload, route.peer)
                request.progress.answer(answer.slice, answer.version, answer.staleness, answer.ignored)
            return _StreamNews(answer.waiting_for, answer.reading)
        case PullRequest():
            pulled = frames.unpack(pb.PullResponse, data)
            if not pulled.header.waiting_for:
                _write_weights(request, _result(pulled.header), pulled.payload, route.peer)
                request.progress.answer(pulled.header.slice, pulled.header.version)
            return _StreamNews(pulled.header.waiting_for)
        case InstallRequest():
            installed = pb.InstallResponse.FromString(data)
            if installed.slices != len(route.slices):
                raise InternalError(
                    f"{route.peer} installed {installed.slices} of {len(route.slices)} slices of initial values"
                )
            for index in route.slices:
                request.placed[index] = route.server
                request.progress.answer(index, 0)
    return _StreamNews()


def _result(answer: pb.PushPullResponse | pb.PullResponse) -> pb.SliceResult:
    """Return the fields of an answer that describe its weights."""
    differences = answer.differences if answer.HasField("differences") else None
    return pb.SliceResult(slice=answer.slice, version=answer.version, differences=differences)


def _write_weights(request: PushRequest | PullRequest, answer: pb.SliceResult, payload: memoryview, peer: str) -> None:
    """Write the weights of a slice that ``peer`` sent.

    Raises InternalError for a slice that is no longer asked for: a late answer must not overwrite a newer one; and as
    ``PullTarget.write``.
    """
    index = answer.slice
    if index not in request.progress.pending or request.target is None:
        raise InternalError(f"{peer} answered slice {index}, which is not asked for or was answered before")
    request.target.write(answer, payload, peer)
    request.traffic.received += len(payload)
