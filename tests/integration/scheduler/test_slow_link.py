"""A link that becomes slow: the dashboard and ``psdist explain`` name the worker, over each transport."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shaped_hosts import ShapedHosts, hosts_missing
from psdist.monitoring.dashboard import view_key

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(hosts_missing()), reason=hosts_missing() or "hosts exist")]

TOKEN = "a-token"
WORKERS = 3
SCRIPT = """
import os, time, numpy as np, psdist
count = int(os.environ["ELEMENTS"])
with psdist.init() as context:
    model = context.client.parameters("model", {"w": np.zeros(count, np.float32)}, psdist.optim.SGD(0.1))
    gradient = {"w": np.ones(count, np.float32)}
    while True:
        time.sleep(0.05)
        model.push_pull(gradient)
"""
FAST = 10e9
#: Transport, elements, and the speed of the slow link. Buffers of a connection hold less than 4 MB in each direction,
#: but all of 256 KiB.
CASES = [("tcp", 1 << 20, 100e6), ("grpc", 1 << 20, 100e6), ("grpc", 1 << 16, 8e6)]
#: The dashboard takes 2 s on an idle machine.
NAMED_SECONDS = 30.0


@pytest.fixture
def hosts() -> Iterator[ShapedHosts]:
    with ShapedHosts(WORKERS, FAST) as made:
        yield made


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch, transport: str, elements: int) -> None:
    for name, value in {
        "PSDIST_TOKEN": TOKEN,
        "PSDIST_INSECURE": "1",
        "PSDIST_TRANSPORT": transport,
        "OMP_NUM_THREADS": "1",
        "ELEMENTS": str(elements),
    }.items():
        monkeypatch.setenv(name, value)


def start(stack: ExitStack, log: Path, *command: str) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )

    def end() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    stack.callback(end)
    return process


def start_run(stack: ExitStack, hosts: ShapedHosts, path: Path) -> subprocess.Popen[bytes]:
    """Start the scheduler with its dashboard, which is returned, a server beside it, and a worker on each host."""
    found = ("--scheduler-file", str(path / "scheduler"))
    (path / "train.py").write_text(SCRIPT)
    services = ("--host", hosts.gateway, "--insecure")
    flags = ("--run-id", "shaped", "--min-workers", str(WORKERS), "--dashboard-port", "0", "--log-format", "console")
    scheduler = ("psdist_scheduler", *services, *flags, "--address-file", str(path / "scheduler"))
    process = start(stack, path / "log", sys.executable, "-m", *scheduler)
    start(stack, path / "log", sys.executable, "-m", "psdist_server", *services, *found)
    for host in range(WORKERS):
        start(stack, path / "log", *hosts.inside(host), sys.executable, "-c",
              "from psdist.cli.main import worker; worker()", *found, "--nproc-per-node", "1", "--max-restarts", "0",
              "--nnodes", str(WORKERS), "--node-rank", str(host), str(path / "train.py"))  # fmt: skip
    return process


def dashboard(scheduler: subprocess.Popen[bytes], log: Path) -> str:
    """Return the dashboard's address once the scheduler has logged it."""
    until = time.monotonic() + 200
    while time.monotonic() < until:
        text = log.read_text() if log.exists() else ""
        if "dashboard: http://" in text:
            return text.split("dashboard: http://")[1].split("/")[0]
        with suppress(subprocess.TimeoutExpired):
            scheduler.wait(0.1)
            break
    raise AssertionError(log.read_text())


def states(address: str) -> Iterator[dict[str, Any]]:
    """Yield each value of the state's problems and workers that the page is sent."""
    with closing(http.client.HTTPConnection(address, timeout=240)) as connection:
        key = view_key(TOKEN, "shaped")
        connection.request("GET", "/events", headers={"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        with closing(answer):
            state: dict[str, Any] = {}
            for line in answer:
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    state = event.get("state") or merged(state, event.get("change", {}))
                    yield state


def merged(tree: Any, change: Any) -> Any:
    """Return ``tree`` with a JSON merge patch applied."""
    if not isinstance(change, dict):
        return change
    found = dict(tree) if isinstance(tree, dict) else {}
    for key, value in change.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


def trains(state: dict[str, Any]) -> bool:
    workers = state.get("workers", {}).values()
    return len(workers) == WORKERS and all(one.get("rate", 0) > 0 for one in workers) and not state.get("problems")


def explained(path: Path) -> dict[str, Any]:
    """Return the JSON form of ``psdist explain``."""
    command = ("explain", "--format", "json", "--seconds", "4", "--timeout", "60")
    done = subprocess.run(
        [sys.executable, "-m", "psdist.cli.main", *command],
        env=os.environ | {"PSDIST_SCHEDULER_FILE": str(path / "scheduler")},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.usefixtures("environ")
@pytest.mark.parametrize(("transport", "elements", "slow"), CASES)
def test_a_link_that_becomes_slow_is_named(hosts: ShapedHosts, tmp_path: Path, slow: float) -> None:
    with ExitStack() as stack:
        scheduler = start_run(stack, hosts, tmp_path)
        seen = states(dashboard(scheduler, tmp_path / "log"))
        quiet, until = 0, time.monotonic() + 200
        for state in seen:
            assert time.monotonic() < until, state
            quiet = quiet + 1 if trains(state) else 0
            if quiet == 6:  # Also with the rates of some seconds.
                break
        hosts.shape(1, slow)
        began = time.monotonic()
        for state in seen:
            if found := [one for one in state["problems"] if one["kind"] in ("link", "straggler")]:
                break
            assert time.monotonic() - began < NAMED_SECONDS, state
        while (explanation := explained(tmp_path))["culprit"] != "worker-1":  # Its window still has fast steps.
            assert time.monotonic() - began < NAMED_SECONDS, explanation
    named = next(one for one in found if one["kind"] == "link")
    assert "has a slow link" in named["text"]
    assert named["who"] == "worker-1", found
    assert explanation["bottleneck"] == "straggler", explanation
    assert "worker-1 has a slow link" in explanation["sentences"][1], explanation
