"""Members whose sessions end: which are lost immediately, and which may return."""

from __future__ import annotations

import pytest

from psdist_scheduler.decide import cluster_events as ev
from tests.support.scheduler_driver import Driver


def test_a_server_that_is_killed_while_the_scheduler_stands_still_is_lost_once_somebody_else_is_heard() -> None:
    d = Driver()
    killed, other = [d.open(d.register("server")) for _ in range(2)]
    d.now += 1.75
    d.on(ev.SessionClosed(killed, "killed"))
    d.on(ev.Tick())
    assert not d.lost, "this process may be cut off"
    d.beat(other)
    d.tick()
    assert len(d.lost) == 1 and len(d.map.servers) == 1


@pytest.mark.parametrize("lease", [2.0, 10.0, 600.0])
def test_however_long_the_lease_is_a_server_that_is_killed_between_two_ticks_is_lost_at_once(lease: float) -> None:
    d = Driver(lease_seconds=lease)
    sessions = [d.open(d.register("server")) for _ in range(3)]
    step = d.cluster.settings.tick_seconds
    for lost, session in enumerate(sessions, 1):
        d.tick(3 * step)
        d.beat(*sessions[lost - 1 :])
        d.now += 0.9 * step
        d.on(ev.SessionClosed(session, "killed"))
        assert len(d.lost) == lost
