"""Random schedules of calls and faults in groups of real processes.

``python tests/chaos/group_schedules.py --seed S`` carries out one schedule and prints its course; ``--schedules N
--first S`` carries out N of them, and prints their faults, ends, and the longest time between the errors of two ranks.

The workers are ``schedule_worker``, the schedules ``schedule_draw``, and the checks ``schedule_oracle``. The processes
of a run serve many schedules; those that have ended are replaced by a process that was started before.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.chaos.schedule_draw import WORKERS, Fault, Schedule, draw  # noqa: E402
from tests.chaos.schedule_oracle import (  # noqa: E402
    LEASE_SECONDS,
    Call,
    Record,
    Stop,
    outcomes,
    spread,
    violations,
)
from tests.support.chaos import faults  # noqa: E402

#: Time limit for starts and groups, and for the end of a schedule once its last fault could be noticed.
_START_SECONDS: Final = 120.0
_END_SECONDS: Final = 60.0


class Worker:
    """Process of one worker. It connects once it has a rank in the run."""

    def __init__(self, events: queue.Queue[tuple[Worker, dict[str, Any]]], run: Run) -> None:
        self.log = run.path / f"worker-{run.count}.log"
        run.count += 1
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.schedule_worker"], cwd=run.path, env=run.environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        self._events = events
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for text in output:
                self._events.put((self, json.loads(text)))
        self._events.put((self, {"event": "ended", "at": time.monotonic()}))

    def tell(self, command: Any) -> None:
        """Send a command. A process that has ended gets none."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        self.reader.join()
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()


class Run:
    """The scheduler and the workers of all schedules, as processes of this host."""

    def __init__(self, stack: ExitStack) -> None:
        self.path = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.count = 0
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PSDIST_")}
        address = self.path / "address"
        self.environment |= {
            "PYTHONPATH": str(ROOT),
            "PSDIST_TOKEN": "secret",
            "XDG_RUNTIME_DIR": str(self.path),
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(WORKERS),
        }
        self._workers: list[Worker] = []
        stack.callback(self._end)
        self._scheduler = subprocess.Popen(
            [sys.executable, "-m", "psdist_scheduler", "--address-file", str(address),
             "--worker-timeout", str(LEASE_SECONDS)],
            env=self.environment, cwd=self.path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.environment["PSDIST_SCHEDULER_FILE"] = str(address)
        self.events: queue.Queue[tuple[Worker, dict[str, Any]]] = queue.Queue()
        #: Workers by rank, and a process for the next that is lost.
        self.workers = [self._start() for _ in range(WORKERS)]
        for rank, worker in enumerate(self.workers):
            worker.tell(rank)
        self._spare = self._start()
        self.wait_for("ready", self.workers)
        self._groups = 0

    def _start(self) -> Worker:
        worker = Worker(self.events, self)
        self._workers.append(worker)
        return worker

    def _end(self) -> None:
        for worker in self._workers:
            worker.end()
        self._scheduler.kill()
        self._scheduler.wait()

    def wait_for(self, event: str, workers: list[Worker]) -> dict[Worker, dict[str, Any]]:
        """Wait until each of ``workers`` has reported an event. Returns the reports."""
        found: dict[Worker, dict[str, Any]] = {}
        until = time.monotonic() + _START_SECONDS
        while len(found) < len(workers):
            worker, report = self.events.get(timeout=max(0.0, until - time.monotonic()))
            if worker in workers:
                assert report["event"] == event, (report, worker.log.read_text()[-3000:])
                found[worker] = report
        return found

    def replace(self, rank: int) -> None:
        """Replace the worker of a rank by a new process."""
        self.workers[rank].end()
        self._workers.remove(self.workers[rank])
        self.workers[rank] = self._spare
        self._spare.tell(rank)
        self.wait_for("ready", [self._spare])
        self._spare = self._start()

    def play(self, schedule: Schedule) -> Record:
        """Carry out a schedule, and replace the workers that it has cost."""
        self._groups += 1
        members = [self.workers[worker] for worker in schedule.workers]
        for member in members:
            member.tell({"schedule": asdict(schedule), "name": f"group-{self._groups}"})
        joined = self.wait_for("joined", members)
        ranks = [joined[member]["rank"] for member in members]
        assert ranks == [*range(schedule.size)], ranks
        for member in members:
            member.tell("all have joined")
        course = Course(self.events, schedule, members)
        course.follow()
        for rank, worker in enumerate(schedule.workers):
            if not course.is_usable(rank):
                self.replace(worker)
        return course.record


class Course:
    """Course of one schedule: the workers' reports, and the faults that come from outside of them."""

    def __init__(
        self, events: queue.Queue[tuple[Worker, dict[str, Any]]], schedule: Schedule, members: list[Worker]
    ) -> None:
        self.record = Record(schedule)
        self._events = events
        self._schedule = schedule
        self._members = members
        self._ranks = {member: rank for rank, member in enumerate(members)}
        self._began = time.monotonic()
        #: Actions to come: time, number, action.
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0
        self._done: set[int] = set()
        self._announced: set[int] = set()
        self._last = self._began

    def is_usable(self, rank: int) -> bool:
        """True if the process of a rank has carried out its part."""
        return rank in self._done and rank not in self.record.deaths

    def follow(self) -> None:
        """Take reports and strike until all ranks have ended their parts, or are lost."""
        self._follow()
        for stop in self.record.stops:
            if stop.rank in self._done and stop.until == math.inf:  # It was struck after its end.
                self._thaw(stop)

    def _follow(self) -> None:
        while left := set(range(self._schedule.size)) - self._done - self.record.deaths.keys():
            frozen = {stop.rank for stop in self.record.stops if stop.until == math.inf}
            if not self._timers and left <= frozen:
                return  # They are stopped for good.
            now = time.monotonic()
            if now > self._last + _END_SECONDS and not self._timers:
                self._note(f"no end: ranks {sorted(left)}")
                return
            until = min([now + 0.5, *(timer[0] for timer in self._timers[:1])])
            with suppress(queue.Empty):
                self._take(*self._events.get(timeout=max(0.0, until - now)))
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()

    def _note(self, text: str, at: float | None = None) -> None:
        self.record.lines.append(((at or time.monotonic()) - self._began, text))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._numbers, action))

    # --- reports ------------------------------------------------------------------------------------------------------

    def _take(self, worker: Worker, report: dict[str, Any]) -> None:
        rank = self._ranks.get(worker)
        if rank is None:
            return
        at, self._last = report["at"], time.monotonic()
        details = {name: value for name, value in report.items() if name not in ("event", "at")}
        self._note(f"rank {rank}: {report['event']} {details or ''}", at)
        match report["event"]:
            case "begin":
                number = report["operation"]
                call = Call(rank, self._schedule.operations[number], at)
                self.record.calls[rank, number] = call
                if report["waits"]:
                    call.since = at
                    self._strike_during(rank, number)
            case "wait":
                number = report["operation"]
                self.record.calls[rank, number].since = at
                self._strike_during(rank, number)
            case "end":
                self._take_end(rank, report)
            case "strike":
                self._note_strike(report["fault"], at)
            case "done":
                self._done.add(rank)
            case "ended":
                self.record.deaths.setdefault(rank, at)

    def _take_end(self, rank: int, report: dict[str, Any]) -> None:
        call = self.record.calls[rank, report["operation"]]
        call.ended, call.result = report["at"], report["result"]
        call.error, call.text, call.lost = report.get("error", ""), report.get("text", ""), report.get("lost", -1)
        if call.failed:
            for number, fault in enumerate(self._schedule.faults):
                if fault.moment == "any error":
                    self._strike_later(number, fault)

    def _strike_during(self, rank: int, operation: int) -> None:
        for number, fault in enumerate(self._schedule.faults):
            if (fault.rank, fault.operation, fault.moment) == (rank, operation, "during"):
                self._strike_later(number, fault)

    # --- faults -------------------------------------------------------------------------------------------------------

    def _strike_later(self, number: int, fault: Fault) -> None:
        if number not in self._announced:
            self._announced.add(number)
            self._later(fault.seconds, lambda: self._strike(number, fault))

    def _strike(self, number: int, fault: Fault) -> None:
        if fault.rank in self._done or fault.rank in self.record.deaths:
            return
        pid = self._members[fault.rank].process.pid
        self._note(f"strike: {fault}")
        self._note_strike(number, time.monotonic())
        match fault.kind:
            case "kill":
                faults.kill(pid)
            case "give up":
                os.kill(pid, signal.SIGINT)
            case _:
                faults.freeze(pid)

    def _note_strike(self, number: int, at: float) -> None:
        fault, self.record.strikes[number] = self._schedule.faults[number], at
        if fault.kind == "kill":
            self.record.deaths.setdefault(fault.rank, at)
        elif fault.kind in ("freeze", "freeze briefly"):
            stop = Stop(fault.rank, at)
            self.record.stops.append(stop)
            if fault.thaw_seconds < math.inf:
                self._later(fault.thaw_seconds, lambda: self._thaw(stop))

    def _thaw(self, stop: Stop) -> None:
        stop.until = time.monotonic()
        self._note(f"rank {stop.rank} is thawed")
        faults.thaw(self._members[stop.rank].process.pid)


# --- many schedules ---------------------------------------------------------------------------------------------------


def run(seeds: range, show: Callable[[str], None] = print) -> tuple[list[str], Totals]:
    """Carry out the schedules of some seeds. Returns all violations, and the totals."""
    found, totals = [], Totals()
    with ExitStack() as stack:
        processes = Run(stack)
        for seed in seeds:
            record = processes.play(draw(seed))
            broken = violations(record)
            totals.add(record)
            if broken:
                show("\n".join([str(record.schedule), record.course, *broken]))
            found += [f"seed {seed}: {text}" for text in broken]
    return found, totals


class Totals:
    """Figures of many schedules."""

    def __init__(self) -> None:
        self.spread, self.seed = 0.0, -1
        self.spreads: list[float] = []
        self.faults: Counter[str] = Counter()
        self.combinations: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.schedules: Counter[str] = Counter()

    def add(self, record: Record) -> None:
        """Count a schedule."""
        longest = spread(record)
        self.spreads.append(longest)
        if longest > self.spread:
            self.spread, self.seed = longest, record.schedule.seed
        self.faults.update(fault.kind for fault, _ in record.struck())
        self.combinations[" + ".join(sorted(_name(fault) for fault, _ in record.struck())) or "none"] += 1
        found = outcomes(record)
        self.outcomes += found
        errors = sorted(name for name in found if name not in ("right", "end of its process"))
        self.schedules[" and ".join(errors) or "results only"] += 1

    def __str__(self) -> str:
        spreads = sorted(self.spreads)
        lines = [
            f"{len(spreads)} schedules; first to last error: median {spreads[len(spreads) // 2]:.3f} s, longest "
            f"{self.spread:.3f} s (seed {self.seed})"
        ]
        for name, counts in (
            ("faults", self.faults),
            ("faults of one schedule", self.combinations),
            ("ends of calls", self.outcomes),
            ("schedules", self.schedules),
        ):
            lines.append(f"{name}: " + ", ".join(f"{count} {what}" for what, count in counts.most_common()))
        return "\n".join(lines)


def _name(fault: Fault) -> str:
    return fault.kind if fault.moment in ("before", "during") else f"{fault.kind} at {fault.moment}"


def main() -> int:
    """Carry out schedules, and return the exit status."""
    parser = argparse.ArgumentParser(description="Carry out random schedules of a group's calls and faults.")
    parser.add_argument("--seed", type=int, help="carry out this one, and print its course")
    parser.add_argument("--schedules", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Leaves no process behind.
    if given.seed is None:
        found, totals = run(range(given.first, given.first + given.schedules), lambda text: print(text, flush=True))
        print(totals)
    else:
        with ExitStack() as stack:
            record = Run(stack).play(draw(given.seed))
        print(record.schedule, record.course, sep="\n")
        found = violations(record)
        print(f"first to last error: {spread(record):.3f} s")
    print(*found, f"{len(found)} violations", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
