"""Curves of a run: bounded for any length of the run, and joined points have the mean."""

from __future__ import annotations

import random
from typing import Any

from psdist.monitoring.run_json import sample_json
from psdist_scheduler.dashboard.run_state import POINTS, Curves, point
from tests.support.dashboard_runs import sample


def made(time: int, loss: float) -> dict[str, Any]:
    return {"time": float(time), "step": time, "reported": {"loss": loss}, "steps": {"model": 2.0}, "samples": 1.0}


def test_a_point_has_means_of_numbers_and_leaves_out_the_others() -> None:
    found = sample_json(sample(3, 2, 0, random.Random(1)))
    first, second = found["workers"].values()
    first["reported"], second["reported"] = {"loss": 1.0, "bad": "nan"}, {"loss": 2.0}
    first["steps_per_second"], second["steps_per_second"] = {"model": 2.0}, {"model": 4.0}
    assert point(found) == {
        "time": 1003.0, "step": 3, "reported": {"loss": 1.5}, "steps": {"model": 3.0}, "samples": 640.0
    }  # fmt: skip


def test_the_curves_of_a_day_are_short_and_keep_the_mean() -> None:
    curves, day = Curves(), 86_400
    for second in range(day):
        curves.add(made(second, second / day))
        assert len(curves.whole) <= POINTS and len(curves.recent) <= POINTS
    assert [one["time"] for one in curves.recent] == [float(second) for second in range(day - POINTS, day)]
    assert len(curves.whole) > POINTS / 2 - 1
    times = [one["time"] for one in curves.whole]
    assert times == sorted(times) and times[-1] > day - 2 * curves.stride
    assert abs(curves.whole[0]["reported"]["loss"] - (curves.stride - 1) / 2 / day) < 2 * curves.stride / day


def test_names_that_come_late_are_kept() -> None:
    curves = Curves()
    for second in range(2 * POINTS):
        one = made(second, 1.0)
        if second > POINTS:
            one["reported"] = {"late": 2.0}
        curves.add(one)
    assert curves.stride == 2
    assert curves.whole[0]["reported"] == {"loss": 1.0} and curves.whole[-1]["reported"] == {"late": 2.0}
