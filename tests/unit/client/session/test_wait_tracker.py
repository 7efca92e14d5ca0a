"""Long waits are listed once per reason, with their durations."""

from __future__ import annotations

import asyncio

import pytest

from psdist.client.session.waits import WaitTracker
from psdist.wire import limits


async def test_lasting_waits_are_listed_once_per_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = WaitTracker()
    with waits.open("for server-0"), waits.open("for server-0") as second, waits.open("for worker-1"):
        assert waits.sentences() == []
        monkeypatch.setattr(limits, "REPORT_WAIT_SECONDS", 0.0)
        assert waits.sentences() == ["for server-0 (0 s)", "for worker-1 (0 s)"]
        second.update_reason("for worker-1")
        assert waits.sentences() == ["for server-0 (0 s)", "for worker-1 (0 s)"]
    assert waits.sentences() == []


async def test_a_reason_is_logged_once_for_all_calls_that_wait_for_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = WaitTracker()
    with waits.open("for server-0") as one, waits.open("for server-1") as other:
        monkeypatch.setattr(limits, "REPORT_WAIT_SECONDS", 0.0)
        one.update_reason("for worker-1 (rank 1) to push step 0")
        other.update_reason("for worker-1 (rank 1) to push step 0")
        assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
            "waiting 0 s for worker-1 (rank 1) to push step 0"
        ]
        other.update_reason("for server-1 to answer")
        assert "waiting 0 s for server-1 to answer" in caplog.text


async def test_a_new_reason_is_mentioned_once_for_all_calls(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "psdist")
    waits = WaitTracker()
    with waits.open("for one") as one, waits.open("for another") as other:
        for wait in (one, other):
            wait.update_reason("for rank 1 to call barrier()")
        assert [record.message for record in caplog.records] == ["waiting for rank 1 to call barrier()"]
        one.update_reason("for rank 2 to call barrier()")
        assert caplog.records[-1].message == "waiting for rank 2 to call barrier()"


async def test_a_wait_that_lasts_is_logged_again_each_minute_however_many_wait(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = WaitTracker()
    loop = asyncio.get_running_loop()
    now = loop.time()
    with waits.open("for worker-1"), waits.open("for worker-1"):
        for minutes in range(1, 4):
            monkeypatch.setattr(loop, "time", lambda minutes=minutes: now + 60.0 * minutes)
            for wait in waits.open_waits.values():
                wait.update_reason("for nobody")
                wait.update_reason("for worker-1")
            logged = [record.message for record in caplog.records if record.message.endswith(" s for worker-1")]
            assert len(logged) == minutes
        monkeypatch.undo()
