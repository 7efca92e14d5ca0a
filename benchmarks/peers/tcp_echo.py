"""Raw TCP under uvloop: the bytes of a step travel to servers that return them. No psdist in it.

Roles: ``server`` receives messages of 1 MiB into preallocated memory, and returns each from there when it is complete;
``client`` (the worker) sends its share of the bytes to every server without copying, and receives equally many in
place, all concurrently. This is the cost of the interpreter, the event loop and the kernel's TCP for a step's bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import cast

import uvloop

from benchmarks import turns
from benchmarks.peers.echo import ITEM_BYTES, MESSAGE_BYTES, address_file, await_address

#: Messages that a server may hold: those being returned, and the one being received.
_HELD = 8


class _Echo(asyncio.BufferedProtocol):
    """Server's end of a connection."""

    def __init__(self) -> None:
        self._free = deque(memoryview(bytearray(MESSAGE_BYTES)) for _ in range(_HELD))
        self._message = self._free.popleft()
        self._filled = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits((_HELD - 1) * MESSAGE_BYTES - 1, 0)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._message[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled == MESSAGE_BYTES:
            self._transport.write(self._message)
            self._free.append(self._message)
            self._message, self._filled = self._free.popleft(), 0

    def pause_writing(self) -> None:
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()


class _Client(asyncio.BufferedProtocol):
    """Worker's end of a connection: ``size`` bytes there and back, in whole messages."""

    def __init__(self, size: int) -> None:
        self._out, self._in = memoryview(bytearray(size)), memoryview(bytearray(size))
        self._spare = memoryview(bytearray(1))
        self._filled = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._whole = asyncio.Event()

    async def exchange(self) -> None:
        """One step."""
        self._filled = 0
        self._whole.clear()
        for start in range(0, len(self._out), MESSAGE_BYTES):
            await self._writable.wait()
            self._transport.write(self._out[start : start + MESSAGE_BYTES])
        await self._whole.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(2 * MESSAGE_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:
        # The loop requests a buffer even if nothing is expected.
        return self._in[self._filled :] if self._filled < len(self._in) else self._spare

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled == len(self._in):
            self._whole.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()


async def _serve(settings: turns.Settings) -> None:
    server = await asyncio.get_running_loop().create_server(_Echo, "127.0.0.1", 0)
    path = address_file(settings.rank)
    draft = path.with_suffix(".draft")
    draft.write_text(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    draft.rename(path)
    await asyncio.to_thread(turns.serve, lambda steps: [])
    server.close()


async def _take_turns(settings: turns.Settings) -> None:
    loop = asyncio.get_running_loop()
    total = settings.params * ITEM_BYTES[settings.wire_dtype]
    size = -(-total // (MESSAGE_BYTES * settings.servers)) * MESSAGE_BYTES
    clients = []
    for number in range(settings.servers):
        host, _, port = (await await_address(number)).rpartition(":")
        _, client = await loop.create_connection(lambda: _Client(size), host, int(port))
        clients.append(client)

    async def turn(steps: int) -> list[float]:
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            await asyncio.gather(*(client.exchange() for client in clients))
            times.append(time.perf_counter() - begin)
        return times

    await asyncio.to_thread(turns.serve, lambda steps: asyncio.run_coroutine_threadsafe(turn(steps), loop).result(), {})


def main() -> None:
    """Take turns until the benchmark ends."""
    settings = turns.settings()
    uvloop.run(_serve(settings) if settings.role == "server" else _take_turns(settings))


if __name__ == "__main__":
    main()
