"""What grows with the size of a run: ``python -m benchmarks.growth``.

Curves of a step: its time by the number of workers, servers, parameters, tensors and copies, while all else stays as it
is; over shared memory and direct connections. Each point is a run of its own for some seconds. And the curve of the
scheduler, by the number of its sessions (``sessions``). ``--page`` writes a page with tables, and a picture of each
curve beside it; what a page says from ``## Notes`` on is written by hand, and kept. Results are kept in
``.bench/growth.json``, so that one curve can be measured again.

What it is not: a test; it asserts nothing. All processes share the cores of this machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import growth_page, machine, registry, sessions
from benchmarks.contenders import PEER_VENVS, WARM_STEPS, ContenderError, Running
from benchmarks.turns import Settings

TRANSPORTS = ("shm", "tcp")
RESULTS = PEER_VENVS / "growth.json"
#: A point is measured for so long, in so many steps.
SECONDS = 2.0
STEPS_MIN, STEPS_MAX = 5, 200


@dataclass(frozen=True)
class Curve:
    """A step's time by one number. ``settings`` makes those of a point of it and the number of parameters."""

    label: str
    values: tuple[int, ...]
    settings: Callable[[int, int], Settings]


CURVES: Mapping[str, Curve] = {
    "workers": Curve("workers", (1, 2, 4, 8, 16), lambda value, size: Settings(size, workers=value)),
    "servers": Curve("servers", (1, 2, 4, 8), lambda value, size: Settings(size, servers=value)),
    "params": Curve(
        "parameters", (1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000, 200_000_000),
        lambda value, _: Settings(value),
    ),
    "tensors": Curve(
        "tensors", (1, 10, 100, 1000, 5000, 20_000),
        lambda value, size: Settings(size, layer_elements=-(-size // value)),
    ),
    "replicas": Curve("copies", (1, 2), lambda value, size: Settings(size, servers=3, replicas=value)),
}  # fmt: skip
SESSIONS = "sessions"


def point(settings: Settings, transport: str) -> dict[str, float]:
    """Milliseconds of a step: the median of all workers' steps, and the 10th and 90th percentile. Raises
    ContenderError."""
    with Running(registry.psdist(settings, transport)) as running:
        for _ in range(WARM_STEPS - 1):
            running.turn(1)
        seconds = statistics.median(one[-1] for one in running.turn(2))
        steps = min(max(STEPS_MIN, round(SECONDS / seconds)), STEPS_MAX)
        times = sorted(1e3 * second for one in running.turn(steps) for second in one)
    tenth = len(times) // 10
    return {"ms": statistics.median(times), "low": times[tenth], "high": times[-1 - tenth]}


def measure_curve(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """All points of a curve of steps. Raises ContenderError."""
    curve = CURVES[name]
    points: dict[str, dict[str, Any]] = {transport: {} for transport in options.transport}
    for value in options.values or curve.values:
        settings = curve.settings(value, options.params)
        for transport in options.transport:
            one = points[transport][str(value)] = point(settings, transport)
            print(f"{value:>12,} {curve.label:12}{transport:6}{one['ms']:10.1f} ms", flush=True)
    return {"label": curve.label, "params": options.params, "points": points}


def measure_sessions(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All numbers of sessions. Raises ContenderError."""
    print(sessions.HEADING)
    points = []
    for count in options.sessions:
        points.append(sessions.measure(count, options.processes, options.rest_seconds))
        print(points[-1].text(), flush=True)
    return [asdict(one) for one in points]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.growth", description="What grows with the size of a run.")
    line.add_argument("curve", nargs="*", help=f"{', '.join([*CURVES, SESSIONS])} (default: all)")
    line.add_argument(
        "--params", type=int, default=25_000_000, help="where it is not what grows (default: %(default)s)"
    )
    line.add_argument("--values", type=int, nargs="+", help="of a curve of steps, in place of its own")
    line.add_argument("--transport", nargs="+", choices=("shm", "tcp", "grpc"), default=list(TRANSPORTS))
    line.add_argument("--sessions", type=int, nargs="+", default=[100, 200, 500, 1000, 2000])
    line.add_argument("--processes", type=int, default=4, help="processes that hold the sessions")
    line.add_argument("--rest-seconds", type=float, default=10.0, help="time in which nothing but heartbeats happens")
    line.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="kept there, curve by curve")
    line.add_argument("--page", type=Path, metavar="FILE", help=f"written from all results, such as {growth_page.PAGE}")
    line.add_argument("--json", type=Path, metavar="FILE")
    return line


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints, and writes the files."""
    command_line = parser()
    options = command_line.parse_args(arguments)
    wanted = options.curve or [*CURVES, SESSIONS]
    if unknown := set(wanted) - {*CURVES, SESSIONS}:
        command_line.error(f"no such curve: {', '.join(sorted(unknown))}")
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    for name in wanted:
        try:
            results[name] = measure_sessions(options) if name == SESSIONS else measure_curve(name, options)
        except ContenderError as error:
            raise SystemExit(str(error)) from None
        results["machine"] = machine.facts()
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1) + "\n")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.page:
        growth_page.write(results, options.page)


if __name__ == "__main__":
    main()
