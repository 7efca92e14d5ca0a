"""Members whose sessions end: which are lost at once, and which may be back."""

from __future__ import annotations

import pytest

from psdist.wire.limits import KEEPALIVE_SECONDS
from psdist_scheduler.events import cluster_events as ev
from tests.support.scheduler_driver import Driver


def test_a_server_that_is_killed_while_the_scheduler_stands_still_for_a_moment_is_lost_at_once() -> None:
    """Nobody hangs up on a scheduler so soon. To wait for the server's return would cost all workers a lease."""
    d = Driver()
    killed, other = [d.open(d.register("server")) for _ in range(2)]
    d.now += KEEPALIVE_SECONDS - d.cluster.settings.tick_seconds
    d.on(ev.SessionClosed(killed, "killed"))
    assert len(d.lost) == 1 and len(d.map.servers) == 1
    d.on(ev.Tick())
    d.on(ev.SessionClosed(other, "killed"))
    assert len(d.lost) == 2, "a session that ends soon after is a loss, too"


@pytest.mark.parametrize("lease", [2.0, 10.0, 600.0])
def test_however_long_the_lease_is_a_server_that_is_killed_between_two_ticks_is_lost_at_once(lease: float) -> None:
    d = Driver(lease_seconds=lease)
    sessions = [d.open(d.register("server")) for _ in range(3)]
    step = d.cluster.settings.tick_seconds
    assert step < KEEPALIVE_SECONDS, "a standstill must show before members hang up"
    for lost, session in enumerate(sessions, 1):
        d.tick(3 * step)
        d.now += 0.9 * step
        d.on(ev.SessionClosed(session, "killed"))
        assert len(d.lost) == lost
