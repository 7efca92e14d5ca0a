"""Cost of exactly-once on the servers, as a share of a step: ``python -m benchmarks.bookkeeping``.

Two figures. ``machine``: a shard machine processes the pushes of a step in this process, with and without its checks
(``unchecked``); the difference of its thread's time is divided by the time of a real step. ``step``: real steps of two
runs in turns, one with and one without the checks on its servers. The first is exact and small; the second confirms it
within the machine's noise. It asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures, machine, registry
from benchmarks.contenders import ROOT, ContenderError, run_all
from benchmarks.psdist_step import CONSISTENCIES
from benchmarks.turns import Settings
from psdist.types import ParametersMember, Slicing, choose_slice_elements
from psdist_server.core.async_shard import AsyncShard
from psdist_server.core.bsp_shard import BspShard
from psdist_server.core.role_changes import make_shard
from psdist_server.core.shard import Apply, Effect, SliceApplied, SlicePushed

_UNCHECKED = ROOT / "benchmarks" / "unchecked"
_REPEATS = 30
_TURNS = 9


def _path() -> str:
    return os.pathsep.join([str(_UNCHECKED), *filter(None, [os.environ.get("PYTHONPATH")])])


def _workers(count: int) -> tuple[ParametersMember, ...]:
    return tuple(ParametersMember(f"worker-{rank}", 1, rank) for rank in range(count))


def machine_seconds(settings: Settings) -> float:
    """Return the time in which one server's machine processes the pushes of a step; the fastest of many steps."""
    slicing = Slicing(settings.params, choose_slice_elements(settings.params))
    mine = range(0, slicing.count, settings.servers)
    members = _workers(settings.workers)
    one = make_shard(mine, members, CONSISTENCIES[settings.consistency], clipping=False)
    times = []
    for step in range(_REPEATS):
        first = step * settings.workers * slicing.count
        pushes = [
            SlicePushed(first + number, index, member.worker_id, 1, step, step * settings.workers, False, True)
            for number, (index, member) in enumerate((index, member) for index in mine for member in members)
        ]
        times.append(_timed(one.on, pushes))
    return min(times)


def _timed(on: Callable[[Any], list[Effect]], pushes: Sequence[SlicePushed]) -> float:
    begin = time.thread_time()  # time of this thread alone
    for push in pushes:
        waiting = [effect for effect in on(push) if isinstance(effect, Apply)]
        while waiting:
            applied = SliceApplied(waiting.pop().index)
            waiting += [effect for effect in on(applied) if isinstance(effect, Apply)]
    return time.thread_time() - begin


def machine_share(settings: Settings, step_seconds: float) -> dict[str, float]:
    """Return the checks' share of a step, on each server."""
    from benchmarks.unchecked import sitecustomize

    machines = (BspShard, AsyncShard)
    kept = [(one._refusal, one._pushed) for one in machines]
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(_TURNS):
        times[True].append(machine_seconds(settings))
        sitecustomize.install()
        times[False].append(machine_seconds(settings))
        for one, checks in zip(machines, kept, strict=True):
            one._refusal, one._pushed = checks
    with_checks, without = min(times[True]), min(times[False])
    return {
        "with_ms": 1e3 * with_checks,
        "without_ms": 1e3 * without,
        "share": (with_checks - without) / step_seconds,
        "whole_share": with_checks / step_seconds,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run both contenders in turns, and returns what ``--json`` writes."""
    settings = Settings(
        params=options.params, workers=options.workers, servers=options.servers, consistency=options.consistency
    )
    contenders = [
        registry.psdist(settings, options.transport),
        registry.psdist(settings, options.transport, "unchecked", {"PYTHONPATH": _path()}),
    ]
    rounds, _ = run_all(contenders, options.rounds, options.steps_per_round)
    result = figures.result(rounds)
    result["machine_share"] = machine_share(settings, result["psdist_ms"] / 1e3)
    result["step_share"] = 1 - result["peers"]["unchecked"]["ratio"]
    result["machine"] = machine.facts()
    return result


def table(result: dict[str, Any]) -> str:
    """Return the result as text."""
    own, peer = result["machine_share"], result["peers"]["unchecked"]
    low, high = peer["spread"]
    return "\n".join(
        (
            f"step      {result['psdist_ms']:8.2f} ms; without checks {peer['ms']:.2f} ms: checks are "
            f"{result['step_share']:.1%} of it ({1 - high:.1%} to {1 - low:.1%})",
            f"machine   {own['with_ms']:8.3f} ms; without checks {own['without_ms']:.3f} ms: checks are "
            f"{own['share']:.2%} of a step, the machine as a whole {own['whole_share']:.2%}",
        )
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, prints, and writes the file of ``--json``."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.bookkeeping", description="What exactly-once costs.")
    line.add_argument("--workers", type=int, default=2)
    line.add_argument("--servers", type=int, default=2)
    line.add_argument("--params", type=int, default=25_000_000)
    line.add_argument("--transport", choices=("auto", "shm", "tcp", "grpc"), default="auto")
    line.add_argument("--consistency", choices=list(CONSISTENCIES), default="bsp")
    line.add_argument("--rounds", type=int, default=15, help="turns of each contender (default: %(default)s)")
    line.add_argument("--steps-per-round", type=int, default=8, help="steps of one turn (default: %(default)s)")
    line.add_argument("--json", type=Path, metavar="FILE")
    options = line.parse_args(arguments)
    try:
        result = measure(options)
    except ContenderError as error:
        raise SystemExit(str(error)) from None
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
