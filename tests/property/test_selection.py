"""Selection by sparse codecs in vectors large enough to be sampled, compiled compared with numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from psdist.compression.kernel_runtime import Kernel
from psdist.compression.segments import sparse

Floats = NDArray[np.float32]
Kind = Callable[[np.random.Generator, int], Floats]


def interpreted(kernel: Kernel, *arguments: Any) -> Any:
    assert kernel.interpreted is not None
    return kernel.interpreted(*arguments)


def _normal(rng: np.random.Generator, size: int) -> Floats:
    return rng.standard_normal(size).astype(np.float32)


def _ties(rng: np.random.Generator, size: int) -> Floats:
    return rng.integers(-3, 4, size).astype(np.float32)


def _in_clusters(rng: np.random.Generator, size: int) -> Floats:
    """Return a vector whose largest values are adjacent: a sample may contain none of them, or too many."""
    values = _normal(rng, size) * np.float32(1e-3)
    for start in rng.integers(0, size, 3):
        values[start : start + size // 50] = np.float32(1e6) * _normal(rng, size)[start : start + size // 50]
    return values


def _nearly_zeros(rng: np.random.Generator, size: int) -> Floats:
    values = np.zeros(size, np.float32)
    values[rng.integers(0, size, 20)] = _normal(rng, 20)
    return values


def _of_many_sizes(rng: np.random.Generator, size: int) -> Floats:
    return _normal(rng, size) * (10.0 ** rng.integers(-30, 30, size)).astype(np.float32)


def _growing(rng: np.random.Generator, size: int) -> Floats:
    return np.linspace(0, rng.normal(), size, dtype=np.float32)


def _in_the_sample(rng: np.random.Generator, size: int) -> Floats:
    """Return a vector whose large values are exactly at the sampled positions."""
    values = _normal(rng, size)
    where = np.arange(size) % max(size // 1024, 1) < 16
    values[where] *= np.float32(1e3)
    return values


KINDS = st.sampled_from([_normal, _ties, _in_clusters, _nearly_zeros, _of_many_sizes, _growing, _in_the_sample])
SIZES = st.one_of(st.integers(1, 300), st.sampled_from([32768, 32769, 50_001, 131_072]))
PARTS = st.sampled_from([0.0, 0.0001, 0.001, 0.01, 0.1, 0.5, 1.0])


@given(KINDS, KINDS, SIZES, PARTS, st.sampled_from([1.0, -1.0, 0.25]), st.integers(0, 2**32))
def test_the_largest(kind: Kind, other: Kind, size: int, part: float, factor: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, addend = kind(rng, size), other(rng, size)
    kept = max(1, round(part * size))
    expected = interpreted(sparse.select_largest, values, kept)
    assert sparse.select_largest(values, kept).tolist() == expected.tolist()
    assert expected.size == min(kept, np.count_nonzero(values))
    sums, same = np.empty_like(values), np.empty_like(values)
    expected = interpreted(sparse.add_and_select_largest, values, addend, factor, kept, same)
    assert sparse.add_and_select_largest(values, addend, factor, kept, sums).tolist() == expected.tolist()
    assert sums.tobytes() == same.tobytes()
    in_place = addend.copy()
    assert sparse.add_and_select_largest(values, in_place, factor, kept, in_place).tolist() == expected.tolist()
    assert in_place.tobytes() == same.tobytes()


@given(KINDS, KINDS, SIZES, st.integers(1, 5000), PARTS, st.integers(0, 2**32))
def test_the_largest_of_chunks(kind: Kind, other: Kind, size: int, chunk: int, part: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, addend = kind(rng, size), other(rng, size)
    kept = max(1, round(part * chunk))
    expected = interpreted(sparse.select_chunks, values, chunk, kept)
    assert sparse.select_chunks(values, chunk, kept).tolist() == expected.tolist()
    sums, same = np.empty_like(values), np.empty_like(values)
    expected = interpreted(sparse.add_and_select_chunks, values, addend, 0.5, chunk, kept, same)
    assert sparse.add_and_select_chunks(values, addend, 0.5, chunk, kept, sums).tolist() == expected.tolist()
    assert sums.tobytes() == same.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [100, 40_000])
@given(st.integers(0, 2**32))
def test_what_is_not_finite_is_found_anywhere(size: int, bad: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, zeros, sums = _normal(rng, size), np.zeros(size, np.float32), np.empty(size, np.float32)
    values[rng.integers(size)] = bad
    for kept in (1, size // 10):
        assert sparse.select_largest(values, kept).tolist() == [-1]
        assert sparse.add_and_select_largest(zeros, values, 1.0, kept, sums).tolist() == [-1]
        assert sparse.select_chunks(values, 64, min(kept, 64)).tolist() == [-1]
        assert sparse.add_and_select_chunks(values, zeros, 1.0, 64, min(kept, 64), sums).tolist() == [-1]


@pytest.mark.parametrize("part", [0.001, 0.01, 0.1])
def test_a_sample_that_is_not_like_the_rest(part: float) -> None:
    """Fewer values exceed the sampled threshold than expected, so all are searched again."""
    values = _in_the_sample(np.random.default_rng(1), 131_072)
    kept = round(part * values.size)
    expected, sums = interpreted(sparse.select_largest, values, kept), np.empty_like(values)
    assert sparse.select_largest(values, kept).tolist() == expected.tolist()
    zeros = np.zeros_like(values)
    assert sparse.add_and_select_largest(values, zeros, 1.0, kept, sums).tolist() == expected.tolist()
