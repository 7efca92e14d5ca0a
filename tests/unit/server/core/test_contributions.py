"""Contributions of a step: equal gradients, settings that differ, and refusals that are repeated."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from psdist import optim
from psdist.consistency import BSP
from psdist.errors import InvalidArgumentError
from psdist.hyperparameters import Setting, Settings
from psdist.optim import SGD, Mean, Optimizer
from psdist.types import ParametersSpec
from psdist.wire.limits import MEMBERS_MAX
from psdist_server.core.contributions import (
    STEPS,
    ContributionComparison,
    Decision,
    LateRefusals,
    SettingsCheck,
    Stated,
)

Floats = NDArray[np.float32]
SIZE = 300_000


def watcher(optimizer: Optimizer | None = None) -> ContributionComparison:
    return ContributionComparison(ParametersSpec("mlp", optimizer or SGD(lr=0.1), BSP()))


def random(seed: int, size: int = SIZE) -> Floats:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def push(watching: ContributionComparison, step: int, *gradients: Floats) -> None:
    if watching.needs(step):
        watching.compare(step, {f"worker-{rank}": gradient for rank, gradient in enumerate(gradients)})


def test_equal_workers_are_reported_after_three_steps_in_a_row() -> None:
    for size in [8, 100, SIZE]:
        for dtype in ["<f4", "<f2"]:
            watching = watcher()
            for step in range(STEPS):
                assert watching.report is None
                first, other = random(step, size).astype(dtype), random(100 + step, size).astype(dtype)
                push(watching, step, first, other, first.copy())
            assert watching.report is not None and not watching.needs(STEPS)
            assert (watching.report.parameters, watching.report.step) == ("mlp", STEPS - 1)
            assert watching.report.worker_ids == ("worker-0", "worker-2")


def test_a_step_with_different_gradients_starts_the_count_again() -> None:
    watching = watcher()
    for step in range(10 * STEPS):
        push(watching, step, random(step), random(step if step % STEPS else -step % 97 + 1000))
    assert watching.report is None


def test_one_different_element_makes_a_difference() -> None:
    watching = watcher()
    for step in range(20):
        other = random(step)
        other[SIZE - 2 - step] += 1
        push(watching, step, random(step), other)
    assert watching.report is None
    assert not watching.needs(20), "whole slices are compared a few times, then no more"


def test_gradients_that_may_be_equal_by_their_kind_are_no_evidence() -> None:
    for gradient in [
        np.zeros(SIZE, np.float32),
        np.ones(SIZE, np.float32),
        np.full(SIZE, 0.25, np.float32),
        np.arange(SIZE, dtype=np.float32) % 2,
        np.array([0.5], np.float32),
        np.array([0.5, 0.25, 100.0], np.float32),
    ]:
        watching = watcher()
        for step in range(2 * STEPS):
            push(watching, step, gradient, gradient.copy())
            assert watching.needs(step), "another slice of the step may tell"
        assert watching.report is None


def test_a_slice_of_zeros_leaves_the_decision_to_the_next() -> None:
    watching = watcher()
    for step in range(STEPS):
        push(watching, step, np.zeros(100, np.float32), np.zeros(100, np.float32))
        push(watching, step, random(step), random(step))


def test_averages_of_a_few_metrics_are_no_evidence_and_gradients_are() -> None:
    metrics, gradients = watcher(Mean()), watcher(Mean())
    for step in range(STEPS):
        push(metrics, step, random(step, 20), random(step, 20))
        push(gradients, step, random(step), random(step))
    assert metrics.report is None and gradients.report is not None


def test_a_run_that_went_back_is_compared_again_from_its_later_steps() -> None:
    watching = watcher()
    push(watching, 50, random(0), random(1))
    for step in range(40, 60):
        push(watching, step, random(step), random(step))
    assert watching.report is not None and watching.report.step == 53


# --- settings ---------------------------------------------------------------------------------------------------------


SPEC = optim.SGD(lr=0.1, momentum=0.9, overrides=(optim.override("b", weight_decay=0.5),))
LOW = (Setting(0, "momentum", 0.8),)


def stated(
    number: int, first_step: int = 0, lr_factor: float | None = None, settings: Settings | None = None
) -> Stated:
    return Stated(f"worker-{number}", first_step, lr_factor, settings)


def test_nothing_stated_is_the_specification() -> None:
    for given in ([], [stated(0), stated(1)]):
        decision = Decision(SPEC, given)
        assert (decision.lr_factor, decision.settings) == (1.0, ())
        assert decision.difference(stated(0)) == ("", "", "")


def test_the_longest_standing_worker_decides_each_part() -> None:
    """Among workers that joined at the same step, the one with the lowest rank decides."""
    given = [stated(0, 7, 0.5, ()), stated(1, 3, None, LOW), stated(2, 3, 2.0, ())]
    decision = Decision(SPEC, given)
    assert (decision.lr_factor, decision.settings) == (2.0, LOW)
    assert decision.difference(given[0]) == ("lr_factor=0.5", "lr_factor=2.0", "worker-2")
    assert decision.difference(given[1]) == ("", "", "")
    assert decision.difference(given[2]) == ("momentum=0.9 of group 0", "momentum=0.8", "worker-1")


def test_a_difference_in_the_last_digits_is_ignored() -> None:
    """A number that is left out is the specification's."""
    for settings, differs in [
        ((Setting(0, "momentum", 0.8 * (1 + 1e-9)),), False),
        ((Setting(0, "momentum", 0.8 * (1 + 1e-5)),), True),
        ((*LOW, Setting(1, "weight_decay", 0.5 * (1 - 1e-9))), False),
        ((*LOW, Setting(1, "weight_decay", 0.0)), True),
        ((*LOW, Setting(0, "weight_decay", 1e-12)), True),
        ((), True),
        (None, False),
    ]:
        decision = Decision(SPEC, [stated(0, 0, None, LOW), stated(1, 0, None, settings)])
        assert decision.settings == LOW
        assert bool(decision.difference(stated(1, 0, None, settings))[0]) == differs


def test_equal_settings_are_stored_once() -> None:
    check = SettingsCheck(SPEC)
    first = check.check((Setting(1, "lr", 0.5), *LOW))
    assert first == (*LOW, Setting(1, "lr", 0.5))
    assert check.check((Setting(1, "lr", 0.5), *LOW)) is first
    assert check.check(()) == ()
    with pytest.raises(InvalidArgumentError, match="is given twice"):
        check.check((*LOW, *LOW))
    with pytest.raises(InvalidArgumentError, match="settings of group 2"):
        check.check((Setting(2, "lr", 0.5),))
    assert check.check(LOW) == LOW


# --- refusals of pushes that slices had counted -----------------------------------------------------------------------


WORKER = ("worker-0", 1)
STATED = Stated("worker-0", 0, 0.5, None)
OTHER = Stated("worker-0", 0, 0.25, None)
ERROR = InvalidArgumentError("lr_factor=0.5 in step 3", step=3)


@pytest.fixture
def refusals() -> LateRefusals:
    refusals = LateRefusals()
    refusals.add_settings(WORKER, 3, 7, STATED, ERROR)
    refusals.add_not_finite(WORKER, 3, 7)
    return refusals


def test_the_same_push_has_its_error_again(refusals: LateRefusals) -> None:
    for _ in range(2):
        error = refusals.settings_error(WORKER, 3, 7, STATED)
        assert error is not None and error is not ERROR and (str(error), error.details) == (str(ERROR), ERROR.details)
    assert refusals.was_not_finite(WORKER, 3, 7)


@pytest.mark.parametrize(
    ("producer", "step", "index", "stated"),
    [
        (("worker-0", 2), 3, 7, STATED),
        (("worker-1", 1), 3, 7, STATED),
        (WORKER, 4, 7, STATED),
        (WORKER, 3, 8, STATED),
        (WORKER, 3, 7, OTHER),
    ],
)
def test_no_other_push_has_it(
    refusals: LateRefusals, producer: tuple[str, int], step: int, index: int, stated: Stated
) -> None:
    assert refusals.settings_error(producer, step, index, stated) is None
    assert stated != STATED or not refusals.was_not_finite(producer, step, index)


def test_a_later_refusal_replaces_it(refusals: LateRefusals) -> None:
    refusals.add_not_finite(WORKER, 4, 1)
    assert refusals.settings_error(WORKER, 3, 7, STATED) is None
    assert not refusals.was_not_finite(WORKER, 3, 7) and refusals.was_not_finite(WORKER, 4, 1)


def test_memory_is_bounded(refusals: LateRefusals) -> None:
    for number in range(MEMBERS_MAX):
        refusals.add_not_finite((f"worker-{number}", 2), 0, 0)
    assert refusals.settings_error(WORKER, 3, 7, STATED) is None
    assert refusals.was_not_finite((f"worker-{MEMBERS_MAX - 1}", 2), 0, 0)
