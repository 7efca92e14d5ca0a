"""Runs with snapshots, many at a time: ``python -m tests.simulation snapshots``. As ``runner``, which it uses."""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator, Sequence

from tests.simulation import runner
from tests.simulation.runner import CHUNK, Summary
from tests.simulation.storage import FAULTS

#: Cases that a process takes at a time.
CASES = 10
#: Names of the runs of ``snapshot_faults``.
RUNS = ("bsp", "asp")


def prepare() -> None:
    """Once per process. What the environment replaces parts of must be loaded before."""
    from tests.simulation import snapshot_ablations, snapshot_faults

    assert snapshot_ablations and snapshot_faults
    runner.prepare()


def run_chunk(seeds: Sequence[int]) -> Summary:
    """Some seeds, one after another, in a prepared process."""
    from tests.simulation import snapshots

    summary = Summary()
    for seed in seeds:
        result = snapshots.run(seed)
        again = f"\nagain: python -m tests.simulation snapshots --seed {seed} --trace"
        failures = [result.text.partition("\nagain")[0] + again] if result.violations else []
        summary.add(
            Summary(
                1, result.cpu_seconds, result.virtual_seconds, result.handles, result.counts, failures,
                (result.cpu_seconds, seed),
            )
        )  # fmt: skip
    return summary


def run_many(first: int, count: int, processes: int) -> Iterator[Summary]:
    """The seeds from ``first`` on, chunk by chunk as they are done."""
    seeds = range(first, first + count)
    chunks = [seeds[at : at + CHUNK] for at in range(0, count, CHUNK)]
    with multiprocessing.get_context("spawn").Pool(processes, prepare) as pool:
        yield from pool.imap_unordered(run_chunk, chunks)


def cases(run: str) -> list[object]:
    """All cases of a run of RUNS, in a prepared process."""
    from tests.simulation import snapshot_faults

    return list(snapshot_faults.cases(run))


def run_cases(given: Sequence[object]) -> tuple[int, list[str]]:
    """How many there were, and what is wrong; in a prepared process."""
    from tests.simulation import snapshot_faults

    failed = snapshot_faults.run_cases(given)  # type: ignore[arg-type]
    return len(given), [f"{case.text} (--case {case.number} {case.fault!r})\n  {seen[0]}" for case, seen in failed]


def run_faults(runs: Sequence[str], processes: int, each: int = 1) -> Iterator[tuple[int, list[str]]]:
    """Every ``each``-th case of these runs: how many there were, and those that broke a promise."""
    with multiprocessing.get_context("spawn").Pool(processes, prepare) as pool:
        all_cases = [case for found in pool.map(cases, runs) for case in found][::each]
        chunks = [all_cases[at : at + CASES] for at in range(0, len(all_cases), CASES)]
        yield from pool.imap_unordered(run_cases, chunks)


def hunt(name: str) -> tuple[str, int, str]:
    """Looks for a run that sees that a safeguard is gone, in a prepared process."""
    from tests.simulation import snapshot_ablations

    return name, *snapshot_ablations.hunt(name)


def hunt_all(names: Sequence[str], processes: int) -> Iterator[tuple[str, int, str]]:
    """For each ablation how many runs it took (0: it was not caught), and what was seen."""
    with multiprocessing.get_context("spawn").Pool(processes, prepare) as pool:
        yield from pool.imap_unordered(hunt, names)


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation snapshots", description=__doc__)
    parser.add_argument("--seed", type=int, help="one seed, in this process")
    parser.add_argument("--trace", action="store_true", help="with --seed or --case: all that happened")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--faults", nargs="*", metavar="RUN", help="each fault of each operation; without names all")
    parser.add_argument("--case", nargs=3, metavar=("RUN", "NUMBER", "FAULT"), help=f"one of them: {', '.join(FAULTS)}")
    parser.add_argument("--ablations", nargs="*", metavar="NAME", help="safeguards taken away; without names all")
    given = parser.parse_args(arguments)
    if given.ablations is not None:
        return _ablations(given.ablations, given.processes)
    if given.faults is not None:
        return _all_faults(given.faults, given.processes)
    if given.case is not None or given.seed is not None:
        return _one(given)
    return _many(given)


def _one(given: argparse.Namespace) -> int:
    from tests.simulation import snapshot_faults, snapshots

    prepare()
    if given.case is not None:
        run, number, fault = given.case
        case = next(c for c in snapshot_faults.cases(run) if c.number == int(number) and c.fault == fault)
        result = snapshot_faults.run_case(case, trace=given.trace)
    else:
        result = snapshots.run(given.seed, trace=given.trace)
    for line in result.lines:
        print(line)
    for name, count in sorted(result.counts.items()):
        print(f"{count:8} {name}")
    print(f"{result.virtual_seconds:.3f} virtual s, {result.handles} handles, trace {result.trace_hash}")
    print(result.text if result.violations else f"{result.options.text}\n  nothing is wrong")
    return 1 if result.violations else 0


def _all_faults(runs: Sequence[str], processes: int) -> int:
    total, failed = 0, 0
    for count, failures in run_faults(runs or RUNS, processes):
        total, failed = total + count, failed + len(failures)
        for failure in failures:
            print(failure, flush=True)
    print(f"{total} cases, {failed} failed")
    return 1 if failed else 0


def _ablations(names: Sequence[str], processes: int) -> int:
    from tests.simulation.snapshot_ablations import ABLATIONS

    missed = 0
    for name, runs, seen in hunt_all(names or list(ABLATIONS), processes):
        missed += not runs
        print(f"{f'caught by run {runs}' if runs else 'NOT CAUGHT':20} {name}: {seen:.100}", flush=True)
    return 1 if missed else 0


def _many(given: argparse.Namespace) -> int:
    total = Summary()
    for part in run_many(given.first, given.seeds, given.processes):
        total.add(part)
        for failure in part.failures:
            print(failure, flush=True)
    for name, count in sorted(total.counts.items()):
        print(f"{count:10} {name}")
    print(total.line)
    return 1 if total.failures else 0
