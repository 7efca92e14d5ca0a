"""Longest time that a large model blocks any event loop of a run: ``python -m benchmarks.blocking``.

Each case is a run of ``psdist run`` with its default limits, and a second one that resumes from its snapshot. The
worker creates the parameter set, makes steps, takes a snapshot, kills a server and waits until all copies are full
again (with one copy: until the run has rolled back to the snapshot), drains a server, and closes.
``benchmarks.loop_monitor`` watches the loops of all processes. The table shows the longest turn of each process's loop,
without the time in which the kernel ran other threads (which a busy machine adds), and its place in the code. Values
are checked.

It does not measure speed. A case fails if a process that was not killed is expelled, or if a value is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import loop_monitor
from benchmarks.contenders import ROOT

LIMIT_SECONDS = 0.1
_GiB = 1 << 30
_POLL_SECONDS = 0.2
_WAIT_SECONDS = 600.0


@dataclass(frozen=True)
class Case:
    """Model and cluster. bytes: size of its float32 weights."""

    bytes: int
    tensors: int
    copies: int
    transport: str

    @property
    def title(self) -> str:
        """Description in one line."""
        size = f"{self.bytes / _GiB:.2f} GiB" if self.bytes >= _GiB // 8 else f"{self.bytes >> 20} MiB"
        return f"{size} in {self.tensors:,} tensors, {self.copies} copies, {self.transport}"


@dataclass(frozen=True)
class Turn:
    """Longest turn of a loop. blocked: without the time in which other threads had the processor."""

    process: str
    late: float
    blocked: float
    cpu: float
    count: int
    stack: str


# --- the worker -------------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """The script of the run's only worker."""
    import numpy as np

    import psdist

    elements = options.bytes // 4 // options.tensors
    with psdist.init() as context:
        # Zeros that are never written take no memory.
        zeros = np.zeros(elements * options.tensors, np.float32).reshape(options.tensors, elements)
        init = {f"{number // 2:05}.{('weight', 'bias')[number % 2]}": row for number, row in enumerate(zeros)}
        # Most scripts do so; it makes every other tensor a range of the cluster map.
        groups = (psdist.optim.override("*.bias", weight_decay=0.0),) if options.tensors > 1 else ()
        worker = Worker(options, context.client)
        worker.model = context.client.parameters(
            "model", init=init, optimizer=psdist.optim.SGD(lr=1.0, overrides=groups), consistency=psdist.BSP()
        )
        worker.say("restored" if worker.model.version else "created")
        worker.run()
    worker.say("closed")


@dataclass
class Worker:
    """Trains, and breaks its run. model: the parameter set."""

    options: argparse.Namespace
    client: Any
    model: Any = None
    began: float = field(default_factory=time.monotonic)

    def say(self, what: str) -> None:
        """Print a finished phase, with its time."""
        print(f"{what}: {time.monotonic() - self.began:.1f} s", flush=True)
        self.began = time.monotonic()

    def run(self) -> None:
        """All phases."""
        for _ in range(self.options.steps):
            self.step()
        self.say(f"{self.options.steps} steps")
        if "snapshot" in self.options.phases:
            self.client.snapshot()
            self.say("saved")
        if "kill" in self.options.phases:
            self.kill()
            self.say("refilled")
        if "drain" in self.options.phases:
            self.drain()
            self.say("drained")

    def step(self) -> None:
        """One step, which adds 1 to all weights."""
        for gradient in self.model.gradient_buffers().values():
            gradient[...] = -1.0
        weights, version = self.model.push_pull(self.model.gradient_buffers(), copy=False), self.model.version
        assert all(array[0] == array[-1] == version for array in weights.values()), version

    def kill(self) -> None:
        """Kill a server, and train until all copies are full again."""
        killed = self.servers()["server-0"]
        os.kill(killed.pid, signal.SIGKILL)

        def is_over() -> bool:
            now, shards = self.servers().get("server-0"), self.client.status().parameters[0].entry.shards
            is_full = all(len(one.backups) == self.options.copies - 1 and not one.filling for one in shards)
            return now is not None and now.incarnation > killed.incarnation and is_full

        self.train_until(is_over)

    def drain(self) -> None:
        """Drain a server while another one is live."""
        command = [sys.executable, "-m", "psdist.cli.main"]
        if self.options.copies == 1:
            subprocess.run([*command, "scale", "servers", "2"], check=True)
            self.train_until(lambda: len(self.servers()) == 2)
        subprocess.run([*command, "drain", "server-0", "--timeout", "300"], check=True)
        self.train_until(lambda: "server-0" not in self.servers(draining=True))

    def train_until(self, is_over: Callable[[], bool]) -> None:
        """Make steps, with pauses."""
        late = time.monotonic() + _WAIT_SECONDS
        while not is_over():
            assert time.monotonic() < late, self.client.status()
            self.step()
            time.sleep(_POLL_SECONDS)

    def servers(self, draining: bool = False) -> dict[str, Any]:
        """Return the live servers by id. draining: also those that are drained."""
        live = [one for one in self.client.status().members if one.state == "live" and (draining or not one.draining)]
        return {one.member_id: one for one in live if one.member_id.startswith("server")}


# --- the run ----------------------------------------------------------------------------------------------------------


def run(case: Case, options: argparse.Namespace, path: Path) -> bool:
    """Run a case, and print its table. Returns True if it passed."""
    print(f"\n{case.title}", flush=True)
    fine = True
    for number, phases in enumerate(
        (options.phases, ["restore"]) if "restore" in options.phases else (options.phases,)
    ):
        monitored = path / f"monitor-{number}"
        monitored.mkdir()
        status, text = start(case, path, monitored, phases, options.steps, verbose=options.verbose)
        turns = sorted(read(monitored), key=lambda turn: -turn.blocked)
        print(table(turns), flush=True)
        lost = [line for line in text.splitlines() if "silent" in line or "expelled" in line]
        if status or lost:
            print(text if status else "\n".join(lost))
        fine = fine and not status and not lost and all(turn.blocked <= LIMIT_SECONDS for turn in turns)
    return fine


def start(
    case: Case, path: Path, monitored: Path, phases: Sequence[str], steps: int, *, verbose: bool = False
) -> tuple[int, str]:
    """Run a case to its end. Returns its exit status and its output.

    path: folder of snapshots; a second run resumes from those of the first.
    monitored: folder to which processes report.
    """
    worker = ["-m", "benchmarks.blocking", "--worker", "--bytes", str(case.bytes), "--tensors", str(case.tensors)]
    flags = ["--nservers", str(case.copies), "--replicas", str(case.copies), "--no-save-at-end", "--log-level", "info"]
    storage = ["--run-id", "blocking", "--storage-path", str(path / "storage")]
    paths = [str(ROOT / "benchmarks/tracing"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, loop_monitor.VARIABLE: str(monitored), "PYTHONPATH": os.pathsep.join(paths)}
    environ["PSDIST_TRANSPORT"] = case.transport
    settings = ["--copies", str(case.copies), "--steps", str(steps), "--phases", *phases]
    lines: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-m", "psdist.cli.main", "run", *flags, *storage, *worker, *settings],
        env={**environ, "XDG_RUNTIME_DIR": str(path), "TMPDIR": str(path)},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if verbose or line.rstrip().endswith(" s"):
                print("   ", line.rstrip(), flush=True)
    return process.returncode, "".join(lines)


def read(directory: Path) -> Iterator[Turn]:
    """Return the longest turn of each process that wrote into ``directory``."""
    found = {file.stem: turns_in(file) for file in sorted(directory.glob("*.jsonl"))}
    for name, turns in found.items():
        others = [turn for other, theirs in found.items() if other != name for turn in theirs]
        blocked = [(_blocked(turn, others), turn) for turn in turns]
        seconds, longest = max(blocked, key=lambda pair: pair[0], default=(0.0, None))
        if longest is None:
            yield Turn(name, 0, 0, 0, 0, "")
            continue
        stacks = longest["stacks"] or longest["holders"]
        over = sum(seconds > LIMIT_SECONDS for seconds, _ in blocked)
        yield Turn(name, longest["late"], seconds, longest["cpu"], over, stacks[0][0] if stacks else "")


def turns_in(file: Path) -> list[dict[str, Any]]:
    """Return the long turns that one process reported."""
    return [turn for line in file.read_text().splitlines() if "late" in (turn := json.loads(line))]


def _blocked(turn: dict[str, Any], others: Sequence[dict[str, Any]]) -> float:
    """Return the seconds that a turn itself is responsible for.

    Excluded is time in which the kernel ran other threads, and time in which the loop of another process waited, too.
    Two loops share only the machine, which was stalled then.
    """
    begin, end = turn["at"] - turn["late"], turn["at"]
    both = [min(end, other["at"]) - max(begin, other["at"] - other["late"]) for other in others if other["waited"] > 0]
    return turn["cpu"] + max(0.0, turn["waited"] - max(0.0, *both))


def table(turns: Sequence[Turn]) -> str:
    """One line for each process."""
    heading = f"    {'process':18}{'blocked':>9}{'cpu':>9}{'late':>9}  over 100 ms  where\n"
    return heading + "\n".join(map(_row, turns))


def _row(turn: Turn) -> str:
    times = "".join(f"{1e3 * seconds:6.0f} ms" for seconds in (turn.blocked, turn.cpu, turn.late))
    return f"    {turn.process:18}{times}{turn.count:13}  {' < '.join(turn.stack.split(' < ')[:4])}"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.blocking", description=__doc__.partition("\n")[0])
    line.add_argument("--bytes", type=lambda text: int(float(text)), nargs="+", default=[_GiB // 4])
    line.add_argument("--tensors", type=int, nargs="+", default=[1])
    line.add_argument("--copies", type=int, nargs="+", default=[1, 2])
    line.add_argument("--transport", nargs="+", choices=("shm", "tcp", "grpc"), default=["shm"])
    line.add_argument("--steps", type=int, default=3)
    line.add_argument("--rounds", type=int, default=1, help="how often each case is run (default: %(default)s)")
    line.add_argument("--phases", nargs="+", default=["snapshot", "kill", "drain", "restore"])
    line.add_argument("--keep", type=Path, metavar="DIR", help="keep the monitors' files there")
    line.add_argument("--verbose", action="store_true", help="all lines of all processes")
    line.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases: each size in one tensor, and each number of tensors, with all copies and transports."""
    options = parser().parse_args(arguments)
    if options.worker:
        options.bytes, options.tensors, options.copies = options.bytes[0], options.tensors[0], options.copies[0]
        work(options)
        return 0
    cases = [
        Case(size, tensors, copies, transport)
        for size in options.bytes
        for tensors in options.tensors
        for copies in options.copies
        for transport in options.transport
    ]
    fine = True
    for number, case in enumerate(case for case in cases for _ in range(options.rounds)):
        if options.keep is not None:
            path = options.keep / str(number)
            path.mkdir(parents=True)
            fine = run(case, options, path) and fine
            continue
        with tempfile.TemporaryDirectory(prefix="psdist-blocking-") as directory:
            fine = run(case, options, Path(directory)) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
