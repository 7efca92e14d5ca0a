"""Every kernel equals its numpy reference, byte for byte, for any values, lengths and cuts of a vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from psdist import optim
from psdist.compression.kernel_runtime import Kernel
from psdist_server.kernels import means
from psdist_server.kernels.optimizers import Rule, Run
from psdist_server.kernels.updates import UPDATES
from tests.support import reference
from tests.support.dense_updates import SPECS
from tests.support.example_counts import examples
from tests.support.fused_update import update

Array = NDArray[Any]

pytestmark = pytest.mark.usefixtures("execution")


lengths = st.one_of(st.integers(0, 70), st.sampled_from([255, 256, 257, 511, 513, 4095, 4096, 4097, 8209]))
seeds = st.integers(0, 2**32 - 1)
kinds = st.sampled_from(["normal", "bits", "tiny", "huge", "zero"])
dtypes = st.sampled_from(list(means.DTYPES))


def draw(size: int, seed: int, kind: str = "normal") -> NDArray[np.float32]:
    """Return float32[size].

    The values are normal numbers, any finite bits (including denormals and both zeros), denormals, huge numbers, or
    zeros.
    """
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(size, dtype=np.float32)
    if kind == "bits":
        values = rng.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
        return np.where(np.isfinite(values), values, normal)
    factor = {"normal": 1.0, "tiny": 1e-41, "huge": 1e38, "zero": 0.0}[kind]
    with np.errstate(all="ignore"):
        return np.nan_to_num(normal * np.float32(factor), posinf=3e38, neginf=-3e38)


def any_bits(size: int, seed: int, dtype: str) -> Array:
    """Return any values, including NaN and infinities."""
    wanted = means.DTYPES[dtype]
    bits = np.random.default_rng(seed).integers(0, 256, size * wanted.itemsize, dtype=np.uint8)
    return bits.view(wanted)


def misaligned(array: Array) -> Array:
    """Return the same values in unaligned read-only memory, like a message's payload."""
    return np.frombuffer(b"x" + array.tobytes(), np.uint8)[1:].view(array.dtype)


def assert_same(ours: Array, theirs: Array) -> None:
    """Check for equal bytes, except that any NaN equals any other NaN."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    bits = np.dtype(f"u{ours.dtype.itemsize}")
    equal = (ours.view(bits) == theirs.view(bits)) | ((ours != ours) & (theirs != theirs))
    assert equal.all(), (np.flatnonzero(~equal)[:5], ours[~equal][:5], theirs[~equal][:5])


# --- contributions and casts ------------------------------------------------------------------------------------------


@given(lengths, st.lists(st.tuples(seeds, dtypes, kinds), min_size=1, max_size=9), st.integers(1, 70), st.booleans())
def test_combine(size: int, drawn: list[tuple[int, str, str]], divisor: int, odd: bool) -> None:
    parts = [reference.cast(draw(size, seed, kind), dtype) for seed, dtype, kind in drawn]
    ours, theirs = np.full(size, np.nan, np.float32), np.empty(size, np.float32)
    means.combine(ours, [misaligned(part) for part in parts] if odd else parts, divisor)
    reference.combine(theirs, parts, divisor)
    assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("parts", [1, 2])
def test_all_16_bit_values_widen_exactly(dtype: str, parts: int) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(means.DTYPES[dtype])
    ours, theirs = np.empty(1 << 16, np.float32), np.empty(1 << 16, np.float32)
    means.combine(ours, [every] * parts, 1)
    reference.combine(theirs, [every] * parts, 1)
    assert_same(ours, theirs)


@given(lengths, seeds, dtypes, st.booleans())
def test_cast_of_any_bits(size: int, seed: int, dtype: str, odd: bool) -> None:
    values = any_bits(size, seed, "float32")
    assert_same(means.cast(misaligned(values) if odd else values, dtype), reference.cast(values, dtype))


@pytest.mark.parametrize(("dtype", "shift"), [("float16", 13), ("bfloat16", 16)])
def test_cast_rounds_ties_to_even(dtype: str, shift: int) -> None:
    """Tests each 16-bit value, the midpoint to the next one, and the float32 values next to both."""
    every = np.arange(1 << 16, dtype=np.uint16).view(means.DTYPES[dtype]).astype(np.float32).view(np.uint32)
    middle = every + np.uint32(1 << (shift - 1))
    values = np.concatenate([base + np.uint32(step) for base in (every, middle) for step in (-1 % 2**32, 0, 1)])
    floats = values.view(np.float32)
    assert_same(means.cast(floats, dtype), reference.cast(floats, dtype))


# --- sums, checks -----------------------------------------------------------------------------------------------------


@given(lengths, seeds, kinds)
def test_sum_squares(size: int, seed: int, kind: str) -> None:
    values = draw(size, seed, kind)
    assert means.sum_squares(values) == reference.sum_squares(values)
    assert means.sum_squares(misaligned(values)) == pytest.approx(float((values.astype(np.float64) ** 2).sum()))


@given(lengths, seeds, dtypes, st.data())
def test_all_finite(size: int, seed: int, dtype: str, data: st.DataObject) -> None:
    values = reference.cast(np.clip(draw(size, seed, "bits"), -60000, 60000), dtype)
    assert means.all_finite(values) and reference.all_finite(values)
    assert means.all_finite(misaligned(values))
    assume(size)
    values[data.draw(st.integers(0, size - 1))] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    assert not means.all_finite(values) and not reference.all_finite(values)
    assert not means.all_finite(misaligned(values))


# --- updates ----------------------------------------------------------------------------------------------------------


def fresh(rule: Rule, weights: Array, runs: Sequence[Run]) -> tuple[Array, ...]:
    states = tuple(np.full(weights.size, np.nan, np.float32) for _ in rule.state_names)
    rule.initialize(weights, states, runs)
    return states


_BELOW_ONE, _POSITIVE, _ANY = (0.0, 0.3, 0.999), (1e-8, 0.3, 1e3), (0.0, 1e-8, 0.3, 0.999, 1.5, 1e3)
#: Values of hyperparameters to choose from. Other names take ``_ANY``.
POOLS: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("beta1", "beta2", "alpha", "rho"), _BELOW_ONE),
    **dict.fromkeys(("lr", "eps", "step_size_min", "step_size_max"), _POSITIVE),
    **dict.fromkeys(("nesterov", "centered", "amsgrad", "maximize", "decoupled_weight_decay"), (0.0, 1.0)),
    **{"etaminus": (1e-8, 0.3), "etaplus": (1.5, 1e3)},
}


@st.composite
def values_of(draw: st.DrawFn, kind: str) -> dict[str, float]:
    """Return hyperparameters of one group."""
    names = optim.OPTIMIZERS[kind]().values()
    values = {name: draw(st.sampled_from(POOLS.get(name, _ANY))) for name in names}
    return values | ({"momentum": 0.3, "dampening": 0.0} if values.get("nesterov") else {})


@pytest.mark.parametrize("kind", optim.OPTIMIZERS)
@examples(12)
@given(data=st.data(), size=st.integers(1, 300), seed=seeds, weights_are=kinds, gradients_are=kinds)
def test_update_with_any_settings(
    kind: str, data: st.DataObject, size: int, seed: int, weights_are: str, gradients_are: str
) -> None:
    """Three steps equal the reference, with two groups that differ in any settings. ``test_dense`` checks schedules,
    batches, and states that begin later."""
    others = optim.override("*", **data.draw(values_of(kind)))
    spec = optim.optimizer_from_values(kind, data.draw(values_of(kind)), optim.Linear(4, 0.5), 0.0, (others,))
    rule, weights = Rule(spec), draw(size, seed, weights_are)
    runs = [(0, size // 2, 0), (size // 2, size, 1)]
    states = fresh(rule, weights, runs)
    expected, expected_states = weights.copy(), tuple(state.copy() for state in states)
    for step in range(3):
        gradient = draw(size, seed + 1 + step, gradients_are if step % 2 else "normal")
        update(rule, weights, states, gradient, step, runs=runs)
        for start, stop, group in runs:
            parts = tuple(state[start:stop] for state in expected_states)
            reference.update(spec, spec.group_values(group), expected[start:stop], parts, gradient[start:stop], step)
    for ours, theirs in zip((weights, *states), (expected, *expected_states), strict=True):
        assert_same(ours, theirs)


def test_every_kernel_is_tested() -> None:
    assert {kernel for spec in SPECS for kernel in Rule(spec).kernels} == set(UPDATES.values())
    private = ("_combine", "_sum_squares", "_all_finite32", "_all_finite16", "_add_elements", "_add_weighted")
    all_kernels = {kernel for kernel in vars(means).values() if isinstance(kernel, Kernel)}
    assert all_kernels == {getattr(means, name) for name in private}
    assert {spec.kind for spec in SPECS} == set(optim.OPTIMIZERS)
