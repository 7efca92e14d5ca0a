"""The scheduler's machine that goes back to a snapshot while members are not there. ``test_scheduler_resume`` has the
rest."""

from __future__ import annotations

import pytest

from psdist.errors import FencedError
from tests.unit.test_scheduler_resume import lose, saved_run


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
