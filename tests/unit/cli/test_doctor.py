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
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from psdist import cgroups
from psdist.cli import doctor_checks as machine
from psdist.cli.doctor import _here, command_line
from psdist.cli.doctor_checks import STATUSES, Check, Finding, TimeLimit, check_storage, ok, warn, worst
from psdist.cli.doctor_cluster import check_clock, check_connection, check_name, check_version
from psdist.errors import DeviceUnavailableError
from psdist.version import __version__

#: Time for the checks that ask others.
LONG = 200.0


def doctor(*flags: str, limits: Callable[[], None] | None = None, **environment: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the findings by check."""
    command = [sys.executable, "-m", "psdist.cli.main", "doctor", "--format", "json", "--timeout", str(LONG), *flags]
    done = subprocess.run(
        command, env=os.environ | environment, preexec_fn=limits, capture_output=True, text=True, check=False,
        timeout=240,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, {finding["check"]: finding for finding in json.loads(done.stdout)}


def test_the_levels_are_ordered() -> None:
    assert worst([]) == "ok" and worst([ok("a", ""), warn("b", "", "r")]) == "warn"
    assert worst([Finding("c", "fail", ""), warn("b", "", "r")]) == "fail" and STATUSES["fail"] > STATUSES["warn"] > 0


def test_limits_of_64_files_and_1_mib_of_locked_memory_are_found(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))

    # The home directory does not exist, and cannot be made.
    status, found = doctor("--storage-path", str(tmp_path / "kept"), limits=limit, HOME="/proc/nobody")
    assert status == STATUSES["fail"]
    assert found["open files"]["level"] == "fail" and "ulimit -n" in found["open files"]["remedy"]
    assert found["locked memory"]["level"] == "warn" and "ulimit -l" in found["locked memory"]["remedy"]
    assert found["home"]["level"] == "warn" and "XDG_CACHE_HOME" in found["home"]["remedy"]
    assert found["storage"]["level"] in ("ok", "warn") and "read at" in found["storage"]["text"]
    assert not list(tmp_path.iterdir()), "the check left something behind"
    assert found["packages"]["level"] == found["python"]["level"] == found["shared memory"]["level"] == "ok"


def test_an_old_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"grpcio": "1.60.0"}
    installed = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name) or installed(name))
    (found,) = machine.check_packages()
    assert (found.check, found.level) == ("grpcio", "fail") and "pip install -U 'grpcio>=" in found.remedy


def test_versions_are_compared_as_numbers() -> None:
    assert machine.numbers("1.85.1") > machine.numbers("1.9.3") and machine.numbers("2.0rc1") == (2, 0)
    assert machine.numbers("0.61.0") >= machine.numbers("0.61")


def test_a_full_shared_directory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage("/"))(64 << 20, 64 << 20, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found = machine.check_shared_directory()
    assert found.level == "warn" and "--shm-size" in found.remedy
    assert machine.check_temporary_directory().level == "fail"


def test_cgroups_limits_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    assert machine.check_cores().level == "ok"
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.check_cores().level == "ok"
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert machine.check_cores().level == "warn"
    (tmp_path / "memory.max").write_text(f"{100 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{50 << 20}\n")
    assert machine.check_memory().level == "fail" and "--memory" in machine.check_memory().remedy


def test_memory_of_cached_files_counts_as_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    (tmp_path / "memory.max").write_text(f"{8 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{8 << 30}\n")
    (tmp_path / "memory.stat").write_text(f"anon {1 << 30}\ninactive_file {7 << 30}\nactive_file 0\n")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=16 << 30))
    assert machine.check_memory() == ok("memory", "7.0 GiB available (cgroup)")


def test_limits_of_a_systemd_unit_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Outside of a container the cgroup of a process is below the root, and those between limit it, too."""
    unit = tmp_path / "system.slice" / "psdist.service"
    unit.mkdir(parents=True)
    (tmp_path / "membership").write_text("0::/system.slice/psdist.service\n")
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "MEMBERSHIP", tmp_path / "membership")
    (unit / "cpu.max").write_text("max 100000\n")
    (unit.parent / "cpu.max").write_text("50000 100000\n")
    (unit / "memory.max").write_text(f"{100 << 20}\n")
    assert machine.check_cores().level == "warn" and machine.check_memory().level == "fail"


@pytest.mark.parametrize(("device", "level"), [("", "warn"), ("cuda:0", "fail")])
def test_a_gpu_that_no_server_was_told_to_use_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, device: str, level: str
) -> None:
    def refuse(name: str) -> object:
        raise DeviceUnavailableError(f"no CUDA for {name}")

    monkeypatch.setattr("psdist.device.device.open_device", refuse)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    (check,) = [check for check in machine.machine_checks((), device) if check.name == "device"]
    assert [finding.level for finding in check.run()] == [level]


def test_a_port_in_use_is_found() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        found = machine.check_port(port)
    assert found.level == "fail" and "ss -tlnp" in found.remedy
    assert machine.check_port(port).level == "ok"


def test_a_host_name_that_does_not_resolve_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    (found,) = machine.check_names()
    assert found.level == "warn" and "--advertise" in found.remedy


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


async def test_a_storage_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    for place in (str(tmp_path / "file" / "below"), "/proc/kept"):
        found = await check_storage(place, LONG)
        assert found.level == "fail" and "mount" in found.remedy, found


def test_another_version_is_found() -> None:
    assert check_version(__version__).level == "ok" and check_version("0.0.1").level == "fail"


def test_a_check_that_does_not_end_fails_with_its_remedy() -> None:
    limit, release = TimeLimit(0.05), threading.Event()
    try:
        assert limit.run(Check("home", lambda: [ok("home", "written")], "r")) == [ok("home", "written")]
        assert not limit.has_abandoned
        hung = Check("home", lambda: [ok("home", str(release.wait()))], "remount it")
        assert limit.run(hung) == [Finding("home", "fail", "no answer within 0.05 s", "remount it")]
        assert limit.has_abandoned
    finally:
        release.set()


def test_errors_of_a_check_propagate() -> None:
    with pytest.raises(ZeroDivisionError):
        TimeLimit(LONG).run(Check("home", lambda: [ok("home", str(1 // 0))], "r"))


def test_a_dead_disk_below_home_and_storage_ends_the_command_with_both_named(tmp_path: Path) -> None:
    script = """
import threading
from psdist.cli import main
from psdist import cgroups
from psdist.cli import doctor_checks as machine
from psdist.snapshots import local
machine._unwritable = lambda directory: threading.Event().wait()
local.missing_directories = lambda path: threading.Event().wait()
import psdist.cli.doctor as storage_check
storage_check.missing_directories = local.missing_directories
main.main()
"""
    words = ["doctor", "--format", "json", "--timeout", "3", "--storage-path", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, check=False, timeout=LONG
    )
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == STATUSES["fail"]
    assert found["home"]["text"] == found["storage"]["text"] == "no answer within 3 s"
    assert "set HOME" in found["home"]["remedy"] and "--storage-path" in found["storage"]["remedy"]


def test_no_storage_is_a_warning() -> None:
    line = command_line()
    given = line.parse(["--storage-path", "none"], {})
    (finding,) = [one for one in _here(given, TimeLimit(LONG)) if one.check == "storage"]
    assert finding.level == "warn" and "no snapshots" in finding.text and "--storage-path" in finding.remedy
