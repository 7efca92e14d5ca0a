"""Segments compared with plain Python, for any tensor and any cut into slices, compiled and interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from psdist.compression import (
    BFloat16,
    Chain,
    ChunkedTopK,
    Codec,
    Compressor,
    Float16,
    Int2,
    Int4,
    Int8,
    OneBit,
    PerTensor,
    PowerSGD,
    RandomK,
    TopK,
)
from psdist.compression.segments import KERNELS, PushNumber, accumulate, check, encode, payload_limit, prepare, regions
from psdist.types import TensorSpec
from tests.support import segment_reference as reference

Floats = NDArray[np.float32]

#: Deterministic codecs, with their effect on a tensor.
CODECS = {
    Int8(block=32): lambda v: reference.integers(v, 8, 32),
    Int4(block=48): lambda v: reference.integers(v, 4, 48),
    Int2(block=16): lambda v: reference.integers(v, 2, 16),
    TopK(0.05): lambda v: reference.top_k(v, max(1, round(0.05 * v.size))),
    TopK(1.0): lambda v: reference.top_k(v, v.size),
    ChunkedTopK(5, 64): lambda v: reference.chunked(v, 5, 64, 32),
    ChunkedTopK(64, 64): lambda v: reference.chunked(v, 64, 64, 32),
    ChunkedTopK(3, 20, bits=16): lambda v: reference.chunked(v, 3, 20, 16),
    ChunkedTopK(9, 64, bits=8): lambda v: reference.chunked(v, 9, 64, 8),
    ChunkedTopK(7, 64, bits=2): lambda v: reference.chunked(v, 7, 64, 2),
    Chain(TopK(0.1), BFloat16()): lambda v: reference.top_k(v, max(1, round(0.1 * v.size)), 16),
    Chain(TopK(0.1), Int8(), chunk=100): lambda v: reference.top_k(v, max(1, round(0.1 * v.size)), 8, 100),
    Chain(TopK(0.3), Int2(), chunk=128): lambda v: reference.top_k(v, max(1, round(0.3 * v.size)), 2, 128),
    Chain(ChunkedTopK(2, 32), Int2()): lambda v: reference.chunked(v, 2, 32, 2),
}
#: Codecs that only their payloads describe.
OTHERS = (
    *(Int8(32, stochastic=True), Int4(48, stochastic=True, seed=5), Int2(16, stochastic=True), OneBit(16), OneBit(200)),
    *(RandomK(0.1), RandomK(1.0, seed=7), RandomK(0.3, error_feedback=False), Chain(RandomK(0.2), BFloat16())),
    *(PowerSGD(1), PowerSGD(3), BFloat16(), Float16()),
)

_LARGEST = float(np.finfo(np.float32).max)
_ELEMENTS = st.one_of(
    st.floats(-1, 1, width=32),
    st.floats(-_LARGEST, _LARGEST, width=32, allow_subnormal=True),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-39, _LARGEST, -_LARGEST]),
)


@st.composite
def tensors(draw: st.DrawFn) -> Floats:
    """Return a tensor large enough to be compressed, with any values, or with values like gradients."""
    size = draw(st.integers(64, 700))
    if draw(st.booleans()):
        return draw(arrays(np.float32, size, elements=_ELEMENTS, fill=_ELEMENTS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return (rng.standard_normal(size) * 10.0 ** rng.integers(-3, 3, size)).astype(np.float32)


@contextmanager
def interpreted(wanted: bool) -> Iterator[None]:
    """Run a test with interpreted and with compiled kernels."""
    before = [kernel._current for kernel in KERNELS]
    for kernel in KERNELS:
        kernel._current = kernel.interpreted if wanted else None
    try:
        yield
    finally:
        for kernel, one in zip(KERNELS, before, strict=True):
            kernel._current = one


def shape_of(size: int) -> tuple[int, int]:
    """Return the shape of a nearly square matrix."""
    rows = next(rows for rows in range(int(size**0.5), 0, -1) if size % rows == 0)
    return rows, size // rows


def by_slices(values: Floats, codec: Codec, borders: list[int]) -> tuple[list[bytes], Floats, Floats]:
    """Return the payloads of slices, their decoded values, and the residual."""
    policy = PerTensor({"*": codec}, min_elements=64, min_vector=64)
    cut = regions([TensorSpec("first", (3,)), TensorSpec("w", shape_of(values.size - 3))], policy)
    prepared = [prepare(r, values[r.start : r.stop], PushNumber(3, 4)) for r in cut]
    decoded, residual, payloads = np.zeros_like(values), np.full_like(values, np.nan), []
    for start, stop in zip([0, *borders], [*borders, values.size], strict=True):
        out = np.full(payload_limit(stop - start), 0xAA, np.uint8)
        payload = out[: encode(prepared, start, stop, out, residual)].tobytes()
        check(payload, stop - start)
        accumulate(payload, decoded[start:stop])
        payloads.append(payload)
    return payloads, decoded, residual


def same(one: Floats, other: Floats) -> bool:
    return one.tobytes() == other.tobytes()


@pytest.mark.parametrize("codec", [*CODECS, *OTHERS], ids=repr)
@given(data=st.data(), values=tensors())
def test_all_ways_agree(codec: Codec, data: st.DataObject, values: Floats) -> None:
    flat = np.concatenate([np.ones(3, np.float32), values])
    if isinstance(codec, Float16):
        flat = np.clip(flat, -60000, 60000)
    elif isinstance(codec, BFloat16) or codec == RandomK(0.3, error_feedback=False):
        flat = np.clip(flat, -1e38, 1e38)
    borders = sorted(data.draw(st.sets(st.integers(1, flat.size - 1), max_size=4)))
    with interpreted(False):
        payloads, decoded, residual = by_slices(flat, codec, borders)
        _, whole, whole_residual = by_slices(flat, codec, [])
    with interpreted(True):
        interpreted_payloads, *interpreted_rest = by_slices(flat, codec, borders)
    assert payloads == interpreted_payloads
    assert same(decoded, interpreted_rest[0]) and same(residual, interpreted_rest[1])
    assert same(decoded, whole) and same(residual, whole_residual)
    if not isinstance(codec, Compressor) or codec.feedback:
        assert same(residual + np.float32(0), flat - decoded + np.float32(0))  # Zeros may have either sign.
    sizes = np.diff([0, *borders, flat.size])
    parts = [reference.decode(payload, int(size)) for payload, size in zip(payloads, sizes, strict=True)]
    assert same(decoded, np.concatenate(parts))
    if codec in CODECS:
        assert same(decoded, np.concatenate([flat[:3], CODECS[codec](values)]) + np.float32(0))


def test_what_low_rank_leaves_out_of_the_largest_values_is_finite() -> None:
    """The difference between such values and a product of the opposite sign could overflow."""
    values = np.zeros(76, np.float32)
    values[[27, 30, 49]] = _LARGEST, 2.5540677e38, _LARGEST
    flat = np.concatenate([np.ones(3, np.float32), values])
    _, decoded, residual = by_slices(flat, PowerSGD(1), [])
    assert same(residual + np.float32(0), flat - decoded + np.float32(0))


@given(data=st.data())
def test_payloads_stay_below_their_limit(data: st.DataObject) -> None:
    """Also with the smallest tensors, and with slices that begin and end inside them."""
    codecs = st.sampled_from([Int8(16), TopK(1.0), ChunkedTopK(16, 16, bits=8), RandomK(1.0), OneBit(16), BFloat16()])
    tensors = [TensorSpec(f"{i}", (data.draw(st.sampled_from([1, 64, 65, 100])),)) for i in range(12)]
    policy = PerTensor({tensor.name: data.draw(codecs) for tensor in tensors}, min_elements=64, min_vector=64)
    cut = regions(tensors, policy)
    values = np.ones(cut[-1].stop, np.float32)
    prepared = [prepare(r, values[r.start : r.stop], PushNumber(0, 0)) for r in cut]
    start = data.draw(st.integers(0, values.size - 1))
    stop = data.draw(st.integers(start + 1, values.size))
    out = np.empty(payload_limit(stop - start), np.uint8)
    check(out[: encode(prepared, start, stop, out)], stop - start)
