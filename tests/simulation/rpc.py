"""grpc.aio without gRPC: the parts of its interface that psdist uses, over the simulated network.

``SimChannel`` replaces ``grpc.aio.insecure_channel``; ``serve`` passes calls to the very handlers that a grpc server
gets. These behaviours of grpc.aio are preserved, because code relies on them or must survive them:

* Cancelling a write or read cancels its call; so does dropping the last reference to the call.
* A locally cancelled call raises CancelledError; one that ended raises AioRpcError with the server's status.
* A server's handler is cancelled when its client is gone. A separate task of it that reads then sees the end of the
  stream, as if the client had finished sending.
* A write to a call that has ended raises InvalidStateError.
* After a failed attempt to connect, calls fail immediately until a pause is over.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from tests.simulation.loop import Node
from tests.simulation.network import Connection, Network, Stream

Metadata = tuple[tuple[str, Any], ...]
_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
_BACKOFF = (0.1, 1.0)


class _Details:
    """Details of a call, as passed to a generic handler."""

    def __init__(self, method: str, metadata: Metadata) -> None:
        self.method = method
        self.invocation_metadata = metadata


def _pack(message: Any, serialize: Callable[[Any], bytes] | None) -> bytes:
    """Serialize a message as the serializer does, but with the same order of maps in every process."""
    if serialize is not None and isinstance(message, Message):
        return message.SerializeToString(deterministic=True)
    return bytes(serialize(message) if serialize is not None else message)


# --- the client's side ------------------------------------------------------------------------------------------------


class SimChannel:
    """Channel of the node that made it."""

    def __init__(self, network: Network, address: str) -> None:
        self.network = network
        self._address = address
        self._node: Node = network.loop.current()
        self._connection: Connection | None = None
        self._connecting: list[_Client] | None = None
        self._backoff = _BACKOFF[0]
        self._failed_until = 0.0
        self._reason = ""
        self._closed = False
        self._clients: dict[_Client, None] = {}

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio."""
        return _method(self, method, False, False, *args, **kwargs)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio."""
        return _method(self, method, False, True, *args, **kwargs)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio."""
        return _method(self, method, True, False, *args, **kwargs)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio."""
        return _method(self, method, True, True, *args, **kwargs)

    async def close(self, grace: float | None = None) -> None:
        """End all calls."""
        self._closed = True
        for client in list(self._clients):
            client.cancel()

    def begin(self, client: _Client) -> None:
        """Give ``client`` a stream as soon as there is a connection."""
        if self._closed:
            raise grpc.aio.UsageError("Channel is closed.")
        self._clients[client] = None
        if self._connection is not None and self._connection.open[0]:
            client.connected(self._connection)
        elif self._connecting is not None:
            self._connecting.append(client)
        elif self.network.loop.time() < self._failed_until:
            self.network.loop.call_soon(client.finish, _UNAVAILABLE, self._reason)
        else:
            self._connecting = [client]
            self.network.connect(self._node, self._address, self._connected)

    def forget(self, client: _Client) -> None:
        """Forget ``client``, which has ended."""
        self._clients.pop(client, None)

    def _connected(self, outcome: Connection | str) -> None:
        waiting, self._connecting = self._connecting or [], None
        if isinstance(outcome, str):
            self._reason = f"failed to connect to all addresses; last error: {outcome}"
            self._failed_until = self.network.loop.time() + self._backoff
            self._backoff = min(self._backoff * 1.6, _BACKOFF[1])
            for client in waiting:
                client.finish(_UNAVAILABLE, self._reason)
            return
        self._connection, self._backoff = outcome, _BACKOFF[0]
        for client in waiting:
            if outcome.open[0]:
                client.connected(outcome)
            else:
                client.finish(_UNAVAILABLE, "connection closed while connecting")


def _method(
    channel: SimChannel,
    method: str,
    streams_up: bool,
    streams_down: bool,
    request_serializer: Callable[[Any], bytes] | None = None,
    response_deserializer: Callable[[bytes], Any] | None = None,
    _registered_method: bool = False,
) -> Callable[..., SimCall]:
    def call(
        request: Any = None, *, timeout: float | None = None, metadata: Sequence[Any] | None = None, **_: Any
    ) -> SimCall:
        client = _Client(channel, method, tuple(metadata or ()), timeout)
        result = SimCall(client, streams_down, request_serializer, response_deserializer)
        if streams_up and request is not None:
            result.consume(request)
        elif not streams_up:
            client.send("only", result.pack(request))
        return result

    return call


class _Client:
    """The client's end of a stream, without the user's view of it."""

    def __init__(self, channel: SimChannel, method: str, metadata: Metadata, timeout: float | None) -> None:
        self._channel = channel
        self._method = method
        self._metadata = metadata
        self._stream: Stream | None = None
        self._unsent: list[tuple[str, Any]] = []
        self.network = channel.network
        self.messages: deque[bytes] = deque()
        self.status: tuple[grpc.StatusCode, str, Metadata] | None = None
        self.cancelled_here = False
        self.half_closed = False
        self.begun = False
        self._waiting: list[asyncio.Future[None]] = []
        self.done_callbacks: list[Callable[[], None]] = []
        loop = self.network.loop
        self._timer = loop.call_later(timeout, self._too_late) if timeout is not None else None
        channel.begin(self)

    def connected(self, connection: Connection) -> None:
        """Use a connection that is now available."""
        if self.status is not None:
            return
        self._stream = self.network.open(connection, self, self._method)
        self.network.send(self._stream, 1, "open", self._metadata)
        self.begun = True
        for kind, value in self._unsent:
            self.network.send(self._stream, 1, kind, value)
        self._unsent.clear()
        self._wake()

    def send(self, kind: str, value: Any) -> None:
        """Send now, or when there is a connection."""
        if self._stream is None:
            self._unsent.append((kind, value))
        else:
            self.network.send(self._stream, 1, kind, value)

    def receive(self, kind: str, value: Any) -> None:
        """See network.End."""
        if self.status is not None:
            return
        if kind == "message":
            self.messages.append(value)
            self._wake()
        elif kind == "status":
            self.finish(*value)

    def broken(self, reason: str) -> None:
        """See network.End."""
        self.finish(_UNAVAILABLE, reason)

    def finish(self, code: grpc.StatusCode, details: str, trailing: Metadata = ()) -> None:
        """Record the end of the call."""
        if self.status is not None:
            return
        self.status = (code, details, trailing)
        self._channel.forget(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._stream is not None:
            self.network.end(self._stream, 0)
        for callback in self.done_callbacks:
            self.network.loop.call_soon(callback)
        self._wake()

    def cancel(self) -> bool:
        """Cancel the call from this side."""
        if self.status is not None:
            return False
        self.cancelled_here = True
        self._reset(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        return True

    def _too_late(self) -> None:
        if self.status is None:
            self._reset(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _reset(self, code: grpc.StatusCode, details: str) -> None:
        if self._stream is not None:
            self.network.send(self._stream, 1, "reset", None)
        self.finish(code, details)

    async def wait(self) -> None:
        """Wait until something changes."""
        future = self.network.loop.create_future()
        self._waiting.append(future)
        await future

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def raise_for_status(self) -> None:
        """Raise the error that grpc.aio raises for a status other than OK."""
        assert self.status is not None
        code, details, trailing = self.status
        if self.cancelled_here:
            raise asyncio.CancelledError
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details)


class SimCall:
    """A call, as grpc.aio's users see it."""

    def __init__(
        self,
        client: _Client,
        streams_down: bool,
        serializer: Callable[[Any], bytes] | None,
        deserializer: Callable[[bytes], Any] | None,
    ) -> None:
        self._client = client
        self._streams_down = streams_down
        self._serializer = serializer
        self._deserializer = deserializer
        self._poller: asyncio.Task[None] | None = None
        self._responses: AsyncIterator[Any] | None = None

    def __del__(self) -> None:
        self._client.cancel()

    def pack(self, request: Any) -> bytes:
        """Return the request as bytes."""
        return _pack(request, self._serializer)

    # --- sending ---

    def consume(self, requests: AsyncIterator[Any]) -> None:
        """Send the items of an iterator."""
        self._poller = asyncio.get_running_loop().create_task(_pump(self._client, self.pack, requests))

    async def write(self, request: Any) -> None:
        """See grpc.aio."""
        await _write(self._client, self.pack(request))

    async def done_writing(self) -> None:
        """See grpc.aio."""
        await _done_writing(self._client)

    async def wait_for_connection(self) -> None:
        """See grpc.aio."""
        while not self._client.begun and self._client.status is None:
            await self._client.wait()
        if self._client.status is not None:
            self._client.raise_for_status()

    # --- receiving ---

    async def read(self) -> Any:
        """See grpc.aio."""
        message = await self._read()
        if message is grpc.aio.EOF:
            self._client.raise_for_status()
        return message

    async def _read(self) -> Any:
        client = self._client
        try:
            while not client.messages:
                if client.status is not None:
                    return grpc.aio.EOF
                await client.wait()
        except asyncio.CancelledError:
            client.cancel()
            raise
        data = client.messages.popleft()
        return self._deserializer(data) if self._deserializer is not None else data

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._responses is None:
            self._responses = self._iterate()
        return self._responses

    async def _iterate(self) -> AsyncIterator[Any]:
        while (message := await self._read()) is not grpc.aio.EOF:
            yield message
        self._client.raise_for_status()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._response().__await__()

    async def _response(self) -> Any:
        message = await self._read()
        while self._client.status is None:
            await self._client.wait()
        if message is grpc.aio.EOF or self._client.status[0] is not grpc.StatusCode.OK:
            self._client.raise_for_status()
        return message

    # --- the rest ---

    def cancel(self) -> bool:
        """See grpc.aio."""
        ended = self._client.cancel()
        if ended and self._poller is not None:
            self._poller.cancel()
        return ended

    def cancelled(self) -> bool:
        """See grpc.aio."""
        return self._client.status is not None and self._client.status[0] is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        """See grpc.aio."""
        return self._client.status is not None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """See grpc.aio."""
        self._client.done_callbacks.append(lambda: callback(self))

    async def code(self) -> grpc.StatusCode:
        """See grpc.aio."""
        while self._client.status is None:
            await self._client.wait()
        return self._client.status[0]


async def _pump(client: _Client, pack: Callable[[Any], bytes], requests: AsyncIterator[Any]) -> None:
    try:
        async for request in requests:
            await _write(client, pack(request))
        await _done_writing(client)
    except grpc.aio.AioRpcError:
        return
    except BaseException:
        client.cancel()


async def _write(client: _Client, data: bytes) -> None:
    if client.status is not None:
        raise asyncio.InvalidStateError("RPC already finished.")
    if client.half_closed:
        raise asyncio.InvalidStateError('RPC is half closed after calling "done_writing".')
    try:
        while not client.begun and client.status is None:
            await client.wait()
        if client.status is not None:
            client.raise_for_status()
        client.send("message", data)
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        client.cancel()
        raise


async def _done_writing(client: _Client) -> None:
    if client.status is None and not client.half_closed:
        client.half_closed = True
        client.send("end", None)
        await asyncio.sleep(0)


# --- the server's side ------------------------------------------------------------------------------------------------


def serve(network: Network, address: str, node: Node, *handlers: grpc.GenericRpcHandler) -> None:
    """Serve ``address`` from ``node`` with these handlers."""

    def accept(stream: Stream, method: str, metadata: Metadata) -> ServerCall:
        call = ServerCall(network, stream, metadata)
        details = _Details(method, metadata)
        handler = next((found for generic in handlers if (found := generic.service(details)) is not None), None)
        call.begin(handler)
        return call

    network.listen(address, node, accept)


class ServerCall:
    """The server's end of a stream, and the context passed to its handler."""

    def __init__(self, network: Network, stream: Stream, metadata: Metadata) -> None:
        self._network = network
        self._stream = stream
        self._metadata = metadata
        self._messages: deque[bytes] = deque()
        self._ended = False
        self._gone = False
        self._status_sent = False
        self._waiting: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._handler: Any = None
        self._trailing: Metadata = ()
        self._done_callbacks: list[Callable[[Any], None]] = []

    def begin(self, handler: Any) -> None:
        """Run the handler, or report that none exists."""
        self._handler = handler
        if handler is None:
            self._end(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        else:
            self._task = self._network.loop.create_task(self._serve())

    def receive(self, kind: str, value: Any) -> None:
        """See network.End."""
        if kind in ("message", "only"):
            self._messages.append(value)
        if kind in ("end", "only"):
            self._ended = True
        if kind == "reset":
            self._leave()
        self._wake()

    def broken(self, reason: str) -> None:
        """See network.End."""
        self._leave()
        self._wake()

    def _leave(self) -> None:
        """Handle the client's departure: readers see the end, and the handler is cancelled."""
        if self._status_sent or self._gone:
            return
        self._gone = self._ended = True
        self._network.end(self._stream, 1)
        if self._task is not None:
            self._task.cancel()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def _serve(self) -> None:
        handler = self._handler
        try:
            method = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
            request: Any = self._requests() if handler.request_streaming else await self._only()
            if inspect.isasyncgenfunction(method):
                async for response in method(request, self):
                    await self.write(response)
            else:
                response = await method(request, self)
                if not handler.response_streaming:
                    await self.write(response)
            self._end(grpc.StatusCode.OK, "")
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            self._end(grpc.StatusCode.CANCELLED, "cancelled")
        except Exception as error:
            self._network.loop.call_exception_handler({"message": f"in {self._stream.method}", "exception": error})
            self._end(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")

    async def _only(self) -> Any:
        data = await self._receive()
        if data is None:
            raise asyncio.CancelledError
        return self._parse(data)

    async def _receive(self) -> bytes | None:
        while not self._messages:
            if self._ended:
                return None
            future = self._network.loop.create_future()
            self._waiting.append(future)
            await future
        return self._messages.popleft()

    def _parse(self, data: bytes) -> Any:
        parse = self._handler.request_deserializer
        return parse(data) if parse is not None else data

    async def _requests(self) -> AsyncIterator[Any]:
        while (data := await self._receive()) is not None:
            yield self._parse(data)

    def _end(self, code: grpc.StatusCode, details: str, trailing: Metadata = ()) -> None:
        if self._status_sent or self._gone:
            return
        self._status_sent = self._ended = True
        self._network.send(self._stream, 0, "status", (code, details, (*self._trailing, *trailing)))
        self._network.end(self._stream, 1)
        for callback in self._done_callbacks:
            self._network.loop.call_soon(callback, self)

    # --- the context --------------------------------------------------------------------------------------------------

    async def read(self) -> Any:
        """See grpc.aio."""
        data = await self._receive()
        return grpc.aio.EOF if data is None else self._parse(data)

    async def write(self, message: Any) -> None:
        """See grpc.aio."""
        if self._gone:
            raise asyncio.CancelledError
        if self._status_sent:
            raise grpc.aio.UsageError("RPC already finished.")
        self._network.send(self._stream, 0, "message", _pack(message, self._handler.response_serializer))
        await asyncio.sleep(0)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        """See grpc.aio."""
        self._end(code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError("Locally aborted.")

    def invocation_metadata(self) -> Metadata:
        """See grpc.aio."""
        return self._metadata

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """See grpc.aio."""
        self._trailing = tuple(metadata)

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """See grpc.aio."""
        await asyncio.sleep(0)

    def peer(self) -> str:
        """See grpc.aio."""
        return f"ipv4:{self._stream.connection.nodes[0].name}"

    def auth_context(self) -> dict[str, list[bytes]]:
        """See grpc.aio. There is no TLS."""
        return {}

    def cancelled(self) -> bool:
        """See grpc.aio."""
        return self._gone

    def done(self) -> bool:
        """See grpc.aio."""
        return self._gone or self._status_sent

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """See grpc.aio."""
        self._done_callbacks.append(callback)
