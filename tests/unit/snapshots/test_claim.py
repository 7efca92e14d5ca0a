"""The claim on a directory of snapshots: one holder, named to the others, and nothing left of it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from psdist.snapshots.opening import IN_USE, DirectoryClaim, Holder


def test_a_second_run_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    path = str(tmp_path / "a/b")
    first, second = DirectoryClaim(path, "first"), DirectoryClaim(path, "second")
    assert first.take() is None
    holder = second.take()
    assert holder is not None and (holder.run_id, holder.pid) == ("first", os.getpid())
    second.release()
    assert os.path.exists(os.path.join(path, IN_USE)), "who does not hold it, does not end it"
    first.release()
    assert os.listdir(tmp_path) == []
    assert second.take() is None
    second.release()


def test_a_directory_with_snapshots_stays(tmp_path: Path) -> None:
    claim = DirectoryClaim(str(tmp_path), "run")
    assert claim.take() is None
    (tmp_path / "commits").mkdir()
    claim.release()
    assert os.listdir(tmp_path) == ["commits"]


def test_the_file_of_a_process_that_died_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / IN_USE).write_text('{"run_id": "dead", "host": "h", "pid": 1}')
    claim = DirectoryClaim(str(tmp_path), "run")
    assert claim.take() is None
    assert '"run"' in (tmp_path / IN_USE).read_text()
    claim.release()


def test_a_holder_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    for text in ["", "{", "[]", '{"run_id": "x"}']:
        claim = DirectoryClaim(str(tmp_path), "run")
        assert claim.take() is None
        (tmp_path / IN_USE).write_text(text)
        assert DirectoryClaim(str(tmp_path), "other").take() == Holder()
        claim.release()


def test_a_file_system_without_locks_or_that_refuses_is_not_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, flags: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    claim = DirectoryClaim(str(tmp_path), "run")
    assert claim.take() is None
    claim.release()
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").touch()
    claim = DirectoryClaim(str(tmp_path / "file"), "run")
    assert claim.take() is None
    claim.release()
