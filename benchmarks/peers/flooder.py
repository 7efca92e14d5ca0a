"""Stranger without a token who floods a port: ``python -m benchmarks.peers.flooder KIND HOST PORT COUNT``.

It speaks a minimal hand-written HTTP/2 to use little processor time of its own, so that the load is on the attacked
process. It runs until its standard input ends, then prints a line of JSON: the answers, how often the other side closed
a connection, and its own processor time.

``calls``: complete calls without a token, one at a time on each connection. ``ping``: PING frames, 64 at a time.
``settings``: SETTINGS frames, 64 at a time. ``headers``: calls with 48 KiB of headers, one at a time.
``continuation``: a call whose headers never end. ``reset``: calls that are reset as soon as they have started.
``churn``: connections that say hello and hang up. ``handshakes``: TLS handshakes without a certificate, one on each
connection. ``half-open``: connections that begin TLS and say no more. ``idle``: connections that say hello and then
only answer pings. ``silent``: connections that say nothing. ``slow``: connections that say hello byte by byte, over a
minute. A connection that the other side closes is reopened, after a pause if it was closed immediately; ``reset``,
``continuation``, ``churn`` and ``handshakes`` make no pause.
"""

from __future__ import annotations

import json
import resource
import selectors
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable
from typing import Final

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 8, 9
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_PINGS_AT_ONCE: Final = 64
_RESETS_AT_ONCE: Final = 16
_STREAM_IDS: Final = 1 << 30
#: Pause before reopening a connection that was refused or closed without an answer.
_RETRY_SECONDS: Final = 0.1
#: Connections that are opened concurrently: the queue of a listening socket is short.
_OPENING_AT_ONCE: Final = 100
#: Bytes that a slow connection sends in a second, roughly.
_SLOW_SECONDS: Final = 1.0
KINDS: Final = (
    "calls", "ping", "settings", "headers", "continuation", "reset", "churn", "handshakes",
    "half-open", "idle", "silent", "slow",
)  # fmt: skip
#: Kinds that send whenever the other side reads, without waiting for answers.
_PUSHING: Final = ("reset", "continuation")
#: Kinds that speak TLS, without a certificate.
_TLS: Final = ("handshakes", "half-open")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return an HTTP/2 frame."""
    return struct.pack("!IBBI", len(payload), kind, flags, stream)[1:] + payload


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\0" + _length(len(name)) + name + _length(len(value)) + value


def _length(size: int) -> bytes:
    """Return the length of a text in HPACK: seven bits, then more of them."""
    if size < 127:
        return bytes([size])
    made, size = [127], size - 127
    while size >= 128:
        made.append(128 | size & 127)
        size >>= 7
    return bytes([*made, size])


#: Headers of a PushPull without a token, in literals that need no table.
_CALL_HEADERS: Final = b"".join(
    _literal(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/psdist.v1.ServerService/PushPull"),
        (b":authority", b"server"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
)
_CALL_BODY: Final = b"\0" + struct.pack("!I", 64) + bytes(64)
_LARGE_HEADERS: Final = _CALL_HEADERS + _literal(b"x-large", bytes(48 << 10).replace(b"\0", b"x"))
_HELLO: Final = _PREFACE + frame(_SETTINGS, 0, 0)


def _context() -> ssl.SSLContext:
    """Return a context without a certificate, which accepts any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


class _Connection:
    """One connection of the flood."""

    def __init__(self, flood: Flood) -> None:
        self.flood = flood
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.connect_ex(flood.address)
        self.stream = 1
        self.answered = 0
        self._received = b""
        self._unsent = b""
        self._from_peer, self._to_peer = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = flood.context.wrap_bio(self._from_peer, self._to_peer) if flood.context is not None else None

    def send(self, data: bytes) -> None:
        """Send as much as the other side accepts, and the rest later."""
        self._unsent += data
        try:
            sent = self.socket.send(self._unsent)
        except BlockingIOError:
            return
        self._unsent = self._unsent[sent:]

    def on_open(self) -> None:
        if self._tls is not None:
            self._shake_hands()
        elif self.flood.kind not in ("silent", "slow"):
            self.send(_HELLO)
            self.flood.next[self.flood.kind](self)

    def on_readable(self) -> None:
        """Read the received bytes. Raises ConnectionError at the end."""
        if self._unsent:
            self.send(b"")
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError
        if self._tls is not None:
            if self.flood.kind == "handshakes":
                self._from_peer.write(data)
                self._shake_hands()
            return
        self._received += data
        while len(self._received) >= 9:
            size = int.from_bytes(self._received[:3])
            if len(self._received) < 9 + size:
                return
            _, kind, flags, _ = struct.unpack("!IBBI", b"\0" + self._received[:9][:3] + self._received[3:9])
            payload, self._received = self._received[9 : 9 + size], self._received[9 + size :]
            self._on_frame(kind, flags, payload)

    def _shake_hands(self) -> None:
        """Send the next part of a handshake, and count it once it is complete on this side."""
        assert self._tls is not None
        try:
            self._tls.do_handshake()
            self.flood.answered += 1
        except ssl.SSLWantReadError:
            pass
        self.send(self._to_peer.read())

    def _on_frame(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            self.send(frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self.send(frame(_PING, _ACK, 0, payload))
        elif (kind == _HEADERS and flags & _END_STREAM) or kind == _RESET or (flags & _ACK and self._counts(kind)):
            self.answered += 1
            self.flood.answered += 1
            if kind in (_HEADERS, _RESET) or self.answered % _PINGS_AT_ONCE == 0:
                self.flood.next[self.flood.kind](self)

    def _counts(self, kind: int) -> bool:
        return kind == _PING or (kind == _SETTINGS and self.flood.kind == "settings")


class Flood:
    """``count`` connections that are kept open, however the other side reacts."""

    def __init__(self, kind: str, address: tuple[str, int], count: int) -> None:
        self.kind, self.address, self.count = kind, address, count
        self.answered = self.closed = self.opened = 0
        self.next: dict[str, Callable[[_Connection], None]] = {
            "calls": self._call, "ping": self._ping, "settings": self._settings, "headers": self._headers,
            "continuation": self._continue, "reset": self._reset, "churn": self._hang_up,
            "handshakes": lambda _: None, "half-open": lambda _: None,
            "idle": lambda _: None, "silent": lambda _: None, "slow": lambda _: None,
        }  # fmt: skip
        self.context = _context() if kind in _TLS else None
        self._selector = selectors.DefaultSelector()
        self._opening: dict[_Connection, None] = {}
        self._open: set[_Connection] = set()
        self._retry_at = 0.0
        self._slow_at = 0.0

    def run(self) -> None:
        """Flood until the standard input ends."""
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            self._refill()
            for key, events in self._selector.select(0.05):
                if key.fileobj is sys.stdin:
                    return
                self._step(key.data, events)
            if self.kind in _PUSHING:
                for connection in list(self._open):
                    self._try(connection, self.next[self.kind])
            if self.kind == "slow" and time.monotonic() > self._slow_at:
                self._slow_at = time.monotonic() + _SLOW_SECONDS
                for connection in list(self._open):
                    self._try(connection, self._greet)

    def _refill(self) -> None:
        if time.monotonic() < self._retry_at:
            return
        while len(self._open) + len(self._opening) < self.count and len(self._opening) < _OPENING_AT_ONCE:
            connection = _Connection(self)
            self._opening[connection] = None
            self._selector.register(connection.socket, selectors.EVENT_WRITE, connection)

    def _step(self, connection: _Connection, events: int) -> None:
        if connection in self._opening:
            del self._opening[connection]
            if connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._forget(connection)
                return
            self._open.add(connection)
            self.opened += 1
            self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
            self._try(connection, _Connection.on_open)
        elif events & selectors.EVENT_READ:
            self._try(connection, _Connection.on_readable)

    def _try(self, connection: _Connection, step: Callable[[_Connection], None]) -> None:
        try:
            step(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        self.closed += 1
        self._open.discard(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if not connection.answered and self.kind not in ("churn", "handshakes", *_PUSHING):
            self._retry_at = time.monotonic() + _RETRY_SECONDS

    def _call(self, connection: _Connection) -> None:
        stream, connection.stream = connection.stream, connection.stream + 2
        connection.send(
            frame(_HEADERS, _END_HEADERS, stream, _CALL_HEADERS) + frame(_DATA, _END_STREAM, stream, _CALL_BODY)
        )

    def _ping(self, connection: _Connection) -> None:
        connection.send(frame(_PING, 0, 0, bytes(8)) * _PINGS_AT_ONCE)

    def _settings(self, connection: _Connection) -> None:
        connection.send(frame(_SETTINGS, 0, 0) * _PINGS_AT_ONCE)

    def _headers(self, connection: _Connection) -> None:
        stream, connection.stream = connection.stream, connection.stream + 2
        connection.send(frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, _LARGE_HEADERS))

    def _continue(self, connection: _Connection) -> None:
        if connection._unsent:
            connection.send(b"")
            return
        if connection.stream == 1:
            connection.stream = 3
            connection.send(frame(_HEADERS, 0, 1, _CALL_HEADERS))
        more = frame(_CONTINUATION, 0, 1, _literal(b"x-more", b"y" * 100))
        connection.send(more * _RESETS_AT_ONCE)

    def _greet(self, connection: _Connection) -> None:
        at, connection.stream = connection.stream - 1, connection.stream + 1
        connection.send(_HELLO[at : at + 1])

    def _reset(self, connection: _Connection) -> None:
        if connection._unsent:
            connection.send(b"")
            return
        for _ in range(_RESETS_AT_ONCE):
            stream, connection.stream = connection.stream, connection.stream + 2
            connection.send(
                frame(_HEADERS, _END_HEADERS, stream, _CALL_HEADERS) + frame(_RESET, 0, stream, struct.pack("!I", 8))
            )
        if connection.stream > _STREAM_IDS:
            raise ConnectionResetError

    def _hang_up(self, connection: _Connection) -> None:
        raise ConnectionResetError

    @property
    def result(self) -> dict[str, float]:
        """The counters as one JSON object."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "answered": self.answered,
            "closed": self.closed,
            "opened": self.opened,
            "open": len(self._open),
            "cpu_seconds": used.ru_utime + used.ru_stime,
        }


def main(argv: list[str]) -> int:
    kind, host, port, count = argv[0], argv[1], int(argv[2]), int(argv[3])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    flood = Flood(kind, (host, port), count)
    flood.run()
    print(json.dumps(flood.result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
