"""A scheduler that lacks a part of its run's past: which members it recognizes, and how the run ends."""

from __future__ import annotations

from dataclasses import replace

from psdist.errors import InvalidArgumentError, RunLostError
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_events import SessionOpened
from psdist_scheduler.decide.cluster_state import SchedulerProcess, StoredState
from psdist_scheduler.decide.member_admission import Lineage
from tests.support.saved_runs import resumed, saved_run
from tests.support.scheduler_driver import Driver, caller

STORED = StoredState("run", 60, schedulers=(SchedulerProcess("a", 50), SchedulerProcess("b")))


def hello(scheduler_id: str, epoch: int) -> SessionOpened:
    return SessionOpened(1, "server-0", 1, epoch, scheduler_id)


def test_a_map_belongs_to_the_past_up_to_the_epoch_that_its_process_had_made_durable() -> None:
    lineage = Lineage("c", STORED)
    for scheduler_id, epoch in (("a", 50), ("b", 60), ("c", 65), ("", 99)):
        assert not lineage.missing(hello(scheduler_id, epoch), 65)
    for scheduler_id, epoch in (("a", 51), ("b", 61), ("c", 66), ("x", 1)):
        assert lineage.missing(hello(scheduler_id, epoch), 65)


def test_each_process_is_on_record_for_the_next() -> None:
    lineage = Lineage("c", STORED)
    record = lineage.take_change()
    assert record == (SchedulerProcess("a", 50), SchedulerProcess("b", 60), SchedulerProcess("c"))
    assert lineage.take_change() == ()
    assert not Lineage("d", StoredState("run", 70, schedulers=record)).missing(hello("c", 70), 71)


def greet(d: Driver, scheduler_id: str, epoch: int) -> int:
    """A member that nobody knows says hello. Returns its session."""
    session = d.number()
    d.on(replace(hello(scheduler_id, epoch), call=session))
    return session


def test_an_empty_store_ends_the_run_of_members_that_it_does_not_know() -> None:
    d = Driver(salt="new")
    known, _ = d.join("server")
    error = d.errors[greet(d, "old", 12)]
    assert isinstance(error, RunLostError) and "map 12" in error.message
    assert isinstance(d.errors[d.cluster.members.sessions.call_of(known.member_id)], RunLostError)
    assert d.stored.run_lost == d.cluster.phase == error.message
    again = Driver(d.stored, salt="newer")
    assert isinstance(again.cluster.failed, RunLostError), "the store remembers that the run is lost"


def test_the_history_names_each_further_process() -> None:
    first = Driver(salt="first")
    first.join("server")
    for d, expected in ((first, 0), (Driver(first.stored, salt="second"), 1)):
        logs = [one for one in d.cluster.start(d.now) if isinstance(one, ef.LogEvent)]
        assert sum("a new process of the scheduler" in one.text for one in logs) == expected


def test_an_older_store_ends_the_run() -> None:
    d = Driver(salt="first")
    d.join("server")
    older = d.stored
    d.join("server")
    again = Driver(older, salt="second")
    error = again.errors[greet(again, "first", d.map.epoch)]
    assert isinstance(error, RunLostError) and "newest store" in error.message
    assert again.cluster.failed is not None


def test_a_stranger_that_comes_when_training_is_under_way_does_not_end_it() -> None:
    d = Driver(salt="new")
    d.join("server")
    worker, _ = d.join()
    d.create(worker)
    d.on(ev.CommitParameters(d.number(), caller(worker), "mlp", d.map.epoch))
    assert d.map.parameters[0].ready
    assert isinstance(d.errors[greet(d, "old", 12)], RunLostError)
    assert d.cluster.failed is None and not d.stored.run_lost


def test_a_map_that_this_scheduler_has_not_published_yet_ends_no_run() -> None:
    """Check that one wrong number of one member cannot end the run of all others."""
    d = Driver(salt="new")
    member, _ = d.join("server")
    error = d.errors[greet(d, "new", (1 << 63) - 1)]
    assert type(error) is InvalidArgumentError and str((1 << 63) - 1) in error.message
    assert d.cluster.failed is None and not d.stored.run_lost
    assert d.cluster.members.sessions.call_of(member.member_id) not in d.errors


def test_a_run_that_resumes_from_a_snapshot_refuses_its_past_and_continues() -> None:
    d = resumed(saved_run(7), salt="new")
    error = d.errors[greet(d, "old", 99)]
    assert isinstance(error, RunLostError) and "snapshot" in error.details
    assert d.cluster.failed is None
