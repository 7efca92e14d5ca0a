"""Inputs for the ports of live processes, and conversations that send them.

With TLS most inputs are sent through it, with a certificate of any role. Others are sent in plaintext, or as TLS
with changed bytes in one flight: the greeting, the end of the handshake, or the data.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from psdist.link.frame_connection import PREFIX
from psdist.security.roles import Role
from psdist.v1 import server_pb2
from tests.fuzz.guard import why_harmful
from tests.fuzz.messages import MessageGenerator, mutate_bytes
from tests.fuzz.run import FuzzedRun

HOST: Final = "127.0.0.1"
_GREETING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
#: Time for the other side to react. It may also wait for more bytes.
_MOMENT_SECONDS: Final = 0.1
#: Of an answer, about so many bytes are returned.
_ANSWER_BYTES: Final = 1 << 17
#: Time to get a connection that the fuzzing speaks on.
OPEN_SECONDS: Final = 60.0
_WAYS: Final = ("inside", "inside", "inside", "plaintext", "changed")
#: Flights of a TLS client.
_FLIGHTS: Final = range(3)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Input:
    """Decides one input. rng: everything follows from it."""

    run: FuzzedRun
    rng: random.Random

    @property
    def generator(self) -> MessageGenerator:
        return MessageGenerator(self.rng, self.run.known)

    def noise(self) -> bytes:
        """Return bytes without a meaning."""
        return self.rng.randbytes(self.rng.choice((0, 1, 3, 9, 64, 5000, 1 << 17)))

    def frames(self, kind: Any, *, has_payloads: bool, opening: bytes = b"") -> bytes:
        """Return frames with random messages, some of them changed."""
        made = [opening] if opening else []
        for _ in range(self.rng.choice((1, 2, 4, 8))):
            message = self._message(kind)
            payload = self.generator.message(server_pb2.InstallRequest.DESCRIPTOR).payload if has_payloads else b""
            made.append(frame(message, payload if self.rng.random() < 0.5 else b"", has_payloads=has_payloads))
        data = b"".join(made)
        if self.rng.random() < 0.4:
            data = data[: len(opening)] + mutate_bytes(self.rng, data[len(opening) :])
        return data

    def _message(self, kind: Any) -> Any:
        while True:
            message = self.generator.message(kind)
            if not why_harmful("Share", [message], self.run.known):
                return message

    def http2(self) -> bytes:
        """Return HTTP/2 that begins well: frames of every kind with random flags, streams and contents."""
        made = [_GREETING]
        for _ in range(self.rng.choice((1, 3, 20))):
            content = self.rng.randbytes(self.rng.choice((0, 4, 5, 8, 30, 300)))
            size = len(content) if self.rng.random() < 0.9 else self.rng.choice((0, 1, 0xFFFFFF, 0x4001))
            kind, flags = self.rng.choice((*range(11), 200)), self.rng.choice((0, 1, 4, 5, 8, 0x20, 0xFF))
            stream = self.rng.choice((0, 1, 1, 2, 3, 0x7FFFFFFF, 0xFFFFFFFF))
            made.append(size.to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + content)
        return b"".join(made)

    def source(self) -> tuple[str, int]:
        """Return an own address on loopback: processes close connections of addresses that have failed often."""
        return f"127.0.{self.rng.randrange(256)}.{self.rng.randrange(1, 255)}", 0


def frame(message: Any, payload: bytes = b"", *, has_payloads: bool = True) -> bytes:
    """Return a frame of a link."""
    header = message.SerializeToString()
    prefix = PREFIX.pack(len(header), len(payload))
    return prefix + header + payload if has_payloads else prefix[:4] + header


async def tell(
    one: Input, data: bytes, port: int, *, is_service: bool = True, role: Role | None = None, always: bool = False
) -> str:
    """Send bytes to a port, and return their outcome.

    is_service: the port is one of a scheduler or server.
    role: of the certificate, with TLS; None for any.
    always: send them as they are, inside of TLS if there is TLS.
    """
    role = role or one.rng.choice((Role.WORKER, *one.run.certificates))
    way = "inside" if always else one.rng.choice(_WAYS)
    if not one.run.certificates:
        way = "plaintext"
    tls = one.run.tls(HOST, role, is_service=is_service)
    try:
        async with asyncio.timeout(OPEN_SECONDS):
            streams = await connect(one, port, **(tls if way == "inside" else {}))
            if way == "changed":
                data = await _changed_tls(one.rng, streams, tls, data)
    except (ConnectionError, ssl.SSLError):  # The certificate of a client role, for example, or TLS with changed bytes.
        return "refuses TLS"
    return (await converse(streams, data))[0]


async def connect(one: Input, port: int, **tls: Any) -> Streams:
    """Connect to a port from an address of this input's own."""
    return await asyncio.open_connection(HOST, port, local_addr=one.source(), **tls)


async def converse(streams: Streams, data: bytes) -> tuple[str, bytes]:
    """Send bytes, read what comes within a moment, and hang up. Return the outcome, and the first bytes of the
    answer."""
    reader, writer = streams
    outcome, answer = "waits for more", b""
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(_MOMENT_SECONDS):
                writer.write(data)
                await writer.drain()
                while received := await reader.read(1 << 16):
                    outcome, answer = "answers", answer + received if len(answer) < _ANSWER_BYTES else answer
                outcome = "closes"
    except (ConnectionError, ssl.SSLError):
        outcome = "closes"
    if writer.get_extra_info("ssl_object") is not None:
        writer.transport.abort()  # A farewell of TLS would wait for an answer.
    writer.close()
    with suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()
    return outcome, answer


async def _changed_tls(rng: random.Random, streams: Streams, tls: dict[str, Any], data: bytes) -> bytes:
    """Speak TLS up to one of its flights. Return that flight with changed bytes."""
    reader, writer = streams
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = tls["ssl"].wrap_bio(incoming, outgoing, server_hostname=tls["server_hostname"])
    flight = rng.choice(_FLIGHTS)
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    while flight > 0:
        writer.write(outgoing.read())
        if not (received := await reader.read(1 << 16)):
            raise ConnectionResetError("the handshake was ended")
        incoming.write(received)
        with suppress(ssl.SSLWantReadError):
            client.do_handshake()
            break
    if flight == _FLIGHTS[-1]:
        writer.write(outgoing.read())
        client.write(data or b"\0")
    return mutate_bytes(rng, outgoing.read())
