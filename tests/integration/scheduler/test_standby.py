"""Two schedulers with a store in etcd: when the leader is killed, frozen or cut off from etcd, the standby leads, the
old one persists nothing more, and training continues, exact to the byte."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from psdist.addresses import free_port
from psdist.chaos.proxy import HELD, Fault, FaultProxy
from psdist.settings import exit_codes
from tests.support.etcd import Etcd, running

STEPS = 1500
TOKEN = "a-token-of-this-test-0123456789abcdef"
WORKER = """
import hashlib, sys, time
import numpy as np
import psdist
rank, steps = int(sys.argv[1]), int(sys.argv[2])
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
        time.sleep(0.004)
    print("digest", hashlib.sha256(values["w"].tobytes()).hexdigest(), longest, flush=True)
"""


class Cluster:
    """Two schedulers, two servers and two workers, all as processes."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self.places = [f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2)]
        self.schedulers: list[subprocess.Popen[str]] = []
        self._logs: dict[str, str] = {}
        self._printed = threading.Condition()

    def add_scheduler(self, store: str) -> None:
        """Start the next scheduler."""
        number = len(self.schedulers)
        port = self.places[number].rpartition(":")[2]
        self.schedulers.append(
            self._start(
                f"scheduler-{number}", "psdist_scheduler", "--port", port, "--store", store, "--standby",
                "--run-id", "run", "--min-workers", "2", "--min-servers", "2", "--storage-path", "none",
                "--failure-timeout", "2", "--replicas", "2",
            )
        )  # fmt: skip

    def _start(self, name: str, module: str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        ours = ("PSDIST_", "RANK", "WORLD_SIZE", "LOCAL_")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments] if module else [sys.executable, *arguments],
            env=kept | {"PSDIST_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"} | environ,
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

    def train(self) -> list[subprocess.Popen[str]]:
        """Start servers and workers. Returns the workers."""
        for number in range(2):
            self._start(f"server-{number}", "psdist_server", "--scheduler", ",".join(self.places))
        (self._directory / "worker.py").write_text(WORKER)
        return [
            self._start(
                f"worker-{rank}", "", str(self._directory / "worker.py"), str(rank), str(STEPS),
                PSDIST_SCHEDULER=",".join(self.places), WORLD_SIZE="2", RANK=str(rank),
            )
            for rank in range(2)
        ]  # fmt: skip

    def log(self, name: str) -> str:
        """Return the lines that a process has printed."""
        return self._logs.get(name, "")

    def until(self, name: str, text: str, seconds: float = 120.0) -> float:
        """Wait until a process has printed ``text``. Returns the time."""
        with self._printed:
            found = self._printed.wait_for(lambda: text in self.log(name), seconds)
            assert found, f"no {text!r} of {name}:\n{self.log(name)}"
        return time.monotonic()

    def status(self) -> dict[str, object]:
        """Return what psdist status says, asked at both places."""
        places = ",".join(self.places)
        done = subprocess.run(
            [sys.executable, "-m", "psdist.cli.main", "status", "--scheduler", places, "--format", "json"],
            env=os.environ | {"PSDIST_TOKEN": TOKEN}, capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        found: dict[str, object] = json.loads(done.stdout)
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
def cluster(directory: Path, store: str, leader_store: str = "") -> Iterator[Cluster]:
    """Run two schedulers. The first one leads."""
    directory.mkdir()
    with ExitStack() as stack:
        made = Cluster(directory, stack)
        made.add_scheduler(leader_store or store)
        made.until("scheduler-0", "listening")
        made.add_scheduler(store)
        made.until("scheduler-1", "leads it")
        yield made


def results(made: Cluster, workers: list[subprocess.Popen[str]]) -> tuple[str, float]:
    """Return the digest of the weights, and the longest pause of a step in seconds."""
    for worker in workers:
        assert worker.wait(240) == 0, made.log("worker-0") + made.log("worker-1")
    lines = [made.log(f"worker-{rank}").split("digest ")[1].split() for rank in range(2)]
    assert lines[0][0] == lines[1][0]
    return lines[0][0], max(float(line[1]) for line in lines)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture(scope="module")
def undisturbed(etcd: Etcd, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run without faults."""
    with cluster(tmp_path_factory.mktemp("run") / "run", etcd.url("undisturbed")) as made:
        return results(made, made.train())[0]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["kill", "freeze", "end"])
def test_the_standby_takes_over(etcd: Etcd, undisturbed: str, tmp_path: Path, fault: str) -> None:
    with cluster(tmp_path / "run", etcd.url(fault)) as made:
        workers = made.train()
        made.until("worker-0", "trains")
        struck = time.monotonic()
        made.schedulers[0].send_signal({"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "end": signal.SIGTERM}[fault])
        led = made.until("scheduler-1", "listening") - struck
        digest, longest = results(made, workers)
        print(f"{fault}: the standby led after {led:.2f} s, longest step {longest:.2f} s")
        assert digest == undisturbed
        if fault == "freeze":
            made.schedulers[0].send_signal(signal.SIGCONT)
            assert made.schedulers[0].wait(60) == exit_codes.UNAVAILABLE
            assert "does not lead the run any more" in made.log("scheduler-0")
        assert made.status()["run_id"] == "run"


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_leader_that_etcd_does_not_hear_stops(etcd: Etcd, undisturbed: str, tmp_path: Path) -> None:
    host, port = etcd.endpoints[0].split(":")
    proxy = FaultProxy((host, int(port)), random.Random(0))
    place = await proxy.start()
    try:
        with ExitStack() as stack:
            manager = cluster(tmp_path / "run", etcd.url("cut"), f"etcd://{place}/cut")
            made = await asyncio.to_thread(stack.enter_context, manager)
            workers = made.train()
            await asyncio.to_thread(made.until, "worker-0", "trains")
            struck, proxy.fault = time.monotonic(), HELD
            led = await asyncio.to_thread(made.until, "scheduler-1", "listening") - struck
            status = await asyncio.to_thread(made.schedulers[0].wait, 60)
            proxy.fault = Fault()
            digest, longest = await asyncio.to_thread(results, made, workers)
            print(f"cut: the standby led after {led:.2f} s, longest step {longest:.2f} s")
            assert digest == undisturbed
            assert status == exit_codes.UNAVAILABLE
    finally:
        await proxy.close()
