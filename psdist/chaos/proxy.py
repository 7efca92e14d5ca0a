"""``FaultProxy``: a TCP proxy whose owner makes the connections that pass it slow, silent or broken, while they live.

It stands before one address and copies bytes both ways. ``fault`` says how, and may be replaced at any time:
connections that are open follow at once. What it is not: a model of packets (TCP below it is whole), nor for use
between machines: it listens on loopback unless it is told otherwise.

A connection that lost bytes (``drop``) can never be whole again. As with a network that comes back after the other side
gave up, it is reset when its bytes would pass again.
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

#: What becomes of the bytes of one direction: they pass; they wait, and pass later; they vanish.
Passage = Literal["pass", "hold", "drop"]

_READ_BYTES: Final = 1 << 16
#: Pieces of one direction that are on their way at most; then the sender feels it.
_PIECES_MAX: Final = 64
_RESET: Final = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Fault:
    """How bytes are treated; the default passes them untouched.

    latency_seconds, jitter_seconds: each piece is late by so much, and by a random part of the jitter; order is kept.
    bytes_per_second: of each connection and direction; 0 does not limit.
    up, down: from whoever connected to the address behind, and back.
    cut_after: so many bytes of a direction pass, from the moment the fault is set, then the connection is reset.
    close_seconds: the end of one side is told to the other so much later.
    """

    latency_seconds: float = 0.0
    jitter_seconds: float = 0.0
    bytes_per_second: float = 0.0
    up: Passage = "pass"
    down: Passage = "pass"
    cut_after: int | None = None
    close_seconds: float = 0.0


BLACKHOLE: Final = Fault(up="drop", down="drop")
HELD: Final = Fault(up="hold", down="hold")
HALF_OPEN: Final = Fault(down="drop")


class FaultProxy:
    """One listener before ``target`` (host, port). ``target`` may be replaced; new connections go to the new one."""

    def __init__(self, target: tuple[str, int], rng: random.Random) -> None:
        self.target = target
        self.accepted = 0
        self._rng = rng
        self._fault = Fault()
        self._server: asyncio.Server | None = None
        self._connections: dict[_Connection, asyncio.Task[None]] = {}

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listens; the address (host:port) to connect to instead of the target's."""
        self._server = await asyncio.start_server(self._accept, host, port)
        bound: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return f"{bound[0]}:{bound[1]}"

    @property
    def fault(self) -> Fault:
        """How bytes are treated now."""
        return self._fault

    @fault.setter
    def fault(self, fault: Fault) -> None:
        self._fault = fault
        for connection in list(self._connections):
            connection.follow()

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    def reset(self) -> int:
        """Breaks all connections as a crashed host would (RST); how many there were."""
        broken = list(self._connections)
        for connection in broken:
            connection.reset()
        return len(broken)

    async def close(self) -> None:
        """Listens no more and resets what is open."""
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
        connection = _Connection(self._get_fault, self._rng, writer)
        task = asyncio.current_task()
        assert task is not None
        self._connections[connection] = task
        try:
            await connection.run(reader, self.target)
        except* (OSError, asyncio.CancelledError):
            pass  # One side is gone, or the proxy ends: both sides are told by the reset.
        finally:
            connection.reset()
            del self._connections[connection]

    def _get_fault(self) -> Fault:
        return self._fault


class _Connection:
    """One accepted connection and the one that was made for it."""

    def __init__(self, fault: Callable[[], Fault], rng: random.Random, client: asyncio.StreamWriter) -> None:
        self._fault = fault
        self._rng = rng
        self._writers = [client]
        self._changed = asyncio.Event()
        self._lost = False
        #: Bytes that passed since the fault was set, by direction.
        self._passed = {"up": 0, "down": 0}

    def follow(self) -> None:
        """The fault is another one."""
        self._passed = dict.fromkeys(self._passed, 0)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def reset(self) -> None:
        """Breaks both sides with RST."""
        for writer in self._writers:
            peer = writer.get_extra_info("socket")
            with suppress(OSError):
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def run(self, reader: asyncio.StreamReader, target: tuple[str, int]) -> None:
        """Copies until both directions have ended. Raises OSError where one side is gone."""
        # Nothing is opened behind a proxy that passes nothing: the address behind would see it.
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
        """One direction: pieces are read when they come, and written when they are due."""
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
        """Waits while bytes are held. False: they are gone. Raises ConnectionResetError where the connection is cut."""
        while (passage := getattr(self._fault(), way)) == "hold":
            await self._changed.wait()
        if passage == "drop":
            self._lost = True
            return False
        limit = self._fault().cut_after
        self._passed[way] += len(data)
        if self._lost or (limit is not None and self._passed[way] > limit):
            self.reset()
            raise ConnectionResetError("cut by the proxy")
        return True
