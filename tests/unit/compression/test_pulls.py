"""Text form of a codec for weights in the settings of a parameter set."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.compression import BFloat16, Chain, ChunkedTopK, Codec, Int2, Int4, Int8, OneBit, PowerSGD, RandomK, TopK
from psdist.compression.specifications import pull_codec_from_text, pull_codec_to_text
from psdist.errors import InvalidArgumentError, LimitExceededError, PsdistError, UnknownCodecError

integers = {"block": st.integers(16, 65536), "stochastic": st.booleans(), "seed": st.integers(0, 2**63 - 1)}
codecs: st.SearchStrategy[Codec] = st.one_of(
    *(st.builds(kind, **integers) for kind in (Int8, Int4, Int2)),
    st.builds(OneBit, block=integers["block"]),
    st.builds(TopK, ratio=st.floats(1e-9, 1.0)),
    st.builds(RandomK, ratio=st.floats(1e-4, 1.0), seed=integers["seed"]),
    st.builds(ChunkedTopK, k=st.integers(1, 16), chunk=integers["block"], bits=st.sampled_from([32, 16, 8, 2])),
)


@given(codecs)
def test_a_codec_is_what_its_text_says(codec: Codec) -> None:
    assert pull_codec_from_text(pull_codec_to_text(codec)) == codec


def test_the_text_is_what_a_user_would_write() -> None:
    assert pull_codec_to_text(ChunkedTopK(bits=2)) == "ChunkedTopK(k=64, chunk=4096, bits=2)"
    assert pull_codec_from_text("TopK()") == TopK() and pull_codec_from_text("Int8(block=32)") == Int8(32)


def test_another_text_is_refused() -> None:
    for text in [
        "TopK",
        "TopK(0.01)",
        "TopK(ratio=)",
        "TopK(ratio=0.01,warm_up=1)",
        "TopK(ratio=2)",
        "TopK(ratio=1e999)",
        "TopK(ratio=--1)",
        "TopK(size=3)",
        "Int8(block=1.5)",
        "Int8(block=7)",
        "Int8(seed=-1)",
        "Int8(stochastic=1)",
        "Int8() ",
        "Int8(block=32, )",
        "Int8(__class__=1)",
        "PowerSGD(rank=4)",
        "Float32()",
        "BFloat16()",
        "x" * 1000,
        "TopK(ratio=0.01, warm_up=3)",
        "TopK(ratio=0.01, momentum=0.9)",
        "Int8(residual_decay=0.5)",
        "()",
        "Int8(block=1e)",
        f"TopK(ratio=0.{'0' * 300}1)",
    ]:
        with pytest.raises(PsdistError):
            pull_codec_from_text(text)


@given(st.text())
def test_any_text_is_a_codec_or_refused(text: str) -> None:
    with suppress(UnknownCodecError, InvalidArgumentError, LimitExceededError):
        pull_codec_from_text(text)


def test_codecs_that_cannot_send_weights() -> None:
    for codec, error in [
        (BFloat16(), UnknownCodecError),
        (PowerSGD(), UnknownCodecError),
        (Chain(TopK(), Int8()), UnknownCodecError),
        (Int8(error_feedback=True), InvalidArgumentError),
        (TopK(residual_decay=0.9), InvalidArgumentError),
        (TopK(momentum=0.5), InvalidArgumentError),
        (TopK(warm_up=2), InvalidArgumentError),
    ]:
        with pytest.raises(error):
            pull_codec_to_text(codec)
