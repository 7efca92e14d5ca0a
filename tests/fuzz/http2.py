"""HTTP/2 client for fuzzing: many concurrent gRPC calls on one connection, made from bytes.

It does no more than the fuzzing needs: requests are complete when a call starts, and answers are counted. So a call
costs a small part of the CPU time of a client library, and a call that waits is ended by a reset of its stream.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

from hpack import Decoder

from psdist.wire.status import DETAIL_KEY

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_HEADER_TABLE_SIZE, _INITIAL_WINDOW_SIZE = 1, 4
_CANCEL: Final = 8
_WINDOW_MAX: Final = (1 << 31) - 1
#: Given back to the peer when it has used this much of the connection's window.
_RENEWED: Final = 1 << 29
_FRAME_MAX: Final = 16384
#: Largest number of decoded blocks of headers to store: most answers have one of a few.
_BLOCKS_MAX: Final = 4096
_CANCELLED: Final = 1

Headers = dict[str, str]


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a call. status: gRPC's; 1 if this side ended the call. message: gRPC's. detail: psdist's error, encoded.
    answers: frames with data before the end."""

    status: int
    message: str = ""
    detail: bytes = b""
    answers: int = 0


@dataclass(slots=True)
class _Call:
    ended: asyncio.Future[Ended]
    body: memoryview
    window: int
    is_half_closed: bool
    answers_max: int
    answers: int = 0
    block: bytearray = field(default_factory=bytearray)


def request_block(path: str, authority: str, metadata: Sequence[tuple[str, str]], scheme: str = "http") -> bytes:
    """Return the encoded headers of a request; they use no table, so that any connection may send them."""
    pairs = [(":method", "POST"), (":scheme", scheme), (":path", path), (":authority", authority)]
    pairs += [("content-type", "application/grpc"), ("te", "trailers"), *metadata]
    return b"".join(b"\0" + _text(name.encode()) + _text(value.encode()) for name, value in pairs)


def _text(data: bytes) -> bytes:
    """Return a text as HPACK encodes it, without Huffman's code."""
    if len(data) < 127:
        return bytes((len(data),)) + data
    size, encoded = len(data) - 127, bytearray((127,))
    while size >= 128:
        encoded.append(size % 128 + 128)
        size //= 128
    return bytes((*encoded, size)) + data


def body(messages: Sequence[bytes]) -> bytes:
    """Return the bytes of a request's messages."""
    return b"".join(b"\0" + len(one).to_bytes(4) + one for one in messages)


def _frame(kind: int, flags: int, stream: int, content: bytes | memoryview = b"") -> bytes:
    return len(content).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + content


def _setting(name: int, value: int) -> bytes:
    return name.to_bytes(2) + value.to_bytes(4)


class Http2Connection(asyncio.Protocol):
    """A connection. Calls of a connection that is lost raise ConnectionError."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._input = bytearray()
        self._calls: dict[int, _Call] = {}
        self._next_stream = 1
        #: Bytes that may be sent, on the connection and at first on a stream; bytes received since the last renewal.
        self._window = self._stream_window = 65535
        self._received = 0
        self._decoded: dict[bytes, Headers] = {}
        #: True once the peer has said goodbye.
        self._is_leaving = False

    @property
    def is_open(self) -> bool:
        """True if calls can be made, and stream numbers are left."""
        is_connected = self._transport is not None and not self._transport.is_closing()
        return is_connected and not self._is_leaving and self._next_stream < _WINDOW_MAX - 2

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def start(
        self, headers: bytes, body: bytes, *, is_half_closed: bool = True, answers_max: int = 1 << 30
    ) -> tuple[int, asyncio.Future[Ended]]:
        """Start a call. Return its stream, and its end.

        headers: of ``request_block``.
        body: complete messages.
        is_half_closed: False to leave the stream of requests open.
        answers_max: end the call after this many.
        """
        if self._transport is None or not self.is_open:
            raise ConnectionError("the connection is closed")
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        ended = asyncio.get_running_loop().create_future()
        call = _Call(ended, memoryview(body), self._stream_window, is_half_closed, answers_max)
        self._calls[stream] = call
        self._transport.write(_frame(_HEADERS, _END_HEADERS, stream, headers))
        self._send_body(stream, call)
        return stream, ended

    def cancel(self, stream: int) -> None:
        """End a call, if it has not ended."""
        if stream in self._calls and self._transport is not None and not self._transport.is_closing():
            self._transport.write(_frame(_RESET, 0, stream, _CANCEL.to_bytes(4)))
            self._end(stream, Ended(_CANCELLED, answers=self._calls[stream].answers))

    # --- sending ---

    def _send_body(self, stream: int, call: _Call) -> None:
        """Send as much of the body as the windows allow."""
        assert self._transport is not None
        while call.body or call.is_half_closed:
            size = min(len(call.body), self._window, call.window, _FRAME_MAX)
            if call.body and not size:
                return
            is_last = size == len(call.body) and call.is_half_closed
            self._transport.write(_frame(_DATA, _END_STREAM if is_last else 0, stream, call.body[:size]))
            call.body, self._window, call.window = call.body[size:], self._window - size, call.window - size
            if is_last:
                call.is_half_closed = False

    def _send_all(self) -> None:
        for stream, call in list(self._calls.items()):
            if self._window <= 0:
                break
            if call.body:
                self._send_body(stream, call)

    # --- receiving ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        settings = _setting(_HEADER_TABLE_SIZE, 0) + _setting(_INITIAL_WINDOW_SIZE, _WINDOW_MAX)
        grant = _frame(_WINDOW, 0, 0, (_WINDOW_MAX - 65535).to_bytes(4))
        transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + grant)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for call in self._calls.values():
            if not call.ended.done():
                call.ended.set_exception(ConnectionError(f"the connection was lost during the call: {exc}"))
        self._calls.clear()

    def data_received(self, data: bytes) -> None:
        self._input += data
        for kind, flags, stream, content in self._frames():
            self._receive(kind, flags, stream, content)

    def _frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        at, data = 0, self._input
        while len(data) - at >= 9:
            end = at + 9 + int.from_bytes(data[at : at + 3])
            if len(data) < end:
                break
            kind, flags, stream = data[at + 3], data[at + 4], int.from_bytes(data[at + 5 : at + 9])
            content = bytes(data[at + 9 : end])
            at = end
            yield kind, flags, stream, content
        del data[:at]

    def _receive(self, kind: int, flags: int, stream: int, content: bytes) -> None:
        if kind == _DATA:
            self._renew(len(content))
        if kind in (_SETTINGS, _PING):
            self._receive_control(kind, flags, content)
        elif kind == _WINDOW:
            self._widen(stream, int.from_bytes(content))
        elif (call := self._calls.get(stream)) is None:
            self._is_leaving = self._is_leaving or kind == _GOAWAY  # Otherwise the call has ended.
        elif kind == _DATA:
            call.answers += 1
            if call.answers >= call.answers_max:
                self.cancel(stream)
        elif kind in (_HEADERS, _CONTINUATION):
            self._receive_headers(stream, call, flags, content)
        elif kind == _RESET:
            self._end(stream, Ended(_CANCELLED, f"reset with {int.from_bytes(content)}", answers=call.answers))

    def _receive_control(self, kind: int, flags: int, content: bytes) -> None:
        assert self._transport is not None
        if flags & _ACK:
            return
        self._transport.write(_frame(kind, _ACK, 0, content if kind == _PING else b""))
        for at in range(0, len(content), 6) if kind == _SETTINGS else ():
            if int.from_bytes(content[at : at + 2]) == _INITIAL_WINDOW_SIZE:
                change = int.from_bytes(content[at + 2 : at + 6]) - self._stream_window
                self._stream_window += change
                for call in self._calls.values():
                    call.window += change
        self._send_all()

    def _receive_headers(self, stream: int, call: _Call, flags: int, content: bytes) -> None:
        call.block += content
        if not flags & _END_HEADERS:
            return
        headers = self._headers(bytes(call.block))
        call.block.clear()
        if (status := headers.get("grpc-status")) is not None:
            detail = b64decode(headers.get(DETAIL_KEY, "") + "==")
            self._end(stream, Ended(int(status), unquote(headers.get("grpc-message", "")), detail, call.answers))
        elif headers.get(":status", "200") != "200":
            self._end(stream, Ended(2, f"HTTP status {headers[':status']}"))

    def _headers(self, block: bytes) -> Headers:
        """Return the meaning of a block: it depends on nothing else, because there is no table."""
        if (found := self._decoded.get(block)) is None:
            if len(self._decoded) >= _BLOCKS_MAX:
                self._decoded.clear()
            decoder = Decoder(max_header_list_size=1 << 20)
            decoder.header_table_size = 0
            found = self._decoded[block] = dict(decoder.decode(block))
        return found

    def _renew(self, size: int) -> None:
        self._received += size
        if self._received >= _RENEWED and self._transport is not None:
            self._transport.write(_frame(_WINDOW, 0, 0, self._received.to_bytes(4)))
            self._received = 0

    def _widen(self, stream: int, size: int) -> None:
        if stream == 0:
            self._window += size
            self._send_all()
        elif (call := self._calls.get(stream)) is not None:
            call.window += size
            self._send_body(stream, call)

    def _end(self, stream: int, end: Ended) -> None:
        call = self._calls.pop(stream)
        if not call.ended.done():
            call.ended.set_result(end)


async def connect(host: str, port: int, **tls: Any) -> Http2Connection:
    """Connect to a gRPC port. tls: ``ssl`` and ``server_hostname``, as for asyncio."""
    _, connection = await asyncio.get_running_loop().create_connection(Http2Connection, host, port, **tls)
    return connection
