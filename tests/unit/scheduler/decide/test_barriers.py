"""Barriers: numbered arrivals. None is lost and none counts twice."""

from __future__ import annotations

from random import Random

import pytest

from psdist import errors
from psdist.wire.limits import BARRIER_NAMES_MAX
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_state import BarrierRecord, Member
from tests.support.scheduler_driver import Driver, caller


def arrive(d: Driver, worker: Member, passed: int, name: str = "b", *, withdraw: bool = False) -> int:
    call = d.number()
    d.on(ev.EnterBarrier(call, caller(worker), name, 1, passed, withdraw))
    return call


def test_a_barrier_opens_when_all_are_there_and_can_be_used_again() -> None:
    d = Driver(workers_min=2)
    zero, _ = d.join()
    first = d.ask(ev.EnterBarrier, zero, "eval")
    assert d.state(first) == ef.Waiting("for 1 of 2 workers to reach barrier 'eval'")
    one, _ = d.join()
    assert d.state(first) == ef.Waiting("for worker-1 (rank 1) to reach barrier 'eval'")
    other = d.ask(ev.EnterBarrier, one, "other")
    assert d.state(first) == ef.Waiting("for worker-1 (rank 1) to reach barrier 'eval'")
    d.on(ev.CallEnded(other))
    second = d.ask(ev.EnterBarrier, one, "eval")
    assert d.state(first) == d.state(second) == ef.Done()
    again = d.ask(ev.EnterBarrier, zero, "eval")
    assert isinstance(d.state(again), ef.Waiting)


@pytest.mark.parametrize("how", ["lost", "left"])
def test_a_barrier_does_not_wait_for_who_is_gone(how: str) -> None:
    d = Driver(workers_min=2)
    zero, _ = d.join()
    one, session = d.join()
    call = d.ask(ev.EnterBarrier, zero, "end")
    d.on(ev.Leave(d.number(), caller(one)) if how == "left" else ev.SessionClosed(session, "its session broke"))
    assert d.state(call) == ef.Done()


def test_who_gives_up_at_a_barrier_is_waited_for_again() -> None:
    d = Driver(workers_min=2)
    (zero, _), (one, _) = d.join(), d.join()
    d.on(ev.CallEnded(d.ask(ev.EnterBarrier, zero, "end")))
    call = d.ask(ev.EnterBarrier, one, "end")
    assert d.state(call) == ef.Waiting("for worker-0 (rank 0) to reach barrier 'end'")


@pytest.mark.parametrize("withdraws", [True, False])
def test_a_request_that_comes_after_the_next_one_does_not_count(withdraws: bool) -> None:
    """Each is a call of its own, and they may overtake each other."""
    d = Driver(workers_min=2)
    (zero, _), (one, _) = d.join(), d.join()

    def arrive(worker: Member, attempt: int, *, withdraw: bool = False) -> int:
        call = d.number()
        d.on(ev.EnterBarrier(call, caller(worker), "b", 1, 0, withdraw, attempt=attempt))
        return call

    newer = arrive(zero, 1, withdraw=True) if withdraws else arrive(zero, 2)
    late = arrive(zero, 1)
    assert d.state(late) == ef.Withdrawn()
    other = arrive(one, 1)
    assert isinstance(d.state(other), ef.Waiting) is withdraws
    assert d.state(newer) == (ef.Withdrawn() if withdraws else ef.Done())
    if withdraws:
        again = arrive(zero, 2)
        assert d.state(again) == d.state(other) == ef.Done()


def test_a_barrier_with_a_bad_name_is_refused() -> None:
    d = Driver()
    zero, _ = d.join()
    assert isinstance(d.errors[d.ask(ev.EnterBarrier, zero, "a b")], errors.InvalidNameError)


def test_an_arrival_that_is_withdrawn_opens_nothing() -> None:
    d = Driver(workers_min=2)
    (zero, _), (one, _) = d.join(), d.join()
    first = arrive(d, zero, 0)
    # The call that is given up ends sooner or later; until then nobody passes by it.
    assert d.state(arrive(d, zero, 0, withdraw=True)) == ef.Withdrawn()
    assert isinstance(d.errors[first], errors.ClosedError)
    waiting = arrive(d, one, 0)
    assert isinstance(d.state(waiting), ef.Waiting)
    assert d.state(arrive(d, zero, 0)) == d.state(waiting) == ef.Done()


def test_who_gives_up_too_late_is_told_that_it_has_passed() -> None:
    d = Driver(workers_min=2)
    (zero, _), (one, _) = d.join(), d.join()
    arrive(d, zero, 0)
    arrive(d, one, 0)
    assert d.state(arrive(d, zero, 0, withdraw=True)) == ef.Done()
    again = arrive(d, zero, 1)
    assert isinstance(d.state(again), ef.Waiting), "the next round is another"


@pytest.mark.parametrize("restart", [False, True])
def test_an_arrival_whose_answer_was_lost_passes_when_it_comes_again(restart: bool) -> None:
    d = Driver(workers_min=2)
    (zero, _), (one, _) = d.join(), d.join()
    arrive(d, zero, 0)
    arrive(d, one, 0)
    epoch = d.map.epoch
    if restart:
        assert d.stored.barriers == (BarrierRecord("worker-0", "b", 1, 1), BarrierRecord("worker-1", "b", 1, 1))
        d = Driver(d.stored, workers_min=2)
        d.open(zero)
    assert d.state(arrive(d, zero, 0)) == ef.Done()
    assert d.map.epoch == epoch + restart, "no change that the map shows"


def test_an_expelled_worker_counts_on_and_a_new_process_from_nothing() -> None:
    d = Driver(workers_min=1)
    zero, session = d.join()
    assert d.state(arrive(d, zero, 0)) == ef.Done()
    d.on(ev.SessionClosed(session, "its session broke"))
    again, _ = d.join(member_id="worker-0")
    d.join()
    assert d.state(arrive(d, again, 0)) == ef.Done(), "the arrival of its first incarnation, unknown to it"
    call = d.number()
    d.on(ev.EnterBarrier(call, caller(again), "b", 2, 0))
    assert isinstance(d.state(call), ef.Waiting), "another process restarts its count"


def test_what_is_kept_of_a_worker_is_bounded() -> None:
    d = Driver(workers_min=1)
    zero, _ = d.join()
    for number in range(BARRIER_NAMES_MAX + 8):
        assert d.state(arrive(d, zero, 0, f"b{number}")) == ef.Done()
    d.join()
    assert d.state(arrive(d, zero, 0, f"b{BARRIER_NAMES_MAX + 7}")) == ef.Done()
    assert isinstance(d.state(arrive(d, zero, 0, "b0")), ef.Waiting)


def test_nobody_passes_alone_and_nobody_is_left_behind() -> None:
    """Workers arrive, give up at any moment, and lose answers; a round is passed by all or by none."""
    for seed in range(20):
        rng, d = Random(seed), Driver(workers_min=3)
        workers = [d.join()[0] for _ in range(3)]
        passed, calls = [0, 0, 0], [0, 0, 0]
        for _ in range(300):
            number = rng.randrange(3)
            lost = rng.random() < 0.1
            calls[number] = arrive(d, workers[number], passed[number], withdraw=rng.random() < 0.4)
            for other, call in enumerate(calls):
                if call and d.state(call) == ef.Done() and not (lost and other == number):
                    passed[other] += 1
                    calls[other] = 0
                elif call and d.state(call) == ef.Withdrawn():
                    calls[other] = 0
            assert max(passed) - min(passed) <= 1, passed
        assert min(passed) > 10
