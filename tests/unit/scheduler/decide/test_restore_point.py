"""The scheduler's machine and what parameters begin from: resuming, loading, going back, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psdist import errors
from psdist.consistency import ASP, SSP
from psdist.errors import PsdistError
from psdist.snapshots.policy import SavePolicy
from psdist.types import DataPosition, Layout, TensorSpec
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide import snapshot_events as sn
from tests.support.saved_runs import DATA, lease, lose, pass_time, position, reading_run, rejoin, resumed, saved_run
from tests.support.scheduler_driver import caller
from tests.support.snapshot_driver import SnapshotDriver, history_of

# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_an_empty_store_goes_on_from_the_newest(servers: int) -> None:
    before = saved_run(7, workers=2)
    d = resumed(before, workers_min=2)
    assert d.cluster.epoch > before.cluster.snapshots.catalog.commits[0].epoch
    d.begin(servers, 2)
    entry = d.entry()
    commit = before.cluster.snapshots.catalog.commits[0]
    assert entry.restore is not None and entry.restore.directory == commit.directory
    assert entry.restore.manifest_digest.hex() == commit.manifest_digest and not entry.ready
    assert [member.first_step for member in entry.members] == [7, 7] and entry.generation == 0
    assert len(entry.shards) == min(4 * servers, 3)
    d.go_on()
    assert d.entry().ready and d.cluster.registry.get("mlp").version == 7
    assert [d.state(call) for call in d.told if isinstance(d.state(call), ef.ParametersReady)] == [
        ef.ParametersReady(7),
        ef.ParametersReady(7),
    ]
    assert not any(isinstance(told, ef.Upload) for answers in d.told.values() for told in answers)


@pytest.mark.parametrize("consistency", [SSP(1), ASP()])
def test_new_lives_are_not_mistaken_for_those_in_the_snapshot(consistency: Any) -> None:
    d = resumed(saved_run(7, consistency=consistency))
    (worker,) = d.begin(consistency=consistency)
    d.go_on()
    assert worker.incarnation == 2 and [m.first_step for m in d.entry().members] == [0]
    d.versions["mlp"] = 9
    call = d.save(worker, mlp=2)
    assert d.saved(call).steps == {"mlp": 9}


@pytest.mark.parametrize(
    ("settings", "layout", "error", "text"),
    [
        ({"slice_elements": 5000}, None, errors.SettingsMismatchError, "slice_elements is 5000.*another --run-id"),
        ({}, Layout((TensorSpec("w", (3,)),)), errors.LayoutMismatchError, "tensor 'b' is missing"),
    ],
)
def test_another_configuration_is_refused(
    settings: dict[str, Any], layout: Layout | None, error: type[PsdistError], text: str
) -> None:
    d = resumed(saved_run(7))
    d.join("server")
    worker, _ = d.join()
    call = d.create(worker, **({"layout": layout} if layout else {}), **settings)
    with pytest.raises(error, match=text):
        raise d.errors[call]
    assert d.map.parameters == () and d.cluster.registry.all == ()
    d.create(worker)
    d.go_on()
    assert d.entry().ready


def test_a_scheduler_without_its_storage_makes_nothing_anew() -> None:
    """Parameters that were saved must not begin from a worker's values because the storage was away for a moment."""
    before = saved_run(7)
    d = resumed(before)
    d.join("server")
    again = SnapshotDriver(d.stored, d.now, history=None)
    again.history = replace(history_of(before), base=history_of(before).newest)
    again.storing = False
    again.open(d.cluster.members.servers[0])
    worker, _ = again.join()
    call = again.create(worker)
    assert again.state(call).waiting_for == "for the storage to be read"
    dataset = again.number()
    again.on(ev.OpenDataset(dataset, caller(worker), DATA))
    assert isinstance(again.errors[dataset], errors.StorageError)
    again.storing = True
    again.go_on()
    assert again.state(call) == ef.ParametersReady(7)


# --- going back -------------------------------------------------------------------------------------------------------


def test_a_lost_shard_takes_the_run_back() -> None:
    d = saved_run(7, workers=2, servers_min=2)
    d.train(9)
    terms = {shard.term for shard in d.entry().shards}
    epoch, workers = d.cluster.epoch, {d.cluster.members.sessions.call_of(f"worker-{rank}") for rank in range(2)}
    lose(d, "server-1")
    assert d.cluster.epoch == epoch + 1 and not d.shards_lost and d.map.parameters == () and d.map.workers == ()
    (news,) = d.rolled_back
    assert news.lost == (("mlp", 7, 9),) and news.directory == d.cluster.snapshots.catalog.commits[0].directory
    assert "server-1 is lost and held" in news.text and "'mlp' from step 7" in news.text
    assert workers <= set(d.closed)
    d.join("server", member_id="server-1")
    rejoin(d, 2)
    entry = d.entry()
    assert entry.ready and entry.generation == 1 and {m.first_step for m in entry.members} == {7}
    assert {m.incarnation for m in entry.members} == {2}
    assert min(shard.term for shard in entry.shards) > max(terms)
    d.versions["mlp"] = 8
    d.beat_versions()
    assert d.saved(d.save()).steps == {"mlp": 8}


def test_without_its_servers_a_run_that_went_back_goes_on_after_a_while() -> None:
    d = saved_run(7, servers_min=2)
    lose(d, "server-1")
    rejoin(d)
    assert d.map.parameters == ()
    pass_time(d, 11.25)
    assert d.entry().ready and set(d.entry().primaries) == {"server-0"}


def test_without_a_snapshot_the_run_ends() -> None:
    d = SnapshotDriver()
    d.begin()
    lose(d, "server-1")
    assert not d.rolled_back and d.shards_lost and "--save-interval" in d.shards_lost[0].text
    assert isinstance(d.cluster.failed, errors.ServerLostError)
    assert isinstance(d.state(d.save()), errors.ServerLostError)


def test_a_snapshot_that_lacks_parameters_is_not_gone_back_to() -> None:
    d = saved_run(7)
    (worker,) = d.cluster.members.workers
    d.create(worker, name="other")
    d.ask(ev.CommitParameters, worker, "other")
    lose(d, "server-1")
    assert not d.rolled_back and d.shards_lost


def test_nobody_goes_back_where_no_worker_misses_anything() -> None:
    d = saved_run(7)
    d.on(ev.Leave(d.number(), caller(d.cluster.members.workers[0]), "done"))
    lose(d, "server-1")
    assert not d.rolled_back and not d.shards_lost
    worker, _ = d.join()
    assert len(d.rolled_back) == 1
    d.create(worker)
    d.tick(0.25)
    pass_time(d, 11.25)
    assert d.entry().ready


def test_what_servers_say_of_the_life_before_does_not_count() -> None:
    d = saved_run(7, servers_min=1)
    old = d.map.epoch
    d.train(500)
    lose(d, "server-1")
    rejoin(d)
    session = d.cluster.members.sessions.call_of("server-0")
    d.on(ev.Heartbeat(session, old, (("mlp", 500),)))
    assert d.cluster.registry.get("mlp").version == 7


def test_an_attempt_under_way_ends_with_what_it_was_of() -> None:
    d = saved_run(7)
    d.train(9)
    d.writing = False
    call = d.save()
    attempt = d.cluster.snapshots.attempt
    lose(d, "server-1")
    assert d.cluster.snapshots.attempt is None
    assert any(isinstance(c, sn.End) and c.attempt == attempt.number for _, c in d.commands)
    assert d.state(call) == sn.Saved(d.cluster.snapshots.catalog.commits[0], unchanged=True)


def test_going_back_is_durable() -> None:
    """A scheduler that dies right after it went back does not serve what was before."""
    d = saved_run(7, servers_min=2)
    lose(d, "server-1")
    assert d.stored.parameters == () and d.stored.base.generation == 1
    base = d.cluster.snapshots.catalog.newest
    again = SnapshotDriver(d.stored, d.now, history=replace(history_of(d), base=base), servers_min=2)
    again.open(d.cluster.members.servers[0])
    again.join("server")
    rejoin(again)
    assert again.entry().ready and again.entry().generation == 1 and again.entry().members[0].first_step == 7


# --- snapshots that cannot be loaded ----------------------------------------------------------------------------------


def failed(d: SnapshotDriver, *, unreachable: bool = False) -> None:
    """A server says that it cannot load."""
    entry = d.entry()
    session = d.cluster.members.sessions.call_of(entry.primaries[0])
    d.on(sn.LoadFailed(session, "mlp", entry.generation, entry.restore, "shard-0 is not what was written", unreachable))


def two_snapshots() -> tuple[SnapshotDriver, sn.History, sn.History]:
    """A run, and its storage with two snapshots and as it is without the newer."""
    d = saved_run(7, policy=SavePolicy())
    older = history_of(d)
    d.train(9)
    d.saved(d.save())
    return d, history_of(d), replace(history_of(d), newest=older.newest)


def test_a_corrupt_snapshot_falls_back_to_the_one_before() -> None:
    before, history, older = two_snapshots()
    d = SnapshotDriver(None, before.now, history=history)
    d.loading = False
    d.begin()
    assert d.entry().members[0].first_step == 9
    d.history = older
    failed(d)
    assert d.works == [sn.ReadHistory("", (history.commits[0].directory,))]
    failed(d)
    assert len(d.works) == 1
    d.loading = True
    d.go_on()
    rejoin(d)
    entry = d.entry()
    assert entry.ready and entry.members[0].first_step == 7 and entry.generation == 1
    assert any("shard-0 is not what was written; trying the previous one" in note for note in d.notes)
    # What was given up is not the newest again because the scheduler is started again.
    again = SnapshotDriver(d.stored, d.now, history=replace(history, base=older.newest))
    catalog = again.cluster.snapshots.catalog
    assert catalog.newest == older.newest and catalog.commits == history.commits


def test_where_none_can_be_loaded_nothing_begins_anew() -> None:
    before, history, _ = two_snapshots()
    d = SnapshotDriver(None, before.now, history=history)
    d.loading = False
    (worker,) = d.begin()
    d.history = replace(history, newest=None)
    failed(d)
    d.go_on()
    call = d.create(worker)
    assert isinstance(d.errors[call], errors.SnapshotCorruptError)
    directory = history.commits[0].directory
    assert f"{directory} (server-0: shard-0 is not what was written)" in d.errors[call].message
    # Sessions of members end with it, so that nobody waits.
    sessions = [*d.cluster.members.sessions.by_call]
    assert sessions and all(isinstance(d.errors[s], errors.SnapshotCorruptError) for s in sessions)


def test_a_lost_server_and_damaged_snapshots_end_the_run_with_their_names() -> None:
    d = saved_run(7)
    newest = d.cluster.snapshots.catalog.newest
    d.loading = False
    lose(d, "server-0")
    d.join("server")
    rejoin(d)
    d.history = replace(history_of(d), newest=None, skipped=("commits/1.json: it is torn",))
    failed(d)
    d.go_on()
    error = d.cluster.failed
    assert isinstance(error, errors.ServerLostError)
    assert "held shard" in error.message and "commits/1.json (it is torn)" in error.message
    assert f"{newest.commit.directory} (server-0: shard-0 is not what was written)" in error.message
    assert d.cluster.phase == error.message


def test_a_storage_that_does_not_answer_a_server_ends_the_run() -> None:
    d = resumed(saved_run(7))
    d.loading = False
    d.begin()
    failed(d, unreachable=True)
    assert d.works == [] and isinstance(d.cluster.failed, errors.SnapshotCorruptError)


# --- data sets --------------------------------------------------------------------------------------------------------


def test_what_was_done_after_the_cut_is_not_in_the_snapshot() -> None:
    """Writing takes a while, and training continues."""
    d, (worker,) = reading_run(policy=SavePolicy(steps=3))
    held = lease(d, worker, 0)
    d.writing = False
    for step in range(1, 6):
        d.train(step)
        held = lease(d, worker, step, {held.lease.lease_id: step})
    d.writing = True
    d.go_on()
    assert d.steps == [{"mlp": 3}] and position(d).done == ((0, 3),)


@pytest.mark.parametrize("is_done", [False, True])
def test_a_range_that_was_used_before_and_after_the_cut_counts_as_repeated(is_done: bool) -> None:
    d, (worker,) = reading_run(policy=SavePolicy(steps=3))
    first = lease(d, worker, 0)
    d.writing = False
    for step in range(1, 6):
        d.train(step)
        if step == 5:
            lease(d, worker, 5, {first.lease.lease_id: 5} if is_done else {})
    d.writing = True
    d.go_on()
    assert d.steps == [{"mlp": 3}] and position(d) == DataPosition(0, (), repeated_ranges=1)


def test_what_was_reported_before_its_push_was_applied_is_not_in_an_earlier_cut() -> None:
    d, (one, two) = reading_run(workers=2)
    d.train(5)
    given = lease(d, one, 5)
    lease(d, one, 6, {given.lease.lease_id: 6})
    call = d.save(two, mlp=5)
    assert d.saved(call).steps == {"mlp": 5} and position(d).done == ()


def test_ranges_of_a_worker_that_left_during_an_attempt_are_in_the_snapshot() -> None:
    """Check the numbers of a worker whose pushes are not marked: all are in the weights."""
    d = SnapshotDriver(workers_min=2)
    one, two = d.begin(2, 2, consistency=ASP())
    d.go_on()
    d.on(ev.OpenDataset(d.number(), caller(one), DATA))
    d.train(5)
    d.answering = False
    call = d.save()
    first = lease(d, two, 2)
    second = lease(d, two, 3, {first.lease.lease_id: 3})
    returned = (second.lease.lease_id,)
    d.on(ev.EndRanges(d.number(), caller(two), "train", returned=returned, used=returned))
    d.ask(ev.Leave, two)
    d.answering = True
    pass_time(d, 2.5)
    assert d.saved(call) and position(d) == DataPosition(0, ((0, 1),), repeated_ranges=1)


def test_a_worker_that_may_have_used_a_range_is_waited_for() -> None:
    d, (worker,) = reading_run(policy=SavePolicy(steps=3))
    held = lease(d, worker, 2)
    d.train(3)
    assert d.steps == []
    status = d.cluster.snapshots.attempt
    assert status is not None and status.waiting_for == "for worker-0 to report the data it has used"
    lease(d, worker, 3, {held.lease.lease_id: 3})
    d.go_on()
    assert d.steps == [{"mlp": 3}] and position(d).done == ((0, 1),)


def test_a_worker_that_waits_in_its_request_has_told_all() -> None:
    d, (worker,) = reading_run()
    first = lease(d, worker, 2)
    lease(d, worker, 3, {first.lease.lease_id: 3})
    d.train(4)
    call = d.save(worker, mlp=4)
    assert d.saved(call).steps == {"mlp": 4} and position(d).done == ((0, 1),)


def test_a_resumed_data_set_goes_on_from_the_snapshot() -> None:
    d, (worker,) = reading_run()
    held = lease(d, worker, 0)
    lease(d, worker, 1, {held.lease.lease_id: 1})
    d.train(1)
    d.saved(d.save(worker, mlp=1))
    again = resumed(d)
    (worker,) = again.begin()
    again.go_on()
    other = again.number()
    again.on(ev.OpenDataset(other, caller(worker), replace(DATA, seed=5)))
    assert isinstance(again.errors[other], errors.SettingsMismatchError) and "seed is 5" in str(again.errors[other])
    again.train(3)
    again.saved(again.save())
    assert position(again).done == ((0, 1),), "a data set that nobody opened yet is where it was"
    again.on(ev.OpenDataset(again.number(), caller(worker), DATA))
    assert lease(again, worker, 3).range == 1


def test_a_run_that_goes_back_takes_its_data_back() -> None:
    d, (worker,) = reading_run()
    held = lease(d, worker, 0)
    held = lease(d, worker, 1, {held.lease.lease_id: 1})
    d.train(1)
    d.saved(d.save(worker, mlp=1))
    for step in range(2, 5):
        d.train(step)
        held = lease(d, worker, step, {held.lease.lease_id: step})
    lose(d, "server-1")
    (worker,) = rejoin(d)
    d.on(ev.OpenDataset(d.number(), caller(worker), DATA))
    assert lease(d, worker, 1).range == 1


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_what_is_still_to_be_loaded_is_not_deleted() -> None:
    before = saved_run(7)
    d = resumed(before, policy=SavePolicy(steps=1, keep_last=1))
    base = before.cluster.snapshots.catalog.commits[0]
    d.join("server")
    worker, _ = d.join()
    d.ask(ev.Describe, worker)  # So this script is no stranger, but its "mlp" has not begun.
    d.create(worker, name="new")
    d.ask(ev.CommitParameters, worker, "new")
    d.go_on()
    d.train(1, "new")
    d.train(2, "new")
    assert base in d.cluster.snapshots.catalog.commits and len(d.cluster.snapshots.catalog.commits) == 2
    d.create(worker)
    d.go_on()
    d.versions = {"new": 9, "mlp": 9}
    d.beat_versions()
    d.saved(d.save())
    assert base not in d.cluster.snapshots.catalog.commits


# --- loading ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_comes_while_values_are_loaded_begins_at_the_cut() -> None:
    d = resumed(saved_run(7))
    d.loading = False
    d.begin()
    worker, _ = d.join()
    call = d.create(worker)
    assert d.state(call).waiting_for == "for server-0 to load shards 0, 2 of 'mlp' from the snapshot"
    d.loading = True
    d.go_on()
    assert d.state(call) == ef.ParametersReady(7) and [m.first_step for m in d.entry().members] == [7, 7]


def test_a_server_lost_while_it_loads_is_replaced() -> None:
    d = resumed(saved_run(7), servers_min=2)
    d.loading = False
    d.begin()
    entry = d.entry()
    victim = entry.primaries[0]
    for number, shard in enumerate(entry.shards):
        session = d.cluster.members.sessions.call_of(shard.primary.server_id)
        d.on(sn.Loaded(session, "mlp", 0, (number,), (shard.term,)))
        if shard.primary.server_id == victim:
            lose(d, victim)
            break
    assert not d.entry().ready and victim not in d.entry().primaries and not d.shards_lost
    assert not d.rolled_back
    d.loading = True
    d.go_on()
    assert d.entry().ready


def test_what_others_say_of_loading_does_not_count() -> None:
    d = resumed(saved_run(7))
    d.loading = False
    d.begin()
    entry = d.entry()
    owner, other = (d.cluster.members.sessions.call_of(s) for s in (entry.primaries[0], entry.primaries[1]))
    all_shards, terms = (0, 1, 2), tuple(shard.term for shard in entry.shards)
    for event in (
        sn.Loaded(other, "mlp", 0, (0,), terms[:1]),
        sn.Loaded(owner, "mlp", 1, (0,), terms[:1]),
        sn.Loaded(owner, "mlp", 0, (0,), (terms[0] + 1,)),
        sn.Loaded(owner, "mlp", 0, (99,), (1,)),
        sn.Loaded(owner, "unknown", 0, (0,), (1,)),
        sn.Loaded(12345, "mlp", 0, all_shards, terms),
    ):
        d.on(event)
        assert sum(map(len, d.cluster.registry.resume.missing(d.entry()).values())) == 3


def test_a_scheduler_that_is_started_again_while_values_are_loaded_goes_on() -> None:
    before = saved_run(7)
    d = resumed(before)
    d.loading = False
    d.begin()
    base = history_of(before).newest
    again = SnapshotDriver(d.stored, d.now, history=replace(history_of(before), base=base))
    for member in (*d.cluster.members.servers, *d.cluster.members.workers):
        again.open(member)
    call = again.create(d.cluster.members.workers[0])
    again.go_on()
    assert again.entry().ready and again.state(call) == ef.ParametersReady(7)


def test_what_servers_load_counts_after_a_restart_and_the_loss_of_another() -> None:
    """Servers report their loaded shards once per session; the scheduler may already have stored that all are
    loaded."""
    before = saved_run(7)
    d = resumed(before, servers_min=2, replicas=2)
    d.begin()
    d.go_on()
    entry = d.entry()
    assert not entry.ready and not d.cluster.registry.resume.missing(entry)
    base = history_of(before).newest
    again = SnapshotDriver(d.stored, d.now, history=replace(history_of(before), base=base), replicas=2)
    for member in (*d.cluster.members.servers, *d.cluster.members.workers):
        again.open(member)
    again.go_on()
    for number, shard in enumerate(entry.shards):
        session = again.cluster.members.sessions.call_of(shard.primary.server_id)
        again.on(sn.Loaded(session, "mlp", entry.generation, (number,), (shard.term,)))
    victim, loaded = entry.primaries[0], entry.primaries[1]
    lose(again, victim)
    assert victim not in again.entry().primaries
    assert 1 not in again.cluster.registry.resume.missing(again.entry()).get(loaded, [])
