"""Weights that scripts write, from the arrays of the script to the slices of the servers, for any layout."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.client.core.flat_vector import WrittenRanges, WrittenWeights
from psdist.errors import InvalidArgumentError
from psdist.types import Layout, Slicing, TensorSpec
from psdist_server.kernels.arrays import WrittenSlice

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any)


@given(sizes=SIZES, slice_elements=st.integers(1, 12), chosen=st.sets(st.integers(0, 7)), data=st.data())
def test_the_slices_get_exactly_what_was_written(
    sizes: list[int], slice_elements: int, chosen: set[int], data: st.DataObject
) -> None:
    layout = Layout(tuple(TensorSpec(f"t{n}", (size,), "float32") for n, size in enumerate(sizes)))
    slicing = Slicing(layout.total, slice_elements)
    names = [f"t{number}" for number in sorted(chosen) if number < len(sizes)]
    values = {name: np.full(sizes[int(name[1:])], -1.0 - int(name[1:]), np.float32) for name in names}
    written = WrittenWeights.copied(layout, values)
    expected = flat = np.arange(1, layout.total + 1, dtype=np.float32)
    expected = flat.copy()
    for name, array in values.items():
        at = layout.offsets[int(name[1:])]
        expected[at : at + array.size] = array
    for index in range(slicing.count):
        start, stop = slicing.bounds(index)
        ranges = written.in_slice(slicing, index)
        changed = not np.array_equal(flat[start:stop], expected[start:stop])
        assert (ranges is not None) == changed == written.touches(slicing, [index])
        if ranges is not None:
            bounds = [(low, low + size) for low, size in zip(ranges.starts, ranges.sizes, strict=True)]
            assert all(end < begin for (_, end), (begin, _) in pairwise(bounds)), "neighbours are one range"
            whole = WrittenSlice.read(ranges, index, slicing, "float32").onto(flat[start:stop])
            assert whole.tobytes() == expected[start:stop].tobytes()
    assert written.is_empty == np.array_equal(flat, expected)


@given(sizes=SIZES, number=st.integers(0, 7), value=st.floats(-10, 10, width=32))
def test_the_digest_is_of_tensors_and_values(sizes: list[int], number: int, value: float) -> None:
    layout = Layout(tuple(TensorSpec(f"t{n}", (size,), "float32") for n, size in enumerate(sizes)))
    ones = {tensor.name: np.ones(tensor.shape, np.float32) for tensor in layout.tensors}
    tensor = layout.tensors[number % len(sizes)]
    other = ones | {tensor.name: np.full(tensor.shape, value, np.float32)}
    of = [WrittenWeights.copied(layout, one).digest for one in (ones, dict(reversed(ones.items())), other)]
    assert of[0] == of[1] and len(of[0]) == 16
    assert (of[0] == of[2]) == (value == 1.0 or not tensor.size)
    part = WrittenWeights.copied(layout, {tensor.name: ones[tensor.name]})
    assert (part.digest == of[0]) == (len(sizes) == 1)
    rest = WrittenWeights.copied(layout, {name: one for name, one in ones.items() if name != tensor.name}, part)
    assert rest.digest == of[0], "two assignments are one"


def test_malformed_writes_are_refused() -> None:
    for starts, sizes, count, text in [
        ([], [], 0, "0 starts and 0 sizes"),
        ([0], [1, 2], 3, "1 starts and 2 sizes"),
        ([0], [0], 0, "no empty range"),
        ([0, 1], [2, 1], 3, "ascend without overlap"),
        ([4, 0], [1, 1], 2, "ascend without overlap"),
        ([7], [2], 2, "ascend without overlap"),
        ([2**32 - 1], [2**32 - 1], 2, "ascend without overlap"),
        ([0], [2], 3, "have 8 bytes"),
    ]:
        with pytest.raises(InvalidArgumentError, match=text):
            WrittenSlice.read(WrittenRanges(starts, sizes, bytes(4 * count)), 0, Slicing(8, 8), "float32")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_written_values_are_finite(bad: float) -> None:
    with pytest.raises(InvalidArgumentError, match="hold NaN or Inf"):
        WrittenSlice.read(
            WrittenRanges([0], [2], np.array([1.0, bad], np.float32).tobytes()), 0, Slicing(8, 8), "float32"
        )
    with pytest.raises(InvalidArgumentError, match="hold NaN or Inf"):
        WrittenSlice.read(WrittenRanges([0], [4], np.array([1.0, bad]).tobytes()), 0, Slicing(8, 8), "float64")


def test_values_in_float64_are_whole() -> None:
    nan_as_float32 = np.array([np.nan, 1.0], np.float32).view(np.float64)
    ranges = WrittenRanges([2], [2], nan_as_float32.tobytes())
    whole = WrittenSlice.read(ranges, 0, Slicing(8, 8), "float64").onto(np.zeros(8, np.float32))
    assert whole.view(np.float64).tolist() == [0.0, nan_as_float32[0], 0.0, 0.0]
    with pytest.raises(InvalidArgumentError, match="ascend without overlap"):
        WrittenSlice.read(ranges._replace(starts=[1]), 0, Slicing(8, 8), "float64")
