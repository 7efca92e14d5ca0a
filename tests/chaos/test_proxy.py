"""The fault proxy on real sockets: each fault has the effect of its name, on open connections and on new ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from tests.support.chaos.proxy import BLACKHOLE, HALF_OPEN, HELD, Fault, FaultProxy

#: Long enough for bytes that pass at all to have passed.
_SILENCE_SECONDS = 0.15


class Echo:
    """Echo server that counts bytes."""

    def __init__(self) -> None:
        self.received = 0
        self.opened = 0
        self.ends = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        try:
            while data := await reader.read(1 << 16):
                self.received += len(data)
                writer.write(data)
                await writer.drain()
            self.ends += 1
        except OSError:
            pass
        finally:
            writer.transport.abort()


class Peer:
    """A client of the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def read(self, size: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(size), 60)

    async def silent(self) -> bool:
        """True if nothing arrives for a while."""
        try:
            await asyncio.wait_for(self.reader.read(1), _SILENCE_SECONDS)
        except TimeoutError:
            return True
        return False

    async def broken(self) -> bool:
        """Wait for the end. Returns True if it was a reset."""
        try:
            while await asyncio.wait_for(self.reader.read(1 << 16), 60):
                pass
        except ConnectionResetError:
            return True
        return False


class Bench:
    """Echo server behind a proxy, and its open clients."""

    def __init__(self, echo: Echo, proxy: FaultProxy, address: str) -> None:
        self.echo, self.proxy = echo, proxy
        self._host, self._port = address.rsplit(":", 1)
        self._peers: list[Peer] = []

    async def open(self) -> Peer:
        self._peers.append(Peer(*await asyncio.open_connection(self._host, int(self._port))))
        return self._peers[-1]

    def close(self) -> None:
        for peer in self._peers:
            peer.writer.transport.abort()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    proxy = FaultProxy(server.sockets[0].getsockname()[:2], random.Random(0))
    bench = Bench(echo, proxy, await proxy.start())
    yield bench
    await proxy.close()
    bench.close()
    server.close()
    await server.wait_closed()


async def test_passes_bytes_and_ends_untouched(bench: Bench) -> None:
    peer = await bench.open()
    data = random.Random(1).randbytes(1 << 20)
    peer.send(data)
    peer.writer.write_eof()
    assert await peer.read(len(data)) == data
    assert not await peer.broken()
    assert bench.echo.ends == 1


async def test_latency_keeps_the_order(bench: Bench) -> None:
    bench.proxy.fault = Fault(latency_seconds=0.1, jitter_seconds=0.1)
    peer, loop = await bench.open(), asyncio.get_running_loop()
    begin = loop.time()
    for number in range(20):
        peer.send(bytes([number]) * 1000)
        await peer.writer.drain()
    data = await peer.read(20_000)
    assert data == b"".join(bytes([number]) * 1000 for number in range(20))
    assert 0.2 <= loop.time() - begin < 1.5  # twice on its way, not twenty times


async def test_bandwidth_is_limited(bench: Bench) -> None:
    bench.proxy.fault = Fault(bytes_per_second=400_000)
    peer, loop = await bench.open(), asyncio.get_running_loop()
    begin = loop.time()
    peer.send(bytes(100_000))
    await peer.read(100_000)
    assert 0.25 <= loop.time() - begin < 2.0


async def test_a_blackhole_accepts_and_passes_nothing(bench: Bench) -> None:
    before = await bench.open()
    before.send(b"x")
    assert await before.read(1) == b"x"
    bench.proxy.fault = BLACKHOLE
    before.send(b"lost")
    late = await bench.open()
    late.send(b"late")
    assert await before.silent()
    assert await late.silent()
    assert (bench.echo.received, bench.echo.opened, bench.proxy.accepted) == (1, 1, 2)
    bench.proxy.fault = Fault()
    before.send(b"more")
    assert await before.broken()  # bytes of it are missing
    assert await late.read(4) == b"late"  # nothing of it was ever read


@pytest.mark.parametrize(("fault", "received"), [(HALF_OPEN, 4), (Fault(up="drop"), 0)])
async def test_half_open_is_silent_one_way(bench: Bench, fault: Fault, received: int) -> None:
    bench.proxy.fault = fault
    peer = await bench.open()
    peer.send(b"ping")
    assert await peer.silent()
    assert bench.echo.received == received


async def test_hold_and_release(bench: Bench) -> None:
    peer = await bench.open()
    bench.proxy.fault = HELD
    peer.send(b"later")
    assert await peer.silent()
    bench.proxy.fault = Fault()
    assert await peer.read(5) == b"later"


async def test_reset(bench: Bench) -> None:
    peers = [await bench.open() for _ in range(3)]
    for peer in peers:
        peer.send(b"x")
        assert await peer.read(1) == b"x"
    assert bench.proxy.reset() == 3
    assert [await peer.broken() for peer in peers] == [True] * 3
    again = await bench.open()
    again.send(b"x")
    assert await again.read(1) == b"x"
    assert bench.proxy.connections == 1


async def test_reset_after_bytes(bench: Bench) -> None:
    bench.proxy.fault = Fault(reset_after=3000)
    peer = await bench.open()
    peer.send(bytes(3000))
    assert len(await peer.read(3000)) == 3000
    peer.send(b"x")
    assert await peer.broken()
    assert bench.echo.received == 3000


async def test_slow_close(bench: Bench) -> None:
    bench.proxy.fault = Fault(close_seconds=0.3)
    peer, loop = await bench.open(), asyncio.get_running_loop()
    peer.send(b"x")
    assert await peer.read(1) == b"x"
    begin = loop.time()
    peer.writer.write_eof()
    await peer.broken()
    assert 0.3 <= loop.time() - begin < 2.0


async def test_nobody_behind(bench: Bench) -> None:
    bench.proxy.target = ("127.0.0.1", 1)
    peer = await bench.open()
    assert await peer.broken()
