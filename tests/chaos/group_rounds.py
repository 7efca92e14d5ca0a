"""Rounds of faults on the workers of one group, each in a network namespace: kills, stops, and cut networks.

``python tests/chaos/group_rounds.py FAULT ROUNDS`` prints the times after which the survivors have their next sum.
``python tests/chaos/group_rounds.py`` alone is a worker: it adds up arrays, reconfigures its group after each error,
and joins it again if the others continued without it. It prints a line for each group, once it has a sum.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

import psdist
from psdist.errors import (
    ClosedError,
    ExcludedError,
    FencedError,
    PeerUnreachableError,
    WaitTimeoutError,
    WorkerLostError,
)
from tests.support.chaos import faults
from tests.support.chaos.faults import WorkerNetwork

WORKERS = 3
#: Time limit for the start of processes, and for joins.
_SECONDS = 600.0


def work() -> None:
    """Add up arrays, forever."""
    context = psdist.init()
    group, calls, reported = context.join_group("rounds", size=WORKERS), 0, -1
    given = np.full(20_000, 1 + context.rank, np.float32)
    while True:
        try:
            total = group.all_reduce(given)
            assert (total == sum(1 + rank for rank in group.ranks)).all(), "a wrong sum"
            calls += 1
            if group.epoch != reported or not calls % 100:
                reported = group.epoch
                line = {"at": time.monotonic(), "epoch": group.epoch, "ranks": group.ranks, "calls": calls}
                print(json.dumps(line), flush=True)
            waiting = group.count_newcomers() if group.rank == 0 else 0
            if group.all_reduce(waiting, "max"):
                group = group.reconfigure(admit=True)
        except (ExcludedError, FencedError):
            group = context.join_group("rounds", size=WORKERS)
        except (WorkerLostError, WaitTimeoutError, ClosedError, PeerUnreachableError):
            with suppress(ExcludedError, FencedError):
                group = group.reconfigure()
                continue
            group = context.join_group("rounds", size=WORKERS)


class Worker:
    """Process of one worker, and its last line."""

    def __init__(self, rounds: Rounds, rank: int) -> None:
        environment = rounds.environment | {"RANK": str(rank), "WORLD_SIZE": str(WORKERS)}
        self.rank = rank
        self.process = subprocess.Popen(
            [*rounds.network.inside(rank), sys.executable, __file__],
            env=environment, stdout=subprocess.PIPE, text=True, cwd=rounds.path,
        )  # fmt: skip
        self.last: dict[str, Any] = {"at": 0.0, "epoch": 0, "ranks": [], "calls": 0}
        #: First time of a sum in each epoch.
        self.begun: dict[int, float] = {}
        self._changed = rounds.changed
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            with self._changed:
                self.last = json.loads(text)
                self.begun.setdefault(self.last["epoch"], self.last["at"])
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


class Rounds:
    """The scheduler and the workers, as processes in namespaces."""

    def __init__(self, stack: ExitStack) -> None:
        self.network = WorkerNetwork(WORKERS)
        stack.callback(self.network.close)
        self.path = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.changed = threading.Condition()
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PSDIST_")}
        address = self.path / "address"
        self.environment |= {
            "PSDIST_TOKEN": "secret",
            "PSDIST_INSECURE": "1",
            "XDG_RUNTIME_DIR": str(self.path),
            "OMP_NUM_THREADS": "1",
        }
        self._processes: list[subprocess.Popen[Any]] = []
        stack.callback(self._end)
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "psdist_scheduler", "--host", self.network.gateway, "--insecure",
                 "--address-file", str(address), "--worker-timeout", "20"],
                env=self.environment, cwd=self.path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip
        self.environment["PSDIST_SCHEDULER_FILE"] = str(address)
        self.workers = [self.start(rank) for rank in range(WORKERS)]
        self.wait_for_all()

    def start(self, rank: int) -> Worker:
        """Start a worker."""
        worker = Worker(self, rank)
        self._processes.append(worker.process)
        return worker

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def wait_for_all(self) -> None:
        """Wait until all workers have a sum in one group."""
        with self.changed:
            assert self.changed.wait_for(self._are_together, _SECONDS), [worker.last for worker in self.workers]

    def _are_together(self) -> bool:
        self._check()
        lasts = [worker.last for worker in self.workers]
        return len({last["epoch"] for last in lasts}) == 1 and all(len(last["ranks"]) == WORKERS for last in lasts)

    def _check(self) -> None:
        ended = [worker.rank for worker in self.workers if worker.process.poll() is not None]
        assert not ended, f"workers {ended} have ended"

    def strike(self, fault: str, rng: random.Random) -> float:
        """Inject a fault, and repair it. Returns the seconds until all survivors had a sum without the victim."""
        victim = rng.randrange(WORKERS)
        worker = self.workers[victim]
        calls = worker.last["calls"] + rng.randrange(1000)
        with self.changed:
            assert self.changed.wait_for(lambda: worker.last["calls"] >= calls, _SECONDS), worker.last
        began = time.monotonic()
        match fault:
            case "kill":
                faults.kill(worker.process.pid)
            case "freeze":
                faults.freeze(worker.process.pid)
            case _:
                self.network.disconnect(victim)
        survivors = [one for one in self.workers if one is not worker]
        with self.changed:
            assert self.changed.wait_for(lambda: all(map(self._is_past(victim, began), survivors)), _SECONDS), [
                one.last for one in self.workers
            ]
            seconds = max(one.begun[one.last["epoch"]] for one in survivors) - began
        self._repair(fault, worker)
        self.wait_for_all()
        return seconds

    def _is_past(self, victim: int, began: float) -> Any:
        return lambda one: one.last["at"] > began and victim not in one.last["ranks"]

    def _repair(self, fault: str, worker: Worker) -> None:
        match fault:
            case "kill":
                worker.process.wait()
                self.workers[worker.rank] = self.start(worker.rank)
            case "freeze":
                faults.thaw(worker.process.pid)
            case _:
                self.network.heal(worker.rank)


def run(fault: str, rounds: int, seed: int = 0) -> list[float]:
    """Return the seconds until the survivors continued, by round."""
    rng = random.Random(f"{seed}/{fault}")
    with ExitStack() as stack:
        group = Rounds(stack)
        times = []
        for _ in range(rounds):
            times.append(group.strike(fault, rng))
            print(f"{fault}: {times[-1]:.3f} s", flush=True)
        return times


if __name__ == "__main__":
    if sys.argv[1:]:
        found = sorted(run(sys.argv[1], int(sys.argv[2])))
        print(f"{sys.argv[1]}: {len(found)} rounds, median {found[len(found) // 2]:.3f} s, longest {found[-1]:.3f} s")
    else:
        work()
