"""Loading a parameter set from a snapshot: reports of servers, lost servers, and schedulers that are restarted."""

from __future__ import annotations

from dataclasses import replace

from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide import snapshot_events as sn
from tests.support.saved_runs import lose, resumed, saved_run
from tests.support.snapshot_driver import SnapshotDriver, history_of


def test_a_worker_that_comes_while_values_are_loaded_begins_at_the_cut() -> None:
    d = resumed(saved_run(7))
    d.loading = False
    d.begin()
    worker, _ = d.join()
    call = d.create(worker)
    assert d.state(call).text == "for server-0 to load shards 0, 2 of 'mlp' from the snapshot"
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
