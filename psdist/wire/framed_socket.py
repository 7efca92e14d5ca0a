"""Whole messages over the socket on which two processes on one host exchanged their arenas.

Each message follows its length, four bytes little-endian. Messages are delivered from within the loop's own callback,
without a task, and what is sent from there leaves at once. This makes small calls fast.

Invariants: each message is delivered whole, once, in order, and never after the end. ``ended`` is called once, unless
this side closed the socket.

Not here: what the messages mean (``shm_service`` at the server, ``stream`` at the client), how the two met
(``fd_passing``).
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

    receive: called with each message. A PsdistError that it raises closes the connection.
    ended: called when the connection ended, with that error, or None where the other side closed it.
    waits_for_reader: whether nothing is received while the other side does not read what was sent, so that it cannot
        make this process keep more and more. One end only, or the two could wait for each other.
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
        #: Whether the other side does not read what was sent.
        self.is_full = False

    async def open(self, connection: socket.socket) -> None:
        """Takes over a connected socket."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)

    def send(self, message: bytes) -> None:
        """Sends a message. Does nothing on a closed connection."""
        if self.transport is not None:
            self.transport.write(len(message).to_bytes(_LENGTH_BYTES, "little") + message)

    def hold(self) -> None:
        """Pauses receiving until ``release`` was called as often as this."""
        self._holds += 1
        if self._holds == 1 and self.transport is not None:
            self.transport.pause_reading()

    def release(self) -> None:
        """Ends a ``hold``."""
        self._holds -= 1
        if self._holds == 0 and self.transport is not None:
            self.transport.resume_reading()
            self._deliver()

    def close(self) -> None:
        """Closes the connection once everything is sent. A connection that is not open yet will not open."""
        self._closed = True
        # The callbacks refer to this object: without this a cycle would remain until a garbage collection.
        self._receive, self._ended = _ignore, _ignore
        if self.transport is not None:
            self.transport.close()
            self.transport = None

    # --- what the loop calls ------------------------------------------------------------------------------------------

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

    # --- their parts --------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        try:
            while self.transport is not None and not self._holds and (message := self._next()) is not None:
                self._receive(message)
        except PsdistError as error:
            self._end(error)

    def _next(self) -> bytes | None:
        """The next message, once all of it is there."""
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
    """Does nothing."""
