"""``FaultProxy``: a TCP proxy that makes connections slow, silent or broken while they are open.

It copies bytes in both directions between its clients and one address, as ``fault`` says. The fault may be replaced at
any time, which affects open connections immediately. Packets are not modelled, since TCP works as usual on both sides.
The proxy listens on loopback by default.

A connection that lost bytes (``drop``) is reset when its bytes would pass again: neither side could interpret them.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

#: Treatment of the bytes of one direction: they pass, are held until they may pass, or are dropped.
Passage = Literal["pass", "hold", "drop"]

_READ_BYTES: Final = 1 << 16
#: Longest queue of one direction in pieces; beyond it the sender is not read from.
_PIECES_MAX: Final = 64
_RESET: Final = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Fault:
    """Treatment of bytes. By default they pass unchanged.

    latency_seconds, jitter_seconds: delay of each piece, and the longest random addition; order is kept.
    bytes_per_second: of each connection and direction; 0 is no limit.
    up, down: the direction from the client to the target, and back.
    reset_after: bytes of a direction that pass, from when the fault is set, before the connection is reset.
    close_seconds: delay of the end of a stream.
    """

    latency_seconds: float = 0.0
    jitter_seconds: float = 0.0
    bytes_per_second: float = 0.0
    up: Passage = "pass"
    down: Passage = "pass"
    reset_after: int | None = None
    close_seconds: float = 0.0


BLACKHOLE: Final = Fault(up="drop", down="drop")
HELD: Final = Fault(up="hold", down="hold")
HALF_OPEN: Final = Fault(down="drop")


class FaultProxy:
    """A listener for ``target`` (host, port), which may be replaced for new connections."""

    def __init__(self, target: tuple[str, int], rng: random.Random) -> None:
        self.target = target
        self.accepted = 0
        self._rng = rng
        self._fault = Fault()
        self._server: asyncio.Server | None = None
        self._connections: dict[_Connection, asyncio.Task[None]] = {}

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Start listening. Returns the address (host:port) to connect to instead of the target's."""
        self._server = await asyncio.start_server(self._accept, host, port)
        bound: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return f"{bound[0]}:{bound[1]}"

    @property
    def fault(self) -> Fault:
        """The current treatment of bytes."""
        return self._fault

    @fault.setter
    def fault(self, fault: Fault) -> None:
        self._fault = fault
        for connection in list(self._connections):
            connection.on_fault_changed()

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    def reset(self) -> int:
        """Reset all connections, as a crashed host would (RST). Returns their number."""
        broken = list(self._connections)
        for connection in broken:
            connection.reset()
        return len(broken)

    async def close(self) -> None:
        """Stop listening, and reset all connections."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._connections.values())
        self.reset()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        connection = _Connection(lambda: self._fault, self._rng, writer)
        task = asyncio.current_task()
        assert task is not None
        self._connections[connection] = task
        try:
            await connection.run(reader, self.target)
        except* (OSError, asyncio.CancelledError):
            pass  # One side is gone, or the proxy is closed: the reset ends both sides.
        finally:
            connection.reset()
            del self._connections[connection]


class _Connection:
    """An accepted connection, and its connection to the target."""

    def __init__(self, fault: Callable[[], Fault], rng: random.Random, client: asyncio.StreamWriter) -> None:
        self._fault = fault
        self._rng = rng
        self._writers = [client]
        self._changed = asyncio.Event()
        self._lost = False
        #: Bytes that passed since the fault was set, by direction.
        self._passed = {"up": 0, "down": 0}

    def on_fault_changed(self) -> None:
        """Apply a new fault to all bytes that pass from now on."""
        self._passed = dict.fromkeys(self._passed, 0)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def reset(self) -> None:
        """Reset both sides (RST)."""
        for writer in self._writers:
            peer = writer.get_extra_info("socket")
            with suppress(OSError):
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def run(self, reader: asyncio.StreamReader, target: tuple[str, int]) -> None:
        """Copy until both directions have ended. Raises OSError if one side is gone."""
        # While nothing passes, do not connect to the target, which would notice it.
        while "pass" not in (self._fault().up, self._fault().down):
            await self._changed.wait()
        there, writer = await asyncio.open_connection(*target)
        self._writers.append(writer)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._copy("up", reader, writer))
            group.create_task(self._copy("down", there, self._writers[0]))

    async def _copy(
        self, way: Literal["up", "down"], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Copy one direction: pieces are read when they arrive, and written when they are due."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_PIECES_MAX)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(reader, pieces))
            group.create_task(self._write(way, pieces, writer))

    async def _read(self, reader: asyncio.StreamReader, pieces: asyncio.Queue[tuple[float, bytes]]) -> None:
        loop = asyncio.get_running_loop()
        due = 0.0
        while data := await self._receive(reader):
            fault = self._fault()
            late = fault.latency_seconds + self._rng.random() * fault.jitter_seconds
            due = max(due, loop.time() + late)
            if fault.bytes_per_second:
                due += len(data) / fault.bytes_per_second
            await pieces.put((due, data))
        await pieces.put((max(due, loop.time() + self._fault().close_seconds), b""))

    async def _receive(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.read(_READ_BYTES)
        except OSError:
            self.reset()
            raise

    async def _write(
        self, way: Literal["up", "down"], pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await pieces.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not await self._may_pass(way, data):
                continue
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    async def _may_pass(self, way: Literal["up", "down"], data: bytes) -> bool:
        """Wait while bytes are held. Returns False if they are dropped. Raises ConnectionResetError after a reset."""
        while (passage := getattr(self._fault(), way)) == "hold":
            await self._changed.wait()
        if passage == "drop":
            self._lost = True
            return False
        limit = self._fault().reset_after
        self._passed[way] += len(data)
        if self._lost or (limit is not None and self._passed[way] > limit):
            self.reset()
            raise ConnectionResetError("reset by the proxy")
        return True
