"""The standby overlay for Kubernetes with real processes and a real etcd: the leading scheduler's pod is killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from psdist.cli import k8s

pytest.importorskip("yaml", reason="PyYAML reads the generated files")

from tests.support.kustomize import render
from tests.support.pods import pods, run_pods, with_own_address

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "mount"))), reason="needs root and namespaces"
    ),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed (Debian: apt install etcd-server)"),
]
#: Trains until the workers agree that the other scheduler leads, and some steps more. Every sum is exact in float32.
_TRAINS = """
import pathlib, numpy as np, psdist
with psdist.init() as context:
    weights = context.client.parameters("m", {"w": np.ones(60_000, np.float32)}, psdist.optim.SGD(lr=0.5))
    steps, left = 0, 200
    while left:
        values = weights.push_pull({"w": np.full(60_000, context.rank, np.float32)})["w"]
        steps += 1
        if steps == 5:
            print("trains", flush=True)
        if left < 200 or context.collectives.all_reduce(np.full(1, pathlib.Path("led").exists(), np.float32))[0] == 2:
            left -= 1
    assert (values == np.float32(1 - 0.25 * steps)).all()
    print("exact after", steps, "steps", flush=True)
"""
_ANSWERS = "from psdist_scheduler.etcd_client import EtcdClient; EtcdClient(['etcd:2379']).get(b'ready', 5.0)"


def etcd(path: Path) -> dict[str, Any]:
    """Return the process that the address in the manifest means."""
    url, peer = "http://127.0.0.100:2379", "http://127.0.0.100:2380"
    argv = [
        "etcd", "--name", "m0", "--data-dir", str(path / "etcd"), "--listen-client-urls", url,
        "--advertise-client-urls", url, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
        "--initial-cluster", f"m0={peer}", "--log-level", "error",
    ]  # fmt: skip
    probes = [[sys.executable, "-c", _ANSWERS]]
    names = {"name": "etcd", "role": "etcd", "address": "127.0.0.100"}
    return names | {"argv": argv, "env": {**os.environ}, "probes": probes}


def test_a_run_continues_when_the_leading_pod_is_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAINS)
    flags = ("--out", str(tmp_path / "run"), "--nodes", "2", "--nservers", "2")
    assert k8s.run(k8s.command_line().parse([*flags, "train.py"], {}), {}) == 0
    roles = [(f"psdist-{role}-0", f"psdist-{role}-1") for role in ("scheduler", "servers", "workers")]
    made = pods(render(tmp_path / "run/overlays/standby"), *roles, tmp_path)
    found = [with_own_address(pod, number) for number, pod in enumerate(made, 2)]
    assert {pod["env"]["PSDIST_STORE"] for pod in found if pod["role"] == "scheduler"} == {"etcd://etcd:2379/psdist"}
    statuses, logs = run_pods([etcd(tmp_path), *found], tmp_path)
    failover = statuses.pop("failover")
    print(failover)
    assert {failover["killed"], *failover["leads"]} == {f"{name}.psdist-scheduler" for name in roles[0]}, failover
    # The scheduler that was started again waits to lead, or has not come that far: SIGTERM ends it immediately.
    assert statuses.pop(failover["killed"]) in (0, -signal.SIGTERM), logs
    assert statuses.pop("etcd") == -signal.SIGTERM, logs
    assert set(statuses.values()) == {0}, logs
    for worker in roles[2]:
        log = (tmp_path / f"{worker}.psdist-workers.log").read_text()
        assert re.search(r"exact after \d+ steps", log), logs
        assert "rolls back" not in log, "nothing was lost with the scheduler"
