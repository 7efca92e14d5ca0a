"""The scheduler's machine that goes back to a snapshot while members are not there. ``test_scheduler_resume`` has the
rest."""

from __future__ import annotations

import pytest

from psdist.errors import FencedError
from psdist_scheduler import events as ev
from tests.unit.scheduler_driver import caller
from tests.unit.test_scheduler_resume import lose, rejoin, saved_run


def test_a_worker_whose_session_is_broken_when_the_run_goes_back_begins_a_new_life_too() -> None:
    d = saved_run(7, workers=2, servers_min=2)
    d.now += 1.5  # The scheduler stood still, and nobody is lost for hanging up.
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
    assert worker is not None
    lose(d, "server-1")
    call = d.number()
    d.on(ev.Leave(call, caller(worker), "closed"))
    assert d.state(call) == ev.Done()
    d.join("server", member_id="server-1")
    rejoin(d, 1)
    assert d.entry().ready
