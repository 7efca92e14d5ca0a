"""``make verify``: all tests, part by part, and one table at the end.

A failed part stops no other; the exit status is 1 if any failed. The numbers here make the whole take about an hour and
a half on two cores; those of the environment, or passed to make, override them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

ROOT: Final = Path(__file__).resolve().parents[1]
#: Numbers of the parts, for one hour in all.
NUMBERS: Final = {
    "SEEDS": "4000",
    "ORDINARY_SEEDS": "4000",
    "SETS_SEEDS": "1000",
    "SNAPSHOT_SEEDS": "200",
    "LOST_SEEDS": "200",
    "WRITES_SEEDS": "200",
    "KILLS": "25",
    "INTERRUPTS": "12",
    "ROUNDS": "2000",
    "SCHEDULES": "100",
    "INPUTS": "1000000",
    "CALLS": "1000",
}
#: The last line of pytest.
_SUMMARY: Final = re.compile(r"(\d+ (?:passed|failed|error).*?) in [\d.]+s")


@dataclass(frozen=True, slots=True)
class Part:
    """A target of the Makefile. what: its content, with names of ``NUMBERS`` in braces."""

    target: str
    what: str


PARTS: Final = (
    Part("test", "every check, unit and property tests, some simulated runs and eight real ones"),
    Part("clusters", "connections and processes, from clients and links to launchers, faults and snapshots"),
    Part("frameworks", "training by PyTorch, Hugging Face, Lightning, JAX and Ray"),
    Part("long", "the other tests, and hypothesis with more examples"),
    Part("torch-suite", "PyTorch's tests of torch.distributed on psdist and on gloo, where apt-get has their source"),
    Part(
        "sim",
        "{SEEDS} simulated runs, {ORDINARY_SEEDS} of ordinary life, {SETS_SEEDS} with several sets, "
        "{SNAPSHOT_SEEDS} with snapshots, {LOST_SEEDS} that lose their record or snapshots, {WRITES_SEEDS} that write "
        "weights; ablations",
    ),
    Part(
        "chaos",
        "{KILLS} faults and {INTERRUPTS} interrupts of each kind, {ROUNDS} barriers, {SCHEDULES} schedules of groups, "
        "on real processes",
    ),
    Part(
        "fuzz",
        "{INPUTS} payloads for each group of decoders, and some with bounds checked; {CALLS} calls of every RPC and "
        "inputs at every port",
    ),
    Part("bench", "psdist beside its peers"),
)


@dataclass(frozen=True, slots=True)
class Result:
    """How a part ended. counts: what pytest said, once for each time that it ran."""

    part: Part
    status: int
    seconds: float
    counts: tuple[str, ...]


def run(part: Part, environ: dict[str, str], command: Sequence[str] = ("make",)) -> Result:
    """Run a part to its end and show its output."""
    begin, counts = time.monotonic(), []
    process = subprocess.Popen(
        [*command, part.target],
        cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            print(line, end="", flush=True)
            if match := _SUMMARY.search(line):
                counts.append(match[1])
    return Result(part, process.wait(), time.monotonic() - begin, tuple(counts))


def table(results: Sequence[Result], numbers: dict[str, str]) -> Table:
    """One row for each part, and one for all."""
    shown = Table("target", "what ran", "outcome", title="make verify")
    shown.add_column("seconds", justify="right")
    for result in results:
        outcome = "passed" if result.status == 0 else f"FAILED, status {result.status}"
        what = result.part.what.format_map(numbers)
        shown.add_row(result.part.target, "\n".join((what, *result.counts)), outcome, f"{result.seconds:,.0f}")
    failed = sum(result.status != 0 for result in results)
    total = sum(result.seconds for result in results)
    shown.add_section()
    shown.add_row("verify", f"{len(results)} parts", f"{failed} FAILED" if failed else "passed", f"{total:,.0f}")
    return shown


def main() -> int:
    """The exit status."""
    environ = NUMBERS | dict(os.environ)
    results = [run(part, environ) for part in PARTS]
    # Wide enough for whole rows also where nobody looks at it but a file.
    Console(width=None if sys.stdout.isatty() else 140).print(table(results, environ))
    return int(any(result.status for result in results))


if __name__ == "__main__":
    sys.exit(main())
