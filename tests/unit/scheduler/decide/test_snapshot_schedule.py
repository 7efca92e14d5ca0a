"""The scheduler's machine and snapshots: when one is taken, by which cut, and for whom."""

from __future__ import annotations

from typing import Any

import pytest

from psdist import errors
from psdist.consistency import SSP
from psdist.optim import SGD, Optimizer
from psdist.snapshots.policy import SavePolicy
from psdist.types import DataPosition, Layout, TensorSpec
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import snapshot_events as sn
from psdist_scheduler.decide.snapshot_schedule import EndSnapshot, EndState
from tests.support.saved_runs import lease, pass_time, position, reading_run
from tests.support.scheduler_driver import Driver, caller
from tests.support.snapshot_driver import Ready, SnapshotDriver, ready

OTHER = Layout((TensorSpec("v", (64,)),))


# --- on demand --------------------------------------------------------------------------------------------------------


def test_a_snapshot_on_demand_has_what_is_trained() -> None:
    d = ready()
    d.train(7)
    call = d.save()
    commit = d.saved(call)
    assert (commit.steps, commit.sequence, commit.reason) == ({"mlp": 7}, 1, "on demand")
    manifest = d.cluster.snapshots.catalog.newest.manifest
    state = manifest.state("mlp")
    assert state is not None and state.layout == d.cluster.registry.get("mlp").layout
    assert [len(file.versions) for file in state.shards] == [1, 1, 1] and state.step == 7
    assert manifest.epoch == d.cluster.epoch and manifest.directory == commit.directory


def test_without_a_storage_there_is_no_snapshot() -> None:
    for d, word in ((Driver(), "--storage-path"), (SnapshotDriver(unwritable="it is read-only"), "it is read-only")):
        call = d.number()
        d.on(sn.Save(call, ""))
        assert isinstance(d.errors[call], errors.NoStorageError) and word in str(d.errors[call])


def test_without_parameters_there_is_nothing_to_save() -> None:
    d = SnapshotDriver()
    assert isinstance(d.state(d.save()), errors.SnapshotFailedError)


def test_what_was_not_trained_since_is_not_saved_again() -> None:
    d = ready()
    (worker,) = d.members
    d.train(7)
    first = d.saved(d.save())
    for call in (d.save(), d.save(worker, mlp=7)):
        answer = d.state(call)
        assert answer == sn.Saved(first, unchanged=True)
    assert d.steps == [{"mlp": 7}]


def test_servers_that_always_train_on_are_given_room() -> None:
    """A cut is refused while slices pass it on the way; the distance grows until one is not."""
    d = ready()
    d.answering = False
    call = d.save()
    for version in range(4, 24, 4):
        d.versions["mlp"] = version
        for session, command in d.take_commands():
            d.obey(session, command)
    d.answering = True
    d.go_on()
    assert d.saved(call).steps["mlp"] == 20


def test_workers_that_wait_are_served_at_the_step_where_they_wait() -> None:
    d = ready(workers=2)
    one, two = d.members
    d.train(4)
    first = d.save(one, mlp=5)
    d.tick()
    assert d.state(first).waiting_for == "for step 5 of 'mlp'"
    second = d.save(two, mlp=5)
    d.train(5)
    assert d.saved(first) == d.saved(second) and d.steps == [{"mlp": 5}]


def test_a_worker_ahead_of_the_cut_gets_another() -> None:
    d = ready(workers=2)
    one, two = d.members
    d.train(4)
    d.writing = False
    first = d.save(one, mlp=4)
    second = d.save(two, mlp=6)
    d.writing = True
    d.train(4)
    assert d.saved(first).steps == {"mlp": 4}
    d.train(6)
    assert d.saved(second).steps == {"mlp": 6}


def test_who_asks_when_the_cut_is_agreed_gets_the_next() -> None:
    """It was trained on since; at the end of a run that is what matters."""
    d = ready()
    d.train(4)
    d.writing = False
    first = d.save()
    d.versions["mlp"] = 9
    second = d.save()
    d.writing = True
    d.beat_versions()
    d.go_on()
    assert (d.saved(first).steps, d.saved(second).steps) == ({"mlp": 4}, {"mlp": 9})


def test_a_caller_that_is_gone_is_forgotten() -> None:
    d = ready()
    d.writing = False
    d.train(4)
    call = d.save()
    d.on(ev.CallEnded(call))
    d.writing = True
    d.go_on()
    assert d.steps == [{"mlp": 4}] and not isinstance(d.state(call), sn.Saved)


def test_a_worker_that_dies_is_not_answered() -> None:
    d = ready(workers=2)
    one, _ = d.members
    d.answering = False
    call = d.save(one, mlp=3)
    d.on(ev.SessionClosed(d.cluster.members.sessions.call_of(one.member_id), "its session broke"))
    assert isinstance(d.errors[call], errors.FencedError)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"run_id": "other"}, errors.WrongRunError),
        ({"caller": ev.Caller("", "worker-0", 9)}, errors.FencedError),
        ({"caller": ev.Caller("", "server-0", 1)}, errors.InvalidArgumentError),
    ],
)
def test_bad_requests_change_nothing(fields: dict[str, Any], error: type[Exception]) -> None:
    d = ready()
    call = d.number()
    d.on(sn.Save(call, **({"run_id": ""} | fields)))
    assert isinstance(d.errors[call], error) and d.cluster.snapshots.attempt is None


# --- several parameters -----------------------------------------------------------------------------------------------


def two_parameters(optimizer: Optimizer | None = None, **settings: Any) -> Ready:
    """Parameters "mlp" and "other". optimizer: of the latter."""
    d = ready(**settings)
    (worker,) = d.members
    d.create(worker, layout=OTHER, name="other", **({} if optimizer is None else {"optimizer": optimizer}))
    d.ask(ev.CommitParameters, worker, "other")
    return d


def test_parameters_that_are_trained_together_are_cut_together() -> None:
    d = two_parameters()
    d.versions = {"mlp": 6, "other": 5}
    d.beat_versions()
    call = d.save()
    d.train(6, "other")
    assert d.saved(call).steps == {"mlp": 6, "other": 6}


def test_others_are_cut_where_they_are() -> None:
    d = two_parameters()
    d.versions = {"mlp": 60, "other": 6}
    d.beat_versions()
    assert d.saved(d.save()).steps == {"mlp": 60, "other": 6}


def test_who_waits_does_not_stop_what_others_train() -> None:
    """A set in which the waiting worker takes no part trains on, past every cut at its current step."""
    d = ready(workers=2)
    one, two = d.members
    d.create(two, layout=OTHER, name="other")
    d.ask(ev.Describe, one, "other")
    d.ask(ev.CommitParameters, two, "other")
    d.versions = {"mlp": 5, "other": 1}
    d.answering = False
    call = d.save(one, mlp=5)
    for version in range(4, 400, 4):
        d.versions["other"] = version
        for session, command in d.take_commands():
            d.obey(session, command)
    d.answering = True
    d.train(400, "other")
    steps = d.saved(call).steps
    assert steps["mlp"] == 5 and steps["other"] > 8


def test_an_iteration_that_is_not_finished_is_saved_when_its_worker_has_left() -> None:
    """A script that stops within an iteration may be computing for long, and nobody can tell."""
    d = two_parameters()
    d.iterating = False
    d.versions = {"mlp": 6, "other": 5}
    d.beat_versions()
    call = d.save()
    sessions = [
        d.cluster.members.sessions.call_of(m.member_id)
        for m in (*d.cluster.members.servers, *d.cluster.members.workers)
    ]
    for _ in range(60):
        d.beat(*sessions)
        d.beat_versions()
        d.tick()
        d.go_on()
    assert isinstance(d.state(call), sn.Saving) and not d.steps
    assert any("worker-0 (rank 0) to finish an iteration" in wait for wait in d.cluster.waits)
    d.on(ev.Leave(d.number(), caller(d.members[0]), "done"))
    d.go_on()
    assert d.saved(call).steps == {"mlp": 6, "other": 5}


def test_sets_with_different_numbers_of_steps_are_cut_where_an_iteration_starts() -> None:
    """Every ten steps, at the first start of an iteration after them."""
    d = two_parameters(policy=SavePolicy(steps=10, keep_last=10))
    for step in range(1, 5):
        d.versions = {"mlp": 5 * step, "other": step}
        d.beat_versions()
        d.tick(0.5)
        d.go_on()
    assert d.steps == [{"mlp": 10, "other": 2}, {"mlp": 20, "other": 4}]


def test_where_no_worker_is_left_servers_wait_for_no_steps_below_the_highest() -> None:
    for leaves in (False, True):
        d = ready()
        d.train(6)
        if leaves:
            d.on(ev.Leave(d.number(), caller(d.members[-1]), "stopped"))
        assert d.saved(d.save()).steps == {"mlp": 6}
        assert d.finals == [{"mlp": 6} if leaves else {}] * 2


# --- intervals --------------------------------------------------------------------------------------------------------


def test_every_so_many_steps_exactly() -> None:
    d = ready(policy=SavePolicy(steps=10, keep_last=10))
    for version in range(1, 32):
        d.train(version)
    assert d.steps == [{"mlp": 10}, {"mlp": 20}, {"mlp": 30}]


def test_steps_that_are_over_when_it_is_armed_are_left_out() -> None:
    d = ready(policy=SavePolicy(steps=10))
    d.storing = False
    d.train(10)
    d.answering, d.storing = False, True
    d.go_on()
    d.versions["mlp"] = 47
    d.answering = True
    d.go_on()
    d.train(50)
    assert d.steps[-1] == {"mlp": 50} and {"mlp": 20} not in d.steps


def test_an_interval_gives_way_to_who_wants_one_now() -> None:
    d = ready(policy=SavePolicy(steps=100))
    (worker,) = d.members
    d.train(7)
    assert d.saved(d.save(worker, mlp=7)).steps == {"mlp": 7}
    d.train(8)
    assert d.saved(d.save()).steps == {"mlp": 8}
    d.train(100)
    assert d.steps == [{"mlp": 7}, {"mlp": 8}, {"mlp": 100}]


def test_a_worker_that_waits_at_the_very_step_is_served_by_the_interval() -> None:
    d = ready(policy=SavePolicy(steps=10))
    (worker,) = d.members
    d.train(9)
    armed = d.attempt.directory
    call = d.save(worker, mlp=10)
    d.train(10)
    assert d.saved(call).directory == armed


def test_parameters_that_come_later_are_in_the_next() -> None:
    d = two_parameters(policy=SavePolicy(steps=10))
    d.go_on()
    d.versions = {"mlp": 10, "other": 10}
    d.train(10)
    assert d.steps == [{"mlp": 10, "other": 10}]


def test_what_is_not_trained_does_not_hold_an_interval_up() -> None:
    """Nor is an interval's attempt that has written it nearer for that."""
    d = two_parameters(SGD(lr=0.0), policy=SavePolicy(steps=10, keep_last=10))
    for version in range(1, 26):
        d.train(version)
        if version == 17:
            assert d.saved(d.save()).steps == {"mlp": 17, "other": 0}
    assert [steps["mlp"] for steps in d.steps] == [10, 17, 20]
    assert {steps["other"] for steps in d.steps} == {0}


@pytest.mark.parametrize("every", [5, 1000])
def test_parameters_that_are_trained_less_often_are_cut_where_they_are(every: int) -> None:
    """They do not reach the step of the interval when the others do, if ever."""
    d = two_parameters(policy=SavePolicy(steps=10, keep_last=10))
    for version in range(1, 42):
        d.versions["other"] = version // every
        d.train(version)
        d.tick()
        d.go_on()
    assert [steps["mlp"] for steps in d.steps] == [10, 20, 30, 40]
    assert [steps["other"] for steps in d.steps] == [step // every for step in (10, 20, 30, 40)]


def test_every_so_many_seconds_if_something_was_trained() -> None:
    d = ready(policy=SavePolicy(seconds=60.0))

    def pass_time(seconds: float) -> None:
        for _ in range(round(seconds)):
            d.now += 1.0
            d.beat_versions()
            d.beat(d.cluster.members.sessions.call_of("worker-0"))
            d.on(ev.Tick())
            d.go_on()

    pass_time(70)
    assert d.steps == []
    d.train(5)
    pass_time(2)
    assert d.steps == [{"mlp": 5}]
    pass_time(100)
    assert d.steps == [{"mlp": 5}]
    d.train(6)
    pass_time(2)
    assert d.steps == [{"mlp": 5}, {"mlp": 6}]


def test_steps_of_marked_parameters_are_counted_by_the_highest() -> None:
    d = ready(consistency=SSP(2), policy=SavePolicy(steps=10))
    for version in (4, 11, 15, 21):
        d.train(version)
        d.tick()
        d.go_on()
    assert d.steps == [{"mlp": 11}, {"mlp": 21}]


# --- the last snapshot ------------------------------------------------------------------------------------------------


def test_it_is_wanted_then_taken_and_no_later_step_is_saved() -> None:
    d = ready()
    d.train(7)
    commit = d.saved(d.save())
    end = EndSnapshot()
    end.want({"mlp": 7})
    assert end.state is EndState.WANTED and not end.is_safe(None)
    end.attempt = 3
    end.on_attempt_ended(2, commit)  # Of another attempt.
    assert end.state is EndState.WANTED
    end.on_attempt_ended(3, commit)
    assert end.state is EndState.TAKEN and end.commit == commit and end.is_safe(None)
    assert not end.check({"mlp": 7}) and "at step 7" in end.check({"mlp": 8})


def test_one_that_fails_stays_the_last_until_somebody_trains_again() -> None:
    end = EndSnapshot()
    end.want({"mlp": 7})
    end.attempt = 3
    end.on_attempt_ended(3, None)
    assert end.state is EndState.FAILED and end.commit is None and end.is_safe(None)
    assert end.check({"mlp": 8})
    end.forget()
    assert end.state is EndState.NONE and not end.check({"mlp": 8})


# --- a snapshot at the step of the newest -----------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [False, True])
def test_a_range_that_was_reported_too_late_for_a_snapshot_is_in_the_next_at_its_step(waits: bool) -> None:
    d, (worker,) = reading_run(policy=SavePolicy(steps=3))
    held = lease(d, worker, 2)
    d.train(3)
    pass_time(d, 2.5)
    assert d.steps == [{"mlp": 3}] and position(d).done == ()
    lease(d, worker, 3, {held.lease.lease_id: 3})
    call = d.save(worker, mlp=3) if waits else d.save()
    pass_time(d, 2.5)
    assert d.saved(call).steps == {"mlp": 3} and position(d).done == ((0, 1),)
    call = d.save(worker, mlp=3) if waits else d.save()
    assert d.state(call) == sn.Saved(d.cluster.snapshots.catalog.commits[0], unchanged=True) and len(d.steps) == 2


def test_a_data_set_that_was_set_elsewhere_is_saved_though_nothing_was_trained() -> None:
    d, (worker,) = reading_run()
    d.train(4)
    d.saved(d.save(worker, mlp=4))
    d.on(ev.SetPosition(d.number(), caller(worker), "train", DataPosition(0, ((0, 5),))))
    assert d.saved(d.save(worker, mlp=4)).sequence == 2 and position(d).done == ((0, 5),)
