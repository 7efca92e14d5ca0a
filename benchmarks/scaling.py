"""Scaling of training to more workers: ``python -m benchmarks.scaling``.

Each worker "computes" for a fixed time without using the CPU, as if it had an accelerator, and its gradient becomes
ready bucket by bucket during the last two thirds of that time (``emulation``). The rest of a step is communication that
could not be hidden. psdist pushes each tensor as it becomes ready (``push_pull_async``); gloo reduces buckets of 25 MB
as DistributedDataParallel does, then updates by torch's fused Adam. Both take turns.

Efficiency is compute time / step time. It asserts nothing, and its figures are those of this machine at this moment,
whose cores all workers share.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures, machine, registry
from benchmarks.contenders import ContenderError, run_all
from benchmarks.turns import Settings


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description="Emulated accelerators.")
    line.add_argument("--workers", type=int, nargs="+", default=list(range(1, 9)), metavar="W", help="default: 1 to 8")
    line.add_argument("--servers", type=int, default=2)
    line.add_argument("--params", type=int, default=25_000_000)
    line.add_argument("--compute-ms", type=float, default=400.0, help="of one step (default: %(default)s)")
    line.add_argument("--transport", choices=("auto", "shm", "tcp", "grpc"), default="auto")
    line.add_argument("--peer", action="append", choices=["gloo"], default=[])
    line.add_argument("--rounds", type=int, default=5, help="turns of each contender (default: %(default)s)")
    line.add_argument("--steps-per-round", type=int, default=4, help="steps of one turn (default: %(default)s)")
    line.add_argument("--json", type=Path, metavar="FILE")
    return line


def point(step_ms: float, compute_ms: float) -> dict[str, float]:
    """One contender with so many workers."""
    return {
        "step_ms": step_ms,
        "efficiency": compute_ms / step_ms,
        "communication_share": max(0.0, 1 - compute_ms / step_ms),
    }


def relative(points: dict[str, dict[str, Any]], first: str) -> None:
    """Add to each point its efficiency relative to the point with the fewest workers."""
    for of_workers in points.values():
        for name, one in of_workers.items():
            one["relative_efficiency"] = one["efficiency"] / points[first][name]["efficiency"]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run both for each number of workers and returns what ``--json`` writes."""
    points: dict[str, dict[str, Any]] = {}
    for workers in options.workers:
        settings = Settings(
            params=options.params, workers=workers, servers=options.servers, compute_ms=options.compute_ms
        )
        contenders = [
            registry.psdist(settings, options.transport),
            *(registry.PEERS[name](settings) for name in options.peer),
        ]
        rounds, _ = run_all(contenders, options.rounds, options.steps_per_round)
        points[str(workers)] = {
            name: point(figures.milliseconds(times), options.compute_ms) for name, times in rounds.items()
        }
        print(row(workers, points[str(workers)]), flush=True)
    relative(points, str(options.workers[0]))
    settings_json = {
        "params": options.params,
        "servers": options.servers,
        "compute_ms": options.compute_ms,
        "transport": options.transport,
    }
    return {"workers": points, "settings": settings_json, "machine": machine.facts()}


def row(workers: int, contenders: dict[str, Any]) -> str:
    """Return a line of the text."""
    cells = [
        f"{name} {one['step_ms']:7.1f} ms, efficiency {one['efficiency']:6.1%}" for name, one in contenders.items()
    ]
    return f"{workers} workers: " + "; ".join(cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, prints, and writes the file of ``--json``."""
    options = parser().parse_args(arguments)
    try:
        result = measure(options)
    except ContenderError as error:
        raise SystemExit(str(error)) from None
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
