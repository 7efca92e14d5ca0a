"""Frames and memory files written, read and handed over by hand on a plain socket: see docs/internals/wire.md."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from google.protobuf.message import Message

_DIRECTORY = Path("/dev/shm")
#: Limit of a wait, generous for a busy machine.
PATIENCE_SECONDS = 60


class FrameSocket:
    """Connected socket. has_payloads: False if frames are headers alone, after a prefix of four bytes."""

    def __init__(self, connected: socket.socket, *, has_payloads: bool = True) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._prefix = struct.Struct("<II" if has_payloads else "<I")
        self._has_payloads = has_payloads

    @classmethod
    async def dial(cls, port: int, receive_bytes: int = 0) -> FrameSocket:
        """Connect to a port of this machine. receive_bytes: size of the receive buffer; 0 for the system's choice."""
        connecting = socket.socket()
        connecting.setblocking(False)
        if receive_bytes:
            connecting.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(connecting, ("127.0.0.1", port))
        return cls(connecting)

    def framed(self, message: Message | bytes, payload: bytes = b"") -> bytes:
        """Return the bytes of a frame."""
        header = message if isinstance(message, bytes) else message.SerializeToString()
        return self.prefix(len(header), len(payload)) + header + payload

    def prefix(self, header_bytes: int, payload_bytes: int = 0) -> bytes:
        """Return the prefix of a frame with these lengths."""
        return self._prefix.pack(*([header_bytes, payload_bytes] if self._has_payloads else [header_bytes]))

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def frame(self) -> tuple[bytes, bytes]:
        """Return the header and the payload of the next frame. Raises ConnectionError at the end."""
        sizes = self._prefix.unpack(await self.receive(self._prefix.size))
        return await self.receive(sizes[0]), await self.receive(sum(sizes[1:]))

    async def receive(self, size: int, most: int = 0) -> bytes:
        """Return ``size`` bytes; up to ``most`` if they have arrived. Raises ConnectionError at the end."""
        data = bytearray()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(data) < size:
                part = await asyncio.get_running_loop().sock_recv(self._socket, max(size, most) - len(data))
                if not part:
                    raise ConnectionError("the peer closed the connection")
                data += part
        return bytes(data)

    async def until_closed(self) -> None:
        """Wait until the peer has closed the connection."""
        with suppress(ConnectionError):
            while True:
                await self.frame()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


class FileOffer:
    """Memory file that is offered under ``name``."""

    def __init__(self, name: str, listener: socket.socket, fd: int) -> None:
        self.name = name
        self._is_taken = False
        self._taking = asyncio.ensure_future(self._hand_over(listener, fd))

    @staticmethod
    async def _hand_over(listener: socket.socket, fd: int) -> socket.socket:
        connected, _ = await asyncio.get_running_loop().sock_accept(listener)
        socket.send_fds(connected, [b"\0"], [fd])
        return connected

    async def taken(self) -> socket.socket:
        """Wait until the peer has taken the file. Returns the connection to it."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            connected = await self._taking
        self._is_taken = True
        return connected

    def withdraw(self) -> None:
        """Hand the file to nobody any more."""
        if not self._taking.cancel() and not self._is_taken:
            self._taking.result().close()


@contextmanager
def offered(fd: int) -> Iterator[FileOffer]:
    """Offer a memory file to one process of this host."""
    path = _DIRECTORY / f"psdist-{os.urandom(16).hex()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.setblocking(False)
        listener.bind(str(path))
        listener.listen(1)
        offer = FileOffer(path.name, listener, fd)
        try:
            yield offer
        finally:
            offer.withdraw()
            path.unlink()


async def received_file(connected: socket.socket) -> int:
    """Return the file that the peer sends on a connection."""
    connected.setblocking(False)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                _, fds, _, _ = socket.recv_fds(connected, 1, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await asyncio.sleep(0)
            else:
                (fd,) = fds
                return fd
