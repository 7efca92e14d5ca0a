"""One training step beside its peers, in the same run, in turns: ``python -m benchmarks.step --peer gloo``.

It measures the time in which a step's gradients become new weights at all workers, from gradients that exist before the
clock starts, for psdist and for its alternatives. Ratios are peer / psdist: above 1 psdist is faster.

It asserts nothing, and its figures are those of this machine at this moment.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import figures, machine, registry
from benchmarks.contenders import ContenderError, run_all
from benchmarks.psdist_step import CONSISTENCIES, OPTIMIZERS
from benchmarks.turns import Settings
from psdist.types import WIRE_DTYPES


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.step", description="One training step beside its peers.")
    line.add_argument("--workers", type=int, default=2)
    line.add_argument("--servers", type=int, default=2)
    line.add_argument("--params", type=int, default=25_000_000)
    line.add_argument("--replicas", type=int, choices=(1, 2), default=1, help="copies of psdist's shards")
    line.add_argument("--transport", choices=("auto", "shm", "tcp", "grpc"), default="auto")
    line.add_argument("--wire-dtype", choices=WIRE_DTYPES, default="float32", help="of psdist and the echoes")
    line.add_argument("--consistency", choices=list(CONSISTENCIES), default="bsp", help="of psdist")
    line.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adam", help="of psdist; peers have Adam")
    line.add_argument("--copy", action="store_true", help="psdist's plain calls, with arrays of one's own")
    line.add_argument("--peer", action="append", choices=[*registry.PEERS, "all"], default=[], help="may be repeated")
    line.add_argument(
        "--install-peers", action="store_true", help="install ray, tensorflow and pyarrow where they are asked for"
    )
    line.add_argument("--rounds", type=int, default=15, help="turns of each contender (default: %(default)s)")
    line.add_argument("--steps-per-round", type=int, default=4, help="steps of one turn (default: %(default)s)")
    line.add_argument("--json", type=Path, metavar="FILE")
    line.add_argument("--plot", type=Path, metavar="FILE", help="a bar chart, for instance step.png")
    return line


def settings_of(options: argparse.Namespace) -> Settings:
    """Return the settings of the contenders."""
    return Settings(
        params=options.params,
        workers=options.workers,
        servers=options.servers,
        replicas=options.replicas,
        transport=options.transport,
        wire_dtype=options.wire_dtype,
        consistency=options.consistency,
        optimizer=options.optimizer,
        copy=options.copy,
    )


def choose(wanted: Sequence[str], *, install: bool) -> tuple[list[str], dict[str, str]]:
    """Return the peers that can take part, and why the others cannot."""
    names = list(registry.PEERS) if "all" in wanted else list(dict.fromkeys(wanted))
    for name in names:
        if install and name in registry.ENVIRONMENTS and registry.missing(name):
            environment = registry.ENVIRONMENTS[name]
            print(f"installing {', '.join(registry.PACKAGES[environment])}", flush=True)
            registry.install(environment)
    reasons = {name: reason for name in names if (reason := registry.missing(name))}
    return [name for name in names if name not in reasons], reasons


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all contenders and return the content of ``--json``."""
    settings = settings_of(options)
    names, reasons = choose(options.peer, install=options.install_peers)
    contenders = [registry.psdist(settings, settings.transport), *(registry.PEERS[name](settings) for name in names)]
    rounds, facts = run_all(contenders, options.rounds, options.steps_per_round)
    result = figures.result(rounds)
    result["peers"] |= {name: {"missing": reason} for name, reason in reasons.items()}
    result["psdist"]["transports"] = facts["psdist"][0]["transports"]
    result["settings"] = asdict(settings) | {"rounds": options.rounds}
    result["machine"] = machine.facts()
    return result


def table(result: dict[str, Any]) -> str:
    """Return the result as text."""
    lines = [f"{'psdist':12}{result['psdist_ms']:9.1f} ms   {transports(result)}"]
    for name, peer in result["peers"].items():
        if "missing" in peer:
            lines.append(f"{name:12}{peer['missing']:>9}")
        else:
            low, high = peer["spread"]
            lines.append(
                f"{name:12}{peer['ms']:9.1f} ms   {peer['ratio']:5.2f} x psdist's time ({low:.2f} to {high:.2f})"
            )
    return "\n".join(lines)


def transports(result: dict[str, Any]) -> str:
    """Return how psdist reached its servers."""
    return ", ".join(sorted(set(result["psdist"]["transports"].values())))


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw a bar for each contender."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    shown = {"psdist": result["psdist"]} | {name: one for name, one in result["peers"].items() if "ms" in one}
    figure = Figure(figsize=(7, 0.6 + 0.5 * len(shown)), layout="constrained")
    axes = figure.subplots()
    medians = [one["ms"] for one in shown.values()]
    low, high = zip(*(one["ms_spread"] for one in shown.values()), strict=True)
    reach = [
        [max(0.0, m - edge) for m, edge in zip(medians, low, strict=True)],
        [max(0.0, edge - m) for m, edge in zip(medians, high, strict=True)],
    ]
    bars = axes.barh(list(shown), medians, xerr=reach, color=["#2a6f97", *["#adb5bd"] * (len(shown) - 1)])
    axes.bar_label(bars, fmt="%.0f", padding=4)
    axes.invert_yaxis()
    settings = result["settings"]
    axes.set_xlabel("ms a step (median; lines: 10th to 90th percentile of the rounds)")
    axes.set_title(f"{settings['params']:,} parameters, {settings['workers']} workers, {settings['servers']} servers")
    figure.savefig(path)


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
    if options.plot:
        plot(result, options.plot)


if __name__ == "__main__":
    main()
