"""``python -m tests.chaos`` itself, with few faults of each kind; ``make chaos`` makes the long runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.chaos import faults
from tests.support.tree import ROOT

_QUICK = ("--failure-timeout", "1", "--down", "1", "--pace", "0.005")


def _start(path: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.chaos", *_QUICK, "--format", "json", *flags]
    environment = {**os.environ, "TMPDIR": str(path)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _run(path: Path, *flags: str) -> dict[str, Any]:
    process = _start(path, *flags)
    output, progress = process.communicate(timeout=300)
    assert process.returncode == 0, output + progress
    report: dict[str, Any] = json.loads(output)
    assert report["good"] and not report["problems"]
    return report


@pytest.mark.long
def test_servers_killed_in_bsp_change_no_byte(tmp_path: Path) -> None:
    report = _run(tmp_path, "--kills", "2", "--seed", "3")
    assert (report["faults"], report["lost"], report["repeated"], report["equal"]) == (2, 0, 0, True)
    assert report["acknowledged"] > 100
    assert report["recovery_seconds"]["max"] < 5


@pytest.mark.long
def test_a_server_is_struck_while_a_copy_is_being_filled(tmp_path: Path) -> None:
    report = _run(tmp_path, "--fault", "server-refill", "--kills", "2", "--nservers", "4", "--load", "1", "--seed", "5")
    assert (report["faults"], report["during_fill"], report["lost"], report["repeated"]) == (2, 1, 0, 0)
    assert (report["equal"], report["runs_ended"], report["refused_again"]) == (True, 0, 0)


@pytest.mark.long
def test_workers_frozen_are_fenced_and_come_back(tmp_path: Path) -> None:
    report = _run(tmp_path, "--fault", "worker-freeze", "--kills", "1", "--nservers", "2", "--consistency", "asp")
    assert (report["faults"], report["lost"], report["repeated"]) == (1, 0, 0)
    assert report["equal"] is None


def test_the_only_copy_lost_is_said(tmp_path: Path) -> None:
    # The server should be lost by its death, and be the only loss.
    fault = ("--fault", "server-lost", "--kills", "1", "--failure-timeout", "10")
    report = _run(tmp_path, *fault, "--replicas", "1", "--nservers", "2")
    assert len(report["ended"]) >= 2
    assert all("server_lost" in text for text in report["ended"][:2]), report["ended"]


@pytest.mark.long
def test_a_network_that_is_cut(tmp_path: Path) -> None:
    if reason := faults.namespaces_missing():
        pytest.skip(reason)
    report = _run(tmp_path, "--fault", "partition", "--kills", "1", "--consistency", "asp")
    assert (report["faults"], report["lost"], report["repeated"]) == (1, 0, 0)


@pytest.mark.long
def test_killed_itself_it_leaves_nothing(tmp_path: Path) -> None:
    process = _start(tmp_path, "--fault", "worker-freeze", "--kills", "9", "--replicas", "1", "--nservers", "1")
    assert process.stderr is not None
    assert "faults begin" in process.stderr.readline()
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 4
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    process = _start(tmp_path, "--nservers", "1")
    _, message = process.communicate()
    assert process.returncode == 2
    assert "--nservers 1 cannot hold --replicas 2 copies" in message
