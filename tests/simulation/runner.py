"""Many seeds: in several processes, with progress, counters, and the command that shows a failure again.

There are runs of several kinds; each has a module that runs a seed and one with its ablations.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

#: Number of seeds that a process takes per chunk.
CHUNK = 20
#: Kinds of runs; "" is the general one.
KINDS: Final = ("", "snapshots", "ordinary", "lost", "sets", "writes", "groups", "standby")


@dataclass
class Summary:
    """Results of some seeds."""

    seeds: int = 0
    cpu_seconds: float = 0.0
    virtual_seconds: float = 0.0
    handles: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, -1)

    def add(self, other: Summary) -> None:
        """Add the results of another summary."""
        self.seeds += other.seeds
        self.cpu_seconds += other.cpu_seconds
        self.virtual_seconds += other.virtual_seconds
        self.handles += other.handles
        self.counts += other.counts
        self.failures += other.failures
        self.slowest = max(self.slowest, other.slowest)

    @property
    def line(self) -> str:
        """Progress, as one line."""
        each = 1000 * self.cpu_seconds / max(1, self.seeds)
        return (
            f"{self.seeds} seeds, {len(self.failures)} failed; {each:.0f} ms CPU, "
            f"{self.virtual_seconds / max(1, self.seeds):.1f} virtual s and "
            f"{self.handles // max(1, self.seeds)} handles each; "
            f"slowest {self.slowest[0]:.1f} s (seed {self.slowest[1]})"
        )


def runs_of(kind: str) -> Any:
    """Return the module with ``run`` and ``draw`` of a kind of runs."""
    from tests.simulation import groups, lost_runs, ordinary, scenario, sets, snapshots, standby, writes

    return dict(zip(KINDS, (scenario, snapshots, ordinary, lost_runs, sets, writes, groups, standby), strict=True))[
        kind
    ]


def ablations_of(kind: str) -> Any:
    """Return the module with ``ABLATIONS`` and ``hunt`` of a kind of runs."""
    from tests.simulation import (
        ablations,
        group_ablations,
        lost_ablations,
        ordinary_ablations,
        sets_ablations,
        snapshot_ablations,
        standby_ablations,
        write_ablations,
    )

    tables = (
        ablations, snapshot_ablations, ordinary_ablations, lost_ablations, sets_ablations, write_ablations,
        group_ablations, standby_ablations,
    )  # fmt: skip
    return dict(zip(KINDS, tables, strict=True))[kind]


def prepare(kind: str = "") -> None:
    """Prepare a process, once: install the stand-ins, and collect garbage only between runs."""
    from tests.simulation import environment, scenario

    warnings.simplefilter("ignore", RuntimeWarning)  # Coroutines that a crash kept from starting.
    # Modules must be loaded before the environment replaces parts of them.
    assert runs_of(kind) and ablations_of(kind)
    environment.install()
    scenario.run(0)  # Loads everything that is loaded late, such as compiled kernels.
    gc.collect()
    gc.freeze()
    gc.disable()


def run_chunk(kind: str, seeds: Sequence[int]) -> Summary:
    """Run some seeds, one after another, in a prepared process."""
    run, summary = runs_of(kind).run, Summary()
    for seed in seeds:
        result = run(seed)
        failures = [text_of(result, kind)] if result.violations else []
        summary.add(
            Summary(
                1, result.cpu_seconds, result.virtual_seconds, result.handles, result.counts, failures,
                (result.cpu_seconds, seed),
            )
        )  # fmt: skip
    return summary


def text_of(result: Any, kind: str) -> str:
    """Return the violations of a run of this kind, and the command that reproduces it."""
    again = " ".join(["python -m tests.simulation", *([kind] if kind else []), f"--seed {result.seed} --trace"])
    return f"{result.text}\nagain: {again}"


def run_many(kind: str, seeds: Sequence[int], processes: int) -> Iterator[Summary]:
    """Run these seeds and yield the summary of each chunk when it is done."""
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    with multiprocessing.get_context("spawn").Pool(processes, prepare, (kind,)) as pool:
        yield from pool.imap_unordered(partial(run_chunk, kind), chunks)


def hunt(kind: str, name: str) -> tuple[str, int, str]:
    """Look for a seed that detects the removal of a safeguard, in a prepared process."""
    return name, *ablations_of(kind).hunt(name)


def hunt_all(kind: str, names: Sequence[str], processes: int) -> Iterator[tuple[str, int, str]]:
    """Yield for each ablation the number of seeds that it took (0: not caught), and the violation found."""
    with multiprocessing.get_context("spawn").Pool(processes, prepare, (kind,)) as pool:
        yield from pool.imap_unordered(partial(hunt, kind), names)


def parser_of(kind: str) -> argparse.ArgumentParser:
    """Return the command line parser of a kind of runs."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.simulation {kind}".strip(), description=__doc__)
    parser.add_argument("--seed", type=int, help="one seed, in this process")
    parser.add_argument("--trace", action="store_true", help="with --seed: all that happened")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--hashes", action="store_true", help="the trace hash of each seed, and nothing else")
    parser.add_argument("--ablations", nargs="*", metavar="NAME", help="safeguards taken away; without names all")
    return parser


def main(kind: str, arguments: Sequence[str]) -> int:
    """Run a command line."""
    return carry_out(kind, parser_of(kind).parse_args(arguments))


def carry_out(kind: str, given: argparse.Namespace) -> int:
    """Carry out the parsed arguments."""
    if given.hashes:
        return _hashes(kind, range(given.first, given.first + given.seeds))
    if given.ablations is not None:
        return _ablations(kind, given.ablations, given.processes)
    if given.seed is not None:
        prepare(kind)
        status = tell(runs_of(kind).run(given.seed, trace=given.trace), kind)
        sys.unraisablehook = lambda _: None  # Objects of the run that die with this process may complain.
        return status
    return _many(kind, given)


def _hashes(kind: str, seeds: Iterable[int]) -> int:
    prepare(kind)
    for seed in seeds:
        print(seed, runs_of(kind).run(seed).trace_hash)
    return 0


def _ablations(kind: str, names: Sequence[str], processes: int) -> int:
    known, missed = list(ablations_of(kind).ABLATIONS), 0
    if unknown := [name for name in names if name not in known]:
        print(f"no safeguard is named {unknown[0]!r}; these are:", *known, sep="\n  ", file=sys.stderr)
        return 2
    for name, seeds, seen in hunt_all(kind, names or known, processes):
        missed += not seeds
        print(f"{f'caught by seed {seeds - 1}' if seeds else 'NOT CAUGHT':20} {name}: {seen:.100}", flush=True)
    return 1 if missed else 0


def tell(result: Any, kind: str) -> int:
    """Print everything about one run. Returns the exit status."""
    for line in result.lines:
        print(line)
    for name, count in sorted(result.counts.items()):
        print(f"{count:8} {name}")
    print(f"{result.virtual_seconds:.3f} virtual s, {result.handles} handles, trace {result.trace_hash}")
    print(text_of(result, kind) if result.violations else f"{result.text}\n  nothing is wrong")
    return 1 if result.violations else 0


def _many(kind: str, given: argparse.Namespace) -> int:
    total, told = Summary(), time.monotonic()
    for part in run_many(kind, range(given.first, given.first + given.seeds), given.processes):
        total.add(part)
        for failure in part.failures:
            print(failure, flush=True)
        if time.monotonic() > told + 10:
            told = time.monotonic()
            print(total.line, flush=True)
    for name, count in sorted(total.counts.items()):
        print(f"{count:10} {name}")
    print(total.line)
    return 1 if total.failures else 0
