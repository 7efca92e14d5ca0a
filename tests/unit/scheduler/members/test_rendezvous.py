"""The rendezvous of agents."""

from __future__ import annotations

import pytest

from psdist import errors
from psdist_scheduler.events import cluster_events as ev
from tests.support.scheduler_driver import Driver


def enter(d: Driver, agent: str, processes: int = 2, nodes: tuple[int, int] = (2, 2)) -> int:
    call = d.number()
    d.on(ev.EnterRendezvous(call, "", agent, f"host-{agent}", processes, *nodes))
    return call


def ranks(d: Driver, call: int) -> tuple[int, int, int, int]:
    formed = d.state(call)
    return formed.node.node_rank, formed.nodes, formed.node.first_rank, formed.world_size


def test_ranks_are_given_by_arrival() -> None:
    d = Driver()
    first = enter(d, "a", processes=3)
    assert d.state(first) == ev.Waiting("for 1 of 2 nodes to join the rendezvous")
    second = enter(d, "b", processes=2)
    assert ranks(d, first) == (0, 2, 0, 5)
    assert ranks(d, second) == (1, 2, 3, 5)


def test_an_elastic_world_forms_after_the_grace_and_grows() -> None:
    d = Driver(join_grace_seconds=1.0)
    first, second = enter(d, "a", 2, (1, 4)), enter(d, "b", 2, (1, 4))
    assert "join grace" in d.state(first).text
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


@pytest.mark.parametrize(
    ("processes", "nodes", "error"),
    [
        (0, (2, 2), errors.InvalidArgumentError),
        (1, (0, 2), errors.InvalidArgumentError),
        (1, (3, 2), errors.InvalidArgumentError),
        (1, (1, 2), errors.InvalidArgumentError),
        (10**5, (2, 2), errors.LimitExceededError),
    ],
)
def test_refused_agents(processes: int, nodes: tuple[int, int], error: type[Exception]) -> None:
    d = Driver()
    waiting = enter(d, "a")
    assert isinstance(d.errors[enter(d, "b", processes, nodes)], error)
    assert isinstance(d.state(waiting), ev.Waiting)
