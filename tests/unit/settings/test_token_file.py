"""``--create-token``: one token for all who start at the same time, and nobody else's file is written to."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from psdist.errors import ConfigurationError
from psdist.settings.config import create_token_file, find_token


def test_the_token_is_only_this_users_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "token"
    create_token_file({}, path)
    token = find_token({}, None, path)
    assert len(token) >= 43 and path.stat().st_mode & 0o777 == 0o600
    create_token_file({}, path)
    assert find_token({}, None, path) == token and os.listdir(tmp_path) == ["token"]


def test_of_two_starters_both_read_the_token_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one looked for the file before it existed."""
    path = tmp_path / "token"
    create_token_file({}, path)
    token = find_token({}, None, path)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    create_token_file({}, path)
    assert find_token({}, None, path) == token and os.listdir(tmp_path) == ["token"]


@pytest.mark.parametrize("is_link", [True, False])
def test_what_lies_under_a_name_that_could_be_guessed_is_left_alone(tmp_path: Path, is_link: bool) -> None:
    """Neither is it written to, nor does it become the token's file."""
    (tmp_path / "victim").write_text("precious")
    planted = tmp_path / f".token.{os.getpid()}"
    if is_link:
        planted.symlink_to(tmp_path / "victim")
    else:
        planted.write_text("planted")
        planted.chmod(0o666)
    create_token_file({}, tmp_path / "token")
    assert (tmp_path / "victim").read_text() == "precious"
    assert planted.read_text() == ("precious" if is_link else "planted")
    assert not (tmp_path / "token").is_symlink() and (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_a_link_that_leads_nowhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "token").symlink_to(tmp_path / "elsewhere")
    create_token_file({}, tmp_path / "token")
    assert os.listdir(tmp_path) == ["token"]
    with pytest.raises(ConfigurationError, match="cannot be read"):
        find_token({}, None, tmp_path / "token")


def test_a_file_system_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*args: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(ConfigurationError, match=r"cannot be created: Operation not supported.*hard links"):
        create_token_file({}, tmp_path / "token")
    assert os.listdir(tmp_path) == []
