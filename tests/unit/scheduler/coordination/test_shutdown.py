"""The scheduler and servers that want to end: what was trained is saved before, and nothing else keeps them."""

from __future__ import annotations

import pytest

from psdist.snapshots.policy import SavePolicy
from psdist_scheduler.events import cluster_events as ev
from psdist_scheduler.events import snapshot_events as sn
from tests.support.scheduler_driver import caller
from tests.support.snapshot_driver import Ready, ready


def know(d: Ready) -> None:
    """Heartbeats tell what was trained."""
    d.now += 0.1
    d.beat_versions()
    d.tick()
    d.go_on()


def test_the_scheduler_ends_when_all_is_saved() -> None:
    """What was trained last is not in any heartbeat yet."""
    d = ready()
    d.versions["mlp"] = 5
    d.on(ev.Stop(call := d.number()))
    know(d)
    assert d.state(call) == ev.Done() and d.steps == [{"mlp": 5}]
    d.on(ev.Stop(again := d.number()))
    know(d)
    assert d.state(again) == ev.Done() and d.steps == [{"mlp": 5}]


def test_servers_that_end_with_all_values_are_saved_before() -> None:
    d = ready()
    (worker,) = d.members
    d.train(5)
    d.on(ev.Leave(d.number(), caller(worker), "done"))
    d.writing = False
    calls = []
    for server in ("server-0", "server-1"):
        calls.append(d.number())
        d.on(ev.Drain(calls[-1], "", server))
    know(d)
    assert not any(isinstance(d.state(call), ev.Drained) for call in calls)
    d.writing = True
    d.go_on()
    assert all(isinstance(d.state(call), ev.Drained) for call in calls) and d.steps == [{"mlp": 5}]


def test_servers_that_end_do_not_wait_for_a_snapshot_that_fails() -> None:
    d = ready()
    (worker,) = d.members
    d.train(5)
    d.on(ev.Leave(d.number(), caller(worker), "done"))
    d.writing = False
    calls = []
    for server in ("server-0", "server-1"):
        calls.append(d.number())
        d.on(ev.Drain(calls[-1], "", server))
    know(d)
    d.on(sn.PartFailed(d.cluster.members.sessions.of("server-0"), d.attempt.number, "no space"))
    assert all(isinstance(d.state(call), ev.Drained) for call in calls)


@pytest.mark.parametrize("policy", [SavePolicy(at_end=False), SavePolicy()])
def test_servers_end_at_once_where_there_is_nothing_to_save(policy: SavePolicy) -> None:
    d = ready(policy=policy)
    (worker,) = d.members
    d.train(5)
    d.on(ev.Leave(d.number(), caller(worker), "done"))
    if policy.at_end:
        d.saved(d.save())
    calls = []
    for server in ("server-0", "server-1"):
        calls.append(d.number())
        d.on(ev.Drain(calls[-1], "", server))
    assert all(isinstance(d.state(call), ev.Drained) for call in calls)
