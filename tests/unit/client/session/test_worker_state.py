"""Worker-local states: from which push a snapshot gets them, whenever it asks. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import psdist
from psdist.client.core.push_sequence import PendingRequest, PushSequence, SnapshotMarks
from psdist.client.session.worker_state import OWN, WorkerStates
from psdist.consistency import ASP, BSP


def answer(request: PendingRequest, version: int) -> None:
    for index in sorted(request.pending):
        request.answer(index, version)


class Kept:
    """A script's batches, and pushes that are over; psdist's encoded pushes; and the states that were handed in."""

    def __init__(self, consistency: psdist.BSP | psdist.SSP | psdist.ASP, *, encodes: bool = True) -> None:
        self.session, self.pushes = PushSequence(2, consistency), SnapshotMarks()
        self.encoded = np.zeros(1)
        self.script = {"batches": np.zeros(1), "learned": np.zeros(1)}
        self.pushes.enter("p", self.session)
        #: Attempt, the push before which the state was taken, encoded pushes, batches and learned.
        self.taken: list[tuple[int, ...]] = []
        self.failed: list[int] = []
        self.states = WorkerStates(self._take, lambda attempt, error: self.failed.append(attempt))
        if encodes:
            self.states.keep("p", lambda: {"encoded": self.encoded}, lambda state: None, self.session, prefix=OWN)
        self.states.keep("p", lambda: self.script, self._restore, self.session)

    def _take(self, attempt: int, name: str, before: int, state: dict[str, Any]) -> None:
        numbers = (state[name] for name in (f"{OWN}encoded", "batches", "learned") if name in state)
        self.taken.append((attempt, before, *(int(number[0]) for number in numbers)))

    def _restore(self, state: dict[str, Any]) -> None:
        self.script = state

    def mark(self, attempt: int, **steps: int) -> dict[str, int]:
        return self.states.mark(attempt, self.pushes.sequences, steps)

    def compute(self) -> None:
        """Take a batch, outside of calls."""
        self.script["batches"] += 1

    def begin(self) -> PendingRequest:
        self.states.take("p")
        self.states.push_started("p")
        self.session.send(0)
        self.encoded = self.encoded + 1
        return self.session.begin_push()

    def end(self, push: PendingRequest) -> None:
        answer(push, push.number + 1)
        self.session.end_push(push, seen=False)
        self.states.push_finished("p")
        self.script = {**self.script, "learned": self.script.get("learned", np.zeros(1)) + 1}

    def train(self) -> None:
        self.compute()
        self.end(self.begin())


def test_the_state_of_a_cut_is_that_of_its_last_push() -> None:
    """Check that the place in the script is the same whenever the attempt asks: batches = step, learned = step - 1."""
    kept = Kept(BSP())
    kept.train()
    assert kept.mark(5, p=1) == {"p": 1} and kept.taken == [(5, 1, 1, 1, 0)]  # between pushes
    kept.compute()
    assert kept.mark(6, p=1) == {"p": 1} and kept.taken[-1] == (6, 1, 1, 1, 0)  # while it computes
    push = kept.begin()
    assert kept.mark(7, p=1) == {"p": 1} and kept.taken[-1] == (7, 1, 1, 1, 0)  # before the push under way
    assert kept.mark(8, p=0) == {"p": 1} and len(kept.taken) == 3  # that server is gone
    assert kept.mark(9, p=2) == {"p": 1} and len(kept.taken) == 3
    kept.end(push)
    assert kept.taken[-1] == (9, 2, 2, 2, 1)  # after the push
    assert kept.mark(10, p=4) == {"p": 2}
    kept.train()
    assert len(kept.taken) == 4
    kept.train()
    assert kept.taken[-1] == (10, 4, 4, 4, 3)
    assert kept.mark(11) == {} and kept.mark(12, p=5) == {"p": 4}
    kept.states.end(12)
    kept.train()
    assert len(kept.taken) == 5


def test_a_state_is_taken_where_pushes_are_marked() -> None:
    kept = Kept(ASP())
    assert kept.mark(5) == {"p": 0} and kept.taken == [(5, 0, 0, 0, 0)]
    kept.compute()
    push = kept.begin()
    assert kept.mark(6) == {"p": 1} and len(kept.taken) == 1
    kept.states.push_started("p")  # again, after it broke off
    kept.end(push)
    assert kept.taken[-1] == (6, 1, 1, 1, 0)
    kept.compute()
    assert kept.mark(7) == {"p": 1} and kept.taken[-1] == (7, 1, 1, 1, 0)


def test_a_state_does_not_wait_for_the_answer_to_a_push() -> None:
    """In SSP the answer may wait for a worker that waits for the snapshot."""
    kept = Kept(psdist.SSP(1), encodes=False)
    kept.train()
    kept.compute()
    push = kept.begin()
    assert kept.mark(5) == {"p": 2} and kept.taken == [(5, 2, 2, 1)]
    kept.end(push)
    assert len(kept.taken) == 1
    kept.compute()
    kept.begin()
    kept.session.set_given(whole=False)
    assert kept.mark(6) == {"p": 3} and len(kept.taken) == 1, "the rest of the push changes the state"


def test_the_state_of_a_push_is_the_newest_where_the_others_made_steps_alone() -> None:
    kept = Kept(BSP(backup_workers=1))
    kept.compute()
    push = kept.begin()
    answer(push, 3)
    kept.session.end_push(push, seen=True)
    kept.states.push_finished("p")
    assert kept.session.step == 3 and kept.mark(5, p=3) == {"p": 3}
    assert kept.taken == [(5, 3, 1, 1, 0)]


@pytest.mark.parametrize("continues", [True, False])
def test_a_state_follows_a_worker_that_rejoins(continues: bool) -> None:
    kept = Kept(BSP())
    kept.train()
    kept.compute()
    kept.begin()
    before = kept.session if continues else None
    kept.session = PushSequence(2, BSP(), 5, before)
    kept.pushes.enter("p", kept.session)
    restore = kept.states.start_incarnation("p", kept.session, continues=continues)
    kept.compute()
    if continues:
        assert kept.mark(5, p=2) == {"p": 1}
        kept.end(kept.begin())
        assert kept.taken == [(5, 2, 3, 3, 1)]  # Given again, after more was computed.
        return
    assert kept.mark(5, p=5) == {"p": 5} and kept.taken == [(5, 5, 2, 2, 1)]
    assert restore is not None
    restore({"batches": np.full(1, 8), "learned": np.full(1, 7)})  # The run has gone back.
    assert kept.mark(6, p=5) == {"p": 5} and kept.taken[-1] == (6, 5, 2, 8, 7)


def test_a_state_that_cannot_be_had_fails_the_attempt(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(BSP())
    kept.script = {"x": "no array"}
    kept.mark(5, p=2)
    kept.end(kept.begin())
    kept.end(kept.begin())
    assert kept.failed == [5] and not kept.taken
    assert "give numpy arrays" in caplog.text and caplog.text.count("the state of 'p' cannot be saved") == 1
