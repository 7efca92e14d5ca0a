"""Commands that find their run on this machine."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from psdist import errors
from psdist.cli import target
from psdist.cli.commands import Leaf, call
from psdist.errors import InvalidArgumentError
from psdist.monitoring.dashboard import KEY_FILE, view_key
from psdist.settings.flags import CommandLine


def find(monkeypatch: pytest.MonkeyPatch, path: Path, *argv: str) -> target.SchedulerChoice:
    """Return the choice of a command with these flags, where one run is running."""
    (path / "token").write_text("secret")
    names = {"token_file": str(path / "token"), "directory": str(path)}
    record = SimpleNamespace(run_id="local", address="127.0.0.1:1", pid=1, **names)
    monkeypatch.setattr(target, "choose_run", lambda run_id, environ: record)
    environ = {"PSDIST_TLS_CA": str(path / "ca.pem")}
    return target.find_target(CommandLine("c", "", target.target_flags(), "").parse(list(argv), environ), environ)


def test_a_run_of_this_machine_needs_no_tls_though_the_environment_names_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = find(monkeypatch, tmp_path, "--run-id", "local")
    assert (found.credentials.token, found.credentials.tls) == ("secret", None)
    assert found.dashboard_key == view_key("secret", "local")


def test_only_the_record_of_the_run_gives_the_key_of_the_dashboard(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "other").write_text("of a reader")
    assert find(monkeypatch, tmp_path, "--token-file", str(tmp_path / "other")).dashboard_key == ""


def test_a_key_in_a_file_is_that_of_the_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / KEY_FILE).symlink_to(tmp_path / "key")
    (tmp_path / "key").write_text("k1\n")
    assert find(monkeypatch, tmp_path).dashboard_key == "k1"
    (tmp_path / "key").unlink()
    assert find(monkeypatch, tmp_path).dashboard_key == "", "it was revoked"


@pytest.mark.parametrize("run", [("--run-id", "local"), ()])
def test_files_of_tls_for_a_run_without_it_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidArgumentError, match="uses no TLS, so --tls-ca, --tls-cert would have no effect: leave"):
        find(monkeypatch, tmp_path, *run, "--tls-cert", "a.pem", "--tls-ca", "b.pem")


@pytest.mark.parametrize("error", [errors.TlsHandshakeError, errors.UnauthenticatedError, errors.PermissionDeniedError])
def test_a_command_without_the_right_credentials_ends_with_78(
    error: type[errors.PsdistError], capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(given: Namespace, environ: Mapping[str, str]) -> int:
        raise error("demands TLS")

    with pytest.raises(SystemExit) as ended:
        call(Leaf(lambda: CommandLine("psdist status", "", target.target_flags()), refused), [], {})
    assert ended.value.code == 78 and capsys.readouterr().err == "psdist status: error: demands TLS\n"
