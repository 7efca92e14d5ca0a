"""Frames of a TCP connection: independent of how their bytes are split; garbage ends with a typed error."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import LimitExceededError, PsdistError
from psdist.link.frame_connection import FrameReader
from psdist.wire import limits

HEADER_BYTES = 300
FRAMES = st.lists(st.tuples(st.binary(max_size=HEADER_BYTES), st.binary(max_size=40_000)), max_size=6)
CUTS = st.lists(st.integers(1, 20_000), max_size=60)


class Frames:
    """Receiver that records frames, and all memory that it was asked for."""

    def __init__(self) -> None:
        self.frames: list[tuple[bytes, bytes]] = []
        self.asked = 0
        self._frame = b"", bytearray()

    def begin_frame(self, header: bytes, size: int) -> memoryview:
        self._frame = header, bytearray(size)
        self.asked += size
        return memoryview(self._frame[1])

    def end_frame(self) -> None:
        header, payload = self._frame
        self.frames.append((header, bytes(payload)))

    def connection_ended(self, error: PsdistError | None) -> None:
        raise AssertionError("a reader has no connection")


def wire(frames: Sequence[tuple[bytes, bytes]]) -> bytes:
    return b"".join(struct.pack("<II", len(header), len(payload)) + header + payload for header, payload in frames)


def feed(reader: FrameReader, data: bytes, cuts: Sequence[int]) -> None:
    """Feed a reader as an event loop does: at most as many bytes as its buffer holds, split at ``cuts``."""
    position, turn = 0, 0
    while position < len(data):
        buffer = reader.get_buffer()
        assert len(buffer) > 0
        count = min(len(buffer), len(data) - position, cuts[turn % len(cuts)] if cuts else len(data))
        buffer[:count] = data[position : position + count]
        reader.buffer_updated(count)
        position, turn = position + count, turn + 1


@given(FRAMES, CUTS)
def test_frames_are_the_same_however_their_bytes_are_cut(frames: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    receiver = Frames()
    feed(FrameReader(receiver, HEADER_BYTES), wire(frames), cuts)
    assert receiver.frames == frames


@given(FRAMES, CUTS, st.integers(1, 999))
def test_a_discarded_payload_is_written_to_no_more(
    frames: list[tuple[bytes, bytes]], cuts: list[int], missing: int
) -> None:
    sent = [*frames, (b"", b"x" * 1000)]
    stream = wire(sent)
    receiver = Frames()
    reader = FrameReader(receiver, HEADER_BYTES)
    feed(reader, stream[:-missing], cuts)
    memory = receiver._frame[1]
    reader.discard_payload()
    feed(reader, stream[-missing:] + wire(frames), cuts)
    assert bytes(memory) == b"x" * (1000 - missing) + bytes(missing)
    assert [header for header, _ in receiver.frames] == [header for header, _ in sent + frames]


@given(st.binary(max_size=60_000), CUTS)
def test_garbage_ends_with_an_error_and_costs_no_more_than_the_limits(garbage: bytes, cuts: list[int]) -> None:
    receiver = Frames()
    try:
        feed(FrameReader(receiver, HEADER_BYTES), garbage, cuts)
    except PsdistError as error:
        assert isinstance(error, LimitExceededError)
    # Complete frames, and one incomplete payload.
    assert receiver.asked <= len(garbage) + limits.DATA_MESSAGE_BYTES
