"""Many seeds: in several processes, with progress, counters, and the command that shows a failure again."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

#: Seeds that a process takes at a time.
CHUNK = 20


@dataclass
class Summary:
    """What came of some seeds."""

    seeds: int = 0
    cpu_seconds: float = 0.0
    virtual_seconds: float = 0.0
    handles: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, -1)

    def add(self, other: Summary) -> None:
        """Counts those of another."""
        self.seeds += other.seeds
        self.cpu_seconds += other.cpu_seconds
        self.virtual_seconds += other.virtual_seconds
        self.handles += other.handles
        self.counts += other.counts
        self.failures += other.failures
        self.slowest = max(self.slowest, other.slowest)

    @property
    def line(self) -> str:
        """How far it is."""
        each = 1000 * self.cpu_seconds / max(1, self.seeds)
        return (
            f"{self.seeds} seeds, {len(self.failures)} failed; {each:.0f} ms CPU, "
            f"{self.virtual_seconds / max(1, self.seeds):.1f} virtual s and "
            f"{self.handles // max(1, self.seeds)} handles each; "
            f"slowest {self.slowest[0]:.1f} s (seed {self.slowest[1]})"
        )


def prepare() -> None:
    """Once per process: stand-ins, and no collection of garbage but between runs."""
    from tests.simulation import environment, scenario

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    warnings.simplefilter("ignore", RuntimeWarning)  # Coroutines that a crash kept from beginning.
    environment.install()
    scenario.run(0)  # Loads what is loaded late, such as compiled kernels.
    gc.collect()
    gc.freeze()
    gc.disable()


def run_chunk(seeds: Sequence[int]) -> Summary:
    """Some seeds, one after another, in a prepared process."""
    from tests.simulation import scenario

    summary = Summary()
    for seed in seeds:
        result = scenario.run(seed)
        failures = [result.text] if result.violations else []
        summary.add(
            Summary(
                1, result.cpu_seconds, result.virtual_seconds, result.handles, result.counts, failures,
                (result.cpu_seconds, seed),
            )
        )  # fmt: skip
    return summary


def run_many(seeds: Sequence[int], processes: int) -> Iterator[Summary]:
    """These seeds, chunk by chunk as they are done."""
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    with multiprocessing.get_context("spawn").Pool(processes, prepare) as pool:
        yield from pool.imap_unordered(run_chunk, chunks)


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="one seed, in this process")
    parser.add_argument("--trace", action="store_true", help="with --seed: all that happened")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--hashes", action="store_true", help="the trace hash of each seed, and nothing else")
    parser.add_argument("--ablations", nargs="*", metavar="NAME", help="safeguards taken away; without names all")
    given = parser.parse_args(arguments)
    if given.hashes:
        return _hashes(range(given.first, given.first + given.seeds))
    if given.ablations is not None:
        return _ablations(given.ablations, given.processes)
    return _one(given.seed, given.trace) if given.seed is not None else _many(given)


def _hashes(seeds: Iterable[int]) -> int:
    from tests.simulation import scenario

    prepare()
    for seed in seeds:
        print(seed, scenario.run(seed).trace_hash)
    return 0


def hunt(name: str) -> tuple[str, int, str]:
    """Looks for a seed that sees that a safeguard is gone, in a prepared process."""
    from tests.simulation import ablations

    return name, *ablations.hunt(name)


def hunt_all(names: Sequence[str], processes: int) -> Iterator[tuple[str, int, str]]:
    """For each ablation how many seeds it took (0: it was not caught), and what was seen."""
    with multiprocessing.get_context("spawn").Pool(processes, prepare) as pool:
        yield from pool.imap_unordered(hunt, names)


def _ablations(names: Sequence[str], processes: int) -> int:
    from tests.simulation.ablations import ABLATIONS

    missed = 0
    for name, seeds, seen in hunt_all(names or list(ABLATIONS), processes):
        missed += not seeds
        print(f"{f'caught by seed {seeds - 1}' if seeds else 'NOT CAUGHT':20} {name}: {seen:.100}", flush=True)
    return 1 if missed else 0


def _one(seed: int, trace: bool) -> int:
    from tests.simulation import environment, scenario

    environment.install()
    result = scenario.run(seed, trace=trace)
    for line in result.lines:
        print(line)
    for name, count in sorted(result.counts.items()):
        print(f"{count:8} {name}")
    print(f"{result.virtual_seconds:.3f} virtual s, {result.handles} handles, trace {result.trace_hash}")
    print(result.text if result.violations else f"seed {seed}: {result.options.text}\n  nothing is wrong")
    return 1 if result.violations else 0


def _many(given: argparse.Namespace) -> int:
    total, told = Summary(), time.monotonic()
    for part in run_many(range(given.first, given.first + given.seeds), given.processes):
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
