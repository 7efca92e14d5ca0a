"""A run that does not begin: whom it waits for is said, and what ends it."""

from __future__ import annotations

import pytest

from psdist.errors import RunNotStartedError, WrongRunError
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_events import Caller
from tests.support.scheduler_driver import Driver, caller


def give_up(d: Driver, *, elastic: bool = False, run_id: str = "run") -> int:
    """An agent says that its script fails."""
    call = d.number()
    d.on(ev.GiveUp(call, run_id, "box-b", "worker 1 failed: exit code 1", elastic))
    return call


def begun(**settings: float) -> Driver:
    """A run of two workers that trains."""
    d = Driver(workers_min=2, **settings)
    d.join("server")
    workers = [d.join(rank=rank, world_size=2)[0] for rank in range(2)]
    for worker in workers:
        d.create(worker)
    d.ask(ev.CommitParameters, workers[0])
    assert d.map.parameters[0].ready
    return d


def test_scripts_that_never_come_end_the_run() -> None:
    d = Driver(workers_min=2, start_timeout_seconds=30.0)
    _, server = d.join("server")
    _, worker = d.join(rank=0, world_size=2)
    d.tick_and_beat(29.5, server, worker)
    assert d.cluster.failed is None
    d.tick_and_beat(1, server, worker)
    error = d.errors[server]
    assert isinstance(error, RunNotStartedError) and isinstance(d.errors[worker], RunNotStartedError)
    assert "within 30 s (--start-timeout)" in error.message
    assert "for 1 of 2 workers to register (rank 1)" in error.message
    with pytest.raises(RunNotStartedError):
        d.register("server")


def test_without_a_limit_the_wait_is_reported_and_does_not_end() -> None:
    d = Driver(workers_min=1)
    _, server = d.join("server")
    d.tick_and_beat(9.5, server)
    assert not any("has not started" in note for note in d.notes)
    d.tick_and_beat(125, server)
    said = [note for note in d.notes if "has not started" in note]
    assert said[0] == "the run has not started: waiting for a worker to register, 10 s so far"
    assert len(said) == 2 + 1 and d.cluster.failed is None, "after 10, 70 and 130 s"


@pytest.mark.parametrize("comes_first", [True, False])
def test_an_agent_that_gives_up_ends_a_run_that_waits_for_its_workers(comes_first: bool) -> None:
    d = Driver(workers_min=2)
    _, server = d.join("server")
    if not comes_first:
        give_up(d)
        assert isinstance(d.errors[server], RunNotStartedError)
        return
    worker, session = d.join(rank=0, world_size=2)
    waiting = d.create(worker)
    give_up(d)
    for call in (server, session, waiting):
        error = d.errors[call]
        assert isinstance(error, RunNotStartedError)
        assert "the launcher on box-b gave up: worker 1 failed: exit code 1" in error.message


def test_its_workers_may_have_been_there_before_it_gave_up() -> None:
    """A script that fails between psdist.init() and its first parameter set. Its worker counts until it is expelled."""
    d = Driver(workers_min=2)
    d.join("server")
    first, _ = d.join(rank=0, world_size=2)
    second, _ = d.join(rank=1, world_size=2)
    waiting = d.create(first)
    give_up(d)
    assert d.cluster.failed is None
    d.on(ev.Leave(d.number(), caller(second), "failed"))
    assert isinstance(d.errors[waiting], RunNotStartedError)


def test_an_elastic_run_waits_for_others() -> None:
    d = Driver(workers_min=2)
    d.join("server")
    call = give_up(d, elastic=True)
    assert d.cluster.failed is None and d.state(call) == ef.Done()
    assert any("gave up" in note for note in d.notes)


def test_a_run_that_has_begun_goes_on() -> None:
    d = begun(start_timeout_seconds=5.0)
    give_up(d)
    d.on(ev.Leave(d.number(), d_caller(d), "failed"))
    d.tick(1)
    assert d.cluster.failed is None
    again = Driver(d.stored, workers_min=2, start_timeout_seconds=5.0)
    again.tick(5.5)
    assert not isinstance(again.cluster.failed, RunNotStartedError)


def d_caller(d: Driver) -> Caller:
    """Worker 1 of a run that has begun."""
    member = d.cluster.members.get("worker-1")
    return caller(member)


def test_a_run_whose_members_were_complete_has_no_limit_any_more() -> None:
    """Scripts may prepare their data for long between psdist.init() and their first parameter set."""
    d = Driver(workers_min=1, start_timeout_seconds=5.0)
    _, server = d.join("server")
    worker, session = d.join()
    d.tick_and_beat(1, server, session)
    d.on(ev.Leave(d.number(), caller(worker), "failed"))
    d.tick_and_beat(10, server)
    assert d.cluster.failed is None


def test_an_agent_of_another_run_is_refused() -> None:
    d = Driver(workers_min=1)
    call = give_up(d, run_id="other")
    assert isinstance(d.errors[call], WrongRunError) and d.cluster.failed is None
