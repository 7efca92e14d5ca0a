"""The rule for stragglers, alone and in all of the places that name them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from psdist.monitoring import problems
from psdist.monitoring.explanation import Explanation, explain
from psdist.monitoring.problems import FACTOR, STEP_SHARE, StepTimes, lower_quartile, step_times, stragglers
from tests.support.run_samples import samples, status

ROOT = Path(__file__).resolve().parents[3]

#: Compute, push, wait and pull of a typical worker and of one that is measured with it.
CASES = {
    "computes": ((0.2, 0.1, 0.6, 0.1), (0.8, 0.1, 0.0, 0.1), True),
    "sends slowly, so that the others receive slowly": ((0.1, 0.05, 0.3, 0.55), (0.1, 0.8, 0.0, 0.1), True),
    "sends slowly, and nobody waits": ((0.1, 0.05, 0.0, 0.85), (0.1, 0.79, 0.0, 0.11), True),
    "receives slowly": ((0.1, 0.05, 0.8, 0.05), (0.1, 0.05, 0.0, 0.85), True),
    "a little slow": ((0.5, 0.1, 0.3, 0.1), (0.7, 0.1, 0.1, 0.1), False),
    "slow in a small part of the step": ((0.01, 0.01, 0.97, 0.01), (0.09, 0.01, 0.89, 0.01), False),
    "even": ((0.4, 0.1, 0.4, 0.1), (0.4, 0.1, 0.4, 0.1), False),
}


def period(shares: tuple[float, ...], steps: float) -> dict[str, Any]:
    phases = dict(zip(("compute", "push", "wait", "pull"), shares, strict=True))
    return {"seconds": 1.0, "phases": phases, "steps_per_second": {"model": steps, "rare": 0.1}, "traffic": []}


def test_all_places_name_the_same_workers() -> None:
    for case in CASES:
        for steps in [20.0, 1.5]:
            others, mine, slow = CASES[case]
            workers = [period(others, steps), period(mine, steps), period(others, steps)]
            expected = {"worker-1"} if slow else set()
            by_id = {f"worker-{rank}": [one] * 3 for rank, one in enumerate(workers)}
            assert stragglers(step_times(by_id)).keys() == expected
            assert {one["who"] for one in problems.of_workers(by_id)} == expected
            result = explain(status(3), samples(*workers), 10.0)
            assert isinstance(result, Explanation) and sum(result.parts.values()) == pytest.approx(result.step_seconds)
            assert (result.parts["straggler"] > 0) == slow and (result.bottleneck == "straggler") == slow
            assert result.culprit == "worker-1" or not slow


def test_the_alert_has_the_numbers_of_the_rule() -> None:
    rule = (ROOT / "deploy" / "monitoring" / "alerts.yml").read_text().split("- alert: PsdistStraggler")[1]
    rule = rule.split("- alert:")[0]
    assert set(re.findall(r"group_left ([\d.]+) \* quantile by \(run\) \(0.25", rule)) == {f"{FACTOR:g}"}
    assert set(re.findall(r"> ([\d.]+) \* psdist:step_seconds", rule)) == {f"{STEP_SHARE:g}"}


def test_few_steps_are_not_counted() -> None:
    """Two steps or one in the same second is no difference; twenty or three is one."""
    even = (0.9, 0.05, 0.0, 0.05)
    assert stragglers(step_times({"a": [period(even, 2.0)], "b": [period(even, 1.0)]})) == {}
    found = stragglers(step_times({"a": [period(even, 20.0)], "b": [period(even, 3.0)]}))
    assert found == {"b": pytest.approx((0.95 / 3) / (0.75 * 0.95 / 20 + 0.25 * 0.95 / 3))}


def test_workers_that_compute_nothing_have_a_straggler_without_a_factor() -> None:
    none, all_of_it = StepTimes(0.0, 0.0, 1.0, 0.0), StepTimes(1.0, 0.0, 0.0, 0.0)
    assert stragglers({"a": none, "b": none, "c": none, "d": none, "e": all_of_it}) == {"e": float("inf")}
    assert stragglers({}) == step_times({}) == {} and stragglers({"a": all_of_it}) == {}


def test_the_quartile_is_that_of_prometheus() -> None:
    for values, quartile in [([], 0.0), ([4.0], 4.0), ([4.0, 0.0], 1.0), ([3.0, 1.0, 2.0], 1.5), ([5, 1, 4, 2, 3], 2)]:
        assert lower_quartile(values) == quartile
