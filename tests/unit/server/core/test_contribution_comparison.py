"""Detection of workers that push the same gradients: found after three steps, and never for other reasons."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from psdist.consistency import BSP
from psdist.optim import SGD, Mean, Optimizer
from psdist.types import ParametersSpec
from psdist_server.core.contributions import STEPS, ContributionComparison

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
    assert watching.report is not None


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
