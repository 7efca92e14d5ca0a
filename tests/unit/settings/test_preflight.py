"""A program's message on a machine that does not let it run. Limits and disks are faked."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from psdist.errors import ConfigurationError
from psdist.settings import preflight
from psdist.settings.programs import check_machine

_INFINITE = resource.RLIM_INFINITY


class Limits:
    """The limits of a process; changes are recorded."""

    def __init__(self, files: tuple[int, int], addresses: int) -> None:
        self.files, self.addresses = files, addresses

    def getrlimit(self, kind: int) -> tuple[int, int]:
        return self.files if kind == resource.RLIMIT_NOFILE else (self.addresses, self.addresses)

    def setrlimit(self, kind: int, values: tuple[int, int]) -> None:
        assert kind == resource.RLIMIT_NOFILE
        self.files = values


def limited(
    monkeypatch: pytest.MonkeyPatch, files: tuple[int, int] = (1024, 4096), addresses: int = _INFINITE
) -> Limits:
    limits = Limits(files, addresses)
    monkeypatch.setattr(resource, "getrlimit", limits.getrlimit)
    monkeypatch.setattr(resource, "setrlimit", limits.setrlimit)
    return limits


@pytest.mark.parametrize(
    ("files", "children", "after"),
    [
        ((1024, 4096), 10, (1024, 4096)),
        ((32, 4096), 10, (64, 4096)),
        ((32, _INFINITE), 10, (64, _INFINITE)),
        ((_INFINITE, _INFINITE), 10_000, (_INFINITE, _INFINITE)),
    ],
)
def test_a_limit_that_may_be_raised_is_raised_as_far_as_needed(
    files: tuple[int, int], children: int, after: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = limited(monkeypatch, files)
    preflight.require_for_launcher(children)
    assert limits.files == after


def test_too_few_files_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, (32, 32))
    with pytest.raises(ConfigurationError, match=r"may open 32 files, and needs 44 to start 5 .*'ulimit -n 4096'"):
        preflight.require_for_launcher(5)


def test_too_few_addresses_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, addresses=600_000 << 10)
    with pytest.raises(ConfigurationError, match=r"may map 600000 KiB .*'ulimit -v unlimited'"):
        preflight.require_for_launcher(1)


@pytest.mark.parametrize(("files", "addresses"), [((32, 32), _INFINITE), ((1024, 1024), 600_000 << 10)])
def test_a_service_ends_with_one_line(
    files: tuple[int, int], addresses: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limited(monkeypatch, files, addresses)
    with pytest.raises(SystemExit) as ended:
        check_machine("psdist-server")
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 69 and line.startswith("psdist-server: error: this process may") and "ulimit" in line


def test_a_full_temporary_directory_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert preflight.make_private_directory("psdist-").parent == tmp_path
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    with pytest.raises(ConfigurationError, match=rf"{tmp_path} has 4096 bytes free, .* set TMPDIR"):
        preflight.make_private_directory("other-")
    assert not list(tmp_path.glob("other-*"))


def test_a_temporary_directory_that_cannot_be_written_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(ConfigurationError, match=r"no room .* set TMPDIR"):
        preflight.make_private_directory("psdist-")
