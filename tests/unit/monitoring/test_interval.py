"""Sums of reports: over steps, over workers, and as lines for the launcher."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from psdist.errors import InvalidArgumentError, MalformedPayloadError
from psdist.monitoring.metrics import (
    MEASURED,
    IntervalAccumulator,
    Measurements,
    PhaseTimes,
    StepReport,
    WeightedSum,
    WorkerInterval,
    from_line,
    last_step,
    summarize,
    to_line,
)
from psdist.wire.limits import METRIC_LINE_BYTES_MAX, METRIC_NAME_CHARACTERS_MAX, METRIC_NAMES_MAX, WORLD_MAX


def test_reports_add_up_to_an_interval() -> None:
    accumulator = IntervalAccumulator(rank=3)
    accumulator.add(StepReport({"loss": 2.0}, 10), 7, Measurements(staleness_mean=1.0, staleness_max=2))
    accumulator.add(StepReport({"loss": 1.0, "lr": 0.5}, 30), 8, Measurements(staleness_mean=2.0, staleness_max=1))
    interval = accumulator.take(PhaseTimes(1, 2, 3, 4), Measurements(push_bytes=100, pull_bytes=200))
    assert interval == WorkerInterval(
        3, 8, 2, 40, {"loss": WeightedSum(50, 40), "lr": WeightedSum(15, 30)}, PhaseTimes(1, 2, 3, 4), 100, 200, 3.0, 2
    )


def test_the_next_interval_has_what_came_since() -> None:
    accumulator = IntervalAccumulator(rank=0)
    accumulator.add(StepReport({"loss": 2.0}), 1, Measurements())
    accumulator.take(PhaseTimes(1, 1, 1, 1), Measurements(push_bytes=100, pull_bytes=200))
    accumulator.add(StepReport({"loss": 4.0}), 2, Measurements())
    interval = accumulator.take(PhaseTimes(2, 1, 1, 3), Measurements(push_bytes=150, pull_bytes=200))
    assert interval == WorkerInterval(0, 2, 1, 0, {"loss": WeightedSum(4, 1)}, PhaseTimes(1, 0, 0, 2), 50, 0)


def test_a_worker_has_so_many_names_and_no_more() -> None:
    accumulator = IntervalAccumulator(rank=0)
    for number in range(METRIC_NAMES_MAX):
        accumulator.add(StepReport({f"x{number}": 1.0}), number, Measurements())
    with pytest.raises(InvalidArgumentError, match="too many"):
        accumulator.add(StepReport({"one more": 1.0}), 99, Measurements())
    accumulator.add(StepReport({"x0": 1.0}), 50, Measurements())
    interval = accumulator.take(PhaseTimes(), Measurements())
    assert interval.step == 50 and interval.reports == METRIC_NAMES_MAX + 1 and len(interval.values) == METRIC_NAMES_MAX


FAST = WorkerInterval(
    0, 12, 4, 400, {"loss": WeightedSum(400, 400)}, PhaseTimes(1, 0.25, 0.5, 0.25), 1000, 3000, 4.0, 3
)
SLOW = WorkerInterval(1, 10, 1, 100, {"loss": WeightedSum(600, 100)}, PhaseTimes(2, 0, 0, 0), 500, 700, 0.0, 0)


def test_workers_are_combined() -> None:
    numbers = summarize([FAST, SLOW])
    assert numbers["loss"] == 2.0  # (400 * 1 + 100 * 6) / 500
    assert numbers["samples"] == 500 and numbers["samples_per_second"] == 400 / 2 + 100 / 2
    assert numbers["reports"] == 5 and numbers["workers"] == 2 and numbers["seconds"] == 2.0
    assert numbers["step_ms"] == 800 and numbers["compute_ms"] == 600
    assert (numbers["push_ms"], numbers["wait_ms"], numbers["pull_ms"]) == (50, 100, 50)
    assert numbers["communication_share"] == 0.25 and numbers["compute_efficiency"] == 0.75
    assert numbers["push_bytes"] == 1500 and numbers["pull_bytes"] == 3700
    assert numbers["staleness_mean"] == 0.8 and numbers["staleness_max"] == 3
    assert last_step([FAST, SLOW]) == 12
    assert list(numbers) == ["loss", *MEASURED]


def test_what_nobody_said_is_left_out() -> None:
    numbers = summarize([WorkerInterval(0, 1, 1, values={"loss": WeightedSum(0, 0), "lr": WeightedSum(0.5, 1)})])
    assert "loss" not in numbers and numbers["lr"] == 0.5
    assert {"samples", "samples_per_second", "communication_share", "compute_efficiency"}.isdisjoint(numbers)
    assert summarize([])["workers"] == 0 and last_step([]) == 0


def test_a_report_of_no_samples_counts_nothing_and_spoils_nothing() -> None:
    accumulator = IntervalAccumulator(rank=0)
    accumulator.add(StepReport({"loss": math.nan}, 0), 1, Measurements())
    accumulator.add(StepReport({"loss": 3.0}, 8), 2, Measurements())
    assert summarize([accumulator.take(PhaseTimes(), Measurements())])["loss"] == 3.0


def test_a_line_is_read_as_it_was_written() -> None:
    for interval in (FAST, SLOW, WorkerInterval(4, 0, 0, values={"loss": WeightedSum(math.inf, 2)})):
        assert from_line(to_line(interval)) == interval
    nan = from_line(to_line(WorkerInterval(0, 1, 1, values={"loss": WeightedSum(math.nan, 1)})))
    assert math.isnan(nan.values["loss"].total)


def test_the_longest_line_fits_into_a_pipe() -> None:
    number, large = -1.7976931348623157e308, 2**63 - 1
    names = [f"{index:02}".ljust(METRIC_NAME_CHARACTERS_MAX, "x") for index in range(METRIC_NAMES_MAX)]
    values = dict.fromkeys(names, WeightedSum(number, -number))
    times = PhaseTimes(*[1.2345678901234567e-300] * 4)
    interval = WorkerInterval(WORLD_MAX - 1, large, large, -number, values, times, large, large, -number, large)
    assert len(to_line(interval)) <= METRIC_LINE_BYTES_MAX and from_line(to_line(interval)) == interval


def changed(**fields: Any) -> bytes:
    return json.dumps({**json.loads(to_line(FAST)), **fields}).encode()


def test_anything_else_is_no_line() -> None:
    for line in [
        b"",
        b"x",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * METRIC_LINE_BYTES_MAX,
        b" " * METRIC_LINE_BYTES_MAX + b"{}",
        to_line(FAST)[:-3],
        changed(more=1),
        changed(rank=-1),
        changed(rank=WORLD_MAX),
        changed(rank=True),
        changed(step=1.5),
        changed(step=2**63),
        changed(reports="4"),
        changed(samples=-1),
        changed(samples=math.nan),
        changed(values=[]),
        changed(values={"a b": [1, 1]}),
        changed(values={"loss": [1]}),
        changed(values={"loss": [1, -1]}),
        changed(values={"loss": 1}),
        changed(values={f"x{number}": [1, 1] for number in range(METRIC_NAMES_MAX + 1)}),
        changed(seconds=[1, 2, 3]),
        changed(seconds=[1, 2, 3, math.inf]),
        changed(bytes=[1, -1]),
        changed(staleness=[1, 1.5]),
    ]:
        with pytest.raises(MalformedPayloadError, match="line of metrics"):
            from_line(line)
