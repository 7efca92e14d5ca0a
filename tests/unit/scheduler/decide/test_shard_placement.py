"""Copies of shards: placed, filled, promoted, replaced, moved and lost, event by event."""

from __future__ import annotations

import pytest

from psdist import errors
from psdist.types import Replica, Shard
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from tests.support.replicated_run import Run
from tests.support.scheduler_driver import Driver, caller


def whole(shards: tuple[Shard, ...], copies: int = 2) -> bool:
    """Return True if each shard has this many copies on as many servers, and no change is in progress."""
    return all(len({r.server_id for r in (s.primary, *s.backups)}) == copies and not s.filling for s in shards)


# --- creation ---------------------------------------------------------------------------------------------------------


def test_backups_are_filled_before_anything_is_ready() -> None:
    run = Run(servers=2, ready=False)
    assert run.load() == {"server-0": (4, 4), "server-1": (4, 4)}
    run.d.ask(ev.CommitParameters, run.workers[0])
    assert all(shard.filling and not shard.backups for shard in run.shards)
    assert all(shard.filling[0].server_id != shard.primary.server_id for shard in run.shards)
    assert run.d.map.parameters[0].ready is False
    assert run.d.state(run.calls[0]).waiting_for.startswith("for server-")
    assert "to hold a copy of shard" in run.d.state(run.calls[0]).waiting_for
    run.d.fill()
    assert run.d.map.parameters[0].ready
    assert run.d.state(run.calls[0]) == ef.ParametersReady(0)
    assert run.load() == {"server-0": (4, 8), "server-1": (4, 8)}


def test_the_run_waits_for_as_many_servers_as_copies() -> None:
    d = Driver(replicas=2)
    d.join("server")
    call = d.create(d.join()[0])
    assert d.state(call) == ef.Waiting("for 1 of 2 servers to register")
    d.join("server")
    assert d.state(call) == ef.Upload()


def test_copies_are_spread_evenly_and_over_hosts() -> None:
    assert whole(Run(servers=4, replicas=3).shards, 3)
    assert Run(servers=4).load() == dict.fromkeys([f"server-{i}" for i in range(4)], (4, 8))
    d = Driver(replicas=2)
    hosts = {d.join("server", host=host)[0].member_id: host for host in ("a", "a", "a", "b")}
    worker, _ = d.join()
    d.create(worker, slice_elements=400)
    d.ask(ev.CommitParameters, worker)
    (entry,) = d.map.parameters
    assert all(hosts[s.primary.server_id] != hosts[s.filling[0].server_id] for s in entry.shards)


def test_a_commit_outlives_the_scheduler() -> None:
    run = Run(servers=2, ready=False)
    run.d.ask(ev.CommitParameters, run.workers[0])
    again = Driver(run.d.stored, workers_min=1, replicas=2)
    for server in again.cluster.members.servers:
        again.open(server)
    call = again.create(run.workers[0], slice_elements=400)
    assert "to hold a copy" in again.state(call).waiting_for
    again.fill()
    assert again.state(call) == ef.ParametersReady(0)


@pytest.mark.parametrize("replicas", [1, 2])
def test_values_that_went_with_a_server_are_uploaded_again(replicas: int) -> None:
    run = Run(servers=3, replicas=replicas, ready=False)
    stale = run.d.map.epoch
    run.kill("server-0")
    assert run.d.told[run.calls[0]].count(ef.Upload()) == 2
    assert not run.d.shards_lost
    moved = [shard for shard in run.shards if shard.term == 2]
    assert len(moved) == 4 and all(shard.primary.server_id != "server-0" for shard in run.shards)
    late = run.d.number()
    run.d.on(ev.CommitParameters(late, caller(run.workers[0]), "mlp", stale))
    assert isinstance(run.d.errors[late], errors.StaleEpochError)
    assert run.d.told[run.calls[0]].count(ef.Upload()) == 3
    assert run.d.state(run.d.ask(ev.CommitParameters, run.workers[0])) == ef.Done()
    run.d.fill()
    assert run.d.state(run.calls[0]) == ef.ParametersReady(0)


@pytest.mark.parametrize("replicas", [1, 2])
def test_values_that_went_with_all_servers_are_uploaded_when_there_are_others(replicas: int) -> None:
    run = Run(servers=2, replicas=replicas, ready=False)
    if replicas > 1:
        run.d.ask(ev.CommitParameters, run.workers[0])
    for server in ("server-0", "server-1"):
        run.kill(server)
    assert "register" in run.d.state(run.calls[0]).waiting_for
    assert not run.d.shards_lost and "register" in run.d.cluster.phase
    epoch = run.d.map.epoch
    run.d.tick(2.0)
    assert run.d.map.epoch == epoch
    for _ in range(2):
        run.server()
    run.d.ask(ev.CommitParameters, run.workers[0])
    run.d.fill()
    assert run.d.state(run.calls[0]) == ef.ParametersReady(0) and whole(run.shards, replicas)


def test_values_are_uploaded_again_while_they_are_copied() -> None:
    run = Run(servers=3, ready=False)
    run.d.ask(ev.CommitParameters, run.workers[0])
    run.kill("server-0")
    assert run.d.told[run.calls[0]].count(ef.Upload()) == 2
    assert all(not shard.filling for shard in run.shards)
    run.d.ask(ev.CommitParameters, run.workers[0])
    run.d.fill()
    assert run.d.state(run.calls[0]) == ef.ParametersReady(0)
    assert whole(run.shards)


def test_after_a_restart_only_a_commit_by_the_last_map_counts() -> None:
    run = Run(servers=2, ready=False)
    again = Driver(run.d.stored, workers_min=1, replicas=2)
    call = again.number()
    again.on(ev.CommitParameters(call, caller(run.workers[0]), "mlp", run.d.map.epoch - 1))
    assert isinstance(again.errors[call], errors.StaleEpochError)
    again.on(ev.CommitParameters(again.number(), caller(run.workers[0]), "mlp", run.d.map.epoch))
    for server in run.d.cluster.members.servers:  # They are asked as soon as they are back.
        again.open(server)
    assert all(shard.filling for shard in again.map.parameters[0].shards)


# --- fail-over --------------------------------------------------------------------------------------------------------


def test_a_backup_is_promoted_in_the_epoch_that_the_server_is_gone_in() -> None:
    run = Run()
    before, epoch = run.shards, run.d.map.epoch
    run.kill("server-0")
    assert run.d.map.epoch == epoch + 1
    for old, new in zip(before, run.shards, strict=True):
        if old.primary.server_id == "server-0":
            assert (new.primary, new.term) == (old.backups[0], 2)
        else:
            assert (new.primary, new.term) == (old.primary, 1)
        assert "server-0" not in [replica.server_id for replica in new.replicas]
    assert not run.d.shards_lost
    assert "shards have fewer than 2 copies: being copied to server-" in run.d.cluster.phase
    assert "waiting" not in run.d.cluster.phase
    run.d.fill()
    assert whole(run.shards)
    assert run.d.cluster.phase == "training 'mlp' at version 0"


def test_without_a_backup_a_shard_is_lost_for_good() -> None:
    run = Run(servers=2)
    run.kill("server-0")
    assert not run.d.shards_lost
    assert "waiting for a server that can hold the next" in run.d.cluster.phase
    assert run.d.cluster.phase.endswith("with fewer than wanted, waiting for 1 of 2 servers to register")
    run.server()
    assert all(shard.filling for shard in run.shards[:2])
    run.kill("server-1")
    assert all(shard.lost for shard in run.shards)
    assert [news.shards for news in run.d.shards_lost] == [tuple(range(8))]


def test_values_are_asked_of_another_where_their_uploader_has_left() -> None:
    """It may leave once they are on the servers. A server that is lost before there are copies takes them with it."""
    d = Driver(servers_min=2, replicas=2)
    _, session = d.join("server")
    d.join("server")
    (first, _), (second, _) = d.join(), d.join()
    d.create(first)
    call = d.create(second)
    d.ask(ev.CommitParameters, first)
    d.on(ev.Leave(d.number(), caller(first)))
    d.on(ev.SessionClosed(session, "its session broke"))
    assert d.state(call) == ef.Upload()


def test_a_primary_fills_two_copies_at_a_time() -> None:
    run = Run(servers=2)
    run.kill("server-0")
    run.server()
    assert sum(bool(shard.filling) for shard in run.shards) == 2


def test_reports_count_only_from_the_primary_of_the_term() -> None:
    run = Run(servers=2)
    run.kill("server-0")
    run.server()
    shard, epoch = run.shards[0], run.d.map.epoch
    (target,) = shard.filling
    fill = shard.fill_of(target)
    for call, term, replica, number in (
        (run.sessions["server-1"], shard.term - 1, target, fill),
        (run.sessions["server-1"], shard.term + 1, target, fill),
        (run.sessions["server-1"], shard.term, target, fill - 1),
        (run.sessions["server-0"], shard.term, target, fill),
        (run.sessions["server-1"], shard.term, Replica("server-0", 1), fill),
        (999, shard.term, target, fill),
    ):
        run.d.on(ev.ReplicaFilled(call, "mlp", 0, term, replica, number))
    assert run.d.map.epoch == epoch
    run.d.on(ev.ReplicaFilled(run.sessions["server-1"], "mlp", 0, shard.term, target, fill))
    assert run.shards[0].backups == (target,)
    epoch = run.d.map.epoch
    run.d.on(ev.ReplicaFilled(run.sessions["server-1"], "mlp", 0, shard.term, target, fill))
    assert run.d.map.epoch == epoch


def test_reports_on_an_earlier_filling_of_the_same_server_have_no_effect() -> None:
    run = Run(servers=2)
    run.kill("server-0")
    run.server()
    first = run.shards[0]
    (target,) = first.filling
    run.unreachable(0, target)
    assert target not in run.shards[0].filling
    while not run.shards[0].filling:  # Others are filled first.
        for number in [number for number, shard in enumerate(run.shards) if shard.filling]:
            run.filled(number)
        run.pass_time(1.0)
    second = run.shards[0]
    assert second.filling == (target,) and second.fill_of(target) > first.fill_of(target)
    session, epoch = run.sessions["server-1"], run.d.map.epoch
    for late in (ev.ReplicaFilled, ev.ReplicaUnreachable):
        text = ("silent",) if late is ev.ReplicaUnreachable else ()
        run.d.on(late(session, "mlp", 0, first.term, target, first.fill_of(target), *text))
    assert run.shards[0] == second and run.d.map.epoch == epoch
    run.filled(0)
    assert run.shards[0].backups == (target,)


def test_an_unreachable_backup_is_replaced_by_another() -> None:
    run = Run(servers=3)
    (backup,) = run.shards[0].backups
    run.unreachable(0, backup)
    assert run.shards[0].backups == ()
    assert backup not in run.shards[0].filling and len(run.shards[0].filling) == 1
    run.d.fill()
    assert whole(run.shards)


def test_a_backup_is_kept_while_its_primary_does_not_show_that_it_hears() -> None:
    """It may be the primary that nothing reaches, and its session breaks later."""
    run = Run(servers=2)
    shard, behind = run.shards[0], run.d.map.epoch
    session = run.sessions[shard.primary.server_id]
    (backup,) = shard.backups
    run.d.on(ev.ReplicaUnreachable(session, "mlp", 0, shard.term, backup, shard.fill_of(backup), "silent"))
    for _ in range(8):
        run.d.beat(*(other for server, other in run.sessions.items() if server != shard.primary.server_id))
        run.d.on(ev.Heartbeat(session, behind))
        run.d.tick()
        assert run.shards[0] == shard
    run.kill(shard.primary.server_id)
    assert run.shards[0] == Shard(shard.backups[0], shard.term + 1) and not run.d.shards_lost


def test_the_only_other_server_is_tried_again_after_a_lease() -> None:
    run = Run(servers=2)
    (backup,) = run.shards[0].backups
    run.unreachable(0, backup)
    assert run.shards[0].replicas == (run.shards[0].primary,)
    run.pass_time(1.5)
    assert run.shards[0].filling == ()
    run.pass_time(1)
    assert run.shards[0].filling == (backup,)


# --- moves ------------------------------------------------------------------------------------------------------------


def steps(run: Run) -> None:
    """Fills until nothing is under way, and checks at each step that no shard has fewer copies than it should."""
    copies = run.d.settings.replicas
    while any(shard.filling for shard in run.shards):
        for number, shard in enumerate(run.shards):
            for replica in shard.filling[:1]:
                session = run.d.cluster.members.sessions.call_of(shard.primary.server_id)
                run.d.on(ev.ReplicaFilled(session, "mlp", number, shard.term, replica, shard.fill_of(replica)))
                assert all(len(s.backups) >= copies - 1 for s in run.shards)
                run.d.hear()
                assert all(len(s.backups) >= copies - 1 for s in run.shards)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_drained_server_ends_empty_and_no_copy_is_missed(replicas: int) -> None:
    run = Run(servers=3, replicas=replicas)
    call = run.drain("server-1")
    assert isinstance(run.d.state(call), ef.Draining)
    held = run.d.state(call).shards_total
    assert run.d.state(call) == ef.Draining(f"for {held} shards to be moved from server-1 to other servers", held, held)
    steps(run)
    assert run.d.state(call) == ef.Drained(held)
    assert run.load()["server-1"] == (0, 0)
    assert whole(run.shards, replicas)
    epoch = run.d.map.epoch
    run.d.on(ev.Leave(run.d.number(), caller(run.servers[1])))
    assert run.d.map.epoch == epoch + 1 and not run.d.shards_lost


def test_a_drain_of_one_of_two_servers_leaves_one_copy() -> None:
    run = Run(servers=2)
    call = run.drain("server-0")
    run.d.hear()
    assert run.d.state(call) == ef.Drained(8)
    assert run.load() == {"server-0": (0, 0), "server-1": (8, 8)}


def test_a_drain_outlives_the_scheduler() -> None:
    run = Run(servers=3)
    run.drain("server-1")
    again = Driver(run.d.stored, workers_min=1, replicas=2)
    for server in again.cluster.members.servers:
        again.open(server)
    again.fill()
    assert "server-1" not in [r.server_id for s in again.map.parameters[0].shards for r in s.replicas]


def test_a_drain_that_cannot_be_is_refused_and_changes_nothing() -> None:
    run = Run(servers=1, replicas=1)
    epoch = run.d.map.epoch
    error = run.d.errors[run.drain("server-0")]
    assert isinstance(error, errors.InvalidArgumentError) and "start another one first" in str(error)
    assert "server-0" in str(run.d.errors[run.drain("nobody")])
    assert run.d.map.epoch == epoch
    run.d.on(ev.Leave(run.d.number(), caller(run.workers[0])))
    assert run.d.state(run.drain("server-0")) == ef.Drained(run.load()["server-0"][1])


def test_a_drain_goes_on_when_the_workers_are_gone() -> None:
    """They may come back, or others; only with the last server nothing can be saved."""
    run = Run(servers=3)
    call = run.drain("server-1")
    run.d.on(ev.SessionClosed(run.beats[0], "its session broke"))
    assert isinstance(run.d.state(call), ef.Draining)
    steps(run)
    assert isinstance(run.d.state(call), ef.Drained) and run.load()["server-1"] == (0, 0)
    calls = [run.drain(server) for server in ("server-0", "server-2")]
    assert all(isinstance(run.d.state(call), ef.Drained) for call in calls)


def test_a_drain_does_not_wait_for_values_that_nobody_uploads_any_more() -> None:
    run = Run(servers=3, ready=False)
    call = run.drain("server-1")
    assert isinstance(run.d.state(call), ef.Draining)
    run.d.on(ev.Leave(run.d.number(), caller(run.workers[0])))
    assert isinstance(run.d.state(call), ef.Drained)


def test_a_run_does_not_wait_for_what_was_drained_before_it_began() -> None:
    d = Driver(servers_min=4, replicas=2)
    sessions = [d.join("server")[1] for _ in range(4)]
    call, worker = d.number(), d.join()[0]
    d.on(ev.Drain(call, "run", "server-3"))
    assert d.state(call) == ef.Drained(0)
    create = d.create(worker, slice_elements=400)
    assert d.state(create) == ef.Upload()
    assert "server-3" not in d.map.parameters[0].primaries
    late = Driver(d.stored, servers_min=4, replicas=2)
    assert late.cluster.demand.servers_min == 3
    d.on(ev.SessionClosed(sessions[3], "stopped"))
    assert d.cluster.demand.servers_min == 3
    assert d.join("server")[0].member_id == "server-4"
    assert d.cluster.demand.servers_min == 3
    d.join("server", member_id="server-3")
    assert d.cluster.demand.servers_min == 4


def test_a_server_that_dies_while_drained_is_a_lost_server() -> None:
    run = Run(servers=2, replicas=1)
    call = run.drain("server-0")
    run.kill("server-0")
    assert isinstance(run.d.errors[call], errors.ServerLostError)
    run = Run(servers=3)
    call = run.drain("server-0")
    run.kill("server-0")
    assert isinstance(run.d.state(call), ef.Drained)


def test_a_new_server_gets_its_share_one_shard_at_a_time() -> None:
    run = Run(servers=2, replicas=1)
    assert run.load() == {"server-0": (4, 4), "server-1": (4, 4)}
    run.server()
    moves = 0
    while any(shard.filling for shard in run.shards):
        assert sum(len(shard.filling) for shard in run.shards) == 1
        (number,) = [number for number, shard in enumerate(run.shards) if shard.filling]
        run.filled(number)
        run.d.hear()
        moves += 1
    assert moves == 2
    assert sorted(run.load().values()) == [(2, 2), (3, 3), (3, 3)]


def test_who_is_promoted_was_a_backup_in_the_epoch_before_even_over_a_restart() -> None:
    run = Run(servers=2, replicas=1)
    run.server()
    (number,) = [number for number, shard in enumerate(run.shards) if shard.filling]
    old = run.shards[number]
    run.filled(number)
    assert run.shards[number] == old.with_copies(old.filling, ())
    again = Driver(run.d.stored, workers_min=1)
    assert again.map.parameters[0].shards[number] == old.with_copies(old.filling, ())
    for server in again.cluster.members.servers:
        again.open(server)
    for driver in (again, run.d):
        driver.hear()
        assert driver.map.parameters[0].shards[number] == Shard(old.filling[0], old.term + 1)


def test_a_copy_is_not_dropped_for_one_that_did_not_say_that_it_knows() -> None:
    """It may be gone, and not missed yet; or hear nothing any more."""
    run = Run(servers=2, replicas=1)
    run.server()
    (number,) = [number for number, shard in enumerate(run.shards) if shard.filling]
    old = run.shards[number]
    (target,) = old.filling
    run.d.beat(run.sessions[target.server_id])
    run.filled(number)
    behind = run.d.map.epoch - 1
    for _ in range(8):
        run.d.beat(*(session for server, session in run.sessions.items() if server != target.server_id))
        run.d.on(ev.Heartbeat(run.sessions[target.server_id], behind))
        run.d.tick()
        assert run.shards[number] == old.with_copies((target,), ())
    run.kill(target.server_id)
    assert run.shards[number] == Shard(old.primary, old.term) and not run.d.shards_lost


def test_scaling_down_drains_the_highest_and_tells_launchers() -> None:
    run = Run(servers=4)
    watch = run.d.number()
    run.d.on(ev.WatchScale(watch, "run"))
    assert run.d.state(watch) == ef.ScaleNews(0, (), (), "")
    call = run.scale(2)
    assert run.d.state(call) == ef.Scaled(4, ("server-2", "server-3"), 0, 1)
    assert run.d.state(watch) == ef.ScaleNews(2, ("server-2", "server-3"), (), "")
    run.d.fill()
    assert run.d.state(watch) == ef.ScaleNews(2, ("server-2", "server-3"), ("server-2", "server-3"), "")
    assert run.load() == {"server-0": (8, 16), "server-1": (8, 16), "server-2": (0, 0), "server-3": (0, 0)}
    again = Driver(run.d.stored, workers_min=1, replicas=2)
    assert again.cluster.demand.servers_wanted == 2


def test_scaling_up_says_what_is_missing() -> None:
    run = Run(servers=2)
    assert run.d.state(run.scale(5)) == ef.Scaled(2, (), 3, 0)
    assert run.d.map.epoch == run.d.cluster.epoch
    error = run.d.errors[run.scale(1)]
    assert isinstance(error, errors.InvalidArgumentError) and "2 is the least" in str(error)
    assert isinstance(run.d.errors[run.scale(10**6)], errors.LimitExceededError)
