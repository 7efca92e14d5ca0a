"""Division of a script's time into phases, event by event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psdist.monitoring.metrics import Phase, PhaseTimes
from psdist.monitoring.phase_timer import PhaseTimer, TimedRequest


class Script:
    """A script whose events have a time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timer = PhaseTimer(lambda: self.now)

    def at(self, now: float, event: Callable[..., Any], *arguments: Any) -> None:
        self.now = now
        event(*arguments)

    def enter(self, now: float, phase: Phase) -> None:
        """Begin a call."""
        self.at(now, self.timer.call(phase).__enter__)

    def leave(self, now: float) -> None:
        """End a call."""
        self.at(now, self.timer.call(Phase.PUSH).__exit__, None, None, None)

    def request(self, now: float, *, sends: bool = True) -> TimedRequest:
        self.now = now
        return self.timer.open_request(sends=sends)

    def times(self, now: float) -> PhaseTimes:
        self.now = now
        return self.timer.times()


def test_a_step_is_computed_pushed_waited_for_and_pulled() -> None:
    script = Script()
    script.enter(10.0, Phase.PUSH)  # gathers the gradient
    first, second = script.request(11.0), script.request(11.0)
    script.at(12.0, first.sent)
    script.at(13.0, second.sent)  # the second server has received everything, too
    script.at(18.0, first.answered)
    script.at(19.0, first.close)
    script.at(20.0, second.answered)
    script.at(21.0, second.close)
    script.leave(22.0)  # and decoded
    assert script.times(30.0) == PhaseTimes(compute=8, push=3, wait=5, pull=4)


def test_a_pull_pushes_nothing() -> None:
    script = Script()
    script.enter(0.0, Phase.WAIT)
    request = script.request(1.0, sends=False)
    script.at(4.0, request.answered)
    script.at(5.0, request.close)
    script.leave(6.0)
    assert script.times(6.0) == PhaseTimes(wait=4, pull=2)


def test_what_overlaps_with_computing_is_hidden() -> None:
    """A step of two buckets: the first is answered while the script computes; the script waits for the second."""
    script = Script()
    script.enter(0.0, Phase.PUSH)
    script.leave(1.0)
    first = script.request(1.0)
    script.at(2.0, first.sent)
    script.at(3.0, first.answered)
    script.at(4.0, first.close)
    script.enter(10.0, Phase.PUSH)
    script.leave(11.0)
    second = script.request(11.0)
    script.enter(12.0, Phase.WAIT)
    script.at(15.0, second.sent)
    script.at(20.0, second.answered)
    script.at(21.0, second.close)
    script.leave(22.0)
    assert script.times(22.0) == PhaseTimes(compute=10, push=5, wait=5, pull=2)


def test_an_answer_that_was_under_way_before_the_call_is_pulled() -> None:
    script = Script()
    script.at(0.0, script.timer.start)
    request = script.request(0.0)
    script.at(1.0, request.sent)
    script.at(2.0, request.answered)
    script.enter(3.0, Phase.WAIT)
    script.at(5.0, request.close)
    script.leave(6.0)
    assert script.times(6.0) == PhaseTimes(compute=3, pull=3)


def test_a_request_that_breaks_is_not_counted_on() -> None:
    script = Script()
    script.enter(0.0, Phase.PUSH)
    script.at(2.0, script.request(1.0).close)
    script.leave(3.0)
    script.enter(4.0, Phase.WAIT)
    script.at(7.0, script.request(4.0, sends=False).close)
    script.leave(7.0)
    assert script.times(7.0) == PhaseTimes(compute=1, push=3, wait=3)


def test_a_gradient_that_servers_hold_up_waits() -> None:
    script = Script()
    script.enter(0.0, Phase.PUSH)
    first, second = script.request(0.0), script.request(0.0)
    script.at(1.0, first.held_up)  # the other one still sends
    script.at(2.0, first.answered)
    script.at(4.0, second.held_up)
    script.at(9.0, second.resumed)
    script.at(10.0, second.sent)  # the first one is still held up
    script.at(13.0, first.resumed)
    script.at(14.0, first.sent)
    script.at(15.0, second.answered)
    script.at(16.0, first.close)
    script.at(16.0, second.close)
    script.leave(16.0)
    assert script.times(16.0) == PhaseTimes(push=6, wait=8, pull=2)


def test_time_begins_with_the_first_event_or_when_it_is_started() -> None:
    script = Script()
    script.at(5.0, script.timer.start)
    script.at(7.0, script.timer.start)
    assert script.times(9.0) == PhaseTimes(compute=4)


def test_a_reading_does_not_start_the_clock() -> None:
    script = Script()
    assert script.times(5.0) == PhaseTimes()
    script.at(7.0, script.timer.start)
    script.now = 9.0
    assert script.timer.seconds() == [2.0, 0.0, 0.0, 0.0]
