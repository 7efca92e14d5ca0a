"""Calls that wait: when each gets its reason, and when it is over."""

from __future__ import annotations

from psdist.errors import ClosedError
from psdist.wire.limits import REPORT_WAIT_SECONDS
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.waits import REPEAT_SECONDS, WaitingCalls


def test_a_call_is_told_when_the_reason_changes_and_from_time_to_time() -> None:
    calls = WaitingCalls()
    calls.add(1, "worker-0")
    assert calls.report([("barrier", [1], "for b")], 0.0) == [ef.Answer(1, ef.Waiting("for b"))]
    assert calls.report([("barrier", [1], "for b")], REPEAT_SECONDS - 0.1) == []
    assert calls.report([("barrier", [1], "for c")], REPEAT_SECONDS - 0.1) == [ef.Answer(1, ef.Waiting("for c"))]
    assert calls.report([("barrier", [1], "for c")], 2 * REPEAT_SECONDS) == [ef.Answer(1, ef.Waiting("for c"))]
    assert calls.texts == ["for c"] and calls.report([], 5.0) == [] and calls.texts == []


def test_a_long_wait_is_logged_once_for_each_reason() -> None:
    calls = WaitingCalls()
    calls.report([("drain", [], "for a")], 0.0)
    (note,) = calls.report([("drain", [], "for a")], REPORT_WAIT_SECONDS)
    assert isinstance(note, ef.LogEvent) and note.level == "wait" and "waiting for a" in note.text
    assert calls.report([("drain", [], "for a")], REPORT_WAIT_SECONDS + 1) == []


def test_a_wait_that_a_caller_reports_is_not_a_warning_of_the_scheduler_too() -> None:
    calls = WaitingCalls()
    calls.add(1, "worker-0")
    calls.report([("barrier", [1], "for b")], 0.0)
    notes = calls.report([("barrier", [1], "for b")], REPORT_WAIT_SECONDS)
    assert [note.level for note in notes if isinstance(note, ef.LogEvent)] == ["call"]


def test_an_answer_for_good_ends_the_wait_and_upload_does_not() -> None:
    calls = WaitingCalls()
    for call in (1, 2, 3):
        calls.add(call, "worker-0")
    calls.drop_answered([ef.Answer(1, ef.Upload()), ef.Answer(2, ef.Done()), ef.Refuse(3, ClosedError("over"))])
    assert calls.of_members({"worker-0"}) == [(1, "worker-0")]
