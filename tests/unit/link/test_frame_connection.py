"""Connections of frames: payloads in their place on either event loop, back-pressure, limits, one end."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import uvloop

from psdist.errors import InvalidArgumentError, LimitExceededError, PsdistError
from psdist.link.frame_connection import _TURN_BYTES as TURN_BYTES
from psdist.link.frame_connection import FrameConnection, unacknowledged_bytes
from psdist.wire import limits

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


class End:
    """One end of a connection, its received frames, and the errors it ended with. memory: buffer for payloads."""

    def __init__(self, memory: np.ndarray | None = None) -> None:
        self.headers: list[bytes] = []
        self.payloads: list[bytes] = []
        self.ends: list[PsdistError | None] = []
        self.changed = asyncio.Event()
        self.connection = FrameConnection(self)
        self._memory = memory
        self._target = memoryview(b"")

    def begin_frame(self, header: bytes, size: int) -> memoryview:
        if header == b"bad":
            raise InvalidArgumentError("bad")
        self.headers.append(header)
        memory = np.empty(size, np.uint8) if self._memory is None else self._memory
        self._target = memory[:size].data
        self.changed.set()
        return self._target

    def end_frame(self) -> None:
        self.payloads.append(bytes(self._target))
        self.changed.set()

    def connection_ended(self, error: PsdistError | None) -> None:
        self.ends.append(error)
        self.changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


async def pair(end: End) -> tuple[asyncio.Server, socket.socket]:
    """Connects ``end``, and returns its listener, and the socket of the other side."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: end.connection, "127.0.0.1", 0)
    other = socket.socket()
    other.setblocking(False)
    await loop.sock_connect(other, server.sockets[0].getsockname())
    return server, other


def framed(header: bytes, payload: bytes = b"") -> bytes:
    return struct.pack("<II", len(header), len(payload)) + header + payload


async def received(other: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := await asyncio.get_running_loop().sock_recv(other, 1 << 20)):
        data += part
    return data


async def payloads_come_to_their_place() -> None:
    memory = np.zeros(1 << 20, np.uint8)
    end = End(memory)
    server, other = await pair(end)
    payload = np.random.default_rng(1).integers(0, 255, memory.size, np.uint8).tobytes()
    with other:
        await asyncio.get_running_loop().sock_sendall(other, framed(b"a", payload) + framed(b"b"))
        await end.until(lambda: len(end.payloads) == 2)
        assert end.headers == [b"a", b"b"] and end.payloads == [payload, b""] and memory.tobytes() == payload
        other.shutdown(socket.SHUT_WR)
        await end.until(lambda: end.ends)
    assert end.ends == [None]
    server.close()


async def frames_are_sent_from_where_they_lie_and_wait_for_a_reader() -> None:
    end = End()
    server, other = await pair(end)
    with other:
        await asyncio.get_running_loop().sock_sendall(other, framed(b"hello"))
        await end.until(lambda: end.payloads)
        memory = np.arange(1 << 18, dtype=np.float32)
        sent = 0
        while not end.connection.is_full:
            end.connection.send(b"h", memory.view(np.uint8).data)
            sent += 1
        assert end.connection.is_sending and sent < 64
        draining = asyncio.create_task(end.connection.drain())
        whole = framed(b"h", memory.tobytes()) * sent
        assert len(whole) > unacknowledged_bytes(end.connection) > len(whole) // 4
        assert await received(other, len(whole)) == whole
        await draining
        assert unacknowledged_bytes(end.connection) == 0
        assert not end.connection.is_sending
    end.connection.abort()
    server.close()


async def an_abort_lets_go_of_memory_and_of_who_waits() -> None:
    end = End()
    server, other = await pair(end)
    with other:
        await asyncio.get_running_loop().sock_sendall(other, framed(b"hello"))
        await end.until(lambda: end.payloads)
        while not end.connection.is_full:
            end.connection.send(b"h", memoryview(bytes(1 << 20)))
        draining = asyncio.create_task(end.connection.drain())
        end.connection.abort()
        await draining
        assert not end.connection.is_sending
        end.connection.send(b"after the end")
    assert end.ends == []
    server.close()


async def what_is_held_comes_later() -> None:
    end = End()
    server, other = await pair(end)
    with other:
        await asyncio.get_running_loop().sock_sendall(other, framed(b"a"))
        await end.until(lambda: end.payloads)
        end.connection.hold()
        end.connection.hold()
        await asyncio.get_running_loop().sock_sendall(other, framed(b"b", b"x" * 100_000))
        end.connection.release()
        assert end.headers == [b"a"]
        end.connection.release()
        await end.until(lambda: len(end.payloads) == 2)
        assert end.payloads[1] == b"x" * 100_000
    await end.until(lambda: end.ends)
    server.close()


async def a_sender_that_keeps_up_leaves_turns_to_other_callbacks() -> None:
    """The whole payload is in the socket or on its way, and is taken in parts, with turns of the loop between them."""
    end, loop = End(), asyncio.get_running_loop()
    server, other = await pair(end)
    payload, most, before = bytes(limits.DATA_MESSAGE_BYTES), 0, 0

    def look() -> None:
        nonlocal most, before
        most, before = max(most, end.connection._received - before), end.connection._received
        if not end.payloads:
            loop.call_soon(look)

    with other:
        look()
        await loop.sock_sendall(other, framed(b"a", payload))
        await end.until(lambda: end.payloads)
        assert end.payloads == [payload] and 0 < most < limits.DATA_MESSAGE_BYTES - TURN_BYTES
    server.close()


async def what_is_no_frame_ends_the_connection() -> None:
    for data, error in (
        (struct.pack("<II", limits.SHARED_MESSAGE_BYTES + 1, 0), LimitExceededError),
        (struct.pack("<II", 0, limits.DATA_MESSAGE_BYTES + 1), LimitExceededError),
        (framed(b"bad"), InvalidArgumentError),
    ):
        end = End()
        server, other = await pair(end)
        with other:
            await asyncio.get_running_loop().sock_sendall(other, data + framed(b"after"))
            await end.until(lambda end=end: end.ends)
            assert [type(one) for one in end.ends] == [error] and end.payloads == []
        server.close()


async def frames_of_one_turn_are_one_write_and_keep_their_order() -> None:
    end, (own, other) = End(), socket.socketpair()
    for one in (own, other):
        one.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: end.connection, sock=own)
    with other:
        for header in (b"a", b"b"):
            end.connection.send_soon(header)
        end.connection.send(b"c", memoryview(b"payload"))
        end.connection.send_soon(b"d")
        expected = framed(b"a") + framed(b"b") + framed(b"c", b"payload") + framed(b"d")
        assert await received(other, len(expected)) == expected
        end.connection.send_soon(b"e")
        end.connection.abort()
        assert await received(other, 1) == b""


CASES: list[Callable[[], Awaitable[None]]] = [
    payloads_come_to_their_place,
    frames_are_sent_from_where_they_lie_and_wait_for_a_reader,
    an_abort_lets_go_of_memory_and_of_who_waits,
    what_is_held_comes_later,
    a_sender_that_keeps_up_leaves_turns_to_other_callbacks,
    what_is_no_frame_ends_the_connection,
    frames_of_one_turn_are_one_write_and_keep_their_order,
]


def test_connection() -> None:
    for new_loop in LOOPS:
        for case in CASES:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(case())


# --- a path that is cut -----------------------------------------------------------------------------------------------


class KernelsWord:
    """Transport whose socket returns a fixed state of the kernel's connection."""

    def __init__(self, retransmits: int, probes: int, since_ms: int, family: int = socket.AF_INET) -> None:
        self.family = family
        self._info = struct.pack("=2xBB52xI", retransmits, probes, since_ms)

    def get_extra_info(self, name: str) -> Any:
        return self

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        return self._info[:size]


def test_what_the_kernel_says_tells_slow_from_cut_off() -> None:
    for retransmits, probes, since_ms, is_cut_off in [
        (0, 0, 3_600_000, False),  # Idle for an hour.
        (2, 0, 1_500, False),  # Some packets were lost.
        (5, 0, 6_000, True),  # Nothing is acknowledged.
        (0, 5, 6_000, True),  # Nobody answers probes of a window.
        (9, 0, 300, False),  # The other side's kernel lives.
    ]:
        connection = FrameConnection(Any)
        connection._transport = KernelsWord(retransmits, probes, since_ms)
        assert connection.is_cut_off is is_cut_off
        connection._transport = KernelsWord(retransmits, probes, since_ms, socket.AF_UNIX)
        assert not connection.is_cut_off
