"""Connections of frames, with payloads, as headers alone and over TLS, on either event loop: frames in their place,
back-pressure, holds, and one end. ``tests/contract`` checks refused input."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import uvloop

from psdist.link.frame_connection import _TURN_BYTES as TURN_BYTES
from psdist.link.frame_connection import FrameConnection, unacknowledged_bytes
from psdist.security.tls import TlsFiles
from psdist.wire import limits
from tests.support.certificates import make_ca, write_tls
from tests.support.frame_ends import FrameEnd, frame_pair

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return write_tls(tmp_path_factory.mktemp("identity"), make_ca())


async def frames_come_whole_to_their_place(kind: str, files: TlsFiles | None) -> None:
    memory, has_payloads = np.zeros(1 << 20, np.uint8), kind != "headers"
    end = FrameEnd(memory, has_payloads=has_payloads)
    payload = np.random.default_rng(1).integers(0, 255, memory.size, np.uint8).tobytes() if has_payloads else b""
    async with frame_pair(end, files, has_payloads=has_payloads) as peer:
        data = b"".join(map(peer.framed, (b"", b"x" * 70_000, b"y"), (b"", payload, b"")))
        cuts = [0, 2, 9, 50_000, len(data) - 1, len(data)]
        for start, stop in pairwise(cuts):
            await peer.send(data[start:stop])
            await asyncio.sleep(0)
        await end.until(lambda: len(end.payloads) == 3)
        assert end.headers == [b"", b"x" * 70_000, b"y"] and end.payloads == [b"", payload, b""]
        assert memory.tobytes() == (payload or bytes(memory.size))
        peer.close()
        assert await end.ended() is None
        end.connection.send(b"to nobody")
    assert end.ends == [None]


async def frames_wait_for_a_reader_and_are_sent_from_where_they_lie(kind: str, files: TlsFiles | None) -> None:
    end, has_payloads, sent = FrameEnd(has_payloads=kind != "headers"), kind != "headers", 0
    header = b"h" if has_payloads else b"h" * (1 << 19)
    memory = np.arange(1 << 18 if has_payloads else 0, dtype=np.float32)
    async with frame_pair(end, files, has_payloads=has_payloads) as peer:
        while not end.connection.is_full:
            end.connection.send(header, memory.view(np.uint8).data)
            sent += 1
        assert end.connection.is_sending and 0 < sent < 64
        if kind == "payloads":
            assert sent * memory.nbytes + 9 * sent > unacknowledged_bytes(end.connection) > sent * memory.nbytes // 4
        draining = asyncio.create_task(end.connection.drain())
        assert [await peer.frame() for _ in range(sent)] == [(header, memory.tobytes())] * sent
        await draining
        assert not end.connection.is_sending and (kind != "payloads" or unacknowledged_bytes(end.connection) == 0)
        while not end.connection.is_full:
            end.connection.send(header, memory.view(np.uint8).data)
        draining = asyncio.create_task(end.connection.drain())
        end.connection.abort()
        await draining
        assert not end.connection.is_sending
        end.connection.send(b"after the end")
    assert end.ends == []


async def what_is_held_comes_later(kind: str, files: TlsFiles | None) -> None:
    end, payload = FrameEnd(has_payloads=kind != "headers"), b"" if kind == "headers" else b"x" * 100_000
    async with frame_pair(end, files, has_payloads=kind != "headers") as peer:
        end.connection.hold()
        end.connection.hold()
        await peer.send(peer.framed(b"b", payload))
        end.connection.release()
        await asyncio.sleep(0)
        assert end.headers == []
        end.connection.release()
        await end.until(lambda: end.payloads)
        end.connection.discard_payload()  # Between frames this does nothing.
        real, holds = end.end_frame, []

        def hold_at_the_first() -> None:
            real()
            if not holds:
                holds.append(end.connection.hold())

        end.end_frame = hold_at_the_first
        await peer.send(peer.framed(b"c") + peer.framed(b"d", payload) + peer.framed(b"e"))
        await end.until(lambda: len(end.payloads) == 2)
        assert end.headers[1:] == [b"c"], "the rest of one read is held"
        end.connection.release()
        await end.until(lambda: len(end.payloads) == 4)
        assert end.headers == [b"b", b"c", b"d", b"e"] and end.payloads == [payload, b"", payload, b""]


CASES: list[Callable[[str, TlsFiles | None], Awaitable[None]]] = [
    frames_come_whole_to_their_place,
    frames_wait_for_a_reader_and_are_sent_from_where_they_lie,
    what_is_held_comes_later,
]


@pytest.mark.parametrize("make_loop", LOOPS, ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("kind", ["payloads", "headers", "tls"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_connection(
    case: Callable[[str, TlsFiles | None], Awaitable[None]],
    kind: str,
    make_loop: Callable[[], asyncio.AbstractEventLoop],
    files: TlsFiles,
) -> None:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(case(kind, files if kind == "tls" else None))


async def a_sender_that_keeps_up_leaves_turns_to_other_callbacks() -> None:
    """The whole payload is in the socket or on its way, and is taken in parts, with turns of the loop between them."""
    end, loop = FrameEnd(), asyncio.get_running_loop()
    payload, most, before = bytes(limits.DATA_MESSAGE_BYTES), 0, 0

    def look() -> None:
        nonlocal most, before
        most, before = max(most, end.connection._received - before), end.connection._received
        if not end.payloads:
            loop.call_soon(look)

    async with frame_pair(end) as peer:
        look()
        await peer.send(peer.framed(b"a", payload))
        await end.until(lambda: end.payloads)
    assert end.payloads == [payload] and 0 < most < limits.DATA_MESSAGE_BYTES - TURN_BYTES


async def frames_of_one_turn_are_one_write_and_keep_their_order() -> None:
    end = FrameEnd()
    async with frame_pair(end) as peer:
        for header in (b"a", b"b"):
            end.connection.send_soon(header)
        end.connection.send(b"c", memoryview(b"payload"))
        end.connection.send_soon(b"d")
        assert [await peer.frame() for _ in range(4)] == [(b"a", b""), (b"b", b""), (b"c", b"payload"), (b"d", b"")]
        end.connection.send_soon(b"e")
        end.connection.abort()
        with pytest.raises(ConnectionError):
            await peer.frame()


async def who_does_not_read_is_not_heard(waits_for_reader: bool) -> None:
    end = FrameEnd(has_payloads=False, waits_for_reader=waits_for_reader)
    async with frame_pair(end, has_payloads=False) as peer:
        while not end.connection.is_full:
            end.connection.send(bytes(1 << 16))
            await asyncio.sleep(0)
        await peer.send(peer.framed(b"more"))
        if waits_for_reader:
            for _ in range(20):
                await asyncio.sleep(0)
            assert end.headers == []
            reading = asyncio.create_task(peer.until_closed())
        await end.until(lambda: end.headers == [b"more"])
        end.connection.abort()
        if waits_for_reader:
            assert not end.connection.is_full
            await reading


@pytest.mark.parametrize("make_loop", LOOPS, ids=["asyncio", "uvloop"])
def test_turns_and_readers(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(a_sender_that_keeps_up_leaves_turns_to_other_callbacks())
        runner.run(frames_of_one_turn_are_one_write_and_keep_their_order())
        for waits_for_reader in (True, False):
            runner.run(who_does_not_read_is_not_heard(waits_for_reader))


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
