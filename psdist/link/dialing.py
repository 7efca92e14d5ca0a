"""Dialing end of a link: a gRPC stream, and the connection that was negotiated on it.

The gRPC stream authenticates the connection, stays open beside it, and reports why it ended. A worker dials servers
(``client.transport.negotiation``), and a primary its replicas (``store.replica_carriers``).

Invariants: The stream and the connection end together, and ``end`` receives the reason once. A link that ended is not
used again. Nothing is sent over TCP before the peer accepts the connection.

``psdist.link.listening`` is the accepting end over TCP. ``psdist.link.fd_passing`` connects processes of one host.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc.aio
from google.protobuf.message import Message

from psdist.errors import (
    ClosedError,
    InternalError,
    PsdistError,
    ServerUnreachableError,
    TcpUnavailableError,
    copy_error,
)
from psdist.link.frame_connection import FrameConnection, MessageReceiver
from psdist.link.tls_layer import TlsLayer
from psdist.v1 import server_pb2
from psdist.wire import status

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
