"""Encoder of differences (EF21): slices that are sent whole, and gradients that cannot be sent."""

from __future__ import annotations

import numpy as np
import pytest

from psdist.client.core.encoder import DifferenceEncoder, EncodedDifferences, EncodedSlices, GradientEncoder, encoder_of
from psdist.compression import Int8, OneBit, PerTensor, TopK
from psdist.compression.segments import accumulate
from psdist.errors import InternalError, NonFiniteGradientError
from psdist.types import Layout, Slicing, TensorSpec

LAYOUT = Layout((TensorSpec("w", (1000,)),))
SLICING = Slicing(1000, 400)
EVERY = range(SLICING.count)
EF21 = PerTensor({"*": TopK(0.01, error_feedback="ef21")}, min_elements=64, min_vector=64)
INT8 = PerTensor({"*": Int8(error_feedback="ef21")}, min_elements=64, min_vector=64)
ONE_BIT = PerTensor({"*": OneBit(error_feedback="ef21")}, min_elements=64, min_vector=64)


def encoder() -> DifferenceEncoder:
    return DifferenceEncoder(EF21, LAYOUT, SLICING, rank=0)


def gradient(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(1000).astype(np.float32)


def begun(one: GradientEncoder, flat: np.ndarray, slices: range = EVERY) -> EncodedDifferences:
    push: EncodedSlices = one.begin_push()
    assert isinstance(push, EncodedDifferences) and one.encode(push, flat, slices)
    return push


def whole(push: EncodedDifferences, index: int) -> np.ndarray:
    """Return the decoded payload of a slice."""
    values = np.zeros(SLICING.size(index), np.float32)
    accumulate(push.payload(index), values)
    return values


def test_a_push_of_nothing_but_zeros_before_it_is_compressed() -> None:
    one = encoder()
    push = begun(one, gradient(0))
    header = push.difference(EVERY)
    assert (header.number, header.from_zeros) == (0, True)
    assert sum(np.count_nonzero(whole(push, index)) for index in EVERY) == 10
    with pytest.raises(InternalError, match="takes a whole gradient for a difference"):
        push.send_whole([0])
    assert one.end_push() and one.residual.size == 0 and one.residual_norm == 0.0
    header = begun(one, gradient(1)).difference(EVERY)
    assert (header.number, header.from_zeros) == (1, False)


def test_slices_are_sent_whole_where_a_server_has_no_estimate() -> None:
    one = encoder()
    begun(one, gradient(0))
    one.end_push()
    push = begun(one, gradient(1))
    push.send_whole([0, 2])
    assert push.difference([0, 2]).from_zeros and not push.difference([1]).from_zeros
    found = np.empty(400, np.float32)
    push.decode_into(0, found)
    assert np.count_nonzero(found) > 3 and whole(push, 0).tobytes() == found.tobytes()
    with pytest.raises(InternalError, match="takes a whole gradient for a difference"):
        push.send_whole([1, 2])
    # A repeated push sends all slices in one call.
    assert push.difference([0, 1, 2]).from_zeros and np.count_nonzero(whole(push, 1)) > 3
    one.end_push()
    assert not begun(one, gradient(2)).difference(EVERY).from_zeros


def test_the_first_push_after_a_resume_is_whole() -> None:
    one, other = encoder(), encoder()
    begun(one, gradient(0))
    one.end_push()
    other.restore(one.state())
    expected, push = begun(one, gradient(1)), begun(other, gradient(1))
    assert push.difference(EVERY).from_zeros and not expected.difference(EVERY).from_zeros
    for index in EVERY:
        found = np.empty(SLICING.size(index), np.float32)
        expected.decode_into(index, found)
        assert whole(push, index).tobytes() == found.tobytes()
    assert push.norm() == expected.norm() > 0
    # The state of a run of another model size is discarded.
    other.restore({"estimate": np.ones(7, np.float32)})
    assert not other.state()["estimate"].any()


def test_slices_that_abstain_keep_their_estimate() -> None:
    one = encoder()
    begun(one, gradient(0))
    one.end_push()
    before = one.state()["estimate"].copy()
    begun(one, gradient(1), range(1, 2))
    one.end_push()
    after = one.state()["estimate"]
    assert [after[part].tobytes() == before[part].tobytes() for part in map(part_of, EVERY)] == [True, False, True]


def part_of(index: int) -> slice:
    return slice(*SLICING.bounds(index))


def test_a_difference_that_is_too_large_for_float32_is_made_up_for_later() -> None:
    one = DifferenceEncoder(INT8, LAYOUT, SLICING, rank=0)
    largest = np.full(1000, 3e38, np.float32)
    begun(one, largest)
    one.end_push()
    begun(one, -largest)
    one.end_push()
    estimate = one.state()["estimate"]
    assert np.isfinite(estimate).all() and (estimate < 0).all()
    begun(one, -largest)
    one.end_push()
    np.testing.assert_allclose(one.state()["estimate"], -largest, rtol=1e-2)


def test_a_gradient_that_decodes_to_infinity_is_refused() -> None:
    """Check OneBit, which adds the mean magnitude of a block to elements that are near the largest float32 already."""
    one = DifferenceEncoder(ONE_BIT, LAYOUT, SLICING, rank=0)
    begun(one, np.full(1000, 3e38, np.float32))
    one.end_push()
    flat = np.full(1000, -3.3e38, np.float32)
    flat[::2] = 3.3e38
    push = one.begin_push()
    with pytest.raises(NonFiniteGradientError, match=r"elements 0 to 399 .* too large for float32 as they are decoded"):
        one.encode(push, flat, EVERY)
    assert not push.payloads and not one.end_push()
    assert (one.state()["estimate"] == np.float32(3e38)).all()


def test_the_codecs_that_are_used_say_which_encoder() -> None:
    assert isinstance(encoder_of(EF21, LAYOUT, SLICING, 0), DifferenceEncoder)
    for codec in (TopK(0.01), PerTensor({"other": TopK(0.01, error_feedback="ef21")}), Int8(error_feedback="ef21")):
        assert not isinstance(encoder_of(codec, LAYOUT, SLICING, 0), DifferenceEncoder)
