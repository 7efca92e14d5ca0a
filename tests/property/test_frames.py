"""Frames are plain protobuf: the real parser reads packed frames, and unpack reads every valid encoding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import InvalidArgumentError
from psdist.v1 import server_pb2
from psdist.wire import frames

headers = st.builds(
    server_pb2.PushPullRequest,
    slice=st.integers(0, 2**32 - 1),
    base_version=st.integers(0, 2**64 - 1),
    header=st.none()
    | st.builds(
        server_pb2.PushHeader,
        step=st.integers(0, 2**64 - 1),
        grad_norm=st.floats(allow_nan=False),
        abstain=st.booleans(),
        identity=st.builds(server_pb2.Identity, run_id=st.text(max_size=300), epoch=st.integers(0, 2**64 - 1)),
    ),
)
payloads = st.binary(max_size=600)


@given(headers, payloads)
def test_packed_frames_are_protobuf(header: server_pb2.PushPullRequest, payload: bytes) -> None:
    message = server_pb2.PushPullRequest.FromString(frames.pack(header, memoryview(payload)))
    assert message.payload == payload
    message.ClearField("payload")
    message.ClearField("padding")
    assert message == header


@given(headers, payloads, st.randoms(use_true_random=False))
def test_unpack_reads_fields_in_any_order(header: server_pb2.PushPullRequest, payload: bytes, random) -> None:
    parts = [server_pb2.PushPullRequest(payload=payload).SerializeToString()]
    for name in ("header", "slice", "base_version"):
        part = server_pb2.PushPullRequest()
        if header.HasField("header") if name == "header" else getattr(header, name):
            (part.header.CopyFrom(header.header) if name == "header" else setattr(part, name, getattr(header, name)))
        parts.append(part.SerializeToString())
    random.shuffle(parts)
    frame = frames.unpack(server_pb2.PushPullRequest, b"".join(parts))
    assert bytes(frame.payload) == payload
    assert frame.header == header


@given(st.binary(max_size=200))
def test_any_bytes_are_read_like_the_parser_or_refused(data: bytes) -> None:
    try:
        expected = server_pb2.PushPullRequest.FromString(data)
    except Exception:  # protobuf's DecodeError, for any implementation
        with pytest.raises(InvalidArgumentError):
            frames.unpack(server_pb2.PushPullRequest, data)
        return
    frame = frames.unpack(server_pb2.PushPullRequest, data)
    assert bytes(frame.payload) == expected.payload
    expected.ClearField("payload")
    assert frame.header == expected


@given(headers, st.binary(min_size=1, max_size=60))
def test_payloads_begin_at_a_multiple_of_four(header: server_pb2.PushPullRequest, payload: bytes) -> None:
    data = frames.pack(header, payload)
    assert (len(data) - len(payload)) % 4 == 0
