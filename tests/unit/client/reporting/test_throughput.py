"""Pushes and waits of the last seconds: a worker's speed as heartbeats report it."""

from __future__ import annotations

import pytest

from psdist.client.core.push_sequence import SnapshotMarks
from psdist.client.reporting.phase_timer import Throughput
from psdist.client.session.waits import Activities, GroupCalls


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def rates(throughput: Throughput) -> tuple[float, float, dict[str, int]]:
    report = throughput.rates()
    assert report is not None
    return report.seconds, report.waiting_seconds, dict(report.pushes)


def test_pushes_and_waits_of_the_last_ten_seconds() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    assert throughput.rates() is None
    for second in range(1, 31):
        clock.now = 100.0 + second - 0.25
        with throughput.waiting():
            clock.now = 100.0 + second
        for _ in range(1 if second <= 20 else 4):
            throughput.push_ended("model")
        seconds, waited, pushes = rates(throughput)
        assert seconds == min(second, 10) and waited == pytest.approx(0.25 * seconds)
    assert pushes == {"model": 10 * 4}


def test_a_wait_counts_while_it_lasts_and_once_for_all_threads() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    throughput.rates()
    throughput.wait_began()
    clock.now += 2
    throughput.wait_began()
    clock.now += 1
    assert rates(throughput) == (3, 3, {})
    throughput.wait_ended()
    clock.now += 1
    throughput.wait_ended()
    clock.now += 4
    assert rates(throughput) == (8, 4, {})


def test_a_push_of_each_parameter_set() -> None:
    throughput = Throughput(Clock())
    throughput.rates()
    for name in ("encoder", "head", "head"):
        throughput.push_ended(name)
    assert rates(throughput) == (0, 0, {"encoder": 1, "head": 2})


async def test_waits_for_others_count() -> None:
    clock = Clock()
    activities = Activities(SnapshotMarks, GroupCalls())
    activities.throughput = throughput = Throughput(clock)
    throughput.rates()
    with activities.waits(limited=True, call=True):
        clock.now += 3
    clock.now += 1
    assert rates(throughput) == (4, 3, {})
