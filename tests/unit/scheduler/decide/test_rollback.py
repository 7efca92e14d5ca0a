"""The scheduler's machine that goes back to a snapshot while members are gone; ``test_restore_point`` has the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psdist.errors import FencedError, ServerLostError
from psdist.snapshots.policy import SavePolicy
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.snapshot_catalog import WORKERS_GRACE_SECONDS
from psdist_scheduler.decide.snapshot_events import HistoryRead
from tests.support.saved_runs import lose, pass_time, rejoin, saved_run
from tests.support.scheduler_driver import caller
from tests.support.snapshot_driver import SnapshotDriver, history_of


def test_a_worker_whose_session_is_broken_when_the_run_goes_back_begins_a_new_life_too() -> None:
    d = saved_run(7, workers=2, servers_min=2)
    d.now += d.settings.lease_seconds  # The scheduler stood still, and nobody is lost for hanging up.
    lose(d, "worker-1")
    worker, server = d.cluster.members.get("worker-1"), d.cluster.members.get("server-1")
    assert worker is not None and worker.live and server is not None
    d.register("server", address=server.address)
    assert d.rolled_back and not d.cluster.members.workers
    with pytest.raises(FencedError, match="went back to a snapshot"):
        d.open(worker)


def test_a_worker_that_was_done_when_the_run_went_back_is_not_waited_for() -> None:
    """Its word that it leaves was on the way."""
    d = saved_run(7, workers=2, servers_min=2)
    worker = d.cluster.members.get("worker-1")
    lose(d, "server-1")
    call = d.number()
    d.on(ev.Leave(call, caller(worker), "closed"))
    assert d.state(call) == ef.Done()
    d.join("server", member_id="server-1")
    rejoin(d, 1)
    assert d.entry().ready


def test_a_worker_that_does_not_come_back_is_not_waited_for_for_ever() -> None:
    """It may have finished its work while the scheduler was away. The others would have continued without it."""
    d = saved_run(7, workers=2)
    lose(d, "server-1")
    d.join("server", member_id="server-1")
    rejoin(d, 1)
    pass_time(d, WORKERS_GRACE_SECONDS - 1)
    assert d.map.parameters == () and any("for 1 of 2 workers to register" in wait for wait in d.cluster.waits)
    pass_time(d, 2.0)
    assert d.entry().ready and [member.worker_id for member in d.entry().members] == ["worker-0"]


def test_a_scheduler_that_is_started_again_after_the_run_went_back_does_not_miss_who_was_done() -> None:
    before = saved_run(7, workers=2)
    done = before.cluster.members.get("worker-1")
    before.on(ev.Leave(before.number(), caller(done), "done"))
    lose(before, "server-1")
    assert before.rolled_back
    history = history_of(before)
    d = SnapshotDriver(before.stored, before.now, history=replace(history, base=history.newest), workers_min=2)
    d.open(before.cluster.members.servers[0])
    d.join("server", member_id="server-1")
    rejoin(d, 1)
    assert d.entry().ready


def test_a_saved_run_whose_workers_and_servers_left_says_from_where_it_continues() -> None:
    """Nothing is lost for good: the snapshot has it."""
    d = saved_run(7)
    d.on(ev.Leave(d.number(), caller(d.cluster.members.workers[0]), "failed"))
    for server in list(d.cluster.members.servers):
        d.on(ev.Leave(d.number(), caller(server), "stopped"))
    phase = d.cluster.phase
    assert "held shard" in phase and "the run rolls back to snapshot" in phase and "no snapshot has" not in phase
    for number in range(2):
        d.join("server", member_id=f"server-{number}")
    d.join("worker", rank=0)
    assert d.rolled_back


@pytest.mark.parametrize("replicas", [1, 2])
def test_copies_are_no_remedy_for_a_run_that_has_them(replicas: int) -> None:
    remedy = SnapshotDriver(policy=SavePolicy(seconds=600), replicas=replicas).cluster.registry.remedy
    assert ("with --replicas 2" in remedy) is (replicas == 1)
    assert ("the 2 copies do not outlive" in remedy) is (replicas == 2)


@pytest.mark.parametrize("stored", [True, False])
def test_a_loss_before_the_first_snapshot_names_when_that_is_due(stored: bool) -> None:
    """A run that has a storage is not told that a storage would have helped."""
    d = SnapshotDriver(policy=SavePolicy(seconds=600), unwritable="" if stored else "no space")
    d.begin(servers=1)
    d.go_on()
    d.train(3)
    lose(d, "server-0")
    d.go_on()
    (lost,) = d.shards_lost
    due = "no snapshot has all parameter sets yet: snapshots are taken every 10 min and at the end."
    for text in (lost.text, d.cluster.registry.lost_text):
        assert (due in text) is stored is ("--storage-path" not in text)
        assert "--replicas 2" in text and ("--save-interval" in text) is stored


@pytest.mark.parametrize("is_read_late", [False, True])
@pytest.mark.parametrize("has_older", [False, True])
def test_a_scheduler_that_was_started_again_and_can_read_no_snapshot_ends_the_run(
    has_older: bool, is_read_late: bool
) -> None:
    """It names each snapshot, as one does that could not load them."""
    before = saved_run(7)
    whole, why = history_of(before), "snapshots/2/p.safetensors is missing"
    history = replace(whole, newest=whole.newest if has_older else None, skipped=(f"2-damaged: {why}",))
    d = SnapshotDriver(before.stored, before.now, history=None if is_read_late else history)
    for member in (*before.cluster.members.servers, *before.cluster.members.workers):
        d.open(member)
    if is_read_late:
        d.on(HistoryRead(history))
    lose(d, "server-1")
    if has_older:
        assert d.rolled_back and d.cluster.failed is None
        return
    lost = d.cluster.failed
    assert isinstance(lost, ServerLostError) and f"2-damaged ({why})" in lost.message and not d.shards_lost
    assert "server-1 is lost and held shard" in lost.message


def test_shards_that_nobody_misses_end_the_run_only_for_who_comes_later() -> None:
    d = SnapshotDriver(unwritable="no space")
    (worker,) = d.begin()
    d.on(ev.Leave(d.number(), caller(worker), "closed"))
    lose(d, "server-1")
    assert d.cluster.failed is None
    d.register("worker")
    assert isinstance(d.cluster.failed, ServerLostError)
