"""Cost of a snapshot to training, and speed of writing it: ``python -m benchmarks.snapshot``.

In one run of ``psdist run`` the workers make rounds of steps; in every second round a snapshot is taken, on demand, so
that its cut is the next step that no worker has passed. Steps of the rounds with a snapshot are compared with those
without: the stall is the difference of their 99th percentiles. The files' time is from their directory to their
manifest. Beside it, in the same run and on the same disk, one process writes files of the same sizes one after another
and syncs each; both once while the worker trains, and once while it is idle. It asserts nothing, and its figures are
those of this machine at this moment.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import figures, machine
from benchmarks.contenders import PEER_VENVS, ROOT

_CHUNK_BYTES = 1 << 20
_WARM_STEPS = 5
_LOOK_SECONDS = 0.002
#: Smallest number of steps of a round, which lasts until its snapshot is committed.
_COMMIT_SECONDS_MAX = 120.0


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.snapshot", description="Cost of a snapshot to training.")
    line.add_argument("--params", type=int, default=25_000_000)
    line.add_argument("--servers", type=int, default=1)
    line.add_argument("--rounds", type=int, default=6, help="rounds with a snapshot (default: %(default)s)")
    line.add_argument("--steps", type=int, default=40, help="steps of a round, at least (default: %(default)s)")
    line.add_argument("--compute-ms", type=float, default=0.0, help="pause of the worker between two steps")
    line.add_argument("--storage", type=Path, help="directory to write to (default: below .bench)")
    line.add_argument("--json", type=Path, metavar="FILE")
    line.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return line


# --- the worker -------------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """Makes the steps. storage: directory of the run."""

    options: argparse.Namespace
    storage: Path
    bench: Any
    client: Any
    normal: list[list[float]] = field(default_factory=list)
    during: list[list[float]] = field(default_factory=list)
    written: list[dict[str, float]] = field(default_factory=list)
    plain: list[dict[str, float]] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """All rounds."""
        self.steps(_WARM_STEPS)
        self.save(train=True)  # The first one loads libraries, and is not counted.
        self.during.clear()
        self.written.clear()
        for _ in range(self.options.rounds):
            self.normal.append(self.steps(self.options.steps))
            self.save(train=True)
            self.write_plainly(train=True)
            self.steps(1)  # Otherwise there is nothing new to save.
            self.save(train=False)
            self.write_plainly(train=False)
        return {"normal": self.normal, "during": self.during, "written": self.written, "plain": self.plain}

    def step(self) -> float:
        if self.options.compute_ms:
            time.sleep(self.options.compute_ms / 1e3)  # Emulates the computation of a gradient.
        begin = time.perf_counter()
        self.bench.step()
        return time.perf_counter() - begin

    def steps(self, count: int) -> list[float]:
        return [self.step() for _ in range(count)]

    def save(self, train: bool) -> None:
        """Take a snapshot, while steps are made or not."""
        before, deadline = self.commits(), time.perf_counter() + _COMMIT_SECONDS_MAX
        seconds: list[float] = []
        watch = _Watch(self.storage / "snapshots")
        watch.start()
        if train:
            self.client.request_snapshot()
            while self.commits() == before or len(seconds) < self.options.steps:
                seconds.append(self.step())
                if time.perf_counter() > deadline:
                    raise SystemExit(f"no snapshot was committed within {_COMMIT_SECONDS_MAX:.0f} s")
            self.during.append(seconds)
        else:
            self.client.snapshot()
        record = json.loads((self.storage / "commits" / max(self.commits())).read_text())
        watch.join()
        self.written.append(
            {"bytes": record["bytes"], "seconds": watch.seconds, "whole_seconds": record["seconds"], "train": train}
        )

    def commits(self) -> set[str]:
        """Name of the commit records."""
        try:
            return {name for name in os.listdir(self.storage / "commits") if name.endswith(".json")}
        except FileNotFoundError:
            return set()

    def write_plainly(self, train: bool) -> None:
        """Write files like those of the newest snapshot, while steps are made or not."""
        newest = max((self.storage / "snapshots").iterdir(), key=lambda directory: directory.stat().st_mtime)
        sizes = [file.stat().st_size for file in newest.iterdir()]
        command = [sys.executable, "-c", _WRITE, str(self.storage.parent / "plain"), *map(str, sizes)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdout.readline()
            process.stdin.close()
            while train and process.poll() is None:
                self.step()
            seconds = float(process.stdout.readline())
        self.plain.append({"bytes": sum(sizes), "seconds": seconds, "train": train})


class _Watch(threading.Thread):
    """Observer of a snapshot's start and end: its directory, and its manifest, which is written last."""

    def __init__(self, snapshots: Path) -> None:
        super().__init__(daemon=True)
        self._snapshots = snapshots
        self._before = self._names()
        self.seconds = 0.0

    def _names(self) -> set[str]:
        return set(os.listdir(self._snapshots)) if self._snapshots.exists() else set()

    def run(self) -> None:
        while not (new := self._names() - self._before):
            time.sleep(_LOOK_SECONDS)  # In a thread of its own, which only observes.
        began = time.perf_counter()
        while not (self._snapshots / new.pop() / "manifest.json").exists():
            new = self._names() - self._before
            time.sleep(_LOOK_SECONDS)
        self.seconds = time.perf_counter() - began


#: Process that writes plainly: it reports that it is ready, starts when its input ends, and prints the seconds.
_WRITE = f"""
import os, shutil, sys, time
data = os.urandom({_CHUNK_BYTES})
os.makedirs(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
begin = time.perf_counter()
for number, size in enumerate(map(int, sys.argv[2:])):
    with open(f"{{sys.argv[1]}}/{{number}}", "wb", buffering=0) as file:
        while size:
            size -= file.write(data[:size])
        os.fsync(file.fileno())
seconds = time.perf_counter() - begin
shutil.rmtree(sys.argv[1])
print(seconds)
"""


def work(options: argparse.Namespace) -> None:
    """The script of the worker."""
    import psdist
    from benchmarks.psdist_step import BenchSettings, StepBench

    with psdist.init() as context:
        bench = StepBench(context.client, BenchSettings(params=options.params))
        result = Worker(options, options.storage, bench, context.client).run()
    options.worker.write_text(json.dumps(result))


# --- the benchmark ----------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run it, and return the content of ``--json``."""
    parent = options.storage or PEER_VENVS
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="snapshot-", dir=parent) as directory:
        storage, told = Path(directory, "storage"), Path(directory, "worker.json")
        own = ["--params", options.params, "--rounds", options.rounds, "--steps", options.steps]
        own += ["--compute-ms", options.compute_ms, "--storage", storage, "--worker", told]
        flags = ["--nservers", options.servers, "--nproc-per-node", 1, "--storage-path", storage]
        command = [
            sys.executable,
            "-m",
            "psdist.cli.main",
            "run",
            *flags,
            "--no-save-at-end",
            "-m",
            "benchmarks.snapshot",
        ]
        run = subprocess.run(
            [str(word) for word in [*command, *own]], cwd=ROOT, check=False, capture_output=True, text=True
        )
        if run.returncode or not told.exists():
            raise SystemExit(f"the run failed with status {run.returncode}:\n{run.stdout}{run.stderr}")
        raw = json.loads(told.read_text())
    return result(raw, options) | {"machine": machine.facts()}


def result(raw: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return figures of the worker's measurements. Seconds by round; ``written`` and ``plain`` are files."""
    normal = [second for one in raw["normal"] for second in one]
    during = [second for one in raw["during"] for second in one]
    steps = {name: figures.latencies(seconds) for name, seconds in (("normal", normal), ("during", during))}
    rates = {
        name: {
            kind: [one["bytes"] / one["seconds"] / 1e6 for one in raw[kind] if one["train"] == train]
            for kind in ("written", "plain")
        }
        for name, train in (("training", True), ("resting", False))
    }
    return {
        "steps_ms": steps,
        "slowest_ms": {"normal": 1e3 * max(normal), "during": 1e3 * max(during)},
        "stall_ms": steps["during"]["p99"] - steps["normal"]["p99"],
        "snapshot_megabytes": raw["written"][-1]["bytes"] / 1e6,
        "megabytes_per_second": {
            name: {kind: statistics.median(values) for kind, values in both.items()} for name, both in rates.items()
        },
        "write_ratio": {
            name: statistics.median(mine / other for mine, other in zip(both["written"], both["plain"], strict=True))
            for name, both in rates.items()
        },
        "snapshot_seconds": statistics.median(one["whole_seconds"] for one in raw["written"] if one["train"]),
        "settings": {name: getattr(options, name) for name in ("params", "servers", "rounds", "steps", "compute_ms")},
    }


def table(found: dict[str, Any]) -> str:
    """Return the result as text."""
    lines = [f"{'milliseconds a step':24}{'p50':>9}{'p90':>9}{'p99':>9}{'slowest':>9}"]
    for name, title in (("normal", "without a snapshot"), ("during", "while one is taken")):
        points = found["steps_ms"][name]
        cells = "".join(f"{points[point]:9.1f}" for point in ("p50", "p90", "p99"))
        lines.append(f"{title:24}{cells}{found['slowest_ms'][name]:9.1f}")
    lines.append(f"stall: {found['stall_ms']:.1f} ms at p99")
    size = found["snapshot_megabytes"]
    for name, both in found["megabytes_per_second"].items():
        lines.append(
            f"{size:.0f} MB while {name}: {both['written']:.0f} MB/s, plainly {both['plain']:.0f} MB/s: "
            f"{found['write_ratio'][name]:.0%}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, prints, and writes the file of ``--json``."""
    options = parser().parse_args(arguments)
    if options.worker is not None:
        work(options)
        return
    found = measure(options)
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
