"""Wanted numbers of workers: the news for launchers, and the workers that are awaited."""

from __future__ import annotations

import pytest

from psdist import errors
from psdist.wire.limits import MEMBERS_MAX
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from tests.support.scheduler_driver import Driver


def scale(d: Driver, servers: int = 0, workers: int = 0) -> int:
    call = d.number()
    d.on(ev.Scale(call, "run", servers, workers))
    return call


def watch(d: Driver, workers_wanted: int = 0) -> int:
    call = d.number()
    d.on(ev.WatchScale(call, "run", workers_wanted))
    return call


def test_launchers_are_told_of_the_number_and_of_the_ranks_that_are_free() -> None:
    d = Driver(workers_min=2)
    for _ in range(2):
        d.join()
    d.join(rank=7, world_size=8)
    launcher = watch(d)
    assert d.state(launcher).workers_wanted == d.state(launcher).next_rank == 0
    answer = d.state(scale(d, workers=5))
    assert (answer.workers_before, answer.missing, answer.launchers, answer.drained) == (3, 2, 1, ())
    assert (d.state(launcher).workers_wanted, d.state(launcher).next_rank) == (5, 8)


def test_a_scheduler_that_was_started_again_takes_the_number_over() -> None:
    d = Driver(workers_min=2)
    assert d.state(watch(d, 4)).workers_wanted == 4
    scale(d, workers=3)
    assert d.state(watch(d, 4)).workers_wanted == 3
    assert d.state(watch(d)).workers_wanted == 3


def test_workers_that_are_not_wanted_any_more_are_not_waited_for() -> None:
    d = Driver(workers_min=3)
    d.join("server")
    workers = [d.join(rank=rank, world_size=3)[0] for rank in range(2)]
    call = d.create(workers[0])
    assert d.state(call) == ef.Waiting("for 1 of 3 workers to register")
    scale(d, workers=2)
    assert d.state(call) == ef.Waiting("for worker-1 (rank 1) to create 'mlp'")
    scale(d, workers=9)  # More are started meanwhile: those that the run needs are enough.
    assert d.state(call) == ef.Waiting("for 1 of 3 workers to register")


@pytest.mark.parametrize(("servers", "workers"), [(0, 0), (2, 2)])
def test_one_number_is_named(servers: int, workers: int) -> None:
    d = Driver()
    d.join("server")
    assert isinstance(d.errors[scale(d, servers, workers)], errors.InvalidArgumentError)
    assert d.cluster.demand.workers_wanted == d.cluster.demand.servers_wanted == 0


def test_there_is_a_limit() -> None:
    d = Driver()
    assert isinstance(d.errors[scale(d, workers=MEMBERS_MAX + 1)], errors.LimitExceededError)
    assert d.state(watch(d, MEMBERS_MAX + 1)).workers_wanted == MEMBERS_MAX


def test_ranks_that_were_given_or_are_being_started_are_not_given_again() -> None:
    d = Driver(workers_min=1)
    d.join(rank=0, world_size=1)
    agents = [d.number() for _ in range(2)]
    d.on(ev.EnterRendezvous(agents[0], "run", "agent-0", "h", 2, 1, 4))
    d.tick()
    formed = d.state(agents[0])
    assert formed.node.first_rank == 1  # Ranks 1 and 2: neither has registered yet.
    launcher = watch(d)
    scale(d, workers=3)
    assert d.state(launcher).next_rank == 3
    d.on(ev.EnterRendezvous(agents[1], "run", "agent-1", "h", 1, 1, 4))
    d.tick()
    assert d.state(agents[1]).node.first_rank == 6  # The launcher may have started three from rank 3 on.
    for _ in range(2):  # The command asks again until a launcher watches.
        scale(d, workers=4)
        assert d.state(launcher).next_rank == 7
    scale(d, workers=1)
    assert d.state(launcher).next_rank == 11
