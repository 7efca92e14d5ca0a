"""Registrations that come together, and how often members are to be heard."""

from __future__ import annotations

from dataclasses import replace

from scheduler_driver import Driver

from psdist import errors
from psdist.wire.limits import PROTOCOL_VERSION
from psdist_scheduler.events import cluster_events as ev
from psdist_scheduler.events.records import ClusterSettings


def test_workers_that_register_together_share_an_epoch() -> None:
    d = Driver()
    for _ in range(2):
        d.join()
    epoch = d.map.epoch
    # Rank 1 is taken, and so is 9 by then.
    together = [ev.Register(d.number(), PROTOCOL_VERSION, "", "worker", rank=rank) for rank in (9, 7, 1, 9, None)]
    calls = [event.call for event in together]
    d.on_all(*together)
    assert d.map.epoch == epoch + 1
    assert [worker.rank for worker in d.map.workers] == [0, 1, 2, 7, 9]
    told = [d.told[call][-1].member.member_id for call in calls if call in d.told]
    assert told == ["worker-9", "worker-7", "worker-2"]
    assert {call: type(error) for call, error in d.errors.items()} == dict.fromkeys(
        calls[2:4], errors.DuplicateMemberError
    )


def test_nothing_is_committed_where_all_are_refused() -> None:
    d = Driver()
    d.join()
    epoch = d.map.epoch
    d.on_all(*(ev.Register(d.number(), PROTOCOL_VERSION, "", "worker", rank=0) for _ in range(2)))
    assert d.map.epoch == epoch and len(d.errors) == 2


def test_many_workers_beat_less_often() -> None:
    settings = ClusterSettings("run")
    assert [settings.heartbeat_of("worker", workers) for workers in (1, 125, 1000, 4096)] == [0.5, 0.5, 4.0, 7.5]
    assert settings.heartbeat_of("server", 4096) == 0.5
    assert replace(settings, worker_lease_seconds=1.0).heartbeat_of("worker", 4096) == 0.25
    d = Driver(workers_min=1000)
    for role, expected in (("worker", 4.0), ("server", 0.5)):
        d.on(ev.Register(call := d.number(), PROTOCOL_VERSION, "", role))
        assert d.told[call][-1].heartbeat_seconds == expected
