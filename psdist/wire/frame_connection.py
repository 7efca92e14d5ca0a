"""Frames over a TCP connection or unix socket: a short header, and a payload that is received where it is needed.

A frame is a prefix (the lengths of header and payload, four bytes each, little-endian), the header, and the payload.
Once a header is there its receiver names the memory for the payload, and the rest of the payload is received straight
into it. Prefixes, headers, and what came with them are read ahead into a small buffer, so that a frame costs few reads.
Payloads are sent from where they lie: their memory is referenced until it is sent (``is_sending``), or ``abort`` ends
the connection.

Invariants: lengths are checked before memory is allocated. Each frame is delivered whole, once, in order, and never
after the end. ``connection_ended`` is called once, unless this side ended the connection.

Not here: what headers mean (``tcp_service`` at the server, ``client.transport.tcp.stream`` at the client).
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol, cast

from psdist.errors import ClosedError, InternalError, LimitExceededError, PsdistError
from psdist.wire import limits

PREFIX: Final = struct.Struct("<II")
#: What is read ahead is copied, so the buffer holds headers and little more.
_READ_AHEAD_BYTES: Final = 16 << 10
#: So much is queued before ``drain`` waits. It is the payloads' own memory where the event loop is uvloop's.
_QUEUED_BYTES: Final = 2 << 20
#: After this many bytes the event loop runs its other callbacks. Without that uvloop reads a connection up to 32 times
#: in one turn, and a sender that keeps up fills the socket again each time: 100 MiB and more.
_TURN_BYTES: Final = 4 << 20
_NOTHING: Final = memoryview(b"")
#: Seconds of silence after which a connection is probed, between probes, and probes: a router in between may have
#: forgotten it.
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}


#: Of the kernel's struct tcp_info: transmissions of the oldest bytes in vain, probes of a window in vain, and
#: milliseconds since the last acknowledgement.
_TCP_INFO: Final = struct.Struct("=2xBB52xI")
#: So many come in 3 s or more: the pause doubles from 0.2 s on.
_RETRANSMITS: Final = 4


class FrameReceiver(Protocol):
    """Takes the frames of a connection. What it raises as PsdistError ends the connection."""

    def begin_frame(self, header: bytes, size: int) -> memoryview:
        """Returns writable memory of exactly ``size`` bytes for the payload of the frame with this header."""

    def end_frame(self) -> None:
        """The frame is complete."""

    def connection_ended(self, error: PsdistError | None) -> None:
        """The connection ended, with the error that ended it, or None where the other side did."""


class FrameReader:
    """Cuts the bytes of a connection into frames for ``receiver``. header_bytes: of the longest header."""

    def __init__(self, receiver: FrameReceiver, header_bytes: int) -> None:
        self.receiver = receiver
        self.header_bytes = header_bytes
        self.is_held = False
        #: Whether the last frame has begun and is not complete.
        self.is_within_frame = False
        self._ahead = memoryview(bytearray(_READ_AHEAD_BYTES))
        #: What was read ahead and is not used yet.
        self._start = self._stop = 0
        #: The header or payload that is being received, and how much of it is there.
        self._target = _NOTHING
        self._filled = 0
        #: The header while it is received; None between frames, and while a payload is.
        self._header: bytearray | None = None
        self._payload_bytes = 0
        self._is_direct = False

    def get_buffer(self) -> memoryview:
        """Where the next bytes go."""
        self._is_direct = self.is_within_frame
        if self._is_direct:
            return self._target[self._filled :]
        if self._start:
            self._ahead[: self._stop - self._start] = self._ahead[self._start : self._stop]
            self._start, self._stop = 0, self._stop - self._start
        return self._ahead[self._stop :]

    def buffer_updated(self, count: int) -> None:
        """``count`` bytes came. Raises PsdistError for what is no frame, and what the receiver raises."""
        if self._is_direct:
            self._filled += count
        else:
            self._stop += count
        self.deliver()

    def deliver(self) -> None:
        """Delivers what is there, unless it is held. Raises as ``buffer_updated``."""
        while not self.is_held and self._advance():
            pass

    def discard_payload(self) -> None:
        """The memory for the payload that is being received is not to be written to any more."""
        if self.is_within_frame and self._header is None:
            self._target = memoryview(bytearray(len(self._target)))

    def _advance(self) -> bool:
        """Takes one more part of a frame; whether it was there."""
        if not self.is_within_frame:
            return self._begin()
        if missing := len(self._target) - self._filled:
            count = min(missing, self._stop - self._start)
            self._target[self._filled : self._filled + count] = self._ahead[self._start : self._start + count]
            self._start, self._filled = self._start + count, self._filled + count
            if count < missing:
                return False
        if self._header is not None:
            header, self._header = bytes(self._header), None
            self._target, self._filled = self.receiver.begin_frame(header, self._payload_bytes), 0
            if len(self._target) != self._payload_bytes:
                raise InternalError(f"{len(self._target)} bytes of memory for a payload of {self._payload_bytes}")
        else:
            self._target, self.is_within_frame = _NOTHING, False
            self.receiver.end_frame()
        return True

    def _begin(self) -> bool:
        if self._stop - self._start < PREFIX.size:
            return False
        header_bytes, self._payload_bytes = PREFIX.unpack_from(self._ahead, self._start)
        if header_bytes > self.header_bytes:
            raise LimitExceededError(f"a header of {header_bytes} bytes is longer than {self.header_bytes}")
        if self._payload_bytes > limits.DATA_MESSAGE_BYTES:
            raise LimitExceededError(
                f"a payload of {self._payload_bytes} bytes is longer than {limits.DATA_MESSAGE_BYTES}"
            )
        self._start += PREFIX.size
        self._header = bytearray(header_bytes)
        self._target, self._filled, self.is_within_frame = memoryview(self._header), 0, True
        return True


class FrameConnection(asyncio.BufferedProtocol):
    """One end of a connection. header_bytes: of the longest header."""

    def __init__(self, receiver: FrameReceiver, header_bytes: int = limits.SHARED_MESSAGE_BYTES) -> None:
        self._reader = FrameReader(receiver, header_bytes)
        self._transport: asyncio.Transport | None = None
        self._holds = 0
        #: Bytes that were received since the event loop ran other callbacks for this connection.
        self._in_turn = 0
        self._closed = False
        #: Frames of this turn of the event loop that are sent together.
        self._turn: list[bytes] = []
        self._writable = asyncio.Event()
        self._writable.set()
        #: Bytes that were received, and how often the other side did not read what was sent.
        self.received = 0
        self.paused = 0

    def hand_over(self, receiver: FrameReceiver, header_bytes: int = limits.SHARED_MESSAGE_BYTES) -> None:
        """Another receiver takes the frames after this one."""
        self._reader.receiver, self._reader.header_bytes = receiver, header_bytes

    def send(self, header: bytes, payload: memoryview = _NOTHING) -> None:
        """Sends a frame, and what ``send_soon`` had to send, in one write. The payload's memory must stay as it is
        while ``is_sending``. Does nothing after the end."""
        if self._transport is not None:
            turn, self._turn = self._turn, []
            head = PREFIX.pack(len(header), payload.nbytes) + header
            self._transport.writelines([*turn, head, payload] if payload.nbytes else [*turn, head])

    def send_soon(self, header: bytes) -> None:
        """Sends a frame without a payload together with others: the next one that has a payload, or all of this turn
        of the event loop. Each write would wake the other process. Does nothing after the end."""
        if self._transport is not None:
            if not self._turn:
                asyncio.get_running_loop().call_soon(self._send_turn)
            self._turn.append(PREFIX.pack(len(header), 0) + header)

    def _send_turn(self) -> None:
        turn, self._turn = self._turn, []
        if turn and self._transport is not None:
            self._transport.write(b"".join(turn))

    async def drain(self) -> None:
        """Waits until little is queued, or the connection has ended."""
        await self._writable.wait()

    @property
    def is_full(self) -> bool:
        """Whether the other side does not read what was sent."""
        return not self._writable.is_set()

    @property
    def is_sending(self) -> bool:
        """Whether memory of payloads may be referenced still."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    @property
    def is_cut_off(self) -> bool:
        """True if the other side's kernel acknowledges nothing of what was sent, though it was sent again and again. A
        process that is merely slow has a kernel that acknowledges."""
        if self._transport is None:
            return False
        connected = self._transport.get_extra_info("socket")
        if connected.family == socket.AF_UNIX:
            return False
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        retransmits, probes, since_acknowledged_ms = _TCP_INFO.unpack(info)
        in_vain = max(retransmits, probes) >= _RETRANSMITS
        return bool(in_vain and since_acknowledged_ms > 1e3 * limits.KEEPALIVE_SECONDS)

    @property
    def is_within_frame(self) -> bool:
        """Whether a frame has come in part."""
        return self._reader.is_within_frame

    def hold(self) -> None:
        """Pauses receiving until ``release`` was called as often as this."""
        self._holds += 1
        self._reader.is_held = True
        if self._holds == 1 and self._transport is not None:
            self._transport.pause_reading()

    def release(self) -> None:
        """Ends a ``hold``."""
        self._holds -= 1
        if self._holds == 0 and self._transport is not None:
            self._reader.is_held = False
            self._transport.resume_reading()
            self._received(self._reader.deliver)

    def discard_payload(self) -> None:
        """The memory for the payload that is being received is not to be written to any more."""
        self._reader.discard_payload()

    def abort(self) -> None:
        """Ends the connection at once; memory of payloads is not referenced any more."""
        self._closed = self._reader.is_held = True
        # The receiver refers to this object: without this a cycle would remain until a garbage collection.
        self._reader.receiver = _Nobody()
        self._writable.set()
        if self._transport is not None:
            if self.is_sending:
                _shut_down(self._transport)
            self._transport.abort()
            self._transport = None

    # --- what the loop calls ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._closed:
            transport.close()
            return
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_QUEUED_BYTES)
        connected = transport.get_extra_info("socket")
        if connected.family == socket.AF_UNIX:
            return
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connected.setsockopt(socket.IPPROTO_TCP, option, value)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.received += nbytes
        self._received(lambda: self._reader.buffer_updated(nbytes))
        self._in_turn += nbytes
        if self._in_turn >= _TURN_BYTES:
            self._in_turn = 0
            self.hold()
            asyncio.get_running_loop().call_soon(self.release)

    def pause_writing(self) -> None:
        self.paused += 1
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(None)

    # --- their parts --------------------------------------------------------------------------------------------------

    def _received(self, deliver: Callable[[], None]) -> None:
        try:
            deliver()
        except PsdistError as error:
            self._end(error)

    def _end(self, error: PsdistError | None) -> None:
        if not self._closed:
            receiver = self._reader.receiver
            self.abort()
            receiver.connection_ended(error)


class StallTimer:
    """Calls ``stalled`` with an error where nothing has moved on a connection for ``limits.STALL_SECONDS``: neither a
    frame that has come in part, nor what its other side does not read. From then on it does nothing."""

    def __init__(self, connection: FrameConnection, stalled: Callable[[PsdistError], None]) -> None:
        self._connection = connection
        self._stalled = stalled
        self._look(-1, -1)

    def _look(self, received: int, paused: int) -> None:
        """received, paused: of the connection when this was called before."""
        connection = self._connection
        self._timer = asyncio.get_running_loop().call_later(
            # A connection that is not full now, and is then, has paused once more.
            limits.STALL_SECONDS, self._look, connection.received, connection.paused if connection.is_full else -1
        )  # fmt: skip
        if connection.is_within_frame and connection.received == received:
            self._stop(f"the rest of a frame did not come in {limits.STALL_SECONDS:g} s")
        elif connection.is_full and connection.paused == paused:
            self._stop(f"answers were not read for {limits.STALL_SECONDS:g} s")

    def _stop(self, reason: str) -> None:
        self.cancel()
        self._stalled(LimitExceededError(reason))

    def cancel(self) -> None:
        """The connection has ended."""
        self._timer.cancel()


class PathTimer:
    """Watchdog for a connection whose packets get lost while its gRPC stream stands: a firewall may drop one port.
    Calls ``cut_off`` with an error, once."""

    def __init__(self, connection: FrameConnection, cut_off: Callable[[PsdistError], None]) -> None:
        self._connection = connection
        self._cut_off = cut_off
        self._schedule()

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(limits.KEEPALIVE_SECONDS, self._look)

    def _look(self) -> None:
        if self._connection.is_cut_off:
            self._cut_off(ClosedError("no packet of the TCP connection arrives: a new one, or gRPC, is used instead"))
        else:
            self._schedule()

    def cancel(self) -> None:
        """The connection has ended."""
        self._timer.cancel()


def _shut_down(transport: asyncio.Transport) -> None:
    """Ends the sending at once. After ``abort`` uvloop goes on with what is queued until its next turn, when the memory
    of payloads may have been written to."""
    with suppress(OSError), socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


class _Nobody:
    """The receiver of a connection that has ended."""

    def begin_frame(self, header: bytes, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def end_frame(self) -> None:
        pass

    def connection_ended(self, error: PsdistError | None) -> None:
        pass
