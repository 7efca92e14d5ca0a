"""The choice of ``compression="auto"``, and its cost: never more than a twentieth of the uncompressed time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.compression import Auto, Float32, Int4, Int8, PerTensor, resolve
from psdist.compression.specifications import CANDIDATES, USUAL_SPEED, choose
from psdist.errors import InvalidArgumentError
from psdist.types import Layout, TensorSpec

LARGE = Layout((TensorSpec("w", (5000, 1000)), TensorSpec("b", (1000,))))


@pytest.mark.parametrize(
    ("remote", "link", "codec", "reason"),
    [
        (0.0, 1e6, Float32(), "none: all servers share memory with this worker"),
        (1.0, 12e6, Int4(), "Int4: a push takes 1667.0 ms in float32 at 12 MB/s, and 226.7 ms by it"),
        (0.5, 12e6, Int4(), "Int4: a push takes 833.5 ms in float32 at 12 MB/s"),
        (1.0, 5e9, Float32(), "none: a push takes 4.0 ms in float32 at 5,000 MB/s, and 5.5 ms by Int4"),
    ],
)
def test_the_choice_names_its_reason(remote: float, link: float, codec: object, reason: str) -> None:
    choice = choose(LARGE, remote, link, {})
    assert choice.codec == codec and choice.reason.startswith(reason)


def test_small_models_are_sent_as_they_are() -> None:
    choice = choose(Layout((TensorSpec("w", (100, 100)), TensorSpec("b", (60_000,)))), 1.0, 1e6, {})
    assert choice.codec == Float32() and "10000 elements" in choice.reason


def test_a_codec_that_encodes_slowly_is_not_chosen() -> None:
    assert choose(LARGE, 1.0, 5e8, {Int8(): 4e9, Int4(): 1e8}).codec == Int8()
    assert choose(LARGE, 1.0, 5e8, {Int8(): 1e8, Int4(): 1e8}).codec == Float32()


@given(
    link=st.floats(1e5, 1e11),
    speed=st.floats(1e7, 1e11),
    remote=st.floats(0.0, 1.0),
    rows=st.integers(1, 10_000),
    biases=st.integers(0, 65_535),
)
def test_by_its_own_figures_no_choice_is_slower_than_none(
    link: float, speed: float, remote: float, rows: int, biases: int
) -> None:
    layout = Layout((TensorSpec("w", (rows, 64)), TensorSpec("b", (biases,))))
    codec = choose(layout, remote, link, dict.fromkeys(CANDIDATES, speed)).codec
    if codec != Float32():
        sent = 64 * rows * CANDIDATES[codec] + 4 * biases
        assert 4 * layout.total / speed + sent * remote / link <= 0.9001 * 4 * layout.total * remote / link


def test_auto_is_for_all_tensors() -> None:
    assert resolve("auto") == Auto() and USUAL_SPEED > 0
    with pytest.raises(InvalidArgumentError):
        PerTensor({"*": Auto()})
