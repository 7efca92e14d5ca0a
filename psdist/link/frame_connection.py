"""Length-prefixed frames over TCP or a Unix socket, received without copying.

A frame is a prefix (header and payload length, 4 bytes each, little-endian), a header, and a payload. The receiver
inspects the header and returns the buffer that the payload belongs in; the payload is then read straight into it.
Prefixes and headers are read ahead into a small buffer, which keeps the number of reads per frame low. On a connection
without payloads the prefix is the header length alone.

Frames are delivered from the event loop's own callback, without a task. This keeps the latency of small calls low.

Payloads are sent from the caller's memory. It is borrowed until ``is_sending`` is false or ``abort`` is called.

Invariants: Lengths are checked before anything is allocated. Frames are delivered whole, once, in order, and never
after the connection ends. ``connection_ended`` is called exactly once, unless this side closed the connection.

A TCP connection whose packets are lost ends with an error, even if the peer still answers on its gRPC port: a firewall
may drop a single port. The end that sets ``ends_stalls`` also ends a connection without progress.

Headers are interpreted by the subclasses of ``MessageReceiver``.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import termios
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar, cast

from google.protobuf.message import Message

from psdist.errors import (
    ClosedError,
    InternalError,
    InvalidArgumentError,
    LimitExceededError,
    PsdistError,
    TcpUnavailableError,
)
from psdist.link import tls_layer
from psdist.wire import frames, limits

M = TypeVar("M", bound=Message)

PREFIX: Final = struct.Struct("<II")
_LENGTH_BYTES: Final = 4
#: Read-ahead bytes are copied, so keep this just large enough for headers.
_READ_AHEAD_BYTES: Final = 16 << 10
#: Default write-queue size at which ``drain`` starts to wait. Under uvloop the queue references payloads instead of
#: copying them.
QUEUED_BYTES: Final = 2 << 20
#: Bytes received before the event loop runs its other callbacks. Without this limit uvloop reads a connection up to 32
#: times per iteration, and a fast sender refills the socket each time: 100 MiB and more.
_TURN_BYTES: Final = 4 << 20
_NOTHING: Final = memoryview(b"")
#: Probe idle connections: a router on the path may have dropped its state.
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}


#: Fields of the kernel's struct tcp_info: failed retransmissions of the oldest bytes, failed window probes, and
#: milliseconds since the last acknowledgement.
_TCP_INFO: Final = struct.Struct("=2xBB52xI")
#: Fields of the same struct: window probes, segments sent and not acknowledged, and milliseconds since the last
#: acknowledgement.
_TCP_SILENCE: Final = struct.Struct("=3xB20xI28xI")
#: Answer of the ioctl TIOCOUTQ, which Linux calls SIOCOUTQ for sockets.
_INT: Final = struct.Struct("=i")
#: Retransmissions that take at least 3 s: the pause doubles from 0.2 s.
_RETRANSMITS: Final = 4


class FrameReceiver(Protocol):
    """Consumer of a connection's frames. Any PsdistError it raises ends the connection."""

    def begin_frame(self, header: bytes, size: int) -> memoryview:
        """Return a writable buffer of exactly ``size`` bytes for this frame's payload."""

    def end_frame(self) -> None:
        """Process the frame, which is complete."""

    def connection_ended(self, error: PsdistError | None) -> None:
        """Called once when the connection ends. error: the cause, or None if the peer closed it."""


class MessageReceiver(ABC, Generic[M]):
    """Consumer of frames whose headers are messages of type ``message_type``."""

    message_type: type[M]
    #: Latest message.
    message: M

    @abstractmethod
    def on_message(self, message: M) -> None:
        """Process a message, whose payload is complete."""

    @abstractmethod
    def connection_ended(self, error: PsdistError | None) -> None:
        """See ``FrameReceiver``."""

    def payload_buffer(self, message: M, size: int) -> memoryview:
        """Return a buffer for the payload of a message, which has none by default."""
        if size:
            raise InvalidArgumentError(f"a payload of {size} bytes that belongs to no slice")
        return _NOTHING

    def begin_frame(self, header: bytes, size: int) -> memoryview:
        """See ``FrameReceiver``."""
        self.message = frames.parse(self.message_type, header)
        return self.payload_buffer(self.message, size)

    def end_frame(self) -> None:
        """See ``FrameReceiver``."""
        self.on_message(self.message)


class FrameReader:
    """Split a byte stream into frames for ``receiver``. Other arguments as for ``FrameConnection``."""

    def __init__(self, receiver: FrameReceiver, header_bytes: int, *, has_payloads: bool = True) -> None:
        self.receiver = receiver
        self.header_bytes = header_bytes
        self.prefix_bytes = PREFIX.size if has_payloads else _LENGTH_BYTES
        self.is_held = False
        #: True between a frame's prefix and its last byte.
        self.is_within_frame = False
        self._ahead = memoryview(bytearray(_READ_AHEAD_BYTES))
        #: Unconsumed part of the read-ahead buffer.
        self._start = self._stop = 0
        #: Header or payload being received, and its number of bytes so far.
        self._target = _NOTHING
        self._filled = 0
        #: Header being received; None between frames and while receiving a payload.
        self._header: bytearray | None = None
        self._payload_bytes = 0
        self._is_direct = False
        #: True until the first frame of a connection that may be TCP.
        self._is_first = has_payloads

    def get_buffer(self) -> memoryview:
        """Return the buffer for the next read."""
        self._is_direct = self.is_within_frame
        if self._is_direct:
            return self._target[self._filled :]
        if self._start:
            self._ahead[: self._stop - self._start] = self._ahead[self._start : self._stop]
            self._start, self._stop = 0, self._stop - self._start
        return self._ahead[self._stop :]

    def buffer_updated(self, count: int) -> None:
        """Process ``count`` bytes just read, or with 0 those that arrived during a hold: deliver the complete frames,
        unless on hold. Raises PsdistError if they do not form a valid frame; errors of the receiver propagate."""
        if self._is_direct:
            self._filled += count
        else:
            self._stop += count
        while not self.is_held and self._take_frame():
            self._target, self.is_within_frame = _NOTHING, False
            self.receiver.end_frame()

    def discard_payload(self) -> None:
        """Redirect the rest of the current payload to scratch memory. The receiver's buffer is not written to again."""
        if self.is_within_frame and self._header is None:
            self._target = memoryview(bytearray(len(self._target)))

    def _take_frame(self) -> bool:
        """Read one frame into the receiver's memory, as far as its bytes arrived. Returns True once it is whole."""
        if not self.is_within_frame and not self._take_prefix():
            return False
        while not self.is_held:
            if missing := len(self._target) - self._filled:
                count = min(missing, self._stop - self._start)
                self._target[self._filled : self._filled + count] = self._ahead[self._start : self._start + count]
                self._start, self._filled = self._start + count, self._filled + count
                if count < missing:
                    return False
            if self._header is None:
                return True
            header, self._header = bytes(self._header), None
            self._target, self._filled = self.receiver.begin_frame(header, self._payload_bytes), 0
            if len(self._target) != self._payload_bytes:
                raise InternalError(f"{len(self._target)} bytes of memory for a payload of {self._payload_bytes}")
        return False

    def _take_prefix(self) -> bool:
        """Consume a prefix: the header comes next. Returns False if the prefix is incomplete."""
        start = self._start
        begin = start + self.prefix_bytes
        # An alert is shorter than a prefix. As a length its bytes would be over 64 KiB, and first frames are small.
        if self._is_first and tls_layer.is_tls(bytes(self._ahead[start : min(begin, self._stop)])):
            raise TcpUnavailableError(tls_layer.UNEXPECTED)
        if begin > self._stop:
            return False
        header_bytes = int.from_bytes(self._ahead[start : start + _LENGTH_BYTES], "little")
        self._payload_bytes = int.from_bytes(self._ahead[start + _LENGTH_BYTES : begin], "little")
        self._is_first = False
        if header_bytes > self.header_bytes:
            raise LimitExceededError(f"a header of {header_bytes} bytes is longer than {self.header_bytes}")
        if self._payload_bytes > limits.DATA_MESSAGE_BYTES:
            raise LimitExceededError(
                f"a payload of {self._payload_bytes} bytes is longer than {limits.DATA_MESSAGE_BYTES}"
            )
        self._start, self.is_within_frame = begin, True
        self._header = bytearray(header_bytes)
        self._target, self._filled = memoryview(self._header), 0
        return True


class FrameConnection(asyncio.BufferedProtocol):
    """One end of a connection.

    header_bytes: length limit for headers.
    has_payloads: False if frames are headers alone.
    waits_for_reader: stop receiving while the peer does not read, so that it cannot make this process queue more and
        more answers. Set it at one end only; with both ends waiting, the connection deadlocks.
    ends_stalls: end the connection if a frame stops halfway, or the peer does not read, for ``limits.STALL_SECONDS``.
    queued_bytes: size of the write queue at which ``drain`` starts to wait. With 0 it waits until the queue is empty.
    """

    def __init__(
        self,
        receiver: FrameReceiver,
        header_bytes: int = limits.SHARED_MESSAGE_BYTES,
        *,
        has_payloads: bool = True,
        waits_for_reader: bool = False,
        ends_stalls: bool = False,
        queued_bytes: int = QUEUED_BYTES,
    ) -> None:
        self._queued_bytes = queued_bytes
        self._reader = FrameReader(receiver, header_bytes, has_payloads=has_payloads)
        self._waits_for_reader = waits_for_reader
        self._ends_stalls = ends_stalls
        #: Watchdogs; None while they do not run.
        self._path_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._holds = 0
        #: Bytes received since the event loop last ran other callbacks.
        self._in_turn = 0
        self._closed = False
        #: Frames of this loop iteration, sent together.
        self._turn: list[bytes] = []
        self._writable = asyncio.Event()
        self._writable.set()
        #: Number of bytes received, and of times that the peer did not keep up reading.
        self._received = 0
        self._paused = 0

    async def open(self, connected: socket.socket) -> None:
        """Take over a connected Unix socket."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connected)

    def set_receiver(self, receiver: FrameReceiver) -> None:
        """Deliver subsequent frames to another receiver, with headers of the usual length."""
        self._reader.receiver, self._reader.header_bytes = receiver, limits.SHARED_MESSAGE_BYTES

    def allow_stalls(self) -> None:
        """Keep the connection if the peer pauses from now on: others know whether its process lives."""
        self._ends_stalls = False
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def send(self, header: bytes, payload: memoryview = _NOTHING) -> None:
        """Send a frame in one write, with the frames queued by ``send_soon``. The payload's memory must not change
        while ``is_sending``. Does nothing after the end."""
        if self._transport is not None:
            head = self._head(header, payload.nbytes)
            if self._turn or payload.nbytes:
                turn, self._turn = self._turn, []
                self._transport.writelines([*turn, head, payload] if payload.nbytes else [*turn, head])
            else:
                self._transport.write(head)

    def send_soon(self, header: bytes) -> None:
        """Queue a frame without payload. It is sent with the next payload frame, or at the end of this loop iteration,
        so that the peer is not woken once per frame. Does nothing after the end."""
        if self._transport is not None:
            if not self._turn:
                asyncio.get_running_loop().call_soon(self._send_turn)
            self._turn.append(self._head(header, 0))

    def _head(self, header: bytes, payload_bytes: int) -> bytes:
        return PREFIX.pack(len(header), payload_bytes)[: self._reader.prefix_bytes] + header

    def _send_turn(self) -> None:
        turn, self._turn = self._turn, []
        if turn and self._transport is not None:
            self._transport.write(b"".join(turn))

    async def drain(self) -> None:
        """Wait until the write queue is short or the connection has ended."""
        await self._writable.wait()

    @property
    def is_full(self) -> bool:
        """True if the peer is not reading fast enough to keep the write queue short."""
        return not self._writable.is_set()

    @property
    def is_sending(self) -> bool:
        """True while payload memory may still be borrowed."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    @property
    def is_local(self) -> bool:
        """True if both ends of a TCP connection have the same address, so that they are on one host."""
        connected = None if self._transport is None else self._transport.get_extra_info("socket")
        return connected is not None and bool(connected.getpeername()[0] == connected.getsockname()[0])

    @property
    def is_cut_off(self) -> bool:
        """True if the peer's kernel acknowledges nothing despite repeated retransmissions. The kernel of a merely slow
        process still acknowledges."""
        if self._transport is None:
            return False
        connected = self._transport.get_extra_info("socket")
        if connected.family == socket.AF_UNIX:
            return False
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        retransmits, probes, since_acknowledged_ms = _TCP_INFO.unpack(info)
        in_vain = max(retransmits, probes) >= _RETRANSMITS
        return bool(in_vain and since_acknowledged_ms > 1e3 * limits.KEEPALIVE_SECONDS)

    def hold(self) -> None:
        """Pause receiving. Holds nest: each needs its own ``release``."""
        self._holds += 1
        self._reader.is_held = True
        if self._holds == 1 and self._transport is not None:
            self._transport.pause_reading()

    def release(self) -> None:
        """End a ``hold``."""
        self._holds -= 1
        if self._holds == 0 and self._transport is not None:
            self._reader.is_held = False
            self._transport.resume_reading()
            try:
                self._reader.buffer_updated(0)
            except PsdistError as error:
                self._end(error)

    def discard_payload(self) -> None:
        """Redirect the rest of the current payload to scratch memory. The receiver's buffer is not written to again."""
        self._reader.discard_payload()

    def abort(self) -> None:
        """Close immediately and release all borrowed payload memory."""
        self._closed = self._reader.is_held = True
        # Break the reference cycle with the receiver.
        self._reader.receiver = _DiscardingReceiver()
        self._writable.set()
        for timer in (self._path_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        if self._transport is not None:
            if self.is_sending:
                _shut_down(self._transport)
            self._transport.abort()
            self._transport = None

    # --- event loop callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._closed:
            transport.close()
            return
        self._transport = cast(asyncio.Transport, transport)
        if self._reader.prefix_bytes == PREFIX.size:
            self._transport.set_write_buffer_limits(self._queued_bytes)
        if self._ends_stalls:
            self._check_stall(-1, -1)
        connected = transport.get_extra_info("socket")
        if connected.family == socket.AF_UNIX:
            return
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        self._check_path()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._received += nbytes
        try:
            self._reader.buffer_updated(nbytes)
        except PsdistError as error:
            self._end(error)
        self._in_turn += nbytes
        if self._in_turn >= _TURN_BYTES:
            self._in_turn = 0
            self.hold()
            asyncio.get_running_loop().call_soon(self.release)

    def pause_writing(self) -> None:
        self._paused += 1
        self._writable.clear()
        if self._waits_for_reader:
            self.hold()

    def resume_writing(self) -> None:
        self._writable.set()
        if self._waits_for_reader:
            self.release()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc if isinstance(exc, PsdistError) else None)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _end(self, error: PsdistError | None) -> None:
        if not self._closed:
            receiver = self._reader.receiver
            self.abort()
            receiver.connection_ended(error)

    def _check_stall(self, received: int, paused: int) -> None:
        """received, paused: counters at the previous check."""
        # A connection that fills up later has paused once more by then.
        counters = self._received, self._paused if self.is_full else -1
        self._stall_timer = asyncio.get_running_loop().call_later(limits.STALL_SECONDS, self._check_stall, *counters)
        if self._reader.is_within_frame and self._received == received:
            self._end(LimitExceededError(f"the rest of a frame did not arrive within {limits.STALL_SECONDS:g} s"))
        elif self.is_full and self._paused == paused:
            self._end(LimitExceededError(f"answers were not read for {limits.STALL_SECONDS:g} s"))

    def _check_path(self) -> None:
        self._path_timer = asyncio.get_running_loop().call_later(limits.KEEPALIVE_SECONDS, self._check_path)
        if self.is_cut_off:
            self._end(ClosedError("no packets arrive on the TCP connection: using a new one, or gRPC"))


def is_unanswered(connection: FrameConnection, seconds: float) -> bool:
    """True if the peer's kernel has acknowledged nothing for ``seconds``, though something was sent to it. The kernel
    of a slow or stopped process still acknowledges."""
    if connection._transport is None:
        return True
    connected = connection._transport.get_extra_info("socket")
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_SILENCE.size)
    probes, unacknowledged, since_acknowledged_ms = _TCP_SILENCE.unpack(info)
    return bool((probes or unacknowledged) and since_acknowledged_ms > 1e3 * seconds)


def unacknowledged_bytes(connection: FrameConnection) -> int:
    """Return the bytes that are queued here, or sent and not acknowledged by the peer's kernel; 0 after the end."""
    if connection._transport is None:
        return 0
    descriptor = connection._transport.get_extra_info("socket").fileno()
    held = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(_INT.size)) if descriptor >= 0 else bytes(_INT.size)
    return connection._transport.get_write_buffer_size() + int(_INT.unpack(held)[0])


def certificate_names(connection: FrameConnection) -> list[str]:
    """Return the SANs of the peer's certificate, without their kinds; none without TLS."""
    certificate = None if connection._transport is None else connection._transport.get_extra_info("peercert")
    return [name for _, name in (certificate or {}).get("subjectAltName", ())]


def _shut_down(transport: asyncio.Transport) -> None:
    """Stop sending now. After ``abort``, uvloop keeps flushing its queue until the next loop iteration, by which time
    payload memory may have been reused."""
    with suppress(OSError), socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


class _DiscardingReceiver:
    """Receiver of a closed connection: discards everything."""

    def begin_frame(self, header: bytes, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def end_frame(self) -> None:
        pass

    def connection_ended(self, error: PsdistError | None) -> None:
        pass
