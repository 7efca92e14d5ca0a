"""``psdist doctor`` on broken set-ups: each is found, with a remedy that fits; and nothing is found on a good one."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from psdist.cli import doctor_checks
from psdist.cli.doctor_checks import (
    STATUSES,
    Finding,
    check_clock,
    check_connection,
    check_directory,
    check_limits,
    check_load,
    check_name,
    check_shared_directory,
    check_version,
)
from psdist.version import __version__

#: Time for the checks that ask others.
LONG = 200.0


def doctor(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "psdist.cli.main", "doctor", "--format", "json", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


def test_findings_are_printed_and_the_worst_is_the_status() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done = doctor("--connect", f"127.0.0.1:{port}", "--timeout", str(LONG))
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == STATUSES["fail"]
    assert {"/dev/shm", "load", "TMPDIR", "snapshots", "scheduler's name", "port of scheduler"} <= found.keys()
    assert found["port of scheduler"]["level"] == "fail" and "nothing listens" in found["port of scheduler"]["remedy"]


def test_wrong_files_of_tls_are_named(tmp_path: Path) -> None:
    done = doctor(*(f"--tls-{what}={tmp_path / what}" for what in ("ca", "cert", "key")))
    assert done.returncode == 2 and f"{tmp_path / 'ca'} (--tls-ca) cannot be read" in done.stderr


def test_a_full_shared_directory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage("/"))(64 << 20, 64 << 20, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found = check_shared_directory()
    assert found.level == "warn" and "--shm-size" in found.remedy


def test_load_and_limits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (2.0, 0.0, 0.0))
    monkeypatch.setattr(doctor_checks, "usable_cores", lambda: 2)
    assert check_load().level == "ok"
    monkeypatch.setattr(doctor_checks, "usable_cores", lambda: 1)
    assert check_load().level == "warn" and "for 1 core" in check_load().text
    limits = dict.fromkeys((resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS), (-1, -1))
    limits[resource.RLIMIT_NOFILE] = (4096, 4096)
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert [one.level for one in check_limits()] == ["ok"]
    limits[resource.RLIMIT_NOFILE], limits[resource.RLIMIT_FSIZE] = (256, 1024), (5 << 20, -1)
    assert [(one.check, one.level) for one in check_limits()] == [("ulimit -n", "warn"), ("ulimit -f", "warn")]


def test_directories_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(directory: Path, **options: bool) -> Finding:
        return check_directory("TMPDIR", str(directory), "set another TMPDIR", LONG, **options)

    assert check(tmp_path).level in ("ok", "warn") and list(tmp_path.iterdir()) == []
    missing = check(tmp_path / "missing")
    assert (missing.level, missing.text) == ("fail", f"{tmp_path}/missing: No such file or directory")
    assert "set another TMPDIR" in missing.remedy
    assert check(tmp_path / "made" / "later", may_be_made=True).level in ("ok", "warn")
    monkeypatch.setattr(doctor_checks, "_DISK_FEW", 1 << 62)
    assert check(tmp_path).level == "warn" and "MiB free" in check(tmp_path).text


def test_a_disk_that_hangs_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "_WRITER", "import threading; threading.Event().wait()")
    found = check_directory("TMPDIR", str(tmp_path), "set another TMPDIR", 0.2)
    assert found.level == "fail" and "has not ended within 0.2 s" in found.text and "hangs" in found.remedy


def test_clocks_are_compared() -> None:
    for theirs, level in [(1000.5, "ok"), (1003.5, "ok"), (1010, "warn"), (990, "warn"), (4600, "fail"), (0, "ok")]:
        found = check_clock(theirs, 1000, 1002)  # The answer took 2 s.
        assert found.level == level and (level == "ok" or "NTP" in found.remedy)


async def test_a_wrong_name_a_closed_port_and_a_firewall_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await check_name("nowhere.invalid", LONG)
    assert found.level == "fail" and "/etc/hosts" in found.remedy
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert (await check_connection("scheduler", "127.0.0.1", port, LONG)).level == "ok"
    found = await check_connection("scheduler", "127.0.0.1", port, LONG)
    assert found.level == "fail" and "nothing listens there" in found.remedy
    assert found.text == f"127.0.0.1:{port} cannot be reached: Connection refused"

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", never)
    found = await check_connection("scheduler", "127.0.0.1", port, 0.01)
    assert found.level == "fail" and "firewall drops" in found.remedy


def test_another_version_is_found() -> None:
    assert check_version(__version__).level == "ok" and check_version("0.0.1").level == "fail"
