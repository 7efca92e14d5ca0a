"""Listening port for TCP connections: closes those that do not identify themselves.

The first frame of a connection identifies it (``Listener.identify``). Until then nothing else is read from it, and the
frame must arrive within ``limits.NONCE_SECONDS``.

Invariants: Nothing is read from an unidentified connection but its first header, into a small buffer, and the TLS
handshake before it. The number of unidentified connections is bounded: one more closes the oldest, so that silent
strangers keep nobody out. Half of a handshake, or a slow one, counts like silence. After too many failed connections
their address is refused before the handshake, which is the expensive part, until time has passed. Identified
connections are not touched.

``accepting`` is the port of a server, ``peers`` that of a worker.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from google.protobuf.message import Message

from psdist import addresses
from psdist.errors import ConfigurationError, InvalidArgumentError, PsdistError
from psdist.link.frame_connection import FrameConnection, MessageReceiver
from psdist.link.tls_layer import TlsLayer
from psdist.wire import limits
from psdist.wire.backoff import FailureLimit, LogPacer

if TYPE_CHECKING:
    from psdist.security.tls import TlsFiles

M = TypeVar("M", bound=Message)


class Listener(ABC, Generic[M]):
    """Port for TCP connections.

    tls: identity for mutual TLS, if gRPC is encrypted; None for plaintext, as gRPC is then.
    """

    #: Type of the header of a connection's first frame, and its greatest length.
    message_type: type[M]
    opening_bytes = limits.OPENING_BYTES

    def __init__(self, tls: TlsFiles | None = None) -> None:
        #: 0 while it does not listen.
        self.port = 0
        self._tls = tls
        self._unidentified: dict[_Unidentified[M], None] = {}
        self._server: asyncio.Server | None = None
        self._log = LogPacer(limits.STRANGERS_LOG_SECONDS)
        self._failures = FailureLimit(
            limits.UNIDENTIFIED_PER_SECOND, limits.UNIDENTIFIED_BURST, limits.UNIDENTIFIED_ADDRESSES_MAX
        )

    @abstractmethod
    def identify(self, opening: M) -> Callable[[FrameConnection], None]:
        """Return a function that takes over the connection whose first header is ``opening``.

        Raises PsdistError for a connection that is to be closed.
        """

    @abstractmethod
    def log_unavailable(self, host: str, reason: str) -> None:
        """Log that no port of ``host`` could be bound."""

    @abstractmethod
    def log_strangers(self, count: int, reason: str) -> None:
        """Log that ``count`` connections were closed before they were identified. reason: that of the last one, after
        its address."""

    async def open(self, host: str, port: int = 0) -> None:
        """Listen on ``port`` of ``host``; 0 picks a free port.

        Raises ConfigurationError if an explicit port, which a firewall may expect, is not available. If no free port
        can be bound, this is logged, and ``port`` stays 0.
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
            self.log_unavailable(host, reason)
            return
        self.port = listening.getsockname()[1]

    def close(self) -> None:
        """Stop accepting connections."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._unidentified):
            connection.cut_off("this process is shutting down")

    def _accept(self) -> asyncio.BufferedProtocol:
        if len(self._unidentified) >= limits.UNIDENTIFIED_MAX:
            next(iter(self._unidentified)).cut_off(f"{limits.UNIDENTIFIED_MAX} newer connections are waiting")
        unidentified = _Unidentified(self)
        self._unidentified[unidentified] = None
        connection = unidentified.connection
        return connection if self._tls is None else TlsLayer(connection, self._tls.server_context(), None)

    def admit(self, unidentified: _Unidentified[M], opening: M) -> None:
        """Hand a connection over. Raises the error of ``identify``."""
        take_over = self.identify(opening)
        self.forget(unidentified)
        self._failures.succeed(unidentified.host)
        take_over(unidentified.connection)

    def is_refused(self, host: str) -> bool:
        """True if too many connections of this address ended unidentified."""
        return self._failures.is_exceeded(host, asyncio.get_running_loop().time())

    def note_failure(self, host: str) -> None:
        """Count a connection of this address that ended unidentified."""
        self._failures.fail(host, asyncio.get_running_loop().time())

    def note_stranger(self, reason: str) -> None:
        """Log that a connection was closed."""
        if count := self._log.note(asyncio.get_running_loop().time()):
            self.log_strangers(count, reason)

    def forget(self, unidentified: _Unidentified[M]) -> None:
        """Remove a connection that was identified or has ended."""
        self._unidentified.pop(unidentified, None)


def _listening_socket(address: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. For a wildcard it listens at all addresses of both families, as gRPC
    does."""
    if addresses.is_wildcard(address) and socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)


class _StrangerConnection(FrameConnection):
    """Connection that tells its receiver the peer's address, before a TLS handshake."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if isinstance(receiver := self._reader.receiver, _Unidentified):
            receiver.connected(transport)


class _Unidentified(MessageReceiver[M]):
    """Connection whose first frame has not arrived."""

    #: Address of the dialing process, once it is connected.
    host = peer = ""

    def __init__(self, listener: Listener[M]) -> None:
        self.message_type = listener.message_type
        self.connection = _StrangerConnection(self, listener.opening_bytes, ends_stalls=True)
        self._listener = listener
        self._timer = asyncio.get_running_loop().call_later(
            limits.NONCE_SECONDS, self.cut_off, f"its first frame did not arrive within {limits.NONCE_SECONDS:g} s"
        )

    def connected(self, transport: asyncio.BaseTransport) -> None:
        """Learn the peer's address. Ends the connection if its address has failed too often."""
        address = transport.get_extra_info("peername") or ("", 0)  # None if the connection has ended already.
        self.host, self.peer = address[0], addresses.format_address(*address[:2])
        if self._listener.is_refused(self.host):
            self.cut_off(f"over {limits.UNIDENTIFIED_BURST} connections of this address ended unidentified")

    def payload_buffer(self, message: M, size: int) -> memoryview:
        if size:
            raise InvalidArgumentError(
                f"the first frame of a connection has a payload of {size} bytes: send its header alone"
            )
        return memoryview(b"")

    def on_message(self, message: M) -> None:
        self._listener.admit(self, message)
        self._timer.cancel()

    def connection_ended(self, error: PsdistError | None) -> None:
        self._timer.cancel()
        self._listener.forget(self)
        if self.host:
            self._listener.note_failure(self.host)
        if error is not None:
            self._listener.note_stranger(f"{self.peer}: {error.message}")

    def cut_off(self, reason: str) -> None:
        """Close the connection. It has cost little, so it does not count against its address."""
        self.host = ""
        self.connection.abort()
        self.connection_ended(InvalidArgumentError(reason))
