"""The benchmark between hosts: very small, with real namespaces and shaped links, if this machine supports them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import network, shaped_hosts

ROOT = Path(__file__).resolve().parents[3]
COMMAND = (sys.executable, "-m", "benchmarks.network", "--hosts", "2", "--params", "50000", "--rounds", "1")

needs_hosts = pytest.mark.skipif(
    bool(reason := shaped_hosts.hosts_missing()), reason=f"no hosts with shaped links on this machine: {reason}"
)


def namespaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"ps{pid}")]


def processes_in(namespaces: str) -> list[str]:
    """Return the commands of processes that name these hosts."""
    return [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])
            if any(namespaces in word for word in one.info["cmdline"] or ())]  # fmt: skip


@needs_hosts
@pytest.mark.parametrize("contenders", [["psdist"], ["psdist", "psdist_bf16", "psdist_grpc"]])
@pytest.mark.long
def test_a_step_between_two_hosts(tmp_path: Path, contenders: list[str]) -> None:
    path = tmp_path / "out.json"
    command = [*COMMAND, "--rate", "1gbit", "--contender", *contenders, "--json", str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    result = json.loads(path.read_text())["rates"]["1gbit"]
    shown = {"psdist": result["psdist"], **result["peers"]}
    assert list(shown) == contenders
    # Each worker sends half of its gradient to the other host. The server there returns that half of the weights, and
    # answers the other worker in the same way.
    for name in contenders:
        size = 2 if name == "psdist_bf16" else 4
        assert shown[name]["ms"] > 0
        for way in ("sent", "received"):
            assert 50_000 * size <= shown[name]["bytes_per_step"][way] <= 1.5 * 50_000 * size
    assert min(result["transfer_bits_per_second"]) > 0
    assert namespaces_of(process.pid) == []


@needs_hosts
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_behind_by_an_interrupt(signum: int) -> None:
    command = [*COMMAND, "--rate", "100mbit", "--contender", "--rounds", "100000"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "raw TCP" in process.stdout.readline()  # The hosts exist, and contenders start.
        assert len(namespaces_of(process.pid)) == 3
        os.kill(process.pid, signum)
        process.wait(120)
    assert process.returncode != 0
    assert namespaces_of(process.pid) == []
    assert f"ps{process.pid}up" not in psutil.net_if_addrs()
    assert processes_in(f"ps{process.pid}host") == []


@needs_hosts
def test_hosts_share_no_memory_files_and_are_removed(tmp_path: Path) -> None:
    with shaped_hosts.ShapedHosts(2, 1e9) as hosts:
        subprocess.run([*hosts.inside(0), "touch", "/dev/shm/of-host-0"], check=True)
        shown = [
            subprocess.run([*hosts.inside(host), "ls", "/dev/shm"], capture_output=True, text=True, check=True).stdout
            for host in (0, 1)
        ]
        assert shown == ["of-host-0\n", ""]
        name = subprocess.run([*hosts.inside(1), "uname", "-n"], capture_output=True, text=True, check=True).stdout
        assert name == "host-1\n" != f"{os.uname().nodename}\n"
        assert not Path("/dev/shm/of-host-0").exists()
        before = hosts.counters(1)
        rates = network.transfer(hosts, 0.2)
        moved = hosts.counters(1) - before
        # Both links carried all received bytes, and neither more than its rate and its bucket allow.
        assert min(moved.sent, moved.received) > 1 << 20
        assert max(rates) < 1.2e9
    assert namespaces_of(os.getpid()) == []


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="cannot run here: network namespaces need root"):
        network.main([])
