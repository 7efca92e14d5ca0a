"""Runs with two schedulers and a store in etcd, as processes, for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from psdist.addresses import free_port

_TOKEN = "a-token-of-this-test-0123456789abcdef"
_WORKER = """
import hashlib, sys, time
import numpy as np
import psdist
rank, steps, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
with psdist.init(rank=rank) as context:
    init = {"w": np.zeros(3000, np.float32)}
    weights = context.client.parameters("m", init=init, optimizer=psdist.optim.Adam(lr=0.01))
    rng, longest, last = np.random.default_rng(rank), 0.0, time.monotonic()
    while weights.step < steps:
        values = weights.push_pull({"w": rng.standard_normal(3000, np.float32)})
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        if weights.step == 20:
            print("trains", flush=True)
        time.sleep(pause)
    print("digest", hashlib.sha256(values["w"].tobytes()).hexdigest(), longest, flush=True)
"""


class Cluster:
    """Two schedulers, some servers and two workers, all as processes.

    source: directory with the sources of another release, which processes started from now on run.
    """

    def __init__(self, directory: Path, stack: ExitStack, source: Path | None = None) -> None:
        self.source = source
        self._directory = directory
        self._stack = stack
        self.places = [f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2)]
        self.schedulers: dict[int, subprocess.Popen[str]] = {}
        self.servers: dict[int, subprocess.Popen[str]] = {}
        self._logs: dict[str, str] = {}
        self._printed = threading.Condition()

    def start_scheduler(self, number: int, store: str) -> None:
        """Start a scheduler, or start it again."""
        port = self.places[number].rpartition(":")[2]
        self.schedulers[number] = self._start(
            f"scheduler-{number}", "psdist_scheduler", "--port", port, "--store", store, "--standby",
            "--run-id", "run", "--min-workers", "2", "--min-servers", "2", "--storage-path", "none",
            "--failure-timeout", "2", "--replicas", "2",
        )  # fmt: skip

    def start_server(self, number: int) -> None:
        """Start a server, or start it again."""
        name = f"server-{number}"
        self.servers[number] = self._start(
            name, "psdist_server", "--scheduler", ",".join(self.places), "--server-id", name
        )

    def _start(self, name: str, module: str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        ours = ("PSDIST_", "RANK", "WORLD_SIZE", "LOCAL_")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        if self.source is not None:
            kept["PYTHONPATH"] = f"{self.source}{os.pathsep}{self.source / 'servers'}"
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments] if module else [sys.executable, *arguments],
            env=kept | {"PSDIST_TOKEN": _TOKEN, "OMP_NUM_THREADS": "1"} | environ,
            cwd=self._directory,  # Python imports from the working directory first, and this one has no psdist.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        reader = threading.Thread(target=self._read, args=(name, process))
        reader.start()
        self._stack.callback(_end, process, reader)
        return process

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._printed:
                self._logs[name] = self.log(name) + line
                self._printed.notify_all()

    def train(self, steps: int, pause: float = 0.004, servers: int = 2) -> list[subprocess.Popen[str]]:
        """Start servers, and workers that wait ``pause`` seconds after each step. Returns the workers."""
        for number in range(servers):
            self.start_server(number)
        (self._directory / "worker.py").write_text(_WORKER)
        return [
            self._start(
                f"worker-{rank}", "", str(self._directory / "worker.py"), str(rank), str(steps), str(pause),
                PSDIST_SCHEDULER=",".join(self.places), WORLD_SIZE="2", RANK=str(rank),
            )
            for rank in range(2)
        ]  # fmt: skip

    def log(self, name: str) -> str:
        """Return the lines that a process has printed."""
        return self._logs.get(name, "")

    def until(self, name: str, text: str, count: int = 1, seconds: float = 120.0) -> float:
        """Wait until a process, with those of its name before it, has printed ``text`` ``count`` times. Returns the
        time."""
        with self._printed:
            found = self._printed.wait_for(lambda: self.log(name).count(text) >= count, seconds)
            assert found, f"no {text!r} of {name}:\n{self.log(name)}"
        return time.monotonic()

    def status(self) -> dict[str, Any]:
        """Return what psdist status says, asked at both places."""
        places = ",".join(self.places)
        done = subprocess.run(
            [sys.executable, "-m", "psdist.cli.main", "status", "--scheduler", places, "--format", "json"],
            env=os.environ | {"PSDIST_TOKEN": _TOKEN}, capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def _end(process: subprocess.Popen[str], reader: threading.Thread) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
    process.wait(60)
    reader.join(60)
    assert process.stdout is not None
    process.stdout.close()


@contextmanager
def cluster(directory: Path, store: str, leader_store: str = "", source: Path | None = None) -> Iterator[Cluster]:
    """Run two schedulers. The first one leads. source: see ``Cluster``."""
    directory.mkdir()
    with ExitStack() as stack:
        made = Cluster(directory, stack, source)
        made.start_scheduler(0, leader_store or store)
        made.until("scheduler-0", "listening")
        made.start_scheduler(1, store)
        made.until("scheduler-1", "leads it")
        yield made


def results(made: Cluster, workers: list[subprocess.Popen[str]]) -> tuple[str, float]:
    """Return the digest of the weights, and the longest pause of a step in seconds."""
    for worker in workers:
        assert worker.wait(1200) == 0, made.log("worker-0") + made.log("worker-1")
    lines = [made.log(f"worker-{rank}").split("digest ")[1].split() for rank in range(2)]
    assert lines[0][0] == lines[1][0]
    return lines[0][0], max(float(line[1]) for line in lines)
