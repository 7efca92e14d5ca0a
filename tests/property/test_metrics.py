"""Metrics: the phases of a script's time add up to it, and no sum depends on interval boundaries."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import MalformedPayloadError
from psdist.monitoring.metrics import (
    IntervalAccumulator,
    Measurements,
    Phase,
    PhaseTimes,
    StepReport,
    WorkerInterval,
    from_line,
    summarize,
    to_line,
)
from psdist.monitoring.phase_timer import PhaseTimer, TimedRequest

seconds = st.floats(0, 100)
#: Whole numbers, whose float sums are exact in any order.
numbers = st.integers(-(2**20), 2**20).map(float)


class FakeClock:
    """Clock set by the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


EVENTS = ("begin push", "begin wait", "end", "open", "open with gradient", "sent", "answered", "close")


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1000)), max_size=60), st.randoms())
def test_phases_add_up_to_the_time(events: list[tuple[str, int]], rng: object) -> None:
    """Every second is in exactly one phase, for any calls and requests in a valid order."""
    clock = FakeClock()
    timer = PhaseTimer(clock)
    timer.start()
    calls, requests = [], list[TimedRequest]()
    for event, passed in events:
        clock.now += passed
        before, was_in_call = timer.times(), bool(calls)
        match event.split()[0]:
            case "begin":
                calls.append(timer.call(Phase.PUSH if event.endswith("push") else Phase.WAIT).__enter__())
            case "end" if calls:
                calls.pop().__exit__(None, None, None)
            case "open":
                requests.append(timer.open_request(sends=event.endswith("gradient")))
            case "sent" if requests:
                requests[passed % len(requests)].sent()
            case "answered" if requests:
                requests[passed % len(requests)].answered()
            case "close" if requests:
                requests.pop(passed % len(requests)).close()
        phase = timer.phase
        assert before.total == clock.now == timer.times().total
        assert timer.phase is phase, "an event that changes the phase says so"
        clock.now += 1
        spent = timer.times() - before
        assert spent.total == 1 and spent.compute == (0 if calls else 1), (event, was_in_call)


reports = st.builds(StepReport, st.dictionaries(st.sampled_from("abc"), numbers), st.none() | st.integers(0, 512))


@given(st.lists(st.tuples(reports, st.booleans()), min_size=1, max_size=20))
def test_sums_do_not_depend_on_where_intervals_end(given_reports: list[tuple[StepReport, bool]]) -> None:
    whole, parts = IntervalAccumulator(0), IntervalAccumulator(0)
    intervals: list[WorkerInterval] = []
    for step, (report, ends) in enumerate(given_reports):
        now = PhaseTimes(step, step, 2.0 * step, 0), Measurements(step, step, step, 10 * step, 20 * step)
        whole.add(report, step, now[1])
        parts.add(report, step, now[1])
        if ends or step == len(given_reports) - 1:
            intervals.append(parts.take(*now))
    expected = whole.take(*now)
    assert all(first.step < second.step for first, second in pairwise(intervals))
    total = intervals[0]
    for interval in intervals[1:]:
        total = total.followed_by(from_line(to_line(interval)))
    assert total == expected


@given(st.lists(reports, min_size=1, max_size=10), st.integers(2, 4))
def test_means_are_those_of_all_samples(given_reports: list[StepReport], workers: int) -> None:
    """The same reports, made by one worker or divided among several."""
    ranks = [IntervalAccumulator(rank) for rank in range(workers)]
    alone = IntervalAccumulator(0)
    for number, report in enumerate(given_reports):
        for accumulator in (alone, ranks[number % workers]):
            accumulator.add(report, number, Measurements())
    combined = summarize([rank.take(PhaseTimes(), Measurements()) for rank in ranks if rank.reports])
    expected = summarize([alone.take(PhaseTimes(), Measurements())])
    assert combined == expected | {"workers": combined["workers"]}


@given(st.binary(max_size=200))
def test_bytes_are_an_interval_or_a_typed_error(line: bytes) -> None:
    with pytest.raises(MalformedPayloadError):
        from_line(line)


@given(st.data())
def test_a_changed_line_is_an_interval_or_a_typed_error(data: st.DataObject) -> None:
    line = bytearray(to_line(WorkerInterval(3, 12, 4, 40.0, {}, PhaseTimes(1, 2, 3, 4), 5, 6, 7.0, 8)))
    for _ in range(data.draw(st.integers(1, 3))):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.sampled_from(b'0123456789-.eE,:[]{}"NaInf x'))
    try:
        interval = from_line(bytes(line))
    except MalformedPayloadError:
        return
    assert math.isfinite(interval.times.total) and from_line(to_line(interval)) == interval
