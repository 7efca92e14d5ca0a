"""Vectors are reused as soon as nobody holds them, and never before."""

from __future__ import annotations

import numpy as np
import pytest

from psdist.client.core import flat_vector
from psdist.client.transport.buffers import BufferPool, PullTarget
from psdist.errors import InternalError
from psdist.types import Slicing
from psdist.v1.server_pb2 import SliceResult

LAYOUT = flat_vector.layout_of({"a": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.float32)})


def test_a_vector_is_used_again_when_the_last_array_of_it_is_gone() -> None:
    buffer_pool = BufferPool(LAYOUT)
    arrays = flat_vector.unflatten(LAYOUT, buffer_pool.fresh())
    address = arrays["a"].ctypes.data
    part = arrays["a"][0][1:]  # a view of a view keeps it, too
    del arrays
    other = buffer_pool.fresh()
    assert other.ctypes.data != address
    del part
    assert buffer_pool.fresh().ctypes.data == address


def test_a_loop_that_assigns_its_result_alternates_between_two() -> None:
    buffer_pool = BufferPool(LAYOUT)
    addresses = set()
    for _ in range(10):
        values = flat_vector.unflatten(LAYOUT, buffer_pool.fresh())
        addresses.add(values["a"].ctypes.data)
    assert len(addresses) == 2


def test_results_that_are_kept_stay_as_they_are() -> None:
    buffer_pool = BufferPool(LAYOUT)
    kept = []
    for number in range(6):
        vector = buffer_pool.fresh()
        vector[...] = number
        kept.append(vector)
    assert [set(vector) for vector in kept] == [{number} for number in range(6)]
    kept.pop()
    del vector
    address = buffer_pool.fresh().ctypes.data
    assert address not in {vector.ctypes.data for vector in kept}


def test_no_elements() -> None:
    assert BufferPool(flat_vector.layout_of({"e": np.zeros(0)})).fresh().size == 0


def test_weights_that_lie_in_two_places_are_brought_together() -> None:
    shared, target = np.arange(10, dtype=np.float32), np.full(10, -1, np.float32)
    arrival = PullTarget(Slicing(10, 4), target, shared)
    assert arrival.vector(range(3)) is shared
    target[4:8] = [40, 50, 60, 70]
    arrival.received.add(1)
    assert arrival.vector([0, 2]) is shared
    assert arrival.vector([1]) is target
    assert arrival.vector([0, 1]).tolist() == [0, 1, 2, 3, 40, 50, 60, 70, -1, -1]
    assert arrival.vector(range(3)).tolist() == [0, 1, 2, 3, 40, 50, 60, 70, 8, 9]
    assert PullTarget(Slicing(10, 4), target).vector(range(3)) is target


def test_weights_are_received_in_their_place_and_widened_where_they_are_narrower() -> None:
    target = np.zeros(10, np.float32)
    wide = PullTarget(Slicing(10, 4), target)
    memory = wide.memory_for(SliceResult(slice=1), 16, "server-0")
    memory[...] = 1
    wide.accept(SliceResult(slice=1), memory, "server-0")
    assert target.tolist() == [0] * 4 + [1] * 4 + [0] * 2 and wide.received == {1}
    narrow = PullTarget(Slicing(10, 4), target, dtype="float16")
    memory = narrow.memory_for(SliceResult(slice=2), 4, "server-0")
    assert memory.dtype == np.float16
    memory[...] = 0.5
    narrow.accept(SliceResult(slice=2), memory, "server-0")
    assert target.tolist() == [0] * 4 + [1] * 4 + [0.5] * 2 and narrow.received == {2}
    for size in (0, 15, 17):
        with pytest.raises(InternalError, match=f"server-0 sent {size} bytes for slice 1, which has 16 in float32"):
            wide.memory_for(SliceResult(slice=1), size, "server-0")
