"""Encoder of gradients: payloads, residual, and state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from psdist.client.core.encoder import EncodedSlices, GradientEncoder
from psdist.client.core.push_sequence import ReadySlices
from psdist.compression import (
    BFloat16,
    Chain,
    ChunkedTopK,
    Codec,
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
from psdist.compression.segments import accumulate
from psdist.errors import NonFiniteGradientError
from psdist.types import Layout, Slicing, TensorSpec

#: Tensors that start and end anywhere in slices of 500 elements.
LAYOUT = Layout(
    (
        TensorSpec("w1", (30, 41)),
        TensorSpec("b1", (41,)),
        TensorSpec("none", (0, 3)),
        TensorSpec("w2", (41, 17)),
        TensorSpec("scale", ()),
        TensorSpec("w3", (3000,)),
    )
)
SLICING = Slicing(LAYOUT.total, 500)
EVERY = range(SLICING.count)
INT8 = PerTensor({"*": Int8(block=64)}, min_elements=64, min_vector=64)


def encoder_of(codec: Codec = INT8, rank: int = 0) -> GradientEncoder:
    return GradientEncoder(codec, LAYOUT, SLICING, rank)


def gradient(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(LAYOUT.total).astype(np.float32)


def decoded(push: EncodedSlices) -> np.ndarray:
    out = np.zeros(LAYOUT.total, np.float32)
    for index, payload in push.payloads.items():
        start, stop = SLICING.bounds(index)
        accumulate(payload, out[start:stop])
    return out


def pushed(encoder: GradientEncoder, flat: np.ndarray, slices: Any = EVERY) -> np.ndarray:
    """Return a push as servers decode it."""
    push = encoder.begin_push()
    assert encoder.encode(push, flat, slices)
    got = decoded(push)
    assert encoder.end_push()
    return got


def test_what_was_sent_and_the_residual_are_all_that_was_given() -> None:
    encoder, sent, given = encoder_of(), np.zeros(LAYOUT.total), np.zeros(LAYOUT.total)
    for step in range(20):
        sent += pushed(encoder, gradient(step))
        given += gradient(step)
    np.testing.assert_allclose(sent + encoder.residual, given, atol=1e-5)
    assert encoder.residual_norm == pytest.approx(np.linalg.norm(encoder.residual), rel=1e-6) and encoder.residual_norm
    assert 3.4 < encoder.totals.ratio < 4
    # Uncompressed tensors have no residual.
    assert not encoder.residual[LAYOUT.offsets[1] : LAYOUT.offsets[2]].any()


def test_a_push_that_is_made_again_is_the_same_bytes() -> None:
    encoder = encoder_of()
    pushed(encoder, gradient(0))
    push = encoder.begin_push()
    encoder.encode(push, gradient(1), EVERY)
    before = dict(push.payloads)
    again = encoder.begin_push()
    encoder.encode(again, gradient(2), EVERY)
    assert again.payloads == before
    # Nothing of it was sent: the next push replaces it, with the residual of the pushes before.
    residual = encoder.residual.copy()
    encoder.discard_push()
    assert encoder.residual.tobytes() == residual.tobytes()
    other = encoder.begin_push()
    encoder.encode(other, gradient(1), EVERY)
    assert other.payloads == before
    assert not encoder.encode(push, gradient(3), EVERY), "of a push that is over nothing is encoded"


def test_a_residual_waits_while_its_tensor_has_no_gradient() -> None:
    """The residual of the other tensors is that without it: the codec treats each tensor separately."""
    for codec in [
        Int8(block=64),
        OneBit(),
        TopK(0.05),
        TopK(0.05, momentum=0.9, error_feedback=True),
        ChunkedTopK(k=2, chunk=64),
        PowerSGD(rank=2),
        RandomK(0.05, error_feedback=True),
    ]:
        encoders = [encoder_of(PerTensor({"*": codec}, min_elements=64, min_vector=64)) for _ in range(2)]
        for encoder in encoders:
            pushed(encoder, gradient(0))
        one, other = encoders
        start, stop = LAYOUT.offsets[3], LAYOUT.offsets[4]  # "w2"
        mine = slice(start, stop)
        residual, velocity = one.state()["residual"].copy(), one.state()["velocity"].copy()
        flat = gradient(1)
        flat[mine] = 0.0
        one.begin_push().absent = ((start, stop),)
        sent = pushed(one, flat)
        without = pushed(other, flat)
        assert residual[mine].any() and not sent[mine].any()
        assert (one.state()["residual"][mine] == residual[mine]).all()
        assert (one.state()["velocity"] == velocity)[mine].all() if velocity.size else True
        others = np.ones(LAYOUT.total, bool)
        others[mine] = False
        assert (sent == without)[others].all()
        assert (one.state()["residual"] == other.state()["residual"])[others].all()


def test_slices_that_abstain_keep_their_residual() -> None:
    encoder = encoder_of()
    pushed(encoder, gradient(0))
    before = encoder.residual.copy()
    push = encoder.begin_push()
    ready = push.decide(ReadySlices((0, 1, 3), (2, 4)))
    assert ready == ReadySlices((0, 1, 3), (2, 4))
    encoder.encode(push, gradient(1), ready.valued)
    # Decisions do not change.
    assert push.decide(ReadySlices((2, 5), (1, 6))) == ReadySlices((1, 5), (2, 6))
    assert encoder.end_push()
    for index in EVERY:
        start, stop = SLICING.bounds(index)
        same = encoder.residual[start:stop].tobytes() == before[start:stop].tobytes()
        assert same == (index not in (0, 1, 3))
    assert not encoder.end_push() and not encoder.end_push(), "a push is over once"


def test_an_encoder_goes_on_from_its_state() -> None:
    for codec in [
        Int8(stochastic=True, seed=3, error_feedback=True),
        Int4(residual_decay=0.5),
        TopK(0.05, momentum=0.9, warm_up=4),
        ChunkedTopK(8, 256, bits=2),
        Chain(TopK(0.05), Int2()),
        OneBit(),
        RandomK(0.1, seed=2),
        PerTensor({"w1": PowerSGD(2), "*": Int8()}, min_vector=64),
    ]:
        one, other = encoder_of(codec, rank=1), encoder_of(codec, rank=1)
        pushed(other, gradient(9))
        for step in range(3):
            pushed(one, gradient(step))
        under_way = one.begin_push()
        one.encode(under_way, gradient(7), EVERY)  # The state does not include it.
        other.restore({name: array.copy() for name, array in one.state().items()})
        one.discard_push()
        for step in range(3, 6):
            assert pushed(one, gradient(step)).tobytes() == pushed(other, gradient(step)).tobytes()
        other.restore({})
        first = encoder_of(codec, rank=1)
        assert pushed(other, gradient(0)).tobytes() == pushed(first, gradient(0)).tobytes()


def test_the_arrays_of_a_state_stay_until_the_push_after_it_is_over() -> None:
    encoder = encoder_of()
    pushed(encoder, gradient(0))
    state = encoder.state()
    copies = {name: array.tobytes() for name, array in state.items()}
    push = encoder.begin_push()
    encoder.encode(push, gradient(1), EVERY)
    assert {name: array.tobytes() for name, array in state.items()} == copies
    encoder.end_push()
    assert {name: array.tobytes() for name, array in state.items()} == copies


def test_momentum_sums_gradients_up_until_they_are_sent() -> None:
    """Check against Lin et al. 2018, algorithm 2, in plain numpy."""
    codec = TopK(0.1, momentum=0.5)
    encoder = encoder_of(PerTensor({"*": codec}, min_elements=64, min_vector=64))
    part = slice(LAYOUT.offsets[5], LAYOUT.offsets[6])
    velocity, total = np.zeros(3000, np.float32), np.zeros(3000, np.float32)
    for step in range(6):
        velocity = np.float32(0.5) * velocity + gradient(step)[part]
        total = total + velocity
        sent = np.argsort(-np.abs(total), kind="stable")[:300]
        expected = np.zeros(3000, np.float32)
        expected[sent] = total[sent]
        got = pushed(encoder, gradient(step))
        np.testing.assert_array_equal(got[part], expected)
        velocity[sent] = total[sent] = 0.0
        state = encoder.state()
        np.testing.assert_array_equal(state["velocity"][part], velocity)
        np.testing.assert_array_equal(state["residual"][part], total)
    # The small tensor is sent unencoded.
    assert got[LAYOUT.offsets[1] : LAYOUT.offsets[2]].tobytes() == gradient(5)[slice(*LAYOUT.offsets[1:3])].tobytes()


def test_without_error_feedback_nothing_is_kept() -> None:
    encoder = encoder_of(Int8(error_feedback=False))
    assert not encoder.feeds_back and encoder.residual.size == 0
    one = pushed(encoder, gradient(0))
    assert one.tobytes() == pushed(encoder, gradient(0)).tobytes()
    assert encoder.residual_norm == 0.0 and encoder.state()["residual"].size == 0


def test_of_another_codecs_state_the_residual_is_used() -> None:
    one, other = encoder_of(), encoder_of(Int8(block=128))
    pushed(one, gradient(0))
    other.restore(one.state())
    assert other.residual.tobytes() == one.residual.tobytes() and other.residual is not one.residual
    other.restore({"residual": np.ones(3), "ordinal": np.array([4])})
    assert not other.residual.any()


def test_a_refused_gradient_is_encoded_again_from_its_replacement() -> None:
    """Check a gradient whose earlier regions and slices had been encoded before the one that the codec cannot
    represent."""
    for first in [
        *(Int8(block=64), TopK(0.1), TopK(0.1, momentum=0.9), ChunkedTopK(5, 64, bits=2)),
        *(Chain(TopK(0.9), BFloat16()), Chain(TopK(0.2), Int8(), chunk=128), TopK(1.0)),
    ]:
        codec = PerTensor({"w3": Float16(), "*": first}, min_elements=64, min_vector=64)
        encoder, other = encoder_of(codec), encoder_of(codec)
        pushed(encoder, gradient(0))
        pushed(other, gradient(0))
        too_large = gradient(1)
        too_large[-1] = 1e6
        push = encoder.begin_push()
        # It is under way, so it does not change, nor do the regions that it shares.
        assert encoder.encode(push, gradient(2), (0,))
        with pytest.raises(NonFiniteGradientError):
            encoder.encode(push, too_large, EVERY)
        assert set(push.payloads) == {0}
        assert encoder.encode(push, gradient(2), EVERY)
        expected = other.begin_push()
        assert other.encode(expected, gradient(2), EVERY) and push.payloads == expected.payloads
        assert encoder.end_push() and other.end_push()
        assert encoder.residual.tobytes() == other.residual.tobytes()


def test_what_overflows_is_refused_or_forgotten() -> None:
    encoder = encoder_of(PerTensor({"w3": Float16()}, min_vector=64))
    flat = gradient(0)
    flat[-1] = 1e5
    push = encoder.begin_push()
    with pytest.raises(NonFiniteGradientError):
        encoder.encode(push, flat, EVERY)
    encoder = encoder_of(Int8(block=64))
    huge = np.full(LAYOUT.total, 3.4e38, np.float32)
    for _ in range(3):
        assert np.isfinite(pushed(encoder, huge)).all()
    assert np.isfinite(encoder.residual).all()


def test_the_norm_is_that_of_what_is_decoded() -> None:
    encoder = encoder_of()
    push = encoder.begin_push()
    encoder.encode(push, gradient(0), EVERY)
    assert push.norm() == pytest.approx(np.linalg.norm(decoded(push)), rel=1e-6)
    out = np.full(500, 7.0, np.float32)
    push.decode_into(1, out)
    assert out.tobytes() == decoded(push)[500:1000].tobytes()
