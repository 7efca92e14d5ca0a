"""Frames without copies: the payload is read in place, and data that is no protobuf is refused."""

from __future__ import annotations

import numpy as np

from psdist.v1 import server_pb2
from psdist.wire import frames


def test_the_payload_is_a_view_of_what_was_received() -> None:
    data = frames.pack(
        server_pb2.PullResponse(slice=3, version=9), np.arange(500, dtype=np.float32).view(np.uint8).data
    )
    frame = frames.unpack(server_pb2.PullResponse, data)
    assert frame.payload.obj is data
    assert np.frombuffer(frame.payload, np.float32).tolist() == list(range(500))
    assert (frame.header.slice, frame.header.version) == (3, 9)


def test_a_payload_of_two_parts_reads_like_the_parser() -> None:
    """Check Protobuf's rule that the last of a repeated scalar field counts."""
    part = server_pb2.PullResponse(payload=b"first").SerializeToString()
    data = part + server_pb2.PullResponse(payload=b"last").SerializeToString()
    assert bytes(frames.unpack(server_pb2.PullResponse, data).payload) == b"last"
