"""Every fault of the storage in runs with snapshots: ``python -m tests.simulation snapshots --faults``.

``runner`` holds the parts shared with other runs.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence

from tests.simulation import runner
from tests.simulation.storage import FAULTS

KIND = "snapshots"
#: Number of cases that a process takes per chunk.
CASES = 10
#: Names of the runs of ``snapshot_faults``.
RUNS = ("bsp", "asp")


def prepare() -> None:
    """Prepare a process, once."""
    from tests.simulation import snapshot_faults

    assert snapshot_faults
    runner.prepare(KIND)


def cases(run: str) -> list[object]:
    """Return all cases of a run of RUNS, in a prepared process."""
    from tests.simulation import snapshot_faults

    return list(snapshot_faults.cases(run))


def run_cases(given: Sequence[object]) -> tuple[int, list[str]]:
    """Run cases in a prepared process. Returns their number and the failures."""
    from tests.simulation import snapshot_faults

    failed = snapshot_faults.run_cases(given)
    return len(given), [f"{case.text} (--case {case.number} {case.fault!r})\n  {seen[0]}" for case, seen in failed]


def run_faults(runs: Sequence[str], processes: int, each: int = 1) -> Iterator[tuple[int, list[str]]]:
    """Run every ``each``-th case of these runs. Yields, per chunk, the number of cases and the failures."""
    with multiprocessing.get_context("spawn").Pool(processes, prepare) as pool:
        all_cases = [case for found in pool.map(cases, runs) for case in found][::each]
        chunks = [all_cases[at : at + CASES] for at in range(0, len(all_cases), CASES)]
        yield from pool.imap_unordered(run_cases, chunks)


def main(arguments: Sequence[str]) -> int:
    """Run the command line."""
    parser = runner.parser_of(KIND)
    parser.add_argument("--faults", nargs="*", metavar="RUN", help="each fault of each operation; without names all")
    parser.add_argument("--case", nargs=3, metavar=("RUN", "NUMBER", "FAULT"), help=f"one of them: {', '.join(FAULTS)}")
    given = parser.parse_args(arguments)
    if given.faults is not None:
        return _all_faults(given.faults, given.processes)
    if given.case is not None:
        run, number, fault = given.case
        return _one(run, number, fault, given.trace)
    return runner.carry_out(KIND, given)


def _one(run: str, number: str, fault: str, trace: bool) -> int:
    from tests.simulation import snapshot_faults

    prepare()
    case = next(c for c in snapshot_faults.cases(run) if c.number == int(number) and c.fault == fault)
    return runner.tell(snapshot_faults.run_case(case, trace=trace), KIND)


def _all_faults(runs: Sequence[str], processes: int) -> int:
    total, failed = 0, 0
    for count, failures in run_faults(runs or RUNS, processes):
        total, failed = total + count, failed + len(failures)
        for failure in failures:
            print(failure, flush=True)
    print(f"{total} cases, {failed} failed")
    return 1 if failed else 0
