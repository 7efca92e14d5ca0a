"""Growth of costs with the size of a run: ``python -m benchmarks.growth``.

Curves of a step: its time by the number of workers, servers, parameters, tensors and copies, while everything else is
constant; over shared memory and TCP connections. All points of a curve take turns, so that a slow minute of the machine
does not bend it; those of one curve need up to 12 GB. Another curve shows the scheduler by the number of its sessions
(``sessions``). ``--page`` writes a page with tables, and a picture of each curve beside it; the part of the page from
``## Notes`` on is written by hand, and kept. Results are kept in ``.bench/growth.json``, so that one curve can be
measured again, over one transport if needed.

It asserts nothing. All processes share the cores of this machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import figures, growth_page, machine, registry, sessions
from benchmarks.contenders import PEER_VENVS, WARM_STEPS, Contender, ContenderError, Running
from benchmarks.turns import Settings

TRANSPORTS = ("shm", "tcp")
RESULTS = PEER_VENVS / "growth.json"
#: Turns of each point, their length in seconds, and their smallest and largest number of steps.
ROUNDS = 3
TURN_SECONDS = 0.8
STEPS_MIN, STEPS_MAX = 2, 100


@dataclass(frozen=True)
class Curve:
    """Time of a step by one number.

    settings: returns the settings of a point and the number of parameters.
    """

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


def measure_points(contenders: Mapping[int, Contender]) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a step at each point.

    They are the median of all workers' steps, and the 10th and 90th percentile. Raises ContenderError.
    """
    times: dict[int, list[float]] = {value: [] for value in contenders}
    with ExitStack() as stack:
        running = {value: stack.enter_context(Running(one)) for value, one in contenders.items()}
        for one in running.values():
            one.turn(WARM_STEPS)
        steps = {value: _steps_of(one) for value, one in running.items()}
        for _ in range(ROUNDS):
            for value, one in running.items():
                # The first step wakes processes whose memory the others' turns evicted from the caches.
                times[value] += [1e3 * second for seconds in one.turn(steps[value] + 1) for second in seconds[1:]]
    return {
        str(value): dict(zip(("low", "high"), figures.spread(mine), strict=True)) | {"ms": statistics.median(mine)}
        for value, mine in times.items()
    }


def _steps_of(running: Running) -> int:
    """Return how many steps fit into a turn."""
    seconds = statistics.median(one[-1] for one in running.turn(2))
    return min(max(STEPS_MIN, round(TURN_SECONDS / seconds)), STEPS_MAX)


def measure_curve(name: str, transport: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """All points of a curve of steps over one transport. Raises ContenderError."""
    curve = CURVES[name]
    points = measure_points(
        {
            value: registry.psdist(curve.settings(value, options.params), transport, f"{value} {curve.label}")
            for value in options.values or curve.values
        }
    )
    for value, one in points.items():
        print(f"{int(value):>12,} {curve.label:12}{transport:6}{one['ms']:10.1f} ms", flush=True)
    return points


def measure_sessions(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each number of sessions. Raises ContenderError."""
    print(sessions.HEADING)
    for count in options.sessions:
        one = sessions.measure(count, options.processes, options.rest_seconds)
        print(one.text(), flush=True)
        yield asdict(one)


def measure(wanted: Sequence[str], options: argparse.Namespace, results: dict[str, Any]) -> Iterator[None]:
    """Add measurements to ``results``, and yield after each part. Raises ContenderError."""
    for name in wanted:
        if name == SESSIONS:
            results[name] = []
            for one in measure_sessions(options):
                results[name].append(one)
                yield
            continue
        points = results.setdefault(name, {"label": CURVES[name].label, "points": {}})["points"]
        for transport in options.transport:
            points[transport] = measure_curve(name, transport, options)
            yield


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
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
    """Measure, prints, and writes the files."""
    command_line = parser()
    options = command_line.parse_args(arguments)
    wanted = options.curve or [*CURVES, SESSIONS]
    if unknown := set(wanted) - {*CURVES, SESSIONS}:
        command_line.error(f"no such curve: {', '.join(sorted(unknown))}")
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    options.results.parent.mkdir(parents=True, exist_ok=True)
    try:
        for _ in measure(wanted, options, results):
            results["machine"] = machine.facts()
            options.results.write_text(json.dumps(results, indent=1) + "\n")
    except ContenderError as error:
        raise SystemExit(str(error)) from None
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.page:
        growth_page.write(results, options.page)


if __name__ == "__main__":
    main()
