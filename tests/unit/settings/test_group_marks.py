"""The mark of a worker that has made a process group of all workers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from psdist.settings.launcher_reports import group_age, mark_group


def test_the_age_of_the_newest_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connected = tmp_path / "3.1"
    monkeypatch.setenv("PSDIST_CONNECTED_FILE", str(connected))
    assert group_age(connected) is None
    mark_group()
    marked = connected.with_name("3.1.group")
    os.utime(marked, (0, time.time() - 1000))
    old = group_age(connected)
    assert old is not None and 1000 <= old < 1100
    mark_group()
    new = group_age(connected)
    assert new is not None and 0 <= new < 100
    os.utime(marked, (0, time.time() + 1000))  # The clock was set back.
    assert group_age(connected) == 0.0


def test_no_mark_without_a_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PSDIST_CONNECTED_FILE", raising=False)
    mark_group()
    monkeypatch.setenv("PSDIST_CONNECTED_FILE", str(tmp_path / "missing" / "0.0"))
    mark_group()
    assert not list(tmp_path.iterdir())
