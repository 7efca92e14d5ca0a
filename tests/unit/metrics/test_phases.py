"""Division of a script's time into phases, event by event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psdist.metrics.phases import Phase, PhaseClock, PhaseTimes


class Timed:
    """Clock whose events have a time."""

    def __init__(self) -> None:
        self.clock = PhaseClock()

    def __getattr__(self, name: str) -> Callable[..., object]:
        event = getattr(self.clock, name)

        def at(*arguments: object, **more: Any) -> object:
            if name in ("start", "times"):
                return event(*arguments)
            *others, now = arguments
            if event(*others, **more):
                self.clock.advance(now)
            return None

        return at


def test_a_step_is_computed_pushed_waited_for_and_pulled() -> None:
    clock = Timed()
    clock.begin_call(Phase.PUSH, 10.0)  # gathers the gradient
    clock.open_request(11.0, sends=True)
    clock.open_request(11.0, sends=True)
    clock.sent(12.0)
    clock.sent(13.0)  # the second server has received everything, too
    clock.answered(18.0)
    clock.close_request(19.0, unsent=False, answered=True)
    clock.answered(20.0)
    clock.close_request(21.0, unsent=False, answered=True)
    clock.end_call(22.0)  # and decoded
    assert clock.times(30.0) == PhaseTimes(compute=8, push=3, wait=5, pull=4)


def test_a_pull_pushes_nothing() -> None:
    clock = Timed()
    clock.begin_call(Phase.WAIT, 0.0)
    clock.open_request(1.0, sends=False)
    clock.answered(4.0)
    clock.close_request(5.0, unsent=False, answered=True)
    clock.end_call(6.0)
    assert clock.times(6.0) == PhaseTimes(wait=4, pull=2)


def test_what_overlaps_with_computing_is_hidden() -> None:
    """A step of two buckets: the first is answered while the script computes; the script waits for the second."""
    clock = Timed()
    clock.begin_call(Phase.PUSH, 0.0)
    clock.end_call(1.0)
    clock.open_request(1.0, sends=True)
    clock.sent(2.0)
    clock.answered(3.0)
    clock.close_request(4.0, unsent=False, answered=True)
    clock.begin_call(Phase.PUSH, 10.0)
    clock.end_call(11.0)
    clock.open_request(11.0, sends=True)
    clock.begin_call(Phase.WAIT, 12.0)
    clock.sent(15.0)
    clock.answered(20.0)
    clock.close_request(21.0, unsent=False, answered=True)
    clock.end_call(22.0)
    assert clock.times(22.0) == PhaseTimes(compute=10, push=5, wait=5, pull=2)


def test_an_answer_that_was_under_way_before_the_call_is_pulled() -> None:
    clock = Timed()
    clock.start(0.0)
    clock.open_request(0.0, sends=True)
    clock.sent(1.0)
    clock.answered(2.0)
    clock.begin_call(Phase.WAIT, 3.0)
    clock.close_request(5.0, unsent=False, answered=True)
    clock.end_call(6.0)
    assert clock.times(6.0) == PhaseTimes(compute=3, pull=3)


def test_a_request_that_breaks_is_not_counted_on() -> None:
    clock = Timed()
    clock.begin_call(Phase.PUSH, 0.0)
    clock.open_request(1.0, sends=True)
    clock.close_request(2.0, unsent=True, answered=False)
    clock.end_call(3.0)
    clock.begin_call(Phase.WAIT, 4.0)
    clock.open_request(4.0, sends=False)
    clock.close_request(7.0, unsent=False, answered=False)
    clock.end_call(7.0)
    assert clock.times(7.0) == PhaseTimes(compute=1, push=3, wait=3)


def test_a_gradient_that_servers_hold_up_waits() -> None:
    clock = Timed()
    clock.begin_call(Phase.PUSH, 0.0)
    clock.open_request(0.0, sends=True)
    clock.open_request(0.0, sends=True)
    clock.held_up(1.0)  # the other one still sends
    clock.answered(2.0)
    clock.held_up(4.0)
    clock.resumed(9.0)
    clock.sent(10.0)  # the first one is still held up
    clock.resumed(13.0)
    clock.sent(14.0)
    clock.answered(15.0)
    clock.close_request(16.0, unsent=False, answered=True)
    clock.close_request(16.0, unsent=False, answered=True)
    clock.end_call(16.0)
    assert clock.times(16.0) == PhaseTimes(push=6, wait=8, pull=2)


def test_calls_within_calls_are_one() -> None:
    clock = Timed()
    clock.begin_call(Phase.PUSH, 0.0)
    clock.begin_call(Phase.WAIT, 1.0)
    clock.end_call(2.0)
    clock.end_call(5.0)
    assert clock.times(6.0) == PhaseTimes(compute=1, push=5)


def test_time_begins_with_the_first_event_or_when_it_is_started() -> None:
    clock = Timed()
    clock.start(5.0)
    clock.start(7.0)
    assert clock.times(9.0) == PhaseTimes(compute=4)


def test_a_reading_does_not_start_the_clock() -> None:
    clock = PhaseClock()
    assert clock.seconds(5.0) == [0.0] * 4
    clock.start(7.0)
    assert clock.seconds(9.0) == [2.0, 0.0, 0.0, 0.0]


def test_times_are_added_and_subtracted() -> None:
    first, second = PhaseTimes(1, 2, 3, 4), PhaseTimes(2, 2, 4, 8)
    assert first + second == PhaseTimes(3, 4, 7, 12) and second - first == PhaseTimes(1, 0, 1, 4)
    assert first.total == 10 and first.communication == 9
