"""Connections whose frames are headers alone: whole messages in order on either event loop, bounded buffers."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from psdist.errors import InvalidArgumentError, LimitExceededError, PsdistError
from psdist.link.frame_connection import FrameConnection
from psdist.wire import limits

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


class End:
    """One end of a connection, the messages it received, and the errors it ended with."""

    def __init__(self, **options: bool) -> None:
        self.messages: list[bytes] = []
        self.ends: list[PsdistError | None] = []
        self.changed = asyncio.Event()
        self.line = FrameConnection(self, has_payloads=False, **options)
        self._header = b""

    def begin_frame(self, header: bytes, size: int) -> memoryview:
        assert size == 0
        self._header = header
        return memoryview(b"")

    def end_frame(self) -> None:
        if self._header == b"bad":
            raise InvalidArgumentError("bad")
        self.messages.append(self._header)
        self.changed.set()

    def connection_ended(self, error: PsdistError | None) -> None:
        self.ends.append(error)
        self.changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


async def pair(**options: bool) -> tuple[End, socket.socket]:
    """Return one end, and the peer's socket."""
    mine, other = socket.socketpair()
    mine.setblocking(False)
    other.setblocking(False)
    end = End(**options)
    await end.line.open(mine)
    return end, other


def framed(*messages: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(message)) + message for message in messages)


async def read_all(other: socket.socket) -> bytes:
    """Read until the end."""
    data = b""
    while part := await asyncio.get_running_loop().sock_recv(other, 1 << 16):
        data += part
    return data


async def messages_come_whole_however_they_are_cut() -> None:
    end, other = await pair()
    sent = [b"", b"x", b"y" * 70_000, b"z"]
    data = framed(*sent)
    loop = asyncio.get_running_loop()
    with other:
        for start, stop in ((0, 2), (2, 8), (8, 50_000), (50_000, len(data) - 1), (len(data) - 1, len(data))):
            await loop.sock_sendall(other, data[start:stop])
            await asyncio.sleep(0)
        await end.until(lambda: len(end.messages) == 4)
        assert end.messages == sent
        for message in sent:
            end.line.send(message)
        received = b""
        while len(received) < len(data):
            received += await loop.sock_recv(other, 1 << 16)
        assert received == data
        end.line.abort()
        assert await read_all(other) == b""
    assert end.ends == []


async def the_end_comes_once() -> None:
    end, other = await pair()
    other.close()
    await end.until(lambda: end.ends)
    end.line.send(b"to nobody")
    end.line.abort()
    assert end.ends == [None]


async def what_is_wrong_ends_it(data: bytes, error: type[PsdistError]) -> None:
    end, other = await pair()
    with other:
        await asyncio.get_running_loop().sock_sendall(other, framed(b"good") + data + framed(b"late"))
        await end.until(lambda: end.ends)
        assert await read_all(other) == b""
    assert [type(found) for found in end.ends] == [error] and end.messages == [b"good"]


async def a_hold_keeps_what_comes() -> None:
    end, other = await pair()
    with other:
        end.line.hold()
        end.line.hold()
        await asyncio.get_running_loop().sock_sendall(other, framed(b"1", b"2"))
        end.line.release()
        await asyncio.sleep(0)
        assert end.messages == []
        end.line.release()
        await end.until(lambda: len(end.messages) == 2)
    end.line.abort()


async def who_does_not_read_is_not_heard(waits_for_reader: bool) -> None:
    end, other = await pair(waits_for_reader=waits_for_reader)
    with other:
        while not end.line.is_full:
            end.line.send(bytes(1 << 16))
            await asyncio.sleep(0)
        await asyncio.get_running_loop().sock_sendall(other, framed(b"more"))
        if waits_for_reader:
            for _ in range(20):
                await asyncio.sleep(0)
            assert end.messages == []
            reading = asyncio.create_task(read_all(other))
        await end.until(lambda: end.messages == [b"more"])
        end.line.abort()
        if waits_for_reader:
            assert not end.line.is_full and await reading


CASES: dict[str, Callable[[], Awaitable[Any]]] = {
    "cut": messages_come_whole_however_they_are_cut,
    "end": the_end_comes_once,
    "hold": a_hold_keeps_what_comes,
    "refused": lambda: what_is_wrong_ends_it(framed(b"bad"), InvalidArgumentError),
    "too long": lambda: what_is_wrong_ends_it(struct.pack("<I", limits.SHARED_MESSAGE_BYTES + 1), LimitExceededError),
    "full": lambda: who_does_not_read_is_not_heard(True),
    "full, not waiting": lambda: who_does_not_read_is_not_heard(False),
}


@pytest.mark.parametrize("make_loop", LOOPS, ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("case", CASES)
def test_a_line(case: str, make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def run() -> None:
        await CASES[case]()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(run())
