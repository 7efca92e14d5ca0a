"""Batches of fused updates equal the numpy reference, byte for byte: mean or sum of contributions, then the optimizer.

They do so slice by slice, for any batch, for contributions of all types, and if some are not finite.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from psdist import optim
from psdist.errors import InvalidArgumentError
from psdist.hyperparameters import Setting, Settings, by_group
from psdist.types import GroupRange
from psdist_server.kernels.arrays import DenseParameters, Update
from psdist_server.kernels.interpreted import BLOCK, DTYPES
from psdist_server.kernels.optimizers import clip_factor
from tests.support import reference
from tests.support.dense_updates import REDUCTIONS, SLICE, SPECS, TOTAL, make
from tests.support.example_counts import examples

pytestmark = pytest.mark.usefixtures("execution")


def groups_of(ranges: tuple[GroupRange, ...]) -> NDArray[np.int64]:
    groups = np.zeros(TOTAL, np.int64)
    for item in ranges:
        groups[item.start : item.stop] = item.group
    return groups


def settings_of(spec: optim.Optimizer) -> Settings:
    """Return half of each number that may change, the rate of the last group excepted."""
    found: list[Setting] = []
    for group in spec.groups:
        for name, value in spec.setting_defaults(group).items():
            if name == "lr" and group == len(spec.groups) - 1:
                continue
            with suppress(InvalidArgumentError):
                found += spec.check_settings({group: {name: 0.5 * value}})
    return tuple(sorted(found))


class Reference:
    """The same parameters in plain numpy, with the group of each element."""

    def __init__(self, spec: optim.Optimizer, dense: DenseParameters, ranges: tuple[GroupRange, ...]) -> None:
        self.spec, self.groups, self.since = spec, groups_of(ranges), dense.rule.state_since
        self.weights = dense.weights.array.copy()
        self.states = [state.copy() for state in dense.states]
        self._sums = dense.sums

    def combine(self, out: NDArray[np.float32], parts: list[NDArray[Any]]) -> None:
        reference.combine(out, parts, 1 if self._sums else len(parts))

    def update(
        self, start: int, stop: int, step: int, parts: list[NDArray[Any]], lr_scale: float, changed: Settings = ()
    ) -> None:
        changes = by_group(changed)
        gradient = np.empty(stop - start, np.float32)
        self.combine(gradient, parts)
        for group in range(len(self.spec.overrides) + 1):
            chosen = start + np.flatnonzero(self.groups[start:stop] == group)
            weights, states = self.weights[chosen], [state[chosen] for state in self.states]
            values = self.spec.setting_defaults(group) | changes.get(group, {})
            part = gradient[chosen - start]
            reference.update(self.spec, values, weights, states, part, step, lr_scale, self.since)
            self.weights[chosen] = weights
            for state, new in zip(self.states, states, strict=True):
                state[chosen] = new


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind}-{len(spec.values())}")
@examples(2)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_batches_give_the_bytes_of_the_reference(spec: optim.Optimizer, seed: int, data: st.DataObject) -> None:
    since = data.draw(st.sampled_from([0, 1, 70]))
    dense, ranges = make(spec, since, data.draw(st.sampled_from(REDUCTIONS)))
    expected = Reference(spec, dense, ranges)
    rng = np.random.default_rng(seed)
    for step in range(since, since + 3):
        chosen = data.draw(st.permutations(dense.indices))
        updates = []
        for index in chosen:
            size = dense.slicing.size(index)
            dtypes = data.draw(st.lists(st.sampled_from(list(DTYPES)), min_size=1, max_size=5))
            parts = [rng.standard_normal(size).astype(DTYPES[dtype]) for dtype in dtypes]
            lr_scale = data.draw(st.sampled_from([1.0, 0.5, 1 / 3]))
            changed = data.draw(st.sampled_from([(), settings_of(spec)]))
            updates.append(Update(index, step, parts, lr_scale, settings=changed))
            expected.update(*dense.slicing.bounds(index), step, parts, lr_scale, changed)
        cut = data.draw(st.integers(0, len(updates)))
        assert dense.apply(updates[:cut]) + dense.apply(updates[cut:]) == [()] * len(updates)
        assert dense.weights.array.tobytes() == expected.weights.tobytes()
        for state, theirs in zip(dense.states, expected.states, strict=True):
            assert state.tobytes() == theirs.tobytes()
    dense.close()


@pytest.mark.parametrize("max_grad_norm", [0.0, 2.0], ids=["", "clipped"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind}-{len(spec.values())}")
@examples(2)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_an_update_by_the_mean_gives_the_bytes_of_the_update_by_its_parts(
    spec: optim.Optimizer, max_grad_norm: float, seed: int, data: st.DataObject
) -> None:
    spec = dataclasses.replace(spec, max_grad_norm=max_grad_norm)
    reduction = data.draw(st.sampled_from(REDUCTIONS))
    primary, backup = make(spec, reduction=reduction)[0], make(spec, reduction=reduction)[0]
    rng = np.random.default_rng(seed)
    for step, index in enumerate(data.draw(st.permutations(primary.indices * 2))):
        size = primary.slicing.size(index)
        dtypes = data.draw(st.lists(st.sampled_from(list(DTYPES)), min_size=1, max_size=5))
        parts = [rng.standard_normal(size).astype(DTYPES[dtype]) for dtype in dtypes]
        factor = None
        if max_grad_norm:  # One push, scaled down by its own norm (SSP and ASP), or a mean (BSP).
            combined = primary.combine(index, parts)[0]
            assert combined is not None
            parts = [combined] if data.draw(st.booleans()) else parts[:1]
            factor = clip_factor(data.draw(st.sampled_from([0.5, 1.0, 7.0])), max_grad_norm)
        is_poisoned = data.draw(st.booleans())
        if is_poisoned:
            parts[0][data.draw(st.integers(0, size - 1))] = data.draw(st.sampled_from([np.nan, np.inf]))
        mean = np.full(size, -1.0, np.float32)
        assert primary.apply([Update(index, step, parts, factor=factor, mean=mean)]) == [(0,) if is_poisoned else ()]
        backup.apply([Update(index, step, [mean])])
        assert primary.digest(index) == backup.digest(index)
    assert primary.weights.array.tobytes() == backup.weights.array.tobytes()
    primary.close()
    backup.close()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 4), data=st.data())
def test_a_block_is_the_mean_of_what_is_finite(seed: int, count: int, data: st.DataObject) -> None:
    spec = optim.SGD(lr=1.0)
    dense, ranges = make(spec, reduction=data.draw(st.sampled_from(REDUCTIONS)))
    expected = Reference(spec, dense, ranges)
    rng = np.random.default_rng(seed)
    size = dense.slicing.size(1)
    dtypes = [data.draw(st.sampled_from(list(DTYPES))) for _ in range(count)]
    parts = [rng.standard_normal(size).astype(DTYPES[dtype]) for dtype in dtypes]
    poisoned = data.draw(st.dictionaries(st.integers(0, count - 1), st.integers(0, size - 1)))
    for part, position in poisoned.items():
        parts[part][position] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    mean = np.zeros(size, np.float32)
    (bad,) = dense.apply([Update(1, 0, parts, mean=mean)])
    assert bad == tuple(sorted(poisoned))
    for begin in range(0, size, BLOCK):
        stop = min(size, begin + BLOCK)
        good = [part[begin:stop] for part in parts if np.isfinite(part[begin:stop].astype(np.float32)).all()]
        if good:
            expected.update(SLICE + begin, SLICE + stop, 0, good, 1.0)
            combined = np.empty(stop - begin, np.float32)
            expected.combine(combined, good)
            assert mean[begin:stop].tobytes() == combined.tobytes()
        else:
            assert np.isnan(mean[begin:stop]).all()
    assert dense.weights.array.tobytes() == expected.weights.tobytes()
    dense.close()
