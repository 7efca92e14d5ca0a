"""Delivery of reports: intervals, trackers, and a pipe that is full, closed or foreign."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from psdist.errors import ClosedError, ConfigurationError, InvalidArgumentError
from psdist.monitoring.metrics import Measurements, Phase, WorkerInterval, from_line
from psdist.monitoring.phase_timer import PhaseTimer
from psdist.monitoring.worker_reports import MetricsPipe, Reporter


class Worker:
    """Worker whose clock and counters a test sets."""

    def __init__(self, pipe: MetricsPipe | None = None, interval_seconds: float = 1.0) -> None:
        self.now = 100.0
        self.measured = Measurements()
        self.timer = PhaseTimer(lambda: self.now)
        self.reporter = Reporter(
            2, "run", lambda: self.measured, self.timer, interval_seconds=interval_seconds, pipe=pipe
        )

    def report(self, loss: Any = None, samples: Any = None, step: Any = None, **numbers: Any) -> None:
        self.reporter.report(loss, None, samples, step, numbers)


class Log:
    """Tracker that stores its input."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, run_id: str) -> None:
        self.calls.append(run_id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.calls.append((step, dict(values)))

    def close(self) -> None:
        self.calls.append("closed")


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    os.set_blocking(ends[0], False)
    yield ends
    for end in ends:
        os.close(end)


def named(descriptor: int) -> str:
    return f"{descriptor}:{os.fstat(descriptor).st_ino}"


def received(reader: int) -> list[WorkerInterval]:
    try:
        data = os.read(reader, 1 << 20)
    except BlockingIOError:
        return []
    return [from_line(line) for line in data.splitlines()]


def test_reports_of_an_interval_go_together_and_the_rest_at_the_end(pipe: tuple[int, int]) -> None:
    worker = Worker(MetricsPipe(named(pipe[1])))
    for step in range(1, 6):
        with worker.timer.call(Phase.PUSH):
            worker.now += 0.1
        worker.now += 0.2
        worker.measured = Measurements(step, push_bytes=10 * step)
        worker.report(loss=step, samples=4)
    (first,) = received(pipe[0])
    assert (first.rank, first.step, first.reports, first.samples, first.push_bytes) == (2, 5, 5, 20, 50)
    assert first.times.push == pytest.approx(0.5) and first.times.compute == pytest.approx(1.0)
    worker.report(loss=7)
    assert not received(pipe[0])
    worker.reporter.close()
    worker.reporter.close()
    (last,) = received(pipe[0])
    assert last.reports == 1 and last.values["loss"] == (7, 1)


def test_a_full_pipe_holds_nobody_up_and_loses_nothing(pipe: tuple[int, int]) -> None:
    worker = Worker(MetricsPipe(named(pipe[1])), interval_seconds=0.0)
    sent = 0
    while worker.reporter._unsent is None:
        worker.report(loss=1.0, samples=1)
        sent += 1
    for _ in range(3):
        worker.report(loss=1.0, samples=1)
    before = received(pipe[0])
    assert sum(interval.reports for interval in before) == sent - 1
    worker.report(loss=1.0, samples=1)
    (after,) = received(pipe[0])
    assert after.reports == after.samples == 5 and after.step == sent + 4


def test_what_had_no_room_is_sent_at_the_end(pipe: tuple[int, int]) -> None:
    worker = Worker(MetricsPipe(named(pipe[1])), interval_seconds=0.0)
    while worker.reporter._unsent is None:
        worker.report(loss=1.0)
    sent = len(received(pipe[0]))
    worker.reporter.close()
    assert [interval.step for interval in received(pipe[0])] == [sent + 1]


def test_trackers_get_the_same_numbers() -> None:
    worker, log = Worker(), Log()
    worker.reporter.add_tracker(log)
    worker.report(loss=2.0, samples=1)
    worker.now += 1.0
    worker.report(loss=1.0, samples=3)
    worker.reporter.close()
    run_id, (step, values), closed = log.calls
    assert run_id == "run" and closed == "closed" and step == 2
    assert values["loss"] == 1.25 and values["samples_per_second"] == 4.0 and values["compute_efficiency"] == 1.0


def test_the_step_is_said_or_measured_or_counted() -> None:
    for measured, given, expected in [(None, None, 1), (40, None, 40), (40, 7, 7), (None, 7, 7)]:
        worker, log = Worker(interval_seconds=0.0), Log()
        worker.reporter.add_tracker(log)
        worker.measured = Measurements(measured)
        worker.report(loss=1.0, step=given)
        assert log.calls[-1][0] == expected


def test_a_refused_report_changes_nothing() -> None:
    worker, log = Worker(), Log()
    worker.reporter.add_tracker(log)
    for wrong in ({"loss": "x"}, {"loss": 1.0, "step": -1}, {"loss": 1.0, "step": 1.5}, {"samples": -1}):
        with pytest.raises(InvalidArgumentError):
            worker.report(**wrong)
    worker.reporter.close()
    assert log.calls == ["run", "closed"]


def test_a_closed_context_takes_no_reports() -> None:
    worker = Worker()
    worker.reporter.close()
    with pytest.raises(ClosedError):
        worker.report(loss=1.0)
    with pytest.raises(ClosedError):
        worker.reporter.add_tracker(Log())


def test_another_descriptor_is_not_written_to(pipe: tuple[int, int]) -> None:
    inode = os.fstat(pipe[1]).st_ino
    for text in (f"{pipe[1]}:{inode + 1}", f"999999:{inode}", f"{10**30}:{inode}"):
        assert not MetricsPipe(text).is_open and not MetricsPipe(text).send(b"{}\n")
    for text in ("", "1", "x:1", "1:", "-1:1", "1:2:3"):
        with pytest.raises(ConfigurationError, match="PSDIST_METRICS_PIPE"):
            MetricsPipe(text)


def test_a_launcher_that_is_gone_ends_no_training() -> None:
    reader, writer = os.pipe()
    worker = Worker(MetricsPipe(named(writer)), interval_seconds=0.0)
    os.close(reader)
    for _ in range(3):
        worker.report(loss=1.0)
    worker.reporter.close()
    os.close(writer)
