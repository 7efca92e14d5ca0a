"""A scheduler refuses a directory of snapshots that another run is using, and names that run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from psdist.errors import ConfigurationError
from psdist.snapshots.claim import DirectoryClaim
from psdist.snapshots.opening import open_storage
from psdist_scheduler.run.app import _claim


def test_another_run_is_refused_and_the_same_run_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = DirectoryClaim(str(tmp_path), "first")
    assert other.take() is None
    storage = open_storage(str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"in use by the run 'first' \(process .*--storage-path"):
        _claim(storage, "second")
    with caplog.at_level(logging.WARNING, "psdist.scheduler"):
        _claim(storage, "first").release()
    assert "another scheduler of this run" in caplog.text
    other.release()
    _claim(storage, "second").release()


def test_only_directories_are_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for storage in (None, open_storage("memory://claims")):
        held = [_claim(storage, run) for run in ("first", "second")]  # A directory would be refused to the second.
        assert not list(tmp_path.iterdir())
        for claim in held:
            claim.release()
