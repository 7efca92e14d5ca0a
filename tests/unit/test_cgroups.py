"""Cores within the quotas of cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from psdist import cgroups
from psdist.launcher.plan import processes_text


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 64 cores, without quotas."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "MEMBERSHIP", tmp_path / "membership")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_a_machine_without_quotas_gives_all_cores(root: Path) -> None:
    assert cgroups.cpu_limit() is None and cgroups.usable_cores() == 64
    write(root / "membership", "0::/")
    write(root / "cpu.max", "max 100000")
    assert cgroups.usable_cores() == 64 and processes_text("auto") == 64


def test_a_quota_of_version_2_counts(root: Path) -> None:
    for quota, cores in [(200_000, 2), (250_000, 2), (50_000, 1), (10_000_000, 64)]:
        write(root / "membership", "0::/system.slice/psdist.service")
        write(root / "system.slice" / "cpu.max", f"{quota} 100000")
        write(root / "system.slice" / "psdist.service" / "cpu.max", "max 100000")
        assert cgroups.usable_cores() == cores == processes_text("auto")


@pytest.mark.parametrize(("controllers", "own"), [("cpu", "docker/1"), ("cpu,cpuacct", "docker/1"), ("cpu", "")])
def test_a_quota_of_version_1_counts(root: Path, controllers: str, own: str) -> None:
    write(root / "membership", f"3:cpuset:/\n2:{controllers}:/docker/1\n0::/")
    write(root / controllers / own / "cpu.cfs_quota_us", "-1")
    write(root / controllers / own / "cpu.cfs_period_us", "100000")
    assert cgroups.usable_cores() == 64
    write(root / controllers / own / "cpu.cfs_quota_us", "300000")
    assert cgroups.usable_cores() == 3
