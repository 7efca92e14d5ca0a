"""The mark of a worker that has made a process group of all workers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from psdist.settings import group_marks


def test_the_age_of_the_newest_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connected = tmp_path / "3.1"
    monkeypatch.setenv("PSDIST_CONNECTED_FILE", str(connected))
    assert group_marks.age(connected) is None
    group_marks.mark()
    marked = connected.with_name("3.1.group")
    os.utime(marked, (0, time.time() - 1000))
    old = group_marks.age(connected)
    assert old is not None and 1000 <= old < 1100
    group_marks.mark()
    new = group_marks.age(connected)
    assert new is not None and 0 <= new < 100
    os.utime(marked, (0, time.time() + 1000))  # The clock was set back.
    assert group_marks.age(connected) == 0.0


def test_no_mark_without_a_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PSDIST_CONNECTED_FILE", raising=False)
    group_marks.mark()
    monkeypatch.setenv("PSDIST_CONNECTED_FILE", str(tmp_path / "missing" / "0.0"))
    group_marks.mark()
    assert not list(tmp_path.iterdir())
