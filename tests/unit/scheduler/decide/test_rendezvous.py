"""The rendezvous of agents."""

from __future__ import annotations

import pytest

from psdist import errors
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from tests.support.scheduler_driver import Driver, caller


def enter(d: Driver, agent: str, processes: int = 2, nodes: tuple[int, int] = (2, 2), host: str = "") -> int:
    call = d.number()
    d.on(ev.EnterRendezvous(call, "", agent, host or f"host-{agent}", processes, *nodes, f"{agent}:7000"))
    return call


def ranks(d: Driver, call: int) -> tuple[int, int, int, int]:
    formed = d.state(call)
    return formed.node.node_rank, formed.nodes, formed.node.first_rank, formed.world_size


def test_ranks_are_given_by_arrival() -> None:
    d = Driver()
    first = enter(d, "a", processes=3)
    assert d.state(first) == ef.Waiting("for 1 of 2 nodes to join the rendezvous")
    second = enter(d, "b", processes=2)
    assert ranks(d, first) == (0, 2, 0, 5)
    assert ranks(d, second) == (1, 2, 3, 5)


def test_all_are_told_where_the_script_of_rank_0_may_listen() -> None:
    d = Driver(join_grace_seconds=1.0)
    calls = [enter(d, "a", 2, (1, 4)), enter(d, "b", 2, (1, 4))]
    d.tick(1.25)
    later = enter(d, "c", 2, (1, 4))
    d.tick(1.25)
    again = Driver(d.stored)
    assert [d.state(call).master_address for call in (*calls, later)] == ["a:7000"] * 3
    assert again.state(enter(again, "b", 2, (1, 4))).master_address == "a:7000"


def test_an_elastic_world_forms_after_the_grace_and_grows() -> None:
    d = Driver(join_grace_seconds=1.0)
    first, second = enter(d, "a", 2, (1, 4)), enter(d, "b", 2, (1, 4))
    assert "join grace" in d.state(first).waiting_for
    d.tick(1.25)
    assert ranks(d, first) == (0, 2, 0, 4)
    assert ranks(d, second) == (1, 2, 2, 4)
    third = enter(d, "c", 1, (1, 4))
    d.tick(1.25)
    assert ranks(d, third) == (2, 3, 4, 5)
    fourth = enter(d, "d", 1, (1, 4))
    assert ranks(d, fourth) == (3, 4, 5, 6)
    refused = enter(d, "e", 1, (1, 4))
    assert isinstance(d.errors[refused], errors.LimitExceededError)


def test_an_agent_that_goes_away_is_dropped_and_one_that_asks_again_keeps_its_ranks() -> None:
    d = Driver()
    d.on(ev.CallEnded(enter(d, "a")))
    second, third = enter(d, "b"), enter(d, "c")
    assert ranks(d, second) == (0, 2, 0, 4)
    assert ranks(d, enter(d, "c")) == ranks(d, third) == (1, 2, 2, 4)
    again = Driver(d.stored)
    assert ranks(again, enter(again, "b")) == (0, 2, 0, 4)
    assert isinstance(again.errors[enter(again, "x")], errors.LimitExceededError)


def test_refused_agents() -> None:
    for processes, nodes, error in [
        (0, (2, 2), errors.InvalidArgumentError),
        (1, (0, 2), errors.InvalidArgumentError),
        (1, (3, 2), errors.InvalidArgumentError),
        (1, (1, 2), errors.InvalidArgumentError),
        (10**5, (2, 2), errors.LimitExceededError),
    ]:
        d = Driver()
        waiting = enter(d, "a")
        assert isinstance(d.errors[enter(d, "b", processes, nodes)], error)
        assert isinstance(d.state(waiting), ef.Waiting)


def gone(d: Driver, rank: int) -> None:
    """The worker of this rank comes, and dies."""
    _, session = d.join(rank=rank)
    d.on(ev.SessionClosed(session, "its session broke"))


def pass_time(d: Driver, seconds: int, *sessions: int) -> None:
    """Members with these sessions live."""
    for _ in range(seconds):
        d.beat(*sessions)
        d.tick(1.0)


@pytest.mark.parametrize("nodes", [(2, 2), (1, 2)])
def test_the_place_of_a_node_whose_workers_are_gone_is_given_to_another(nodes: tuple[int, int]) -> None:
    d = Driver(join_grace_seconds=0.0)
    first, second = enter(d, "a", 1, nodes), enter(d, "b", 1, nodes)
    _, lives = d.join(rank=0)
    gone(d, 1)
    early = str(d.errors[enter(d, "c", 1, nodes)])
    assert "2 of 2 nodes" in early and "of node 1 are gone, but may come back. Its place is free in 30 s" in early
    pass_time(d, 31, lives)
    other = d.errors[enter(d, "d", 2, nodes)]
    assert "node 1 are gone, and it had 1: start this agent with --nproc-per-node 1" in str(other)
    third = enter(d, "c", 1, nodes)
    assert ranks(d, third) == ranks(d, second) == (1, 2, 1, 2) != ranks(d, first)
    assert ranks(d, enter(d, "c", 1, nodes)) == ranks(d, third), "it asks again"
    assert "free in 30 s" in str(d.errors[enter(d, "b", 1, nodes)]), "another has its place"
    again = Driver(d.stored, join_grace_seconds=0.0)
    assert ranks(again, enter(again, "c", 1, nodes)) == ranks(d, third)
    assert isinstance(again.errors[enter(again, "b", 1, nodes)], errors.LimitExceededError)


def test_an_agent_that_is_started_again_on_its_host_has_its_place_at_once() -> None:
    d = Driver(join_grace_seconds=0.0)
    for agent in ("a", "b"):
        enter(d, agent, 1, host="box")
    _, lives = d.join(rank=0)
    gone(d, 1)
    elsewhere = enter(d, "c", 1, host="other")
    assert "Its place is free in 30 s" in str(d.errors[elsewhere])
    again = enter(d, "d", 1, host="box")
    assert ranks(d, again) == (1, 2, 1, 2)
    assert "free in 30 s" in str(d.errors[enter(d, "e", 1, host="box")]), "its workers are starting"
    d.beat(lives)
    gone(d, 1)
    assert ranks(d, enter(d, "f", 1, host="box")) == (1, 2, 1, 2)


def test_a_node_whose_workers_have_not_come_or_are_done_keeps_its_place() -> None:
    d = Driver(join_grace_seconds=0.0)
    enter(d, "a", 1), enter(d, "b", 1)
    member, _ = d.join(rank=0)
    d.on(ev.Leave(d.number(), caller(member), "closed"))
    d.tick(100.0)
    assert "start it with a larger --nnodes" in str(d.errors[enter(d, "c", 1)])


def test_an_agent_that_comes_after_the_last_worker_is_done_is_told_to_start_another_run() -> None:
    d = Driver(join_grace_seconds=0.0)
    enter(d, "a", 1), enter(d, "b", 1)
    first, second = d.join(rank=0)[0], d.join(rank=1)[0]
    d.on(ev.Leave(d.number(), caller(first), "closed"))
    assert "larger --nnodes" in str(d.errors[enter(d, "c", 1)]), "one of them still works"
    d.on(ev.Leave(d.number(), caller(second), "closed"))
    assert "train again under another --run-id" in str(d.errors[enter(d, "c", 1)])


def test_a_worker_that_is_started_again_keeps_the_place_of_its_node() -> None:
    d = Driver(join_grace_seconds=0.0)
    enter(d, "a", 1), enter(d, "b", 1)
    _, lives = d.join(rank=0)
    gone(d, 1)
    pass_time(d, 20, lives)
    _, again = d.join(rank=1)
    pass_time(d, 20, lives, again)
    assert "start it with a larger --nnodes" in str(d.errors[enter(d, "c", 1)])
