"""Cores within the quotas of cgroups, and the Python of psdist's programs in programs that are not Python."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from psdist import machine
from psdist.errors import ConfigurationError
from psdist.launcher.plan import processes_text
from psdist.machine import VARIABLE, make_directory, python


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 64 cores, without quotas."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_available_memory_is_that_of_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert 0 < machine.available_memory() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(machine, "MEMORY", tmp_path / "meminfo")
    write(tmp_path / "meminfo", "MemTotal:  16 kB\nMemAvailable:  7 kB")
    assert machine.available_memory() == 7 * 1024


def test_a_machine_without_quotas_gives_all_cores(root: Path) -> None:
    assert machine.cpu_limit() is None and machine.usable_cores() == 64
    write(root / "membership", "0::/")
    write(root / "cpu.max", "max 100000")
    assert machine.usable_cores() == 64 and processes_text("auto") == 64


def test_a_quota_of_version_2_counts(root: Path) -> None:
    for quota, cores in [(200_000, 2), (250_000, 2), (50_000, 1), (10_000_000, 64)]:
        write(root / "membership", "0::/system.slice/psdist.service")
        write(root / "system.slice" / "cpu.max", f"{quota} 100000")
        write(root / "system.slice" / "psdist.service" / "cpu.max", "max 100000")
        assert machine.usable_cores() == cores == processes_text("auto")


@pytest.mark.parametrize(("controllers", "own"), [("cpu", "docker/1"), ("cpu,cpuacct", "docker/1"), ("cpu", "")])
def test_a_quota_of_version_1_counts(root: Path, controllers: str, own: str) -> None:
    write(root / "membership", f"3:cpuset:/\n2:{controllers}:/docker/1\n0::/")
    write(root / controllers / own / "cpu.cfs_quota_us", "-1")
    write(root / controllers / own / "cpu.cfs_period_us", "100000")
    assert machine.usable_cores() == 64
    write(root / controllers / own / "cpu.cfs_quota_us", "300000")
    assert machine.usable_cores() == 3


def test_this_python_is_used() -> None:
    assert python() == sys.executable


@pytest.mark.parametrize(
    ("executable", "frozen", "reason"),
    [
        (None, False, "sys.executable is not set"),
        ("", False, "sys.executable is not set"),
        ("/opt/app/app", True, r"frozen application, and sys.executable is the application itself \(/opt/app/app\)"),
        ("/opt/python/app", False, "embeds Python, and sys.executable is the program itself"),
    ],
)
def test_other_programs_name_the_reason_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, executable: str | None, frozen: bool, reason: str
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    with pytest.raises(ConfigurationError, match=f"{reason}.*set {VARIABLE} to a Python"):
        python()


def test_a_chosen_python_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setenv(VARIABLE, sys.executable)
    assert python() == sys.executable
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(ConfigurationError, match=f"{VARIABLE}=.* is no program"):
        python()


def test_a_directory_that_cannot_be_made_names_what_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    (tmp_path / "to-file").symlink_to("file")
    for name, words in {
        "file": "file is no directory",
        "file/below": "file is no directory",
        "dangling": f"dangling is a link to {tmp_path}/gone, which does not exist",
        "dangling/below": f"dangling is a link to {tmp_path}/gone, which does not exist",
        "to-file": "to-file is a link to file, which is no directory",
    }.items():
        with pytest.raises(NotADirectoryError, match=words):
            make_directory(tmp_path / name)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for name in ("link", "link/new/one", "new"):
        make_directory(tmp_path / name, 0o700)
        assert (tmp_path / name).is_dir()
