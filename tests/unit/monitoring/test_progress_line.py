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


def test_numbers_of_any_size_are_short() -> None:
    values = {"a": math.nan, "b": -math.inf, "c": 123456.7, "d": 1.23456e12, "e": 1e-9, "f": 0.0}
    assert progress_line(values, 1) == "step 1  a nan  b -inf  c 123,457  d 1.235e+12  e 1e-09  f 0  1 worker"
