"""Port of a server for TCP connections: accepts promised connections and closes all others.

An authenticated gRPC call promises a connection (``TcpListener.promise``), and its caller receives the port and a
nonce, which is 32 random bytes. The first frame of a connection must show a nonce within ``limits.NONCE_SECONDS``; then
the connection is handed to the stream that it was promised to. A nonce is valid once, within the same time.

``tcp_service`` and ``replica_service`` use the connection afterwards.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import structlog

from psdist.errors import InvalidArgumentError, TcpUnavailableError
from psdist.link.frame_connection import FrameConnection, FrameReceiver
from psdist.link.listening import Listener
from psdist.v1 import server_pb2
from psdist.wire import limits

if TYPE_CHECKING:
    from psdist.security.tls import TlsFiles

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


class TcpListener(Listener[server_pb2.ShareRequest]):
    """Port for promised TCP connections, on the interface of the gRPC port. tls: see ``Listener``."""

    message_type = server_pb2.ShareRequest

    def __init__(self, tls: TlsFiles | None = None) -> None:
        super().__init__(tls)
        self._promises: dict[bytes, Promise] = {}

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

    def identify(self, opening: server_pb2.ShareRequest) -> Callable[[FrameConnection], None]:
        """Return the promise that the connection shows the nonce of. Raises InvalidArgumentError for another one."""
        if opening.WhichOneof("kind") != "open" or opening.call_id != 0:
            raise InvalidArgumentError("the first frame of a connection must be open, with call_id 0")
        promise = self._promises.pop(opening.open.nonce, None)
        if promise is None:
            raise InvalidArgumentError("the nonce is wrong, used before, or expired: request another one")
        return promise.keep

    def log_unavailable(self, host: str, reason: str) -> None:
        logger.warning("TCP connections disabled", host=host, reason=reason)

    def log_strangers(self, count: int, reason: str) -> None:
        logger.info("closed unidentified connections", connections=count, reason_of_the_last=reason)
