"""Files of ``--out``: whole or not at all, with the permissions that the user wants."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from psdist.cli.commands import written_whole
from psdist.errors import ConfigurationError, SchedulerUnreachableError


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("before")
    with pytest.raises(KeyError), written_whole(path) as file:
        file.write("half")
        raise KeyError
    assert path.read_text() == "before"
    with written_whole(path) as file:
        file.write("after")
    assert path.read_text() == "after" and [one.name for one in tmp_path.iterdir()] == ["trace.json"]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (tmp_path, "exists and is no file"),
        (tmp_path / "pipe", "exists and is no file"),
        (tmp_path / "none" / "trace.json", "cannot be written: No such file or directory"),
    ):
        with pytest.raises(ConfigurationError, match=words), written_whole(path):
            raise AssertionError
    assert [one.name for one in tmp_path.iterdir()] == ["pipe"]


@pytest.fixture(params=[0o022, 0o077])
def mask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_mode_is_the_choice_of_the_user(tmp_path: Path, mask: int) -> None:
    path = tmp_path / "run.html"
    for permissions in (0o666 & ~mask, 0o640):
        with written_whole(path) as file:
            file.write("page")
        assert mode(path) == permissions
        path.chmod(0o640)  # The next one keeps it.


def test_errors_of_the_disk_name_the_file_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ConfigurationError, match=f"{path} cannot be written: No space left"), written_whole(path):
        raise full
    with pytest.raises(SchedulerUnreachableError), written_whole(path):
        raise SchedulerUnreachableError("gone")
    assert list(tmp_path.iterdir()) == []
