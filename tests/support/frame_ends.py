"""Connections of frames: psdist's end, and a peer that is written and read by hand, with or without TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np

from psdist.errors import PsdistError
from psdist.link.frame_connection import FrameConnection
from psdist.link.tls_layer import TlsLayer
from psdist.security.tls import TlsFiles
from tests.support.frame_socket import PATIENCE_SECONDS, FrameSocket

HOST = "127.0.0.1"


class FrameEnd:
    """End of a connection: its received frames, and the errors it ended with. memory: buffer for payloads."""

    def __init__(self, memory: np.ndarray | None = None, **options: bool) -> None:
        self.headers: list[bytes] = []
        self.payloads: list[bytes] = []
        self.ends: list[PsdistError | None] = []
        self.changed = asyncio.Event()
        self.connection = FrameConnection(self, **options)
        self._memory = memory
        self._target = memoryview(b"")

    def begin_frame(self, header: bytes, size: int) -> memoryview:
        self.headers.append(header)
        self._target = (np.empty(size, np.uint8) if self._memory is None else self._memory)[:size].data
        return self._target

    def end_frame(self) -> None:
        self.payloads.append(bytes(self._target))
        self.changed.set()

    def connection_ended(self, error: PsdistError | None) -> None:
        self.ends.append(error)
        self.changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a frame or the end makes this true."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def ended(self) -> PsdistError | None:
        """Wait for the only end, and return its error."""
        await self.until(lambda: self.ends)
        assert len(self.ends) == 1
        return self.ends[0]

    async def listen(self, context: ssl.SSLContext | None = None) -> tuple[asyncio.Server, int]:
        """Accept connections, with TLS if there is a context. Returns the port, too."""

        def accept() -> asyncio.BufferedProtocol:
            return self.connection if context is None else TlsLayer(self.connection, context, None)

        server = await asyncio.get_running_loop().create_server(accept, HOST, 0)
        return server, int(server.sockets[0].getsockname()[1])


class TlsFrameSocket(FrameSocket):
    """Peer with a TLS of its own, which can send any part of its records."""

    def __init__(self, connected: socket.socket, context: ssl.SSLContext) -> None:
        super().__init__(connected)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname=HOST)

    async def shake_hands(self) -> None:
        """Complete the handshake."""
        while True:
            try:
                self.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await super().send(self.outgoing.read())
                self.incoming.write(await super().receive(1, most=1 << 16))
        await super().send(self.outgoing.read())

    def encrypted(self, data: bytes) -> bytes:
        """Return the records with this data."""
        self.tls.write(data)
        return self.outgoing.read()

    async def send(self, data: bytes) -> None:
        await super().send(self.encrypted(data))

    async def send_raw(self, data: bytes) -> None:
        """Send bytes that are records already."""
        await super().send(data)

    async def receive(self, size: int, most: int = 0) -> bytes:
        data = b""
        while len(data) < size:
            try:
                data += self.tls.read(size - len(data))
            except ssl.SSLWantReadError:
                self.incoming.write(await super().receive(1, most=1 << 16))
        return data


@asynccontextmanager
async def frame_pair(
    end: FrameEnd, tls: TlsFiles | None = None, *, has_payloads: bool = True
) -> AsyncIterator[FrameSocket]:
    """Connect an end to a peer. tls: files of both sides."""
    server, port = await end.listen(None if tls is None else tls.server_context())
    dialing = socket.socket()
    dialing.setblocking(False)
    await asyncio.get_running_loop().sock_connect(dialing, (HOST, port))
    peer = FrameSocket(dialing, has_payloads=has_payloads)
    if tls is not None:
        peer = TlsFrameSocket(dialing, tls.client_context())
        await peer.shake_hands()
    await peer.send(peer.framed(b"hello"))
    await end.until(lambda: end.payloads)
    end.headers.clear()
    end.payloads.clear()
    try:
        yield peer
    finally:
        peer.close()
        end.connection.abort()
        server.close()
