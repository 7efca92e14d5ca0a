"""Memory over many steps: ``python -m benchmarks.steady``.

Runs two workers and two servers for a thousand steps with each transport, and looks at every process of the run after
each tenth of them: the memory that Python has allocated (tracemalloc, with its peak since the last look) and the
resident memory (RSS). Growth is that of the second half of the steps: allocations of the first ones may stay. It
asserts nothing. Steps are slower than without tracemalloc; ``--untraced`` leaves it out, for runs of many steps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import machine, registry
from benchmarks.contenders import ROOT, ContenderError, Running
from benchmarks.turns import Settings

LOOKS = 10
_TELL_SECONDS = 10.0
_MODULES = {"psdist_scheduler": "scheduler", "psdist_server": "server", "benchmarks.worker": "worker"}


@dataclass
class Watched:
    """One process of the run, and its observations, in bytes."""

    role: str
    process: psutil.Process
    current: list[int] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)

    def look(self, traces: Path | None) -> None:
        """Query the process, unless it is not traced, and the system. Raises ContenderError if it does not answer."""
        if traces is not None:
            self._ask(traces)
        self.resident.append(self.process.memory_info().rss)

    def _ask(self, traces: Path) -> None:
        path = traces / f"{self.process.pid}.json"
        path.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR2)
        deadline = time.monotonic() + _TELL_SECONDS
        while not path.exists():
            if time.monotonic() > deadline:
                raise ContenderError(f"a {self.role} did not report its allocations")
            time.sleep(0.01)
        told = json.loads(path.read_text())
        self.current.append(told["current"])
        self.peak.append(told["peak"])

    def as_json(self) -> dict[str, Any]:
        """Return growth over the second half of the steps, and all observations."""
        half = LOOKS // 2 - 1
        traced = {}
        if self.current:
            traced = {
                "traced_growth_bytes": self.current[-1] - self.current[half],
                "traced_above_bytes": max(self.peak[half + 1 :]) - min(self.current[half:]),
                "current_bytes": self.current,
                "peak_bytes": self.peak,
            }
        return {
            "role": self.role,
            **traced,
            "resident_growth_bytes": self.resident[-1] - self.resident[half],
            "resident_bytes": self.resident,
        }


def watched(running: Running) -> list[Watched]:
    """Scheduler, servers and workers below ``psdist run``."""
    found = []
    for process in psutil.Process(running.processes[0].pid).children(recursive=True):
        words = process.cmdline()
        found += [Watched(role, process) for name, role in _MODULES.items() if name in words]
    return sorted(found, key=lambda one: (one.role, one.process.pid))


def measure(options: argparse.Namespace, transport: str) -> list[dict[str, Any]]:
    """Return the processes of one run."""
    settings = Settings(params=options.params, workers=options.workers, servers=options.servers, copy=options.copy)
    with tempfile.TemporaryDirectory(prefix="psdist-bench-") as name:
        traces = Path(name)
        path = os.pathsep.join([str(ROOT / "benchmarks/tracing"), *filter(None, [os.environ.get("PYTHONPATH")])])
        # Tracing makes a compilation slow enough to cost a server its usual lease.
        environment = {"PSDIST_FAILURE_TIMEOUT": "60"}
        if not options.untraced:
            environment |= {"PYTHONTRACEMALLOC": "1", "PYTHONPATH": path, "BENCH_TRACES": name}
        with Running(registry.psdist(settings, transport, environment=environment)) as running:
            processes = watched(running)
            for _ in range(LOOKS):
                running.turn(max(1, options.steps // LOOKS))
                for one in processes:
                    one.look(None if options.untraced else traces)
            return [one.as_json() for one in processes]


def table(processes: list[dict[str, Any]]) -> str:
    """Return the processes as text."""
    columns = {
        "traced growth": "traced_growth_bytes",
        "a step above": "traced_above_bytes",
        "RSS growth": "resident_growth_bytes",
    }
    columns = {title: key for title, key in columns.items() if key in processes[0]}
    lines = [f"{'KiB':12}{''.join(f'{title:>16}' for title in columns)}  RSS at each look"]
    for one in processes:
        cells = "".join(f"{one[key] / 1024:16,.0f}" for key in columns.values())
        looks = " ".join(f"{size / 1024:,.0f}" for size in one["resident_bytes"])
        lines.append(f"{one['role']:12}{cells}  {looks}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.steady", description="Memory over many steps.")
    line.add_argument("--steps", type=int, default=1000)
    line.add_argument("--workers", type=int, default=2)
    line.add_argument("--servers", type=int, default=2)
    line.add_argument("--params", type=int, default=4_000_000)
    line.add_argument("--transport", nargs="+", choices=("shm", "tcp", "grpc"), default=["shm", "tcp", "grpc"])
    line.add_argument("--copy", action="store_true", help="plain calls, with arrays of one's own")
    line.add_argument("--untraced", action="store_true", help="resident memory only: without tracemalloc")
    line.add_argument("--json", type=Path, metavar="FILE")
    return line


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, prints, and writes the file of ``--json``."""
    options = parser().parse_args(arguments)
    result: dict[str, Any] = {"steps": options.steps, "params": options.params, "processes": {}}
    for transport in options.transport:
        try:
            result["processes"][transport] = measure(options, transport)
        except ContenderError as error:
            raise SystemExit(str(error)) from None
        print(f"{options.steps} steps of {options.params:,} parameters, {transport}")
        print(table(result["processes"][transport]), flush=True)
    result["machine"] = machine.facts()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
