"""Encoded contributions give the same update, byte for byte, as their decoded values.

This holds for any other contributions in the step, for any number of slices updated together, and if some values are
not finite or their sum overflows.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from psdist import compression, optim
from psdist.compression import segments
from psdist.types import TensorSpec
from psdist_server.kernels import means
from psdist_server.kernels.arrays import DenseParameters, Update
from psdist_server.kernels.interpreted import DTYPES
from psdist_server.kernels.optimizers import clip_factor
from tests.support.dense_updates import make
from tests.support.example_counts import examples
from tests.support.segments import integers, raw, sparse

pytestmark = pytest.mark.usefixtures("execution")

SPECS: list[optim.Optimizer] = [
    optim.SGD(lr=0.1, weight_decay=0.1),
    optim.SGD(lr=0.1, momentum=0.9, overrides=(optim.override("*", lr=0.5),)),
    optim.Adam(lr=0.1, overrides=(optim.override("*", eps=0.1),)),
    optim.FTRL(lr=0.5, l1=0.3, l2=0.2),
]
#: Encoders as workers use them.
CODECS: list[compression.Codec] = [
    compression.Int8(block=100, stochastic=True),
    compression.Int4(),
    compression.Int2(),
    compression.OneBit(),
    compression.RandomK(0.05),
    compression.PowerSGD(2),
    compression.TopK(0.05),
    *(compression.ChunkedTopK(3, 64, bits) for bits in (32, 16, 8, 2)),
]
Part = NDArray[Any]


def encoded_part(rng: np.random.Generator, size: int, data: st.DataObject) -> Part:
    """Return an encoding of ``size`` elements (hundreds): by a codec, or of any bytes in up to three segments."""
    if data.draw(st.booleans()):
        return _by_codec(rng, size, data.draw(st.sampled_from(CODECS)))
    borders = [0, *sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=2))), size]
    return np.frombuffer(b"".join(_segment(rng, stop - start, data) for start, stop in pairwise(borders)), np.uint8)


def _by_codec(rng: np.random.Generator, size: int, codec: compression.Codec) -> Part:
    tensor = TensorSpec("w", (size // 100, 100), "float32")
    (region,) = segments.regions([tensor], compression.PerTensor({"*": codec}, min_elements=64))
    prepared = segments.prepare(region, _values(rng, size), segments.PushNumber(0, 0))
    out = np.empty(segments.payload_limit(size), np.uint8)
    return out[: segments.encode([prepared], 0, size, out)]


def _segment(rng: np.random.Generator, size: int, data: st.DataObject) -> bytes:
    kind = data.draw(st.sampled_from(["float32", "float16", "bfloat16", 8, 4, 2, "sparse"]))
    if kind == "sparse":
        places = np.flatnonzero(rng.random(size) < data.draw(st.sampled_from([0.0, 0.002, 0.5])))
        return sparse(size, places.tolist(), _values(rng, places.size).tolist())
    if isinstance(kind, str):
        return raw(_values(rng, size).astype(DTYPES[kind]))
    block = data.draw(st.sampled_from([16, 100, 4096]))
    codes = rng.integers(-(1 << (kind - 1)), 1 << (kind - 1), size)
    return integers(codes, rng.random(-(-size // block)).astype(np.float32), kind, block)


def _values(rng: np.random.Generator, size: int) -> NDArray[np.float32]:
    """Return random values, including zeros of both signs."""
    values = rng.standard_normal(size).astype(np.float32)
    values[rng.random(size) < 0.3] = 0.0
    values[rng.random(size) < 0.3] *= np.float32(-0.0)
    return values


def draw_parts(rng: np.random.Generator, size: int, data: st.DataObject) -> list[Part]:
    """Return contributions, at least one of them encoded."""
    kinds = data.draw(st.lists(st.sampled_from(["encoded", *DTYPES]), max_size=4))
    kinds.insert(data.draw(st.integers(0, len(kinds))), "encoded")
    return [
        encoded_part(rng, size, data) if kind == "encoded" else _values(rng, size).astype(DTYPES[kind])
        for kind in kinds
    ]


def poison(parts: list[Part], data: st.DataObject) -> None:
    """Optionally make an unencoded value non-finite, or a sum overflow."""
    for part in parts:
        if part.dtype == np.float32 and data.draw(st.booleans()):
            part[data.draw(st.integers(0, part.size - 1))] = data.draw(st.sampled_from([np.nan, np.inf, 3e38]))


def same_bytes(one: DenseParameters, other: DenseParameters) -> bool:
    return all(one.digest(index) == other.digest(index) for index in one.indices)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
@examples(4)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_an_update_gives_the_bytes_of_the_update_by_decoded_parts(
    spec: optim.Optimizer, seed: int, data: st.DataObject
) -> None:
    ours, theirs = make(spec)[0], make(spec)[0]
    rng = np.random.default_rng(seed)
    for step in range(2):
        updates, plain = [], []
        for index in data.draw(st.permutations(ours.indices)):
            size = ours.slicing.size(index)
            parts = draw_parts(rng, size, data) if data.draw(st.booleans()) else [_values(rng, size)]
            poison(parts, data)
            factor = clip_factor(7.0, 2.0) if len(parts) == 1 and data.draw(st.booleans()) else None
            mean = np.empty(size, np.float32) if data.draw(st.booleans()) else None
            is_encoded = any(map(means.is_encoded, parts))
            updates.append(Update(index, step, parts, 0.5, factor, mean, is_encoded=is_encoded))
            mean = np.empty(size, np.float32) if mean is not None else None
            decoded = means.decoded(parts, size)
            plain.append(dataclasses.replace(updates[-1], parts=decoded, mean=mean, is_encoded=False))
        cut = data.draw(st.integers(0, len(updates)))
        left_out = ours.apply(updates[:cut]) + ours.apply(updates[cut:])
        assert left_out == theirs.apply(plain)
        assert same_bytes(ours, theirs)
        assert ours.weights.sequence.tolist() == theirs.weights.sequence.tolist()
        for one, other in zip(updates, plain, strict=True):
            if one.mean is not None and other.mean is not None:
                assert np.array_equal(one.mean, other.mean, equal_nan=True)
                assert np.array_equal(np.signbit(one.mean), np.signbit(other.mean)) or np.isnan(one.mean).any()
    ours.close()
    theirs.close()


@examples(10)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_a_mean_has_the_bytes_of_the_mean_of_decoded_parts(seed: int, data: st.DataObject) -> None:
    dense = make(SPECS[0])[0]
    index = data.draw(st.sampled_from(dense.indices))
    size = dense.slicing.size(index)
    parts = draw_parts(np.random.default_rng(seed), size, data)
    poison(parts, data)
    ours, our_square, our_bad = dense.combine(index, parts, is_encoded=True)
    theirs, their_square, their_bad = dense.combine(index, means.decoded(parts, size))
    assert (our_bad, np.float64(our_square).tobytes()) == (their_bad, np.float64(their_square).tobytes())
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert ours.tobytes() == theirs.tobytes()
    dense.close()


@examples(10)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 90).map(lambda rows: 100 * rows), data=st.data())
def test_a_sum_of_zeros_is_never_negative(seed: int, size: int, data: st.DataObject) -> None:
    parts = draw_parts(np.random.default_rng(seed), size, data)
    total = means.total(parts, size)
    assert not np.signbit(total[total == 0]).any()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_a_weighted_sum_has_the_bytes_of_products_that_are_added_up(seed: int, data: st.DataObject) -> None:
    """Non-finite contributions are skipped, with their weights."""
    rng = np.random.default_rng(seed)
    size = data.draw(st.sampled_from([200, 4100, 10_000]))
    kinds = data.draw(st.lists(st.sampled_from(["encoded", *DTYPES]), min_size=1, max_size=4))
    parts = [
        encoded_part(rng, size, data) if kind == "encoded" else _values(rng, size).astype(DTYPES[kind])
        for kind in kinds
    ]
    poison(parts, data)
    weights = [data.draw(st.sampled_from([1.0, 2.0, 0.3, 1e-6, 12345.0])) for _ in parts]
    plain = [part.astype(np.float32) for part in means.decoded(parts, size)]
    expected, counted, bad = np.zeros(size, np.float32), 0.0, []
    with np.errstate(all="ignore"):
        for place, (part, weight) in enumerate(zip(plain, weights, strict=True)):
            if np.isfinite(part).all():
                expected += np.float32(weight) * part
                counted += weight
            else:
                bad.append(place)
    if len(bad) == len(parts):
        expected, counted = np.full(size, np.nan, np.float32), 1.0
    total, divisor, left_out = means.weighted_total(parts, weights, size)
    assert (divisor, left_out) == (counted, tuple(bad))
    assert np.array_equal(total, expected, equal_nan=True)
    if np.isfinite(expected).all():
        assert total.tobytes() == expected.tobytes()
