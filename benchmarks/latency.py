"""Round trip of a small ``push_pull``, and its percentiles: ``python -m benchmarks.latency``.

One worker and one server; psdist's ``Client`` and ``AsyncClient`` beside raw ``grpc.aio`` with messages of the same
size, with one call each and on an open stream, all in turns. It asserts nothing, and its figures are those of this
machine at this moment.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import figures, machine, registry
from benchmarks.contenders import ContenderError, run_all
from benchmarks.turns import Settings

TITLES = {
    "psdist": "psdist.Client",
    "psdist_async": "psdist.AsyncClient",
    "grpc_unary": "grpc.aio, a call each",
    "grpc_stream": "grpc.aio, an open stream",
}


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.latency", description="Round trip of a small push_pull.")
    line.add_argument("--params", type=int, default=1000)
    line.add_argument("--transport", choices=("auto", "shm", "tcp", "grpc"), default="auto")
    line.add_argument("--copy", action="store_true", help="plain calls, with arrays of one's own")
    line.add_argument("--rounds", type=int, default=20, help="turns of each contender (default: %(default)s)")
    line.add_argument("--calls-per-round", type=int, default=250, help="round trips of a turn (default: %(default)s)")
    line.add_argument("--json", type=Path, metavar="FILE")
    return line


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all contenders and returns what ``--json`` writes."""
    settings = Settings(params=options.params, workers=1, servers=1, copy=options.copy)
    contenders = [
        registry.psdist(settings, options.transport),
        registry.psdist(replace(settings, role="async"), options.transport, "psdist_async"),
        registry.round_trips(settings, "unary"),
        registry.round_trips(settings, "stream"),
    ]
    rounds, facts = run_all(contenders, options.rounds, options.calls_per_round)
    pooled = {name: [second for one in turns for second in one] for name, turns in rounds.items()}
    return {
        "milliseconds": {name: figures.latencies(seconds) for name, seconds in pooled.items()},
        "transports": facts["psdist"][0]["transports"],
        "settings": {"params": options.params, "transport": options.transport, "copy": options.copy},
        "machine": machine.facts(),
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as text."""
    lines = [f"{'milliseconds':28}{'p50':>8}{'p90':>8}{'p99':>8}{'p99.9':>8}"]
    for name, points in result["milliseconds"].items():
        cells = "".join(f"{points[point]:8.2f}" for point in ("p50", "p90", "p99", "p99.9"))
        lines.append(f"{TITLES[name]:28}{cells}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, prints, and writes the file of ``--json``."""
    options = parser().parse_args(arguments)
    try:
        result = measure(options)
    except ContenderError as error:
        raise SystemExit(str(error)) from None
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
