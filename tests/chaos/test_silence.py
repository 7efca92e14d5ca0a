"""Silence that is not death: a scheduler whose link is down, and servers that are stopped for several leases. Training
continues, no member is expelled, no process ends, and the weights equal those of the undisturbed run, byte for byte.

The scheduler runs in a network namespace of its own, which needs root. ``FAULT_ROUNDS`` in the environment is the
number of repetitions of each case; the longest pause of training is printed.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROUNDS = int(os.environ.get("FAULT_ROUNDS", "1"))
SCRIPT = Path(__file__).with_name("paced.py")
WORKERS, SERVERS = 2, 3
#: Seconds between steps: each costs processor time of five processes.
PACE = 0.1
#: Of ``paced.py``.
ELEMENTS = 50_000
#: Length of a run before a fault, and after it.
BEFORE_SECONDS, AFTER_SECONDS = 2.0, 8.0
END_SECONDS = 300.0
#: Names of this process alone: several may run side by side.
MINE = os.getpid()
NAMESPACE, LINK, PEER = f"b-scheduler-{MINE}", f"b{MINE}h", f"b{MINE}s"
HERE, THERE = (f"10.{213 + MINE // 256 % 32}.{MINE % 256}.{last}" for last in (1, 2))

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("iptables"),
    reason="network namespaces need root, ip and iptables",
)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def inside(*command: str) -> None:
    ip("netns", "exec", NAMESPACE, *command)


@pytest.fixture
def namespace() -> Iterator[None]:
    """A namespace with one link to this one."""
    ip("netns", "add", NAMESPACE)
    try:
        ip("link", "add", LINK, "type", "veth", "peer", "name", PEER)
        ip("link", "set", PEER, "netns", NAMESPACE)
        ip("addr", "add", f"{HERE}/24", "dev", LINK)
        ip("link", "set", LINK, "up")
        for command in (f"addr add {THERE}/24 dev {PEER}", f"link set {PEER} up", "link set lo up"):
            ip("-n", NAMESPACE, *command.split())
        yield
    finally:
        subprocess.run(["ip", "link", "del", LINK], check=False, capture_output=True)
        ip("netns", "del", NAMESPACE)


class Run:
    """One run: a scheduler in the namespace, servers and workers here."""

    def __init__(self, path: Path, stack: ExitStack, mode: str, steps: int, copies: int = 2) -> None:
        self.path, self._stack = path, stack
        path.mkdir()
        self.environment = os.environ | {"PSDIST_SCHEDULER": f"{THERE}:7777", "PSDIST_WORLD_SIZE": str(WORKERS)}
        for name in ("PSDIST_FAILURE_TIMEOUT", "PSDIST_WORKER_TIMEOUT"):  # The tests rely on the defaults.
            self.environment.pop(name, None)
        self.environment |= {"PSDIST_TOKEN": secrets.token_hex(16), "PSDIST_INSECURE": "1"}
        scheduler = ["ip", "netns", "exec", NAMESPACE, sys.executable, "-m", "psdist_scheduler"]
        scheduler += ["--host", THERE, "--port", "7777", "--insecure", "--replicas", str(copies)]
        scheduler += ["--min-workers", str(WORKERS), "--min-servers", str(SERVERS)]
        self.scheduler = self._start("scheduler", *scheduler)
        server = (sys.executable, "-m", "psdist_server", "--host", HERE, "--insecure")
        self.servers = [self._start(f"server-{number}", *server) for number in range(SERVERS)]
        self.workers = [
            self._start(
                f"worker-{rank}", sys.executable, str(SCRIPT), str(rank), str(WORKERS), str(steps), str(PACE), mode
            )
            for rank in range(WORKERS)
        ]

    def _start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.path / f"{name}.out").open("wb") as out, (self.path / f"{name}.err").open("wb") as err:
            process = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=self.path
            )
        self._stack.callback(self._stop, process)
        return process

    @staticmethod
    def _stop(process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()

    def wait_until_training(self) -> None:
        """Wait until the workers push, and copies are complete."""
        until = time.monotonic() + END_SECONDS
        while "every shard of" not in self.log("scheduler"):
            assert time.monotonic() < until, self.log("scheduler")
            self.check_alive()
            self.go_on(0.05)

    def go_on(self, seconds: float) -> None:
        """Wait for this time. No process may end meanwhile."""
        with suppress(subprocess.TimeoutExpired):
            self.scheduler.wait(seconds)
        self.check_alive()

    def check_alive(self) -> None:
        """Check that scheduler and servers live; workers may have ended."""
        for process in (self.scheduler, *self.servers):
            assert process.poll() is None, f"a process ended with {process.returncode}: {self.logs}"

    def results(self) -> list[dict[str, Any]]:
        """Return the workers' last output."""
        for worker in self.workers:
            assert worker.wait(END_SECONDS) == 0, self.logs
        self.check_alive()
        log = self.log("scheduler")
        assert "is lost" not in log and "rolls back to snapshot" not in log, log
        return [json.loads((self.path / f"worker-{rank}.out").read_text()) for rank in range(WORKERS)]

    def log(self, name: str) -> str:
        return (self.path / f"{name}.err").read_text() + (self.path / f"{name}.out").read_text()

    @property
    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}"
            for path in sorted(self.path.iterdir())
            if path.suffix in (".err", ".out")
        )


def steps_for(seconds: float) -> int:
    """Return the steps of a run that lasts until after the fault."""
    return round((BEFORE_SECONDS + seconds + AFTER_SECONDS) / PACE / 1.3)


def disturb(fault: str, seconds: float, run: Run) -> None:
    """Inject a fault, and remove it after this time."""
    if fault == "link":
        ip("link", "set", LINK, "down")
        run.go_on(seconds)
        ip("link", "set", LINK, "up")
    elif fault == "drop":
        for action in ("-A", "-D"):
            for chain in ("INPUT", "OUTPUT"):
                inside("iptables", action, chain, "-j", "DROP")
            run.go_on(seconds if action == "-A" else 0.0)
    elif fault.startswith("stop"):
        stopped = run.servers[: int(fault[4:])]
        for server in stopped:
            server.send_signal(signal.SIGSTOP)
        run.go_on(seconds)
        for server in stopped:
            server.send_signal(signal.SIGCONT)


def undisturbed(steps: int, mode: str) -> str:
    """Return the digest of the weights of an undisturbed run. Its gradients are those of ``paced.py``: whole numbers,
    so every order gives these bytes."""
    total = np.zeros(ELEMENTS, np.float32)
    for step in range(steps):
        total += WORKERS * 2 * (1 + step % 3)
        total[step % ELEMENTS] += sum(2 * rank for rank in range(WORKERS))
    weights = -total / (WORKERS if mode == "bsp" else 1)
    return hashlib.sha256(weights.astype(np.float32).tobytes()).hexdigest()


def play(path: Path, fault: str, seconds: float, mode: str) -> tuple[list[dict[str, Any]], Run]:
    with ExitStack() as stack:
        run = Run(path, stack, mode, steps_for(seconds))
        run.wait_until_training()
        run.go_on(BEFORE_SECONDS)
        disturb(fault, seconds, run)
        assert all(worker.poll() is None for worker in run.workers), f"the fault came too late: {run.logs}"
        return run.results(), run


LONG = [("stop3", 6.0), ("link", 8.0), ("link", 60.0), ("drop", 3.0), ("drop", 8.0), ("drop", 60.0), ("stop2", 5.0)]
CASES = [
    ("link", 3.0, "bsp"),  # test_rejoin freezes a worker.
    *[pytest.param(*case, "bsp", marks=pytest.mark.long) for case in LONG],
    *[pytest.param(*case, "asp", marks=pytest.mark.long) for case in (("link", 3.0), *LONG)],
]


@needs_root
@pytest.mark.timeout(120 + 240 * ROUNDS)
@pytest.mark.usefixtures("namespace")
@pytest.mark.parametrize(("fault", "seconds", "mode"), CASES)
def test_a_run_continues_with_the_same_bytes(tmp_path: Path, fault: str, seconds: float, mode: str) -> None:
    expected = undisturbed(steps_for(seconds), mode)
    pauses: list[float] = []
    for number in range(ROUNDS):
        results, run = play(tmp_path / f"round-{number}", fault, seconds, mode)
        assert {result["digest"] for result in results} == {expected}, run.logs
        pauses.append(max(result["pause"] for result in results))
    print(f"{fault} {seconds:g} s, {mode}: longest pauses {sorted(round(pause, 3) for pause in pauses)}")
    limit = seconds + 3.0 if fault.startswith("stop") else 2.5
    assert max(pauses) < limit, "training stood still"
