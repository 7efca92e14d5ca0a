"""Workers that wait for each other: the scheduler finds the circle, and nothing that is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psdist import errors
from psdist.consistency import ASP, BSP, SSP, Consistency
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide.cluster_events import Activity, CallChecked, GroupCall, ResumePush
from psdist_scheduler.decide.effects import CheckCall, DeadlockFound
from tests.support.scheduler_driver import LAYOUT, Driver, caller, spec


class Run(Driver):
    """Workers of ready parameters, whose reports are numbered."""

    def __init__(self, consistency: Consistency | None = None, workers: int = 2) -> None:
        super().__init__(workers_min=workers, servers_min=1)
        self.join("server")
        joined = [self.join() for _ in range(workers)]
        self.workers = [worker for worker, _ in joined]
        self.sessions = [session for _, session in joined]
        for worker in self.workers:
            self.create(worker, consistency=consistency or BSP())
        self.ask(ev.CommitParameters, self.workers[0])
        self._reports = 0

    def report(self, kind: Any, step: int = 0, **next_pushes: int) -> Activity:
        self._reports += 1
        name = "mlp" if kind in ("step", "clock") else ""
        return Activity(self._reports, tuple(next_pushes.items()), kind, name, step)

    def beat_with(self, number: int, activity: Activity) -> Activity:
        self.on(ev.Heartbeat(self.sessions[number], self.map.epoch, activity=activity))
        return activity

    def group(self, number: int, key: bytes, *others: int) -> Activity:
        """Report of a worker that waits for others in a barrier of a group."""
        awaited = tuple(self.workers[other].identity for other in others)
        call = GroupCall(key, False, 3, awaited, f"in barrier() of group {key.decode()}")
        return self.beat_with(number, replace(self.report("group", mlp=7), group_call=call))

    def any_message(self, number: int, *others: int) -> Activity:
        """Report of a worker that waits for a message of any of the others. It has heard 10 of rank 1, 20 of rank 2."""
        awaited = tuple(self.workers[other].identity for other in others)
        sources = tuple((10 * other, 5) for other in others)
        call = GroupCall(b"a", True, 0, awaited, "in recv_any(tag=0) of group a", sources=sources)
        return self.beat_with(number, replace(self.report("group", mlp=7), group_call=call))

    def confirm_all(self, *numbers: int) -> None:
        """Let these workers (default: all) answer their questions."""
        for number in numbers or range(len(self.workers)):
            for question in self.asked(number):
                self.confirm(number, question)

    def asked(self, number: int) -> list[CheckCall]:
        """Questions to a worker since it was asked last."""
        self.tick(1.0)
        told = self.told[self.sessions[number]]
        found = [value for value in told if isinstance(value, CheckCall)]
        told[:] = [value for value in told if not isinstance(value, CheckCall)]
        return found

    def confirm(self, number: int, asked: CheckCall) -> None:
        session = self.sessions[number]
        self.on(CallChecked(session, asked.sequence, asked.worker_id, asked.incarnation, asked.waiting))

    def barrier(self, number: int, activity: Activity, name: str = "b") -> int:
        call = self.number()
        self.on(ev.EnterBarrier(call, caller(self.workers[number]), name, 1, 0, activity=activity))
        return call

    def ended(self) -> dict[int, str]:
        """Workers whose calls were ended, and why, after some time."""
        self.tick(1.0)
        found = {}
        for number, session in enumerate(self.sessions):
            for value in self.told[session]:
                if isinstance(value, DeadlockFound):
                    found[number] = value.error.message
        return found


def test_a_barrier_and_a_push_are_a_circle() -> None:
    run = Run()
    waits = run.beat_with(1, run.report("step", 7, mlp=8))
    call = run.barrier(0, run.report("call", mlp=7), "end")
    text = "worker-1 (rank 1) waits in step 7 of 'mlp' for worker-0 (rank 0), which waits at barrier 'end' for worker-1"
    assert run.ended() == {1: run.errors[call].message}
    assert isinstance(run.errors[call], errors.MutualWaitError) and run.errors[call].message.startswith(text)
    assert "count loops by the parameters' step" in run.errors[call].message
    [told] = [value for value in run.told[run.sessions[1]] if isinstance(value, DeadlockFound)]
    assert told.sequence == waits.sequence
    assert f"deadlock: {text}" in run.notes
    assert not any("barrier" in wait for wait in run.cluster.waits), "the call does not wait any more"
    run.beat_with(1, waits)
    assert len([value for value in run.told[run.sessions[1]] if isinstance(value, DeadlockFound)]) == 1, "told once"


def test_a_circle_of_three() -> None:
    run = Run(workers=3)
    for name in ("p", "q", "r"):
        for worker in run.workers:
            run.create(worker, name=name)
        run.ask(ev.CommitParameters, run.workers[0], name)
    for number, (waits, behind) in enumerate((("p", "q"), ("q", "r"), ("r", "p"))):
        next_pushes = dict.fromkeys(("p", "q", "r"), 4) | {behind: 3}
        run.beat_with(number, replace(run.report("step", 3, **next_pushes), parameters=waits))
    assert run.ended() == dict.fromkeys(range(3), run.ended()[0])
    for text in ("in step 3 of 'p' for worker-2", "in step 3 of 'r' for worker-1", "in step 3 of 'q' for worker-0"):
        assert text in run.ended()[0]


def test_only_those_in_the_circle_are_ended() -> None:
    run = Run(workers=3)
    run.beat_with(2, run.report("step", 3, mlp=4))
    run.barrier(1, run.report("call", mlp=4))
    call = run.number()
    run.on(ev.Create(call, caller(run.workers[0]), spec("new"), LAYOUT, activity=run.report("call", mlp=3)))
    assert run.ended() == {}, "worker-2 may continue, as worker-0 does"
    assert "to create 'new'" in run.errors[call].message


def test_different_barriers_are_a_circle() -> None:
    run = Run()
    calls = [run.barrier(number, run.report("call"), f"b{number}") for number in (0, 1)]
    assert run.ended() == {}
    assert all(isinstance(run.errors[call], errors.MutualWaitError) for call in calls)


def test_ssp_waits_by_clocks() -> None:
    run = Run(SSP(2))
    run.beat_with(1, run.report("clock", 5, mlp=7))
    run.barrier(0, run.report("call", mlp=5))
    assert run.ended() == {}, "its clock is 5, which is enough"
    run = Run(SSP(2))
    run.beat_with(1, run.report("clock", 5, mlp=7))
    run.barrier(0, run.report("call", mlp=4))
    assert list(run.ended()) == [1]


def test_a_step_in_parts_waits_for_who_has_pushed_nothing() -> None:
    run = Run()
    for number in (0, 1):  # Each waits for the slices that it has pushed, which the other has pushed, too.
        run.beat_with(number, replace(run.report("step", 7, mlp=7), partial=("mlp",)))
    assert run.ended() == {}
    run = Run()
    run.beat_with(1, replace(run.report("step", 7, mlp=7), partial=("mlp",)))
    call = run.barrier(0, run.report("call", mlp=7))
    assert list(run.ended()) == [1] and call in run.errors
    run = Run()
    run.beat_with(1, run.report("step", 7, mlp=8))
    run.beat_with(0, replace(run.report("step", 7, mlp=7), partial=("mlp",)))
    assert run.ended() == {}, "worker-0 waits for what worker-1 has pushed"


def test_of_one_wait_the_newest_word_counts() -> None:
    run = Run()
    early = run.report("", mlp=7)
    run.beat_with(0, early)  # Its push is not on its way yet; then it is.
    run.beat_with(0, replace(early, next=(("mlp", 8),), kind="step", parameters="mlp", number=7))
    run.beat_with(0, early)
    run.beat_with(1, run.report("step", 7, mlp=8))
    assert run.ended() == {}
    call = run.number()
    waiting = run.report("call", mlp=8)
    run.on(ev.EnterBarrier(call, caller(run.workers[1]), "b", 1, 0, activity=waiting))
    run.beat_with(1, replace(waiting, next=(("mlp", 9),)))  # A push in the background was sent meanwhile.
    run.beat_with(0, run.report("step", 8, mlp=9))
    assert run.ended() == {} and call not in run.errors
    run.beat_with(0, run.report("step", 9, mlp=10))
    assert list(run.ended()) == [0] and call in run.errors


def test_what_may_end_is_no_circle() -> None:
    for (kind, step, pushed), (other_kind, other_pushed) in (
        (("step", 7, 8), ("call", 8)),  # The other has pushed.
        (("step", 7, 8), ("", 7)),  # The other computes, or has a time limit.
        (("", 7, 8), ("call", 7)),  # It waits with a time limit.
    ):
        run = Run()
        run.beat_with(1, run.report(kind, step, mlp=pushed))
        call = run.barrier(0, run.report(other_kind, mlp=other_pushed))
        assert run.ended() == {} and call not in run.errors


@pytest.mark.parametrize("consistency", [ASP(), BSP(backup_workers=1)])
def test_who_does_not_wait_for_all_is_in_no_circle(consistency: Consistency) -> None:
    run = Run(consistency)
    run.beat_with(1, run.report("step", 7, mlp=8))
    run.barrier(0, run.report("call", mlp=7))
    assert run.ended() == {}


def test_a_silent_worker_is_in_no_circle() -> None:
    run = Run(workers=3)
    run.beat_with(1, run.report("step", 7, mlp=8))
    run.ask(ev.EnterBarrier, run.workers[0], "b")  # Of a client that reports nothing.
    assert run.ended() == {}


def test_a_report_that_is_overtaken_means_nothing() -> None:
    run = Run()
    old, new = run.report("step", 7, mlp=8), run.report("", mlp=8)
    run.beat_with(1, new)
    run.beat_with(1, old)
    run.barrier(0, run.report("call", mlp=7))
    assert run.ended() == {}


def test_a_report_of_the_round_before_means_nothing() -> None:
    run = Run()
    run.beat_with(1, run.report("step", 7, mlp=8))  # Answered since, but no heartbeat has said so.
    run.barrier(0, run.report("call", mlp=8))  # It came here after it had pushed step 7.
    assert run.ended() == {}


def test_an_incarnation_that_is_over_is_in_no_circle() -> None:
    run = Run()
    run.beat_with(1, run.report("step", 7, mlp=8))
    run.on(ev.SessionClosed(run.sessions[1], "its session broke"))
    run.join(member_id="worker-1")
    call = run.barrier(0, run.report("call", mlp=7))
    assert run.ended() == {} and call not in run.errors


def created(run: Run, number: int, name: str, resume: ResumePush | None) -> int:
    """A worker's call for a parameter set that is not placed."""
    call, activity = run.number(), run.report("call")
    asked = ev.Create(call, caller(run.workers[number]), spec(name), LAYOUT, resume, activity=activity)
    run.on(asked)
    return call


@pytest.mark.parametrize("resume", [None, ResumePush(1, 0)])
def test_workers_that_rejoin_ask_for_all_sets_at_once(resume: ResumePush | None) -> None:
    """After a rollback each calls for all of its sets, and the calls come in any order."""
    run = Run()
    calls = [created(run, 0, "D", resume), created(run, 1, "E", resume)]
    assert bool(run.ended() or [call for call in calls if call in run.errors]) == (resume is None)


def test_a_worker_that_rejoins_may_wait_for_one_at_a_barrier() -> None:
    run = Run()
    created(run, 0, "D", ResumePush(1, 0))
    call = run.barrier(1, run.report("call"), "end")
    run.ended()
    assert isinstance(run.errors[call], errors.MutualWaitError)


# --- calls of groups --------------------------------------------------------------------------------------------------


def test_calls_of_groups_are_a_circle_once_each_worker_lacks_them() -> None:
    run = Run()
    first, second = run.group(0, b"a", 1), run.group(1, b"b", 0)
    [of_second], [of_first] = run.asked(1), run.asked(0)
    assert of_second == CheckCall(second.sequence, *run.workers[0].identity, first.sequence, b"a", False, 3)
    assert of_first == CheckCall(first.sequence, *run.workers[1].identity, second.sequence, b"b", False, 3)
    run.confirm(1, of_second)
    assert run.ended() == {} and not run.asked(0) and not run.asked(1), "each is asked once"
    run.confirm(0, of_first)
    assert run.ended()[0] == run.ended()[1]
    assert "waits in barrier() of group a for worker-1 (rank 1), which waits in barrier() of group b" in run.ended()[0]


@pytest.mark.parametrize("kind", ["step", "call"])
def test_a_call_of_a_group_and_another_wait_are_a_circle(kind: str) -> None:
    run = Run()
    run.group(0, b"a", 1)
    call = 0
    if kind == "step":
        run.beat_with(1, run.report("step", 7, mlp=8))
    else:
        call = run.barrier(1, run.report("call", mlp=8))
    [question] = run.asked(1)
    assert run.ended() == {} and call not in run.errors
    run.confirm(1, question)
    assert list(run.ended()) == ([0, 1] if kind == "step" else [0])
    assert kind == "step" or isinstance(run.errors[call], errors.MutualWaitError)
    [told] = [value.error for value in run.told[run.sessions[0]] if isinstance(value, DeadlockFound)]
    assert told.details == {"group_0": b"a".hex()}, "its group ends at the other worker, too"


def test_a_worker_that_waits_for_the_circle_is_not_in_it() -> None:
    run = Run(workers=3)
    run.group(2, b"c", 0, 1)
    run.group(0, b"a", 1, 2)
    run.group(1, b"b", 0)
    run.confirm_all(0, 1)
    assert {0, 1} <= run.ended().keys()


def test_a_confirmation_of_another_wait_means_nothing() -> None:
    run = Run()
    run.group(0, b"a", 1)
    run.beat_with(1, run.report("step", 7, mlp=8))
    [question] = run.asked(1)
    run.beat_with(1, run.report("", mlp=8))  # It continued, and waits again.
    run.beat_with(1, run.report("step", 7, mlp=8))
    run.confirm(1, question)
    assert run.ended() == {}
    [again] = run.asked(1)
    assert again.sequence > question.sequence


def test_a_worker_is_asked_again_on_its_next_session() -> None:
    run = Run()
    run.group(0, b"a", 1)
    waits = run.beat_with(1, run.report("step", 7, mlp=8))
    assert len(run.asked(1)) == 1
    run.sessions[1] = run.number()
    run.on(ev.SessionOpened(run.sessions[1], *run.workers[1].identity))
    run.beat_with(1, waits)
    [question] = run.asked(1)
    run.confirm(1, question)
    assert list(run.ended()) == [0, 1]


def test_a_call_waits_for_no_other_incarnation() -> None:
    run = Run()
    run.group(0, b"a", 1)
    run.on(ev.SessionClosed(run.sessions[1], "its session broke"))
    run.tick(100.0)
    run.workers[1], run.sessions[1] = run.join(member_id="worker-1")
    run.beat_with(1, run.report("step", 7, mlp=8))
    assert run.ended() == {} and not run.asked(1)


def test_a_worker_that_computes_is_asked_nothing() -> None:
    run = Run()
    run.group(0, b"a", 1)
    run.beat_with(1, run.report("", mlp=8))
    assert run.ended() == {} and not run.asked(1)


# --- messages of any rank ---------------------------------------------------------------------------------------------


def test_a_message_of_any_rank_never_comes_if_all_ranks_wait_for_its_receiver() -> None:
    run = Run(workers=3)
    run.any_message(0, 1, 2)
    run.group(1, b"b", 0)
    run.group(2, b"b", 0, 1)
    [question] = run.asked(1)
    assert (question.worker_id, question.message, question.number, question.next) == ("worker-0", True, 10, 5)
    run.confirm(1, question)
    run.confirm_all()
    run.confirm_all()
    assert list(run.ended()) == [0, 1, 2]
    text = "worker-0 (rank 0) waits in recv_any(tag=0) of group a for worker-1 or worker-2"
    assert text in run.ended()[0] and "worker-1 (rank 1) waits in barrier() of group b for worker-0" in run.ended()[0]


@pytest.mark.parametrize("silent", ["computes", "has not confirmed", "is gone"])
def test_a_message_of_any_rank_may_come_from_one_that_is_not_held_up(silent: str) -> None:
    run = Run(workers=3)
    run.any_message(0, 1, 2)
    run.group(1, b"b", 0)
    if silent == "computes":
        run.beat_with(2, run.report("", mlp=7))
    else:
        run.group(2, b"b", 0)
    if silent == "is gone":
        run.on(ev.SessionClosed(run.sessions[2], "killed"))
    run.confirm_all(0, 1)
    if silent != "has not confirmed":
        run.confirm_all()
    assert run.ended() == {}


def test_workers_that_wait_for_a_knot_are_not_in_it() -> None:
    run = Run(workers=4)
    run.group(3, b"c", 0)
    run.any_message(0, 1)
    run.group(1, b"b", 0)
    run.beat_with(2, run.report("", mlp=7))
    run.confirm_all()
    run.confirm_all()
    assert list(run.ended()) == [0, 1]


def test_a_cycle_beside_a_message_that_may_come_is_ended() -> None:
    run = Run(workers=4)
    run.any_message(0, 1, 2, 3)
    run.group(1, b"b", 2)
    run.group(2, b"c", 1)
    run.beat_with(3, run.report("", mlp=7))
    run.confirm_all()
    run.confirm_all()
    assert list(run.ended()) == [1, 2]
