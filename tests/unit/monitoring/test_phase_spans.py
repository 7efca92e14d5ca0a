"""Spans of a worker: the phases of a step add up to it exactly, whatever overlaps."""

from __future__ import annotations

from collections import Counter

import pytest

from psdist.monitoring.metrics import Phase, PhaseTimes
from psdist.monitoring.phase_timer import PhaseTimer, Subject
from psdist.monitoring.spans import Span, SpanKind, SpanRecorder

PHASES = (SpanKind.COMPUTE, SpanKind.PUSH, SpanKind.WAIT, SpanKind.PULL)


class Script:
    """A script whose time passes by ``sleep``."""

    def __init__(self, steps: int = 100) -> None:
        self.now = 10.0
        self.timer = PhaseTimer(lambda: self.now)
        self.recorder = SpanRecorder(steps)
        self.timer.start()

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def push_pull(self, step: int) -> None:
        """Make one step of 8 s after 4 s of compute: 1 s push, 2 s wait, and 1 s pull."""
        self.sleep(4)
        with self.timer.call(Phase.PUSH):
            with self.timer.work(SpanKind.GATHER, "mlp", step):
                self.sleep(0.5)
            request = self.timer.open_request(sends=True, subject=Subject("mlp", step, "server-0"))
            self.sleep(0.5)
            request.sent()
            self.sleep(2)
            request.answered()
            self.sleep(1)
            request.close()
            self.timer.end_step("mlp", step)

    def spans(self) -> list[Span]:
        return self.recorder.take(1000)


def test_a_request_that_ends_while_it_is_held_up_leaves_nothing_behind() -> None:
    script = Script()
    with script.timer.call(Phase.PUSH):
        broken = script.timer.open_request(sends=True)
        broken.held_up()
        broken.held_up()
        script.sleep(2)
        broken.close()
        request = script.timer.open_request(sends=True)
        script.sleep(1)
        request.held_up()
        request.sent()
        request.held_up()  # Does nothing any more.
        request.resumed()
        request.answered()
        script.sleep(4)
        request.close()
    assert script.timer.times() == PhaseTimes(push=1, wait=2, pull=4)


def within(spans: list[Span], step: Span) -> Counter[str]:
    """Return the seconds of each phase of the script within a step."""
    seconds: Counter[str] = Counter()
    for span in spans:
        if span.kind in PHASES and not span.peer:
            seconds[span.kind.name] += max(0.0, min(span.end, step.end) - max(span.start, step.start))
    return seconds


def test_the_phases_of_a_step_add_up_to_it() -> None:
    script = Script()
    script.push_pull(1)  # Not recorded.
    script.sleep(1)
    script.timer.add_sink(script.recorder)
    for step in (2, 3, 4):
        script.push_pull(step)
    spans = script.spans()
    steps = [span for span in spans if span.kind is SpanKind.STEP]
    assert [(span.step, span.end - span.start) for span in steps] == [(3, 8.0), (4, 8.0)]
    for step in steps:
        seconds = within(spans, step)
        assert seconds == {"COMPUTE": 4, "PUSH": 1, "WAIT": 2, "PULL": 1}
        assert sum(seconds.values()) == step.end - step.start
    of_third = [(one.kind.name, one.end - one.start) for one in spans if one.step == 3 and one.kind != SpanKind.STEP]
    assert of_third == [("GATHER", 0.5), ("REQUEST", 3.5), ("PUSH", 0.5), ("WAIT", 2.0), ("PULL", 1.0)]


def test_a_step_in_buckets_ends_while_the_script_computes() -> None:
    """The recording ends with it, and has the compute phase until then."""
    script = Script(steps=1)
    script.timer.add_sink(script.recorder)
    for step in (1, 2):
        request = script.timer.open_request(sends=True, subject=Subject("mlp", step, "server-0"))
        script.sleep(3)
        request.answered()  # The first slices are answered before the last ones are sent.
        script.sleep(1)
        request.sent()
        script.sleep(1)
        request.close()
        script.timer.end_step("mlp", step)
    script.sleep(5)
    spans = script.spans()
    (step,) = [span for span in spans if span.kind is SpanKind.STEP]
    assert script.recorder.is_complete and within(spans, step) == {"COMPUTE": 5}
    parts = [(span.kind.name, span.start, span.end) for span in spans if span.peer and span.step == 2]
    assert parts == [("REQUEST", 15, 20), ("PUSH", 15, 19), ("PULL", 19, 20)]


@pytest.mark.parametrize(("sends", "parts"), [(True, ["REQUEST", "PUSH"]), (False, ["REQUEST", "WAIT"])])
def test_a_request_that_fails_has_the_part_that_it_reached(sends: bool, parts: list[str]) -> None:
    script = Script()
    script.timer.add_sink(script.recorder)
    request = script.timer.open_request(sends=sends, subject=Subject("mlp", 1, "server-0"))
    script.sleep(1)
    request.close()
    assert [span.kind.name for span in script.spans()] == parts


def test_nothing_is_recorded_without_a_recording() -> None:
    script = Script()
    script.push_pull(1)
    script.timer.add_sink(script.recorder)
    script.timer.remove_sink(script.recorder)
    script.push_pull(2)
    assert script.recorder.recorded == 0
