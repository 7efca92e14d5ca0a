"""Frames without copies: the payload is read in place, and data that is no protobuf is refused."""

from __future__ import annotations

import numpy as np
import pytest

from psdist.errors import InvalidArgumentError
from psdist.v1 import server_pb2
from psdist.wire import frames


def test_the_payload_is_a_view_of_what_was_received() -> None:
    data = frames.pack(server_pb2.PullResponse(slice=3, version=9), np.arange(5, dtype=np.float32).view(np.uint8).data)
    frame = frames.unpack(server_pb2.PullResponse, data)
    assert frame.payload.obj is data
    assert np.frombuffer(frame.payload, np.float32).tolist() == [0, 1, 2, 3, 4]
    assert (frame.header.slice, frame.header.version) == (3, 9)


def test_no_payload_is_an_empty_one() -> None:
    frame = frames.unpack(server_pb2.PullResponse, frames.pack(server_pb2.PullResponse(waiting_for="for x"), b""))
    assert len(frame.payload) == 0 and frame.header.waiting_for == "for x"


def test_a_payload_of_two_parts_reads_like_the_parser() -> None:
    """Check Protobuf's rule that the last of a repeated scalar field counts."""
    part = server_pb2.PullResponse(payload=b"first").SerializeToString()
    data = part + server_pb2.PullResponse(payload=b"last").SerializeToString()
    assert bytes(frames.unpack(server_pb2.PullResponse, data).payload) == b"last"


def test_what_is_no_message_is_refused() -> None:
    for data in [
        b"\x7a",
        b"\x7a\xff",
        b"\x7a\x05abc",
        b"\x08",
        b"\xff" * 11,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x7a" + b"\xff" * 9 + b"\x01",
    ]:
        with pytest.raises(InvalidArgumentError, match="not a valid"):
            frames.unpack(server_pb2.PullResponse, data)
