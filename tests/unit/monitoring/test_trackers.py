"""Files of metrics, and trackers that fail."""

from __future__ import annotations

import builtins
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from psdist.errors import ConfigurationError
from psdist.monitoring.trackers import ProgressTracker, Trackers
from psdist.trackers import JsonLinesTracker, TensorBoardTracker
from tests.support.event_files import EventFile


def test_lines_are_appended_and_are_json(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    for step in (1, 2):
        tracker = JsonLinesTracker(path)
        tracker.start("run")
        tracker.log({"loss": math.nan if step == 2 else 0.5, "samples": 10}, step)
        assert len(path.read_text().splitlines()) == step, "handed to the system immediately"
        tracker.close()
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())
    assert first.pop("time") <= second.pop("time")
    assert first == {"step": 1, "loss": 0.5, "samples": 10} and second == {"step": 2, "loss": None, "samples": 10}


@pytest.mark.parametrize("make", [lambda path: JsonLinesTracker(path / "metrics.jsonl"), TensorBoardTracker])
def test_a_place_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path, make: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot be written to .*file.*: .*file is no directory"):
        make(tmp_path / "file" / "below").start("run")


def test_event_files_have_each_value_and_where_a_session_begins(tmp_path: Path) -> None:
    for first in (10, 7):
        tracker = TensorBoardTracker(tmp_path / "runs" / "digits")
        tracker.start("digits")
        assert not list(tmp_path.rglob("events*")) or first == 7
        tracker.log({"loss": 0.5, "val/loss": math.nan, "push_ms": 2.0}, first)
        tracker.log({"loss": 0.25}, first + 5)
        tracker.close()
        newest = max(tmp_path.rglob("events*"), key=lambda path: path.stat().st_mtime_ns)
        events = EventFile(newest)
        assert events.version == "brain.Event:2" and events.restarts == [first]
        assert events.scalars["loss"] == [(first, 0.5), (first + 5, 0.25)]
        assert events.scalars["psdist/push_ms"] == [(first, 2.0)]
        assert math.isnan(events.scalars["val/loss"][0][1])
        newest.rename(tmp_path / f"{first}")


def test_without_tensorboardx_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.startswith("tensorboardX"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigurationError, match=r"pip install -U tensorboardX"):
        TensorBoardTracker(tmp_path)


class Failing:
    """Tracker that fails on command."""

    def __init__(self, *, log: bool = False, close: bool = False) -> None:
        self.fails = {"log": log, "close": close}
        self.calls: list[str] = []

    def start(self, run_id: str) -> None:
        self.calls.append(f"start {run_id}")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.calls.append(f"log {step}")
        if self.fails["log"]:
            raise OSError("the disk is full")

    def close(self) -> None:
        self.calls.append("close")
        if self.fails["close"]:
            raise RuntimeError("the service is gone")


def test_a_tracker_that_fails_is_reported_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    trackers, good = Trackers(), Failing()
    bad, worse = Failing(log=True, close=True), Failing(close=True)
    for tracker in (bad, good, worse):
        trackers.add(tracker)
    with caplog.at_level(logging.WARNING, "psdist"):
        trackers.log({}, 1)
        trackers.log({}, 2)
        trackers.close()
        trackers.close()
    assert bad.calls == ["log 1", "close"] and good.calls == worse.calls == ["log 1", "log 2", "close"]
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
        "the disk is full",
        "the service is gone",
    ]
    assert not trackers


@pytest.mark.parametrize(
    ("shows_last", "shown"),
    [
        (False, [("step 1", False), ("step 4", False), ("step 5", True)]),
        (True, [("step 1", False), ("step 4", False), ("step 5", True)]),
    ],
)
def test_progress_is_shown_now_and_then_and_at_the_end(shows_last: bool, shown: list[tuple[str, bool]]) -> None:
    lines, now = list[tuple[str, bool]](), 0.0
    tracker = ProgressTracker(
        lambda line, is_last: lines.append((line.partition("  ")[0], is_last)),
        10.0,
        shows_last=shows_last,
        clock=lambda: now,
    )
    tracker.start("run")
    for step, at in ((1, 10.0), (2, 12.0), (3, 19.0), (4, 20.0), (5, 21.0)):
        now = at
        tracker.log({}, step)
    tracker.close()
    assert lines == shown


@pytest.mark.parametrize("shows_last", [False, True])
def test_a_last_line_that_was_shown_comes_again_where_it_was_in_place(shows_last: bool) -> None:
    lines = list[bool]()
    tracker = ProgressTracker(lambda line, is_last: lines.append(is_last), 0.0, shows_last=shows_last)
    tracker.start("run")
    tracker.close()
    assert not lines
    tracker.log({}, 1)
    tracker.close()
    assert lines == ([False, True] if shows_last else [False])
