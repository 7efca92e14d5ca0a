"""Progress line for people."""

from __future__ import annotations

import math

from psdist.monitoring.metrics import PhaseTimes, WeightedSum, WorkerInterval, progress_line, summarize


def test_the_line_has_the_newest_numbers() -> None:
    values = {"loss": WeightedSum(1.5, 100), "accuracy": WeightedSum(99, 100)}
    times = PhaseTimes(0.3, 0.02, 0.15, 0.03)
    intervals = [WorkerInterval(rank, 1200, 50, 14360, values, times, 25 << 20, 25 << 20, 60.0, 3) for rank in range(2)]
    assert progress_line(summarize(intervals), 1200) == (
        "step 1200  loss 0.015  accuracy 0.99  57,440 samples/s  10 ms (compute 6, push 0.4, wait 3, pull 0.6)  "
        "communication 40%  staleness 1.2, at most 3  1 MiB a step  2 workers"
    )


def test_the_line_of_a_script_that_says_little() -> None:
    assert progress_line(summarize([WorkerInterval(0, 3, 1)]), 3) == "step 3  1 worker"


def test_a_script_that_tells_its_total_has_the_time_left() -> None:
    times = PhaseTimes(4.5, 0.1, 0.3, 0.1)
    for step, total, begins in [
        (1200, 5000, "step 1200 of 5000, 6:20 left  "),
        (1200, 100_000, "step 1200 of 100000, 2:44:40 left  "),
        (1200, 1200, "step 1200 of 1200, 0:00 left  "),
        (1200, 1000, "step 1200  "),
        (1200, math.inf, "step 1200  "),
    ]:
        values = {"total_steps": WeightedSum(float(total), 1)}
        line = progress_line(summarize([WorkerInterval(0, step, 50, 1, values, times, 0, 0, 0.0, 0)]), step)
        assert line.startswith(begins) and "total_steps" not in line, line
    assert progress_line({"total_steps": 9}, 3) == "step 3 of 9  1 worker"


def test_numbers_of_any_size_are_short() -> None:
    values = {"a": math.nan, "b": -math.inf, "c": 123456.7, "d": 1.23456e12, "e": 1e-9, "f": 0.0}
    assert progress_line(values, 1) == "step 1  a nan  b -inf  c 123,457  d 1.235e+12  e 1e-09  f 0  1 worker"
