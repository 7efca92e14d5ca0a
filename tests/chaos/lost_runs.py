"""A run whose programs are started one by one, as on several machines, and the faults that end it: for
``test_lost_runs``.

    python -m tests.chaos.lost_runs CASE ROUNDS

For each round of the case this prints whether the run continued. If it did not, it prints when its last process ended,
and the exit status of each process. Workers run by ``psdist-worker``, so that their launchers are watched too.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psdist
from psdist.addresses import free_port

SCRIPT: Final = """
import threading
import numpy as np
import psdist
with psdist.init() as context:
    p = context.client.parameters("p", {"w": np.zeros(4096, np.float32)}, psdist.optim.SGD(lr=1.0))
    pace = threading.Event()
    if context.rank == 0:
        print("starts at step", p.step, flush=True)
    while True:
        try:
            p.push_pull({"w": np.full(4096, -1, np.float32)})
        except psdist.errors.ServerLostError as error:
            raise RuntimeError("training failed") from error  # As scripts do.
        if context.rank == 0:
            print("step", p.step, flush=True)
        pace.wait(0.02)
"""
#: Everything that should end has ended by then, or hangs.
HANGS_SECONDS: Final = 60.0
_COMMANDS: Final = {
    "psdist_scheduler": (sys.executable, "-m", "psdist_scheduler"),
    "psdist_server": (sys.executable, "-m", "psdist_server"),
    "psdist_worker": (sys.executable, "-c", "import sys; from psdist.cli.main import worker; sys.exit(worker())"),
}
_START: Final = re.compile(r"starts at step (\d+)$", re.MULTILINE)
_STEP: Final = re.compile(r"step (\d+)$")


@dataclass(frozen=True)
class Outcome:
    """Result of a round.

    seconds: from the fault until the last process had ended, or training continued.
    statuses: exit statuses by process; empty if the run continued.
    text: everything that was printed.
    """

    seconds: float
    statuses: Mapping[str, int]
    text: str

    def __str__(self) -> str:
        ends = ", ".join(f"{name} {status}" for name, status in sorted(self.statuses.items()))
        return f"{self.seconds:.1f} s: {ends or 'continued'}"


class Programs:
    """Scheduler, servers and one ``psdist-worker`` with two workers. Only this class restarts servers and scheduler."""

    def __init__(self, path: Path, servers: int = 2, *flags: str) -> None:
        self.path = path
        self.port = free_port("127.0.0.1")
        self.address = f"127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._servers = servers
        self._flags = flags
        (path / "train.py").write_text(SCRIPT)

    def start(self, *flags: str) -> None:
        """Start everything, and return when training is under way."""
        self.start_scheduler(*flags)
        for number in range(self._servers):
            self.start_server(number)
        self._spawn("workers", "psdist_worker", "--scheduler", self.address, "--nproc-per-node", "2", "train.py")
        self.wait_for_step(5)

    def start_scheduler(self, *flags: str) -> None:
        """Start the scheduler, at its previous address."""
        self._spawn(
            "scheduler", "psdist_scheduler", "--port", str(self.port), "--run-id", "lost", "--min-workers", "2",
            "--min-servers", str(self._servers), *self._flags, *flags,
        )  # fmt: skip

    def start_server(self, number: int) -> None:
        """Start a server."""
        self._spawn(f"server-{number}", "psdist_server", "--scheduler", self.address, "--server-id", f"server-{number}")

    def _spawn(self, name: str, module: str, *arguments: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PSDIST_")}
        environment |= {"XDG_STATE_HOME": str(self.path / "state"), "XDG_RUNTIME_DIR": str(self.path)}
        with (self.path / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*_COMMANDS[module], *arguments], env=environment, cwd=self.path, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log,
            )  # fmt: skip

    @property
    def first_steps(self) -> list[int]:
        """Return the steps at which rank 0 started, one for each of its starts."""
        return [int(step) for step in _START.findall((self.path / "workers.log").read_text())]

    def has_resumed(self, starts: int) -> bool:
        """Restart servers that have ended. Returns True if rank 0 was started more than ``starts`` times, has resumed
        from a snapshot, and trains."""
        for number in range(self._servers):
            if self.processes[f"server-{number}"].poll() is not None:
                self.start_server(number)
        first = self.first_steps[starts:]
        if 0 in first:
            raise AssertionError(f"the run began at step 0 again\n{self.text}")
        return bool(first) and f"step {first[-1] + 5}\n" in self.text.rpartition("starts at step ")[2]

    def kill(self, name: str) -> None:
        """Send SIGKILL."""
        self.processes[name].kill()
        self.processes[name].wait()

    @property
    def text(self) -> str:
        """Return everything that was printed."""
        return "\n".join(f"--- {log.name}\n{log.read_text('utf-8', 'replace')}" for log in self.path.glob("*.log"))

    @property
    def step(self) -> int:
        """Return the last step that rank 0 printed."""
        found = [_STEP.search(line) for line in (self.path / "workers.log").read_text().splitlines()]
        return max((int(match[1]) for match in found if match), default=0)

    def wait_for_step(self, step: int) -> None:
        """Wait until that step was made."""
        self._until(lambda: self.step >= step)

    def outcome(self, continues: Callable[[], bool]) -> Outcome:
        """Wait until every process has ended or ``continues`` is true."""
        begun = time.monotonic()
        went_on = self._until(lambda: all(p.poll() is not None for p in self.processes.values()) or continues())
        seconds = time.monotonic() - begun
        ended = {name: status for name, process in self.processes.items() if (status := process.poll()) is not None}
        if not went_on:
            ended |= dict.fromkeys(self.processes.keys() - ended.keys(), -1)
        elif len(ended) < len(self.processes):
            ended = {}
        return Outcome(seconds, ended, self.text)

    def status(self) -> str:
        """Return the output of ``psdist status``."""
        command = [sys.executable, "-m", "psdist.cli.main", "status", "--scheduler", self.address]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        return done.stdout + done.stderr

    def stop(self) -> None:
        """End all processes that still run."""
        workers = self.processes.get("workers")
        if workers is not None and workers.poll() is None:
            workers.send_signal(signal.SIGTERM)
            workers.send_signal(signal.SIGTERM)
        for name, process in self.processes.items():
            if name != "workers" and process.poll() is None:
                process.kill()
                process.wait()
        if workers is not None:
            workers.wait()

    @staticmethod
    def _until(condition: Callable[[], bool]) -> bool:
        pause = threading.Event()
        until = time.monotonic() + HANGS_SECONDS
        while not condition():
            if time.monotonic() > until:
                return False
            pause.wait(0.1)
        return True


def restart_scheduler(path: Path, *, store: str, storage: bool = False, servers: int = 2) -> Outcome:
    """Kill the scheduler of a run that trains, and restart it.

    store: "kept", "lost" (deleted), "memory" (none), or "older" (an older copy).
    """
    flags = ("--storage-path", str(path / "snapshots"), "--save-interval", "20") if storage else ()
    programs = Programs(path, servers, *flags)
    kept = ("--store", "memory" if store == "memory" else str(path / "store.sqlite"))
    try:
        programs.start(*kept)
        if storage:
            programs._until(lambda: any(path.glob("snapshots/commits/*")))
        if store == "older":
            _age_store(programs, path, kept)
        programs.kill("scheduler")
        if store == "lost":
            for file in path.glob("store.sqlite*"):
                file.unlink()
        elif store == "older":
            _put_back(path)
        before, starts = programs.step, len(programs.first_steps)
        programs.start_scheduler(*kept)
        if storage and store == "lost":  # Launchers restart ended workers.
            return programs.outcome(lambda: programs.has_resumed(starts))
        return programs.outcome(lambda: store == "kept" and programs.step > before + 20)
    finally:
        programs.stop()


def _age_store(programs: Programs, path: Path, flags: tuple[str, ...]) -> None:
    """Copy the store, and let the run go through epochs that the copy does not have."""
    programs.kill("scheduler")
    for file in path.glob("store.sqlite*"):
        shutil.copy(file, path / f"older-{file.name}")
    before = programs.step
    programs.start_scheduler(*flags)
    programs._until(lambda: "back" in programs.text)
    programs.wait_for_step(before + 20)


def _put_back(path: Path) -> None:
    for file in path.glob("store.sqlite*"):
        file.unlink()
    for file in path.glob("older-*"):
        file.rename(path / file.name.removeprefix("older-"))


def lose_server(path: Path) -> Outcome:
    """Kill a server of a run with one copy that saves nothing, and start another in its place."""
    programs = Programs(path, 2, "--storage-path", "none")
    try:
        programs.start("--store", "memory")
        programs.kill("server-0")
        programs.start_server(0)
        return programs.outcome(lambda: False)
    finally:
        programs.stop()


def damage_snapshots(path: Path, *, how: str, servers: int = 2) -> Outcome:
    """Damage every snapshot of a run with one copy, then kill and restart a server.

    how: "flip" (a bit of each shard file), "manifests", "records", "empty" (no file is left), or "gone" (nor the
    directory).
    """
    programs = Programs(path, servers, "--storage-path", str(path / "snapshots"), "--save-interval", "5")
    try:
        programs.start("--store", str(path / "store.sqlite"))
        programs._until(lambda: len([*path.glob("snapshots/commits/*")]) >= 2)
        programs.kill("server-0")
        _damage(path / "snapshots", how)
        before = programs.step
        programs.start_server(0)
        return programs.outcome(lambda: how == "records" and programs.step > before + 20)
    finally:
        programs.stop()


def _damage(storage: Path, how: str) -> None:
    if how == "gone":
        storage.rename(storage.with_name("elsewhere"))
        return
    for file in [file for file in storage.rglob("*") if file.is_file()]:
        is_shard, is_record = file.suffix == ".safetensors", file.parent.name == "commits"
        if how == "empty":
            file.unlink()
        elif how == ("flip" if is_shard else "records" if is_record else "manifests"):
            data = bytearray(file.read_bytes())
            data[random.randrange(len(data) // 2, len(data))] ^= 1
            file.write_bytes(data)


CASES: Final[Mapping[str, Callable[[Path], Outcome]]] = {
    **{f"store {store}": lambda path, store=store: restart_scheduler(path, store=store)  # type: ignore[misc]
       for store in ("kept", "lost", "memory", "older")},
    "store lost, snapshots": lambda path: restart_scheduler(path, store="lost", storage=True),
    **{f"snapshots {how}": lambda path, how=how: damage_snapshots(path, how=how)  # type: ignore[misc]
       for how in ("flip", "manifests", "records", "empty", "gone")},
    "nothing saved": lose_server,
}  # fmt: skip


def main() -> None:
    """Run the command; see the module."""
    case, rounds = sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 1
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="psdist-lost-") as path:
            outcome = CASES[case](Path(path))
            print(f"{case}: {outcome}", flush=True)
            if os.environ.get("SHOW"):
                print(outcome.text)


if __name__ == "__main__":
    assert psdist.__version__
    main()
