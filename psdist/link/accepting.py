"""Port for TCP connections: accepts promised connections and closes all others.

An authenticated gRPC call promises a connection (``TcpListener.promise``), and its caller receives the port and a
nonce, which is 32 random bytes. The first frame of a connection must show a nonce within ``limits.NONCE_SECONDS``; then
the connection is handed to the stream that it was promised to. A nonce is valid once, within the same time.

Invariants: Nothing is read from a connection before its nonce but the nonce, into a small buffer. The number of
connections without a nonce is bounded: one more closes the oldest, so that silent strangers keep nobody out.

``tcp_service`` and ``replica_service`` use the connection afterwards.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import structlog

from psdist import addresses
from psdist.errors import ConfigurationError, InvalidArgumentError, PsdistError, TcpUnavailableError
from psdist.link.frame_connection import FrameConnection, FrameReceiver, MessageReceiver
from psdist.v1 import server_pb2
from psdist.wire import limits
from psdist.wire.backoff import LogPacer

logger = structlog.get_logger("psdist.server")


class ConnectionReceiver(FrameReceiver, Protocol):
    """Stream that a connection was promised to, and which receives its frames."""

    def connected(self, connection: FrameConnection) -> None:
        """Take over the connection. Frames arrive from now on."""


class Promise:
    """Promise of a connection to ``receiver``. The dialing process must show ``nonce`` (32 bytes)."""

    def __init__(self, receiver: ConnectionReceiver) -> None:
        self.receiver = receiver
        self.nonce = secrets.token_bytes(32)
        self._is_kept = asyncio.Event()

    def keep(self, connection: FrameConnection) -> None:
        """Hand over the connection that showed the nonce."""
        connection.set_receiver(self.receiver)
        self.receiver.connected(connection)
        self._is_kept.set()

    async def kept(self) -> None:
        """Wait for the connection. Raises TcpUnavailableError."""
        try:
            async with asyncio.timeout(limits.NONCE_SECONDS):
                await self._is_kept.wait()
        except TimeoutError:
            raise TcpUnavailableError(f"no connection arrived within {limits.NONCE_SECONDS:g} s") from None


class TcpListener:
    """Port for TCP connections, on the interface of the gRPC port.

    Connections are plaintext, as gRPC is on that interface. If gRPC were encrypted, no listener might be opened.
    """

    def __init__(self) -> None:
        self.port = 0
        self._promises: dict[bytes, Promise] = {}
        self._unidentified: dict[_Unidentified, None] = {}
        self._server: asyncio.Server | None = None
        self._log = LogPacer(limits.STRANGERS_LOG_SECONDS)

    async def open(self, host: str, port: int = 0) -> None:
        """Listen on ``port`` of ``host``; 0 picks a free port.

        Raises ConfigurationError if an explicit port, which a firewall may expect, is not available. If no free port
        can be bound, a warning is logged and workers use gRPC.
        """
        loop = asyncio.get_running_loop()
        try:
            # Use one address only: each would get a different free port.
            address = (await addresses.look_up(host))[0]
            listening = _listening_socket(address, port)
            self._server = await loop.create_server(self._accept, sock=listening)
        except OSError as error:
            reason = error.strerror or str(error)
            if port:
                raise ConfigurationError(
                    f"--data-port {port} of {host} cannot be bound: {reason}. Choose another port, or 0 for a free one",
                    host=host,
                    port=port,
                ) from None
            logger.warning("TCP connections disabled", host=host, reason=reason)
            return
        self.port = listening.getsockname()[1]

    def close(self) -> None:
        """Stop accepting connections."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._unidentified):
            connection.cut_off("the server is shutting down")

    @contextmanager
    def promise(self, receiver: ConnectionReceiver) -> Iterator[Promise]:
        """Yield a promise of a connection to ``receiver``, valid during the block. Raises TcpUnavailableError if too
        many connections are promised."""
        if len(self._promises) >= limits.NONCES_MAX:
            raise TcpUnavailableError(f"{len(self._promises)} connections are already expected: try again")
        promise = Promise(receiver)
        self._promises[promise.nonce] = promise
        try:
            yield promise
        finally:
            self._promises.pop(promise.nonce, None)

    def _accept(self) -> FrameConnection:
        if len(self._unidentified) >= limits.UNIDENTIFIED_MAX:
            next(iter(self._unidentified)).cut_off(f"{limits.UNIDENTIFIED_MAX} newer connections are waiting")
        unidentified = _Unidentified(self)
        self._unidentified[unidentified] = None
        return unidentified.connection

    def identify(self, unidentified: _Unidentified, nonce: bytes) -> None:
        """Hand a connection to the stream it was promised to. Raises InvalidArgumentError for an unknown nonce."""
        promise = self._promises.pop(nonce, None)
        if promise is None:
            raise InvalidArgumentError("the nonce is wrong, used before, or expired: request another one")
        self.forget(unidentified)
        promise.keep(unidentified.connection)

    def note_stranger(self, reason: str) -> None:
        """Log that a connection was closed."""
        if count := self._log.note(asyncio.get_running_loop().time()):
            logger.info("closed unidentified connections", connections=count, reason_of_the_last=reason)

    def forget(self, unidentified: _Unidentified) -> None:
        """Remove a connection that was identified or has ended."""
        self._unidentified.pop(unidentified, None)


def _listening_socket(address: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. For a wildcard it listens at all addresses of both families, as gRPC
    does."""
    if addresses.is_wildcard(address) and socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)


class _Unidentified(MessageReceiver[server_pb2.ShareRequest]):
    """Connection that has not shown its nonce."""

    message_type = server_pb2.ShareRequest

    def __init__(self, listener: TcpListener) -> None:
        self.connection = FrameConnection(self, limits.OPENING_BYTES, ends_stalls=True)
        self._listener = listener
        self._timer = asyncio.get_running_loop().call_later(
            limits.NONCE_SECONDS, self.cut_off, f"no nonce arrived within {limits.NONCE_SECONDS:g} s"
        )

    def payload_buffer(self, request: server_pb2.ShareRequest, size: int) -> memoryview:
        if size:
            raise InvalidArgumentError(f"the first frame of a connection has a payload of {size} bytes: send the nonce")
        return memoryview(b"")

    def on_message(self, request: server_pb2.ShareRequest) -> None:
        if request.WhichOneof("kind") != "open" or request.call_id != 0:
            raise InvalidArgumentError("the first frame of a connection must be open, with call_id 0")
        self._listener.identify(self, request.open.nonce)
        self._timer.cancel()

    def connection_ended(self, error: PsdistError | None) -> None:
        self._timer.cancel()
        self._listener.forget(self)
        if error is not None:
            self._listener.note_stranger(error.message)

    def cut_off(self, reason: str) -> None:
        """Close the connection."""
        self.connection.abort()
        self.connection_ended(InvalidArgumentError(reason))
