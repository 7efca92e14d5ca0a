"""Length-prefixed messages over the Unix socket on which two processes exchanged their arenas.

A message is preceded by its length, 4 bytes little-endian. Messages are delivered from the event loop's own callback,
without a task, and messages sent from there leave immediately. This keeps the latency of small calls low.

Invariants: Messages are delivered whole, once, in order, and never after the connection ends. ``ended`` is called
exactly once, unless this side closed the socket.

Messages are interpreted by ``shm_service`` (server) and ``client.transport.shm.stream`` (client).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final, cast

from psdist.errors import LimitExceededError, PsdistError
from psdist.wire import limits

_LENGTH_BYTES: Final = 4


class FramedSocket(asyncio.Protocol):
    """One end of a connection.

    receive: called with each message. Any PsdistError it raises closes the connection.
    ended: called when the connection ends, with that error, or None if the peer closed it.
    waits_for_reader: stop receiving while the peer does not read, so that it cannot make this process queue more and
        more answers. Set it at one end only; with both ends waiting, the connection deadlocks.
    """

    def __init__(
        self,
        receive: Callable[[bytes], None],
        ended: Callable[[PsdistError | None], None],
        *,
        waits_for_reader: bool = False,
    ) -> None:
        self._receive = receive
        self._ended = ended
        self._waits_for_reader = waits_for_reader
        self.transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._holds = 0
        self._closed = False
        #: True if the peer is not reading fast enough to keep the write queue short.
        self.is_full = False

    async def open(self, connection: socket.socket) -> None:
        """Take over a connected socket."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)

    def send(self, message: bytes) -> None:
        """Send a message. Does nothing on a closed connection."""
        if self.transport is not None:
            self.transport.write(len(message).to_bytes(_LENGTH_BYTES, "little") + message)

    def hold(self) -> None:
        """Pause receiving. Holds nest: each needs its own ``release``."""
        self._holds += 1
        if self._holds == 1 and self.transport is not None:
            self.transport.pause_reading()

    def release(self) -> None:
        """End a ``hold``."""
        self._holds -= 1
        if self._holds == 0 and self.transport is not None:
            self.transport.resume_reading()
            self._deliver()

    def close(self) -> None:
        """Close the connection once everything is sent. A connection that is not open yet will not open."""
        self._closed = True
        # Break the reference cycle with the callbacks.
        self._receive, self._ended = _ignore, _ignore
        if self.transport is not None:
            self.transport.close()
            self.transport = None

    # --- event loop callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._closed:
            transport.close()
        else:
            self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._deliver()

    def pause_writing(self) -> None:
        self.is_full = True
        if self._waits_for_reader:
            self.hold()

    def resume_writing(self) -> None:
        self.is_full = False
        if self._waits_for_reader:
            self.release()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(None)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        try:
            while self.transport is not None and not self._holds and (message := self._next()) is not None:
                self._receive(message)
        except PsdistError as error:
            self._end(error)

    def _next(self) -> bytes | None:
        """Return the next complete message, or None."""
        size = int.from_bytes(self._buffer[:_LENGTH_BYTES], "little")
        end = _LENGTH_BYTES + size
        if size > limits.SHARED_MESSAGE_BYTES:
            raise LimitExceededError(f"a message of {size} bytes is more than {limits.SHARED_MESSAGE_BYTES}")
        if len(self._buffer) < end:
            return None
        message = bytes(self._buffer[_LENGTH_BYTES:end])
        del self._buffer[:end]
        return message

    def _end(self, error: PsdistError | None) -> None:
        if self.transport is not None:
            ended = self._ended
            self.close()
            ended(error)


def _ignore(_: object) -> None:
    """Do nothing."""
