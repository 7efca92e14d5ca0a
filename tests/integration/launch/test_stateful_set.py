"""A rolling restart of all servers under load, with the processes, settings, signals and times of the StatefulSet.

The settings are those of the generated files; only addresses and paths are of this machine. Kubernetes deletes the pod
with the highest number, waits until it has ended, starts it again under its name, waits until it is ready, and goes to
the next one.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from psdist.addresses import free_port
from psdist.cli import k8s
from psdist.cli.health import probe

pytest.importorskip("yaml", reason="PyYAML reads the generated files")
from tests.support.kustomize import render
from tests.support.pods import token_key

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
_SERVERS = 3
_WAIT_SECONDS = 300
_COMMANDS = {
    "psdist-scheduler": (sys.executable, "-m", "psdist_scheduler"),
    "psdist-server": (sys.executable, "-m", "psdist_server"),
    "psdist-worker": (sys.executable, "-c", "from psdist.cli.main import worker; worker()"),
}
_TRAINS = """
import hashlib, pathlib
import numpy as np, psdist
end = pathlib.Path("end")
with psdist.init() as context:
    weights = context.client.parameters("m", {"w": np.arange(60_000, dtype=np.float32)}, psdist.optim.Adam(lr=0.1))
    values = weights.pull()
    while not (end.exists() and weights.step >= int(end.read_text())):
        rng = np.random.default_rng([weights.step, context.rank])
        values = weights.push_pull({"w": (values["w"] * rng.uniform(0, 1, 60_000)).astype(np.float32)})
        if context.rank == 0:
            pathlib.Path("step").write_text(str(weights.step))
    print(f"digest {weights.step} {hashlib.sha256(values['w'].tobytes()).hexdigest()}", flush=True)
"""


class Pods:
    """Processes of a run by their pods' names, with the settings of the generated files."""

    def __init__(self, path: Path, replicas: int) -> None:
        self.path = path
        flags = ("--out", str(path / "run"), "--nodes", "2", "--nservers", str(_SERVERS), "--replicas", str(replicas))
        line = k8s.command_line()
        assert k8s.run(line.parse([*flags, "train.py"], {}), {}) == 0
        objects = {each["kind"]: each for each in render(path / "run/base")}
        self.templates = {
            kind: objects[kind]["spec"]["template"]["spec"] for kind in ("Deployment", "StatefulSet", "Job")
        }
        self.ports = {number: free_port("127.0.0.1") for number in range(-1, _SERVERS)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, kind: str, number: int = -1) -> None:
        """Start a pod: a server or worker by its number, or the scheduler."""
        (container,) = self.templates[kind]["containers"]
        name = f"{kind}-{number}"
        given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        here = {
            "PSDIST_TOKEN_FILE": str(self.path / "run/base" / token_key(self.templates[kind])),
            "PSDIST_SCHEDULER": f"127.0.0.1:{self.ports[-1]}",
            "PSDIST_HOST": "127.0.0.1",
            "PSDIST_PORT": str(self.ports.get(number, 0)),
            "PSDIST_DATA_PORT": "0",
            "PSDIST_STORE": str(self.path / "scheduler.sqlite"),
            "PSDIST_STORAGE_PATH": str(self.path / "snapshots"),
        }
        fields = {
            "PSDIST_SERVER_ID": f"psdist-servers-{number}",
            "PSDIST_KERNEL_THREADS": "1",
            "PSDIST_NODE_RANK": str(number),
        }
        named = {each["name"] for each in container["env"]}
        variables = {key: value for key, value in (given | here | fields).items() if key in named}
        with (self.path / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*_COMMANDS[container["command"][0]], *container.get("args", ())],
                cwd=self.path, env={**os.environ, **variables}, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def restart_server(self, number: int) -> None:
        """Delete a pod of the StatefulSet, and wait until its successor is ready."""
        process = self._processes[f"StatefulSet-{number}"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(self.templates["StatefulSet"]["terminationGracePeriodSeconds"]) == 0, self.logs()
        self.start("StatefulSet", number)
        self.until_ready(number)

    def until_ready(self, number: int) -> None:
        """Wait until a server's readiness probe succeeds."""
        (container,) = self.templates["StatefulSet"]["containers"]
        service = container["readinessProbe"]["grpc"]["service"]
        self.until(lambda: probe(f"127.0.0.1:{self.ports[number]}", 3.0, service) == "SERVING")

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition that no process reports."""
        pause, deadline = threading.Event(), time.monotonic() + _WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            pause.wait(0.1)

    def step(self) -> int:
        """Return the step of rank 0, or 0 while the file is empty or missing."""
        file = self.path / "step"
        return int((file.read_text() if file.exists() else "") or 0)

    def wait(self, name: str) -> None:
        """Wait for the end of a pod, which must succeed."""
        assert self._processes[name].wait(_WAIT_SECONDS) == 0, self.logs()

    def logs(self) -> str:
        """Return the output of all pods."""
        return "\n".join(f"--- {file.name}\n{file.read_text()[-4000:]}" for file in sorted(self.path.glob("*.log")))

    def close(self) -> None:
        """End all processes, workers first."""
        for kind in ("Job", "StatefulSet", "Deployment"):
            for name, process in self._processes.items():
                if name.startswith(kind) and process.poll() is None:
                    process.send_signal(signal.SIGKILL if kind != "Job" else signal.SIGTERM)
                    process.wait(_WAIT_SECONDS)


@pytest.fixture(params=[2, 1], ids=["two copies", "one copy"])
def pods(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pods]:
    (tmp_path / "train.py").write_text(_TRAINS)
    found = Pods(tmp_path, request.param)
    yield found
    found.close()


def test_a_rolling_restart_of_all_servers_loses_nothing(pods: Pods) -> None:
    pods.start("Deployment")
    for number in range(_SERVERS):
        pods.start("StatefulSet", number)
    for number in range(2):
        pods.start("Job", number)
    pods.until(lambda: pods.step() > 20)
    for number in reversed(range(_SERVERS)):
        before = pods.step()
        pods.restart_server(number)
        pods.until(lambda before=before: pods.step() > before + 5)
    # Both workers are within a step of each other, and read this long before they get there.
    (pods.path / "end").write_text(str(pods.step() + 100))
    for number in range(2):
        pods.wait(f"Job-{number}")
    ends = {re.search(r"digest (\d+) (\w+)", (pods.path / f"Job-{number}.log").read_text()) for number in range(2)}
    (found,) = {(end[1], end[2]) for end in ends if end is not None}
    alone = subprocess.run(
        [sys.executable, "-m", "psdist.cli.main", "run", "--nproc-per-node", "2", "--storage-path", "none", "train.py"],
        cwd=pods.path, text=True, capture_output=True, check=True,
    )  # fmt: skip
    assert set(re.findall(r"digest (\d+) (\w+)", alone.stdout)) == {found}
    assert "rolled back" not in pods.logs() and "lost" not in (pods.path / "Deployment--1.log").read_text()
