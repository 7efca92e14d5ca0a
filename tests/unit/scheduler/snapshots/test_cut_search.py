"""The scheduler's machine and attempts of snapshots: their numbers, and how they end that nobody answers."""

from __future__ import annotations

from psdist.snapshots.policy import SavePolicy
from psdist_scheduler.decide import cluster_events as ev
from tests.support.snapshot_driver import SnapshotDriver, history_of, ready


def test_silence_of_the_storage_ends_an_attempt() -> None:
    d = ready()
    d.train(5)
    d.writing = False
    call = d.save()
    sessions = [d.cluster.members.sessions.call_of(m) for m in ("worker-0", "server-0", "server-1")]
    for _ in range(300):
        d.now += 0.5
        d.beat(*sessions)
        d.on(ev.Tick())
    assert "nothing was heard for" in str(d.errors[call])


def test_silence_of_servers_ends_an_attempt_that_nobody_waits_for_too() -> None:
    d = ready(policy=SavePolicy(steps=10))
    d.answering = False
    d.train(10)
    for _ in range(300):
        d.now += 0.5
        d.beat(*d.cluster.members.sessions.by_call)
        d.on(ev.Tick())
    failures = d.cluster.snapshots.failures
    assert failures.count == 1 and "to agree on a cut" in failures.text


def test_attempts_of_a_scheduler_that_is_started_again_have_higher_numbers_than_those_before() -> None:
    """Servers ignore a number that is not above all that they heard: the attempt would never be agreed on.

    The first one starts before any member can be asked."""
    d = ready(policy=SavePolicy(steps=10))
    for _ in range(3):
        d.save()
    before = d.attempt.number
    again = SnapshotDriver(d.stored, d.now, history=history_of(d), policy=SavePolicy(steps=10))
    attempt = again.cluster.snapshots.attempt
    assert attempt is not None and attempt.number > before
