"""Positions of arrays in registered buffers, and the end of a buffer."""

from __future__ import annotations

import numpy as np
import pytest

from psdist.collectives.core.host_memory import RegisteredBuffers
from psdist.collectives.core.plans import NOWHERE, BufferPosition, Bytes
from psdist.collectives.host_sharing import BufferType
from psdist.errors import DTypeMismatchError, InvalidArgumentError


def memories() -> list[Bytes]:
    return [np.full(4096, rank, np.uint8) for rank in range(3)]


def test_positions_are_those_of_arrays_that_lie_wholly_in_a_buffer() -> None:
    first, second, buffers = memories(), memories(), RegisteredBuffers(1)
    buffers.register(1, first)
    buffers.register(2, second)
    assert buffers.position_of(first[1]) == BufferPosition(1, 0)
    assert buffers.position_of(second[1].view(np.float32)[7:]) == BufferPosition(2, 28)
    assert buffers.position_of(first[0]) == NOWHERE
    assert buffers.position_of(first[1][:0]) == NOWHERE
    overlapping = np.lib.stride_tricks.as_strided(first[1][4000:], (97,), (1,))
    assert buffers.position_of(overlapping) == NOWHERE


def test_contributions_are_the_parts_at_one_position_by_rank() -> None:
    given, buffers = memories(), RegisteredBuffers(1)
    buffers.register(1, given)
    own = given[1][8:24].view(np.uint64)
    found = buffers.contributions(BufferPosition(1, 8), own)
    assert [one.tobytes() for one in found] == [memory[8:24].tobytes() for memory in given]
    assert found[1] is own and found[0].dtype == np.uint64


def test_a_buffer_lasts_as_long_as_any_view_of_it() -> None:
    given, buffers = memories(), RegisteredBuffers(0)
    buffers.register(1, given)
    view = given.pop(0)[100:200].reshape(10, 10)
    assert len(buffers) == 1 and buffers.position_of(view) == BufferPosition(1, 100)
    del view
    assert len(buffers) == 0


def test_types_that_no_buffer_has_are_refused() -> None:
    for shape, dtype, error in [
        (-1, "float32", InvalidArgumentError),
        ((3, 2.5), "float32", InvalidArgumentError),
        ("abc", "float32", InvalidArgumentError),
        ((1,) * 100, "float32", InvalidArgumentError),
        (2**46, "float32", InvalidArgumentError),
        ((0, 10**30), "float32", InvalidArgumentError),
        (3, "U7", DTypeMismatchError),
        (3, "no dtype", DTypeMismatchError),
        (3, ">f4", DTypeMismatchError),
    ]:
        with pytest.raises(error, match=r"shape=|dtype"):
            BufferType.checked(shape, dtype)


def test_sizes_in_bytes() -> None:
    assert BufferType.checked((2, 3), np.float64).nbytes == 48
    assert BufferType.checked(5, "bfloat16").nbytes == 10
    assert BufferType.checked((), bool).nbytes == 1
