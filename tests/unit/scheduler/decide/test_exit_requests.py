"""The scheduler and servers that want to end: what was trained is saved before, and nothing else keeps them."""

from __future__ import annotations

import pytest

from psdist.errors import ClosedError, SnapshotFailedError
from psdist.snapshots.policy import SavePolicy
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide import snapshot_events as sn
from psdist_scheduler.decide.cluster_state import Member
from psdist_scheduler.decide.run_end import SERVERS_END_SECONDS
from tests.support.scheduler_driver import caller
from tests.support.snapshot_driver import Ready, ready


def know(d: Ready) -> None:
    """Heartbeats tell what was trained."""
    d.now += 0.1
    d.beat_versions()
    d.tick()
    d.go_on()


def drain_all(d: Ready) -> list[int]:
    """Let both servers ask for their end. Return their calls."""
    calls = [d.number() for _ in range(2)]
    for number, call in enumerate(calls):
        d.on(ev.Drain(call, "", f"server-{number}"))
    return calls


def leave(d: Ready, member: Member) -> None:
    d.on(ev.Leave(d.number(), caller(member), "done"))


def test_the_scheduler_ends_when_all_is_saved() -> None:
    """The last training steps are not in any heartbeat yet."""
    d = ready()
    d.versions["mlp"] = 5
    d.on(ev.Stop(call := d.number()))
    know(d)
    assert d.state(call) == ef.Done() and d.steps == [{"mlp": 5}]
    d.on(ev.Stop(again := d.number()))
    know(d)
    assert d.state(again) == ef.Done() and d.steps == [{"mlp": 5}]


def test_servers_that_end_with_all_values_are_saved_before() -> None:
    d = ready()
    d.train(5)
    leave(d, d.members[0])
    d.writing = False
    calls = drain_all(d)
    know(d)
    assert not any(isinstance(d.state(call), ef.Drained) for call in calls)
    d.writing = True
    d.go_on()
    assert all(isinstance(d.state(call), ef.Drained) for call in calls) and d.steps == [{"mlp": 5}]


def test_servers_that_end_do_not_wait_for_a_snapshot_that_fails() -> None:
    d = ready()
    d.train(5)
    leave(d, d.members[0])
    d.writing = False
    calls = drain_all(d)
    know(d)
    d.on(sn.PartFailed(d.cluster.members.sessions.call_of("server-0"), d.attempt.number, "no space"))
    assert all(isinstance(d.state(call), ef.Drained) for call in calls)


@pytest.mark.parametrize("policy", [SavePolicy(at_end=False), SavePolicy()])
def test_servers_end_at_once_where_there_is_nothing_to_save(policy: SavePolicy) -> None:
    d = ready(policy=policy)
    d.train(5)
    leave(d, d.members[0])
    if policy.at_end:
        d.saved(d.save())
    calls = drain_all(d)
    assert all(isinstance(d.state(call), ef.Drained) for call in calls)


@pytest.mark.parametrize("policy", [SavePolicy(at_end=False), SavePolicy()])
def test_a_server_that_ends_between_two_workers_hands_its_shards_to_the_others(policy: SavePolicy) -> None:
    d = ready(policy=policy)
    d.train(5)
    leave(d, d.members[0])
    if policy.at_end:
        d.saved(d.save())
    d.on(ev.Drain(call := d.number(), "", "server-0"))
    d.tick()
    held = [shard for shard in d.entry().shards if shard.primary.server_id == "server-0"]
    assert held and any(replica.server_id == "server-1" for shard in held for replica in shard.filling)
    assert not isinstance(d.state(call), ef.Drained)


def test_a_run_is_over_when_no_worker_has_been_there_for_the_idle_timeout() -> None:
    """Not before the first worker came, and not while another one is present, or returns within that time."""
    d = Ready(idle_timeout_seconds=5.0)
    shutdown = d.cluster.exit_requests
    d.now += 60.0
    d.tick()
    assert not shutdown.is_over(d.now)
    d.members = d.begin(servers=2, workers=2)
    for worker in d.members:
        assert not shutdown.is_over(d.now + 60.0)
        leave(d, worker)
    assert not shutdown.is_over(d.now + 4.9) and shutdown.is_over(d.now + 5.0)
    d.now += 4.9
    (late, _) = d.join()
    assert not shutdown.is_over(d.now + 60.0)
    leave(d, late)
    assert not shutdown.is_over(d.now + 4.9) and shutdown.is_over(d.now + 5.0)


def test_a_run_without_an_idle_timeout_is_never_over() -> None:
    d = ready()
    leave(d, d.members[0])
    assert not d.cluster.exit_requests.is_over(d.now + 1e6)


@pytest.mark.parametrize("ends", [True, False])
def test_servers_are_told_that_the_run_is_over_when_it_is_saved_and_waited_for(ends: bool) -> None:
    """Those that do not end are waited for no longer than that."""
    d = ready(idle_timeout_seconds=5.0)
    call = begin_the_end(d)
    d.writing = True
    d.go_on()
    assert d.run_ended == 1 and not isinstance(d.state(call), ef.Done) and d.steps == [{"mlp": 5}]
    if ends:
        for server in list(d.cluster.members.servers):
            d.on(ev.Leave(d.number(), caller(server), "stopped"))
    else:
        d.now += SERVERS_END_SECONDS
        d.beat_versions()
        d.tick()
    assert d.state(call) == ef.Done() and d.run_ended == 1


def begin_the_end(d: Ready) -> int:
    """The last worker leaves, the run is over, and its snapshot is being written. Returns the call of the end."""
    d.train(5)
    leave(d, d.members[0])
    d.writing = False
    d.on(ev.Stop(call := d.number(), servers=True))
    know(d)
    assert d.run_ended == 0 and not isinstance(d.state(call), ef.Done)
    return call


def test_a_run_whose_last_snapshot_fails_goes_on_and_ends_with_the_next() -> None:
    """Servers have the only values, so that they are not told to end."""
    d = ready(idle_timeout_seconds=5.0)
    shutdown = d.cluster.exit_requests
    call = begin_the_end(d)
    d.on(sn.PartFailed(d.cluster.members.sessions.call_of("server-0"), d.attempt.number, "no space"))
    assert isinstance(d.errors[call], SnapshotFailedError) and d.run_ended == 0
    assert not shutdown.is_over(d.now + 4.9) and shutdown.is_over(d.now + 5.0)
    d.writing = True
    d.on(ev.Stop(d.number(), servers=True))
    know(d)
    assert d.run_ended == 1 and d.steps == [{"mlp": 5}]


def test_a_worker_that_registers_during_the_last_snapshot_withdraws_the_end() -> None:
    d = ready(idle_timeout_seconds=5.0)
    call = begin_the_end(d)
    d.join()
    assert isinstance(d.errors[call], ClosedError)
    d.writing = True
    d.go_on()
    know(d)
    assert d.run_ended == 0 and not d.cluster.exit_requests.is_over(d.now + 60.0)


@pytest.mark.parametrize(("idle", "seconds"), [(5.0, 30.0), (60.0, 60.0)])
def test_a_worker_that_was_lost_has_the_time_of_its_lease_to_come_back(idle: float, seconds: float) -> None:
    d = ready(workers=2, idle_timeout_seconds=idle, worker_lease_seconds=30.0)
    shutdown = d.cluster.exit_requests
    lost, last = d.members
    d.on(ev.SessionClosed(d.cluster.members.sessions.call_of(lost.member_id), "its process was killed"))
    leave(d, last)
    assert not shutdown.is_over(d.now + seconds - 0.1) and shutdown.is_over(d.now + seconds)


def test_a_server_that_comes_back_while_servers_end_is_told_too() -> None:
    """Its session broke, perhaps before it heard: the scheduler is still there when it comes back."""
    d = ready(idle_timeout_seconds=5.0)
    call = begin_the_end(d)
    before = d.open(d.cluster.members.servers[0])
    assert ef.RunEnded() not in d.told[before]
    d.writing = True
    d.go_on()
    know(d)
    assert d.run_ended == 1
    d.on(ev.Leave(d.number(), caller(d.cluster.members.servers[1]), "stopped"))
    d.on(ev.SessionClosed(before, "its session broke"))
    assert not d.cluster.members.servers and not isinstance(d.state(call), ef.Done)
    back, session = d.join("server", member_id="server-0")
    assert ef.RunEnded() in d.told[session]
    d.on(ev.Leave(d.number(), caller(back), "stopped"))
    assert d.state(call) == ef.Done()
