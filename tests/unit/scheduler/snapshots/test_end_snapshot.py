"""The last snapshot of a run: its states, and what follows from them."""

from __future__ import annotations

from psdist_scheduler.decide.snapshot_schedule import EndSnapshot, EndState
from tests.support.snapshot_driver import ready


def test_it_is_wanted_then_taken_and_no_later_step_is_saved() -> None:
    d = ready()
    d.train(7)
    commit = d.saved(d.save())
    end = EndSnapshot()
    end.want({"mlp": 7})
    assert end.state is EndState.WANTED and not end.is_safe(None)
    end.assign(3)
    end.on_attempt_ended(2, commit)  # Of another attempt.
    assert end.state is EndState.WANTED
    end.on_attempt_ended(3, commit)
    assert end.state is EndState.TAKEN and end.commit == commit and end.is_safe(None)
    assert not end.check({"mlp": 7}) and "at step 7" in end.check({"mlp": 8})


def test_one_that_fails_stays_the_last_until_somebody_trains_again() -> None:
    end = EndSnapshot()
    end.want({"mlp": 7})
    end.assign(3)
    end.on_attempt_ended(3, None)
    assert end.state is EndState.FAILED and end.commit is None and end.is_safe(None)
    assert end.check({"mlp": 8})
    end.forget()
    assert end.state is EndState.NONE and not end.check({"mlp": 8})
