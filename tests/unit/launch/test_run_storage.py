"""Storage, ports and shared memory are checked before anything is started."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from psdist.cli import run
from psdist.errors import ConfigurationError, StorageError
from psdist.launcher import run_storage
from psdist.launcher.local import LocalSettings, run_local
from psdist.launcher.run_storage import check_shared_memory, check_storage, why_unservable
from psdist.settings.flags import read


def commit(storage: Path, run_id: str, step: int) -> None:
    (storage / "commits").mkdir(parents=True, exist_ok=True)
    record = {"run_id": run_id, "steps": {"w": step}, "directory": str(step)}
    (storage / "commits" / f"{step:012}.json").write_text(json.dumps(record))


def test_a_storage_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "file" / "gone")
    for name, reason in {
        "file": "file is no directory",
        "file/below": "file is no directory",
        "dangling": "file",
    }.items():
        with pytest.raises(StorageError, match=f"{reason}.*--storage-path none"):
            check_storage(str(tmp_path / name), "r", must_be_empty=False, optional=False)
        check_storage(str(tmp_path / name), "r", must_be_empty=False, optional=True)
    for storage in ("", "s3://bucket/x", str(tmp_path / "new" / "one")):
        check_storage(storage, "r", must_be_empty=True, optional=False)
    monkeypatch.setattr(run_storage, "_FREE_BYTES", 1 << 62)
    with pytest.raises(StorageError, match=r"No space left on device: .* bytes are free; free some space"):
        check_storage(str(tmp_path), "r", must_be_empty=False, optional=False)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(StorageError, match=r"Permission denied: .*; grant this user access"):
        check_storage(str(tmp_path), "r", must_be_empty=False, optional=False)


def test_snapshots_of_another_run_or_of_any_are_refused(tmp_path: Path) -> None:
    commit(tmp_path, "r", 5)
    commit(tmp_path, "r", 7)
    (tmp_path / "commits" / "draft").write_text("{")
    check_storage(str(tmp_path), "r", must_be_empty=False, optional=False)
    with pytest.raises(ConfigurationError, match="has snapshots of run 'r', not of 's': pass --run-id r"):
        check_storage(str(tmp_path), "s", must_be_empty=False, optional=False)
    with pytest.raises(ConfigurationError, match=r"--require-empty-storage, but .* has 2 snapshots, .* w at step 7"):
        check_storage(str(tmp_path), "r", must_be_empty=True, optional=False)


def test_a_taken_port_and_missing_shared_memory_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "Choose another --metrics-port" in why_unservable("127.0.0.1", taken.getsockname()[1])
    assert why_unservable("127.0.0.1", 0) == check_shared_memory("") == ""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "use TCP, which is slower" in check_shared_memory("auto")
    assert check_shared_memory("tcp") == ""
    with pytest.raises(ConfigurationError, match="PSDIST_TRANSPORT is 'rdma': set one of auto, shm, tcp, grpc"):
        check_shared_memory("rdma")
    with pytest.raises(ConfigurationError, match="PSDIST_TRANSPORT is shm"):
        check_shared_memory("shm")


def test_a_machine_without_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run_storage.check_loopback()

    def unreachable(*given: object, **named: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(ConfigurationError, match=r"Network is unreachable. Bring the loopback interface up"):
        run_storage.check_loopback()


def settings(*words: str) -> LocalSettings:
    given = run.command_line().parse([*words, __file__], {})
    return read(LocalSettings, given, command=tuple(given.command))


# The status is that of the scheduler, which a launcher may restart later.
def test_a_run_whose_scheduler_could_not_start_prints_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for words in (["--storage-path", f"{__file__}/x"], ["--metrics-port", str(taken.getsockname()[1])]):
            with pytest.raises(SystemExit) as ended:
                run_local(settings(*words), {})
            assert ended.value.code == 69 and len(capsys.readouterr().err.splitlines()) == 1
    commit(tmp_path / "psdist-runs" / "r", "r", 5)
    for words in (["--fresh"], ["--require-empty-storage"]):
        with pytest.raises(ConfigurationError, match="--require-empty-storage, but"):
            run_local(settings("--run-id", "r", *words), {})
    assert [path.name for path in tmp_path.iterdir()] == ["psdist-runs"]


def test_the_former_name_of_a_flag_works_everywhere(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("fresh = true\n")
    for words, environ in {
        ("--fresh",): {}, (): {"PSDIST_FRESH": "1"}, ("--config", str(tmp_path / "run.toml")): {},
        ("--require_empty_storage",): {},
    }.items():  # fmt: skip
        assert run.command_line().parse([*words, "x.py"], environ).require_empty_storage, words
    assert "--fresh" not in run.command_line()._parser().format_help()
