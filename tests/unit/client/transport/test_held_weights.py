"""Weights held by a worker, and differences added to them."""

from __future__ import annotations

import numpy as np
import pytest

from psdist.client.transport.buffers import HeldWeights, PullTarget
from psdist.compression import Int8, segments
from psdist.compression.specifications import Region
from psdist.errors import InternalError, MalformedPayloadError, PsdistError
from psdist.types import Slicing
from psdist.v1.server_pb2 import Differences, SliceResult
from psdist.wire.limits import DIFFERENCES_MAX

SLICING = Slicing(256, 128)
PEER = "server-0"


def encoded(value: float, elements: int = 128) -> bytes:
    """Return a payload that adds ``value`` to all elements of a slice."""
    region = Region(0, elements, Int8(), (elements,))
    prepared = segments.prepare(region, np.full(elements, value, np.float32), segments.PushNumber(0, 0))
    out = np.empty(segments.payload_limit(elements), np.uint8)
    return out[: segments.encode([prepared], 0, elements, out)].tobytes()


def answer(index: int, version: int, *payloads: bytes, whole: bool = False) -> SliceResult:
    """Return an answer with these differences."""
    differences = None if whole else Differences(bytes=map(len, payloads))
    return SliceResult(slice=index, version=version, differences=differences)


def opened() -> tuple[HeldWeights, PullTarget]:
    """Return weights whose two slices are held in version 3 of generation 1: zeros."""
    held = HeldWeights(SLICING, np.full(256, np.nan, np.float32))
    target = PullTarget(SLICING, held.vector, held=held)
    assert not held.message((0, 1), 1).slices
    for index in range(2):
        target.write(answer(index, 3, whole=True), bytes(512), PEER)
    return held, target


def test_differences_are_added_in_their_order() -> None:
    held, target = opened()
    message = held.message((0, 1), 1)
    assert (list(message.slices), list(message.versions), message.generation) == ([0, 1], [3], 1)
    payloads = encoded(1.0), encoded(0.25)
    target.write(answer(1, 5, *payloads), b"".join(payloads), PEER)
    assert (held.vector[128:] == 1.25).all() and not held.vector[:128].any()
    assert list(held.message((0, 1), 1).versions) == [3, 5]
    target.write(answer(0, 9), b"", PEER)
    assert list(held.message((0, 1), 1).versions) == [9, 5] and not held.vector[:128].any()


def test_what_is_written_from_elsewhere_is_not_held() -> None:
    held, target = opened()
    part = target.part(0)
    assert list(held.message((0, 1), 1).slices) == [1]  # Its writer may be cancelled.
    assert part.base is held.vector.base or part.base is held.vector
    target.received.add(0)
    assert list(held.message((0, 1), 1).slices) == [1]
    shared = PullTarget(SLICING, held.vector, np.ones(256, np.float32), held=held)
    shared.received.add(0)
    assert shared.vector(range(2)) is held.vector and held.vector[128:].all()
    assert not held.message((0, 1), 1).slices


def test_weights_that_were_received_in_part_are_not_held() -> None:
    held, target = opened()
    target.memory_for(answer(0, 4, whole=True), 512, PEER)[:3] = 7.0  # The connection breaks here.
    assert list(held.message((0, 1), 1).slices) == [1]


def test_nothing_is_held_of_another_generation() -> None:
    held, target = opened()
    assert not held.message((0,), 2).slices
    with pytest.raises(InternalError, match="holds no weights"):
        target.write(answer(0, 4, encoded(1.0)), encoded(1.0), PEER)
    assert list(held.message((1,), 1).slices) == [1]
    held.message((0,), 2)
    target.write(answer(0, 3, whole=True), bytes(512), PEER)
    assert list(held.message((0,), 2).slices) == [0] and not held.message((0,), 1).slices


ONE = encoded(1.0)


def test_what_cannot_be_added_changes_nothing() -> None:
    for sizes, payload in [
        ([len(ONE) + 1], ONE),
        ([len(ONE)], ONE[:-4]),
        ([len(ONE) - 4], ONE[:-4]),
        ([len(ONE), 8], ONE + bytes(8)),
        ([0] * (DIFFERENCES_MAX + 1), b""),
        ([0], b""),
        ([600], bytes(600)),
        ([len(encoded(1.0, 64))], encoded(1.0, 64)),
    ]:
        held, target = opened()
        bad = SliceResult(slice=0, version=4, differences=Differences(bytes=sizes))
        with pytest.raises((InternalError, MalformedPayloadError)):
            target.write(bad, payload, PEER)
        assert not held.vector.any() and list(held.message((0, 1), 1).versions) == [3]


def test_differences_that_nobody_asked_for_are_refused() -> None:
    target = PullTarget(SLICING, np.zeros(256, np.float32))
    with pytest.raises(PsdistError, match="were not requested"):
        target.write(answer(0, 1, ONE), ONE, PEER)
