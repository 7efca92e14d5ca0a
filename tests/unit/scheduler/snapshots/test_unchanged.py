"""The scheduler's machine: when the newest snapshot is what somebody wants, and when another is needed at its step."""

from __future__ import annotations

import pytest

from psdist.snapshots.policy import SavePolicy
from psdist.types import DataPosition
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import snapshot_events as sn
from tests.support.saved_runs import lease, position, reading_run
from tests.support.scheduler_driver import caller


@pytest.mark.parametrize("waits", [False, True])
def test_a_range_that_was_reported_too_late_for_a_snapshot_is_in_the_next_at_its_step(waits: bool) -> None:
    d, (worker,) = reading_run(policy=SavePolicy(steps=3))
    held = lease(d, worker, 2)
    assert held.lease is not None
    d.train(3)
    for _ in range(10):
        d.beat(*d.cluster.members.sessions.by_call)
        d.tick()
        d.go_on()
    assert d.steps == [{"mlp": 3}] and position(d).done == ()
    lease(d, worker, 3, {held.lease.lease_id: 3})
    call = d.save(worker, mlp=3) if waits else d.save()
    for _ in range(10):
        d.beat(*d.cluster.members.sessions.by_call)
        d.tick()
        d.go_on()
    assert d.saved(call).steps == {"mlp": 3} and position(d).done == ((0, 1),)
    call = d.save(worker, mlp=3) if waits else d.save()
    assert d.state(call) == sn.Saved(d.cluster.snapshots.catalog.commits[0], unchanged=True) and len(d.steps) == 2


def test_a_data_set_that_was_set_elsewhere_is_saved_though_nothing_was_trained() -> None:
    d, (worker,) = reading_run()
    d.train(4)
    d.saved(d.save(worker, mlp=4))
    d.on(ev.SetPosition(d.number(), caller(worker), "train", DataPosition(0, ((0, 5),))))
    assert d.saved(d.save(worker, mlp=4)).sequence == 2 and position(d).done == ((0, 5),)
