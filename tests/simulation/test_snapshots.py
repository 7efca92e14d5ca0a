"""Simulated runs with snapshots: some seeds, some faults of the storage, and ablations.

``python -m tests.simulation snapshots`` runs more of all; the long tests here run every fault.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.simulation import runner, snapshot_runner
from tests.simulation.runner import Summary

FIRST = 200_000
SEEDS = 14
#: Those of make test, which may take fewer paths.
BRIEFLY = 3
#: Seeds that once showed a defect: snapshots that were committed while the run rolled back to the previous one, numbers
#: of attempts after a restart, a finished worker that the run waited for forever.
REGRESSIONS = (2, 6043, 137, 532)
#: ``make test`` runs one in this many cases of ``snapshot_faults``.
EACH = 100
#: Paths that these seeds must have taken.
PATHS = (
    "snapshots compared",
    "began from a snapshot",
    "restart everything",
    "a worker was told of a snapshot",
    "ranges done in snapshots",
    "states of scripts compared",
)


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    with multiprocessing.get_context("spawn").Pool(2, snapshot_runner.prepare) as pool:
        yield pool


@pytest.mark.parametrize("seeds", [BRIEFLY, pytest.param(SEEDS, marks=pytest.mark.long)])
def test_some_seeds(pool: Any, seeds: int) -> None:
    known = REGRESSIONS if seeds == SEEDS else REGRESSIONS[-1:]
    total, chosen = Summary(), [*known, *range(FIRST, FIRST + seeds - len(known))]
    for part in pool.imap_unordered(partial(runner.run_chunk, "snapshots"), _chunks(chosen, 11)):
        total.add(part)
    print(total.line)
    assert not total.failures, "\n".join(total.failures)
    untaken = [name for name in PATHS if not total.counts[name] and seeds == SEEDS]
    assert not untaken, f"no seed took these paths: {untaken}"


def test_some_faults_of_the_storage(pool: Any) -> None:
    _run_faults(pool, EACH)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_fault_of_every_operation_of_the_storage(pool: Any) -> None:
    _run_faults(pool, 1)


def _run_faults(pool: Any, each: int) -> None:
    cases = [case for found in pool.map(snapshot_runner.cases, snapshot_runner.RUNS) for case in found][::each]
    assert len(cases) > 300 // each
    results = pool.imap_unordered(snapshot_runner.run_cases, _chunks(cases, snapshot_runner.CASES))
    failures = [failure for _, failures in results for failure in failures]
    assert not failures, "\n".join(failures)


def _chunks(items: Any, size: int) -> list[Any]:
    return [items[at : at + size] for at in range(0, len(items), size)]
