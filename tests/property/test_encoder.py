"""The encoder with any layout, slices, codec and pushes: nothing is lost or counted twice.

The result does not depend on the order of encoding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from psdist.client.core.encoder import EncodedSlices, GradientEncoder
from psdist.client.core.push_sequence import ReadySlices
from psdist.compression import (
    BFloat16,
    Chain,
    ChunkedTopK,
    Codec,
    Float16,
    Int2,
    Int8,
    OneBit,
    PerTensor,
    PowerSGD,
    RandomK,
    TopK,
)
from psdist.compression.segments import check
from psdist.errors import NonFiniteGradientError
from psdist.types import Layout, Slicing, TensorSpec

SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 300)), st.tuples(st.integers(1, 20), st.integers(1, 20)), st.just(()),
        st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 9)),
    ),
    min_size=1, max_size=5,
)  # fmt: skip
ONE: list[Codec] = [
    Int8(block=16), Int2(block=32, stochastic=True, error_feedback=True), OneBit(block=64), TopK(0.1),
    ChunkedTopK(2, 64, bits=2), RandomK(0.2), PowerSGD(1), TopK(0.3, momentum=0.5), Chain(TopK(0.2), Int2(), chunk=128),
]  # fmt: skip


def each_tensor(codec: Codec) -> PerTensor:
    return PerTensor({"t1": Int8(), "*": codec}, min_elements=64, min_vector=64)


CODECS = st.sampled_from(ONE).map(each_tensor)


def decoded(push: EncodedSlices, index: int) -> np.ndarray:
    out = np.empty(push.slicing.size(index), np.float32)
    push.decode_into(index, out)
    return out


@given(st.data(), SHAPES, st.sampled_from(ONE), st.integers(16, 400))
def test_what_is_sent_and_what_is_kept_is_what_was_given(
    data: st.DataObject, shapes: list[Any], one: Codec, slice_elements: int
) -> None:
    codec, adds_up = (
        each_tensor(one),
        not getattr(one, "momentum", 0),
    )  # Momentum counts a gradient several times.
    layout = Layout(tuple(TensorSpec(f"t{number}", shape) for number, shape in enumerate(shapes)))
    slicing = Slicing(layout.total, slice_elements)
    encoder, other = (GradientEncoder(codec, layout, slicing, rank=2) for _ in range(2))
    balance, kept = np.zeros(layout.total), encoder.residual.copy()
    for seed in range(data.draw(st.integers(1, 4), "pushes")):
        flat = np.random.default_rng(seed).standard_normal(layout.total).astype(np.float32)
        ends = data.draw(st.sampled_from(["answered", "not sent"]), "end")
        chosen = data.draw(st.lists(st.integers(0, slicing.count - 1), unique=True) if slicing.count else st.just([]))
        push = encoder.begin_push()
        left = tuple(set(range(slicing.count)).difference(chosen))
        assert push.decide(ReadySlices((), left)).abstaining == left
        for index in chosen:
            assert encoder.encode(push, flat, [index])
            check(push.payload(index), slicing.size(index))
        if ends == "not sent":
            encoder.discard_push()
            assert encoder.residual.tobytes() == kept.tobytes()
            continue
        whole = other.begin_push()
        other.encode(whole, flat, sorted(chosen))
        assert whole.payloads == push.payloads
        for index in chosen:
            part = slice(*slicing.bounds(index))
            balance[part] += flat[part] - decoded(push, index).astype(np.float64)
        assert encoder.end_push() == other.end_push() == bool(chosen)
        kept = encoder.residual.copy()
        if adds_up:
            np.testing.assert_allclose(kept if kept.size else 0.0, balance if kept.size else 0.0, atol=1e-4)
        assert {name: array.tobytes() for name, array in encoder.state().items()} == {
            name: array.tobytes() for name, array in other.state().items()
        }


@given(
    st.data(), st.sampled_from([*ONE, Float16(), RandomK(0.5, error_feedback=False), Chain(RandomK(0.5), BFloat16())])
)
def test_what_is_sent_while_it_is_encoded_is_never_refused(data: st.DataObject, one: Codec) -> None:
    layout = Layout((TensorSpec("t0", (8, 16)), TensorSpec("t1", (100,)), TensorSpec("t2", (96,))))
    slicing = Slicing(layout.total, 70)
    encoder, refused = GradientEncoder(each_tensor(one), layout, slicing, rank=0), False
    for _ in range(3):
        flat = data.draw(
            arrays(np.float32, layout.total, elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
        )
        try:
            encoder.encode(encoder.begin_push(), flat, range(slicing.count))
            encoder.end_push()
        except NonFiniteGradientError:
            refused = True
    assert not (encoder.sends_meanwhile and refused)
