"""Both ends of a link: a gRPC stream, and the connection that was negotiated on it.

The gRPC stream authenticates the connection, stays open beside it, and reports why it ended. A worker dials servers
(``client.transport.negotiation``), and a primary its replicas (``store.replica_carriers``).

Invariants: The stream and the connection end together, and ``end`` receives the reason once. A link that ended is not
used again. Nothing is sent over TCP before the peer accepts the connection.

``psdist.link.processes`` connects processes of one host.

The listening end is a port that closes TCP connections which do not identify themselves. The first frame of a
connection identifies it (``Listener.identify``). Until then nothing else is read from it, and the frame must arrive
within ``limits.NONCE_SECONDS``.

Invariants: Nothing is read from an unidentified connection but its first header, into a small buffer, and the TLS
handshake before it. The number of unidentified connections is bounded: one more closes the oldest, so that silent
strangers keep nobody out. Half of a handshake, or a slow one, counts like silence. After too many failed connections
their address is refused before the handshake, which is the expensive part, until time has passed. Identified
connections are not touched.

The port of a server (``TcpListener``) accepts promised connections alone. An authenticated gRPC call promises one, and
its caller receives the port and a nonce, which is 32 random bytes. The first frame must show a nonce within the same
limit; then the connection is handed to the stream that it was promised to. A nonce is valid once. ``peer_links`` is the
port of a worker.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import grpc.aio
from google.protobuf.message import Message

from psdist import addresses
from psdist.errors import (
    ClosedError,
    ConfigurationError,
    InternalError,
    InvalidArgumentError,
    PsdistError,
    ServerUnreachableError,
    TcpUnavailableError,
    copy_error,
)
from psdist.link.frame_connection import FrameConnection, FrameReceiver, MessageReceiver
from psdist.link.tls_layer import TlsLayer
from psdist.v1 import server_pb2
from psdist.wire import limits, status
from psdist.wire.limits import FailureLimit, LogPacer

if TYPE_CHECKING:
    from psdist.security.tls import TlsFiles

#: Timeout for firewalls that drop packets silently.
CONNECT_SECONDS: Final = 3.0
#: Waits that a time limit consists of.
_LOOKS: Final = 8
#: Delay before a refused connection is blamed on a firewall.
_REFUSED_SECONDS: Final = 0.25
#: After the connection closes, wait this long for the stream to report the reason.
_REASON_SECONDS: Final = 2.0

M = TypeVar("M", bound=Message)


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError if the block takes longer. Time in which this process does not run hardly counts: the peer may
    have answered meanwhile."""
    loop, looks = asyncio.get_running_loop(), 0
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal looks, timer
        looks += 1
        if looks < _LOOKS:
            timer = loop.call_later(seconds / _LOOKS, look)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds / _LOOKS, look)
        try:
            yield
        finally:
            timer.cancel()


@contextmanager
def ending_with(end: asyncio.Future[PsdistError]) -> Iterator[None]:
    """Cancel the enclosing task's block once ``end`` is set, and raise its error instead of CancelledError.

    The block runs in the calling task, not in a task of its own, so its outcome is never lost: cancelled code cleans
    up.
    """
    if end.done():
        raise copy_error(end.result())
    task = asyncio.current_task()
    assert task is not None
    before, is_over, is_cancelled = task.cancelling(), False, False

    def cancel(_: object) -> None:
        nonlocal is_cancelled
        if not is_over:  # The callback may have been scheduled before the block ended.
            is_cancelled = task.cancel()

    end.add_done_callback(cancel)
    try:
        yield
    except asyncio.CancelledError:
        if not is_cancelled or task.cancelling() > before + 1:  # The task was cancelled by someone else.
            raise
        raise copy_error(end.result()) from None
    finally:
        is_over = True
        end.remove_done_callback(cancel)
        if is_cancelled:
            task.uncancel()


async def connect(connection: FrameConnection, host: str, port: int, tls: TlsFiles | None, name: str = "") -> None:
    """Connect to a TCP port. Frames may be sent from then on.

    tls: identity for mutual TLS; None for plaintext.
    name: with TLS, the name that the peer's certificate must have; empty for ``host``.

    Raises OSError. A failure of TLS ends the connection: see ``FrameReceiver.connection_ended``.
    """
    loop = asyncio.get_running_loop()
    if tls is None:
        await loop.create_connection(lambda: connection, host, port)
        return
    layer = TlsLayer(connection, tls.client_context(), name or host)
    await loop.create_connection(lambda: layer, host, port)
    await layer.secured()


class Link(MessageReceiver[M]):
    """Link to ``peer``. call: the gRPC stream. has_payloads: see ``FrameConnection``."""

    def __init__(self, call: Any, peer: str, *, has_payloads: bool) -> None:
        self.peer = peer
        #: Reason that nothing more can be sent, or None.
        self.broken: PsdistError | None = None
        loop = asyncio.get_running_loop()
        #: Receives that error.
        self.end: asyncio.Future[PsdistError] = loop.create_future()
        self.connection = FrameConnection(self, has_payloads=has_payloads)
        self._call = call
        self._is_dialing = False
        self._reason_timer: asyncio.TimerHandle | None = None
        self._watcher = asyncio.create_task(self._watch(), name="psdist connection")

    def error_of(self, failure: grpc.aio.AioRpcError) -> PsdistError:
        """Return the error for the failed gRPC stream."""
        return status.from_call(failure, self.peer)

    # --- opening ------------------------------------------------------------------------------------------------------

    async def open(self, connected: socket.socket) -> None:
        """Take over a connected Unix socket. Closes the link on failure."""
        try:
            await self.connection.open(connected)
        except BaseException:  # Includes cancellation.
            self.close()
            raise

    async def dial(self, host: str, port: int, nonce: bytes, *, tls: TlsFiles | None, dialers: str) -> None:
        """Connect over TCP to a server, and show the nonce. Closes the link on failure.

        tls: see ``connect``.
        dialers: the connections that a firewall must allow, for the error: "workers connect to any port of servers".

        Raises TcpUnavailableError if that is impossible, or the error that ended the link.
        """
        self._is_dialing = True
        opening, accepted = server_pb2.ShareRequest(open=server_pb2.OpenConnection(nonce=nonce)), _Acceptance(self)
        self.connection.set_receiver(accepted)
        where = f"{host}:{port}"
        try:
            with ending_with(self.end):
                try:
                    async with time_limit(CONNECT_SECONDS):
                        await connect(self.connection, host, port, tls, tls.service_name(host) if tls else "")
                        self.connection.send(opening.SerializeToString())
                        await accepted.arrived
                except TimeoutError:
                    raise TcpUnavailableError(
                        f"{where} did not answer within {CONNECT_SECONDS:g} s: a firewall must let {dialers}"
                    ) from None
                except OSError as error:
                    # The port of a server that was just killed refuses, too; the end of the stream is about to report
                    # that.
                    await asyncio.sleep(_REFUSED_SECONDS)
                    raise TcpUnavailableError(f"no connection to {where}: {error.strerror or error}") from None
        except BaseException:  # Includes cancellation.
            self.close()
            raise
        self._is_dialing = False

    # --- connection callbacks -----------------------------------------------------------------------------------------

    def connection_ended(self, error: PsdistError | None) -> None:
        if isinstance(error, ClosedError):
            self.break_off(ServerUnreachableError(f"{self.peer}: {error.message}"))
        elif isinstance(error, TcpUnavailableError):
            self.break_off(TcpUnavailableError(f"{self.peer}: {error.message}"))
        elif error is not None:
            self.break_off(InternalError(f"{self.peer} sent an invalid message: {error.message}"))
        else:
            # The peer reports the reason on the stream, unless it hangs or is gone.
            kind = TcpUnavailableError if self._is_dialing else ServerUnreachableError
            reason = kind(f"{self.peer} closed the connection")
            self._reason_timer = asyncio.get_running_loop().call_later(_REASON_SECONDS, self.break_off, reason)

    # --- closing ------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Wait for the end of the gRPC stream, which ends the link."""
        try:
            data = await self._call.read()
            error: PsdistError = ServerUnreachableError(f"{self.peer} ended the stream")
            if data is not grpc.aio.EOF:
                error = InternalError(f"{self.peer} sent a second answer on a stream that carries only one")
        except grpc.aio.AioRpcError as failure:
            error = self.error_of(failure)
        except asyncio.CancelledError:
            error = ServerUnreachableError(f"the stream to {self.peer} was closed")
        self.break_off(error)

    def break_off(self, error: PsdistError) -> None:
        """Close the connection and the gRPC stream, because of ``error``. Only the first call has an effect."""
        if self.broken is not None:
            return
        self.broken = error
        self.end.set_result(error)
        if self._reason_timer is not None:
            self._reason_timer.cancel()
        self.connection.abort()
        self._call.cancel()

    def close(self) -> None:
        """Close the connection and the gRPC stream."""
        self.break_off(ServerUnreachableError(f"the stream to {self.peer} was closed"))
        self._watcher.cancel()

    async def ended(self) -> None:
        """Wait until no task of the link runs any more."""
        await asyncio.gather(self._watcher, return_exceptions=True)


class _Acceptance(MessageReceiver[M]):
    """Receiver of a dialed link's connection until the server accepts the nonce."""

    def __init__(self, link: Link[M]) -> None:
        self.message_type = link.message_type
        self.arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._link = link

    def on_message(self, message: M) -> None:
        if message.WhichOneof("kind") != "opened":
            self._link.on_message(message)
            return
        self._link.connection.set_receiver(self._link)
        if not self.arrived.done():
            self.arrived.set_result(None)

    def connection_ended(self, error: PsdistError | None) -> None:
        self._link.connection_ended(error)


# --- the listening end ------------------------------------------------------------------------------------------------


_SHUTDOWN = "this process is shutting down"


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
        self._is_closed = False
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
            # Connections that asyncio is accepting now must precede the close of their server: it fails to make their
            # transports afterwards, and leaves the sockets open.
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._server.sockets[0].fileno())
            loop.call_soon(self._server.close)
            self._server = None
        self._is_closed = True
        for connection in list(self._unidentified):
            connection.cut_off(_SHUTDOWN)

    def _accept(self) -> asyncio.BufferedProtocol:
        if len(self._unidentified) >= limits.UNIDENTIFIED_MAX:
            next(iter(self._unidentified)).cut_off(f"{limits.UNIDENTIFIED_MAX} newer connections are waiting")
        unidentified = _Unidentified(self)
        connection = unidentified.connection
        if self._is_closed:
            unidentified.cut_off(_SHUTDOWN)
        else:
            self._unidentified[unidentified] = None
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
        _logger().warning("TCP connections disabled", host=host, reason=reason)

    def log_strangers(self, count: int, reason: str) -> None:
        _logger().info("closed unidentified connections", connections=count, reason_of_the_last=reason)


def _logger() -> Any:
    import structlog  # Workers have a listener of their own kind, and start without this library.

    return structlog.get_logger("psdist.server")
