"""The history of a run: numbered, bounded, complete for those that follow it, and kept over restarts."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.wire import limits
from psdist_scheduler import run_status
from psdist_scheduler.decide.cluster_state import EventRecord
from psdist_scheduler.decide.effects import LogEvent
from psdist_scheduler.run_status import EventHistory
from psdist_scheduler.run_store import SqliteStore


def filled(count: int) -> EventHistory:
    history = EventHistory()
    for number in range(1, count + 1):
        history.add(LogEvent(f"event {number}", "info", "join" if number % 2 else "loss"), float(number))
    return history


@given(st.integers(0, 30), st.integers(0, 40), st.integers(1, 40))
def test_each_kept_event_is_given_once_in_order(count: int, after: int, batch: int) -> None:
    history, found, number = filled(count), [], after
    while records := history.after(number, batch):
        found += [record.number for record in records]
        number = records[-1].number
    # A number that was not reached yet is of another scheduler's history.
    assert found == list(range(after + 1 if after <= count else 1, count + 1))


def test_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_status, "EVENTS_MAX", 5)
    history = filled(12)
    assert (
        [record.number for record in history.newest(100)]
        == [8, 9, 10, 11, 12]
        == [record.number for record in history.after(3, 100)]
    )
    assert history.counts == {"join": 6, "loss": 6} and [one.number for one in history.newest(2)] == [11, 12]


async def test_a_follower_wakes_for_each_event() -> None:
    history = filled(1)
    waiting = asyncio.create_task(history.changed())
    await asyncio.sleep(0)
    assert not waiting.done()
    history.add(LogEvent("news"), 2.0)
    await waiting
    assert [record.text for record in history.after(1, 10)] == ["news"]


def test_a_restarted_scheduler_continues_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psdist_scheduler.run_store.EVENTS_MAX", 5)
    store, history = SqliteStore(tmp_path / "s", "run"), filled(4)
    store.write_events(history.newest(100))
    store.write_events([history.add(LogEvent("last", "warning", "rollback"), 5.5) for _ in range(3)])
    store.close()
    store = SqliteStore(tmp_path / "s", "run")
    again = EventHistory(store.load_events())
    assert again.newest(100) == history.newest(5) and again.newest(1) == [EventRecord(7, 5.5, "rollback", True, "last")]
    assert again.add(LogEvent("next"), 6.0).number == 8 and again.counts == {"note": 1}
    store.close()


def test_a_store_of_an_earlier_release_gets_a_history(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s", "run")
    store.close()
    with sqlite3.connect(tmp_path / "s") as database:
        database.execute("DROP TABLE events")
    database.close()
    store = SqliteStore(tmp_path / "s", "run")
    assert store.load_events() == []
    store.write_events(filled(1).newest(1))
    assert len(store.load_events()) == 1
    store.close()


def test_a_history_that_cannot_be_stored_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = SqliteStore(tmp_path / "s", "run")
    store._db.execute("DROP TABLE events")
    store.write_events(filled(1).newest(1))
    assert "events of the run's history are not stored" in caplog.text
    assert store._db.execute("PRAGMA synchronous").fetchone() == (
        2,
    )  # The run's own state is written as safely as before.
    store.close()


def test_limits_fit() -> None:
    assert limits.EVENTS_PER_MESSAGE * 4096 < limits.CONTROL_MESSAGE_BYTES
