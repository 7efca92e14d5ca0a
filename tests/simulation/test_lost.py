"""Simulated runs that lose the scheduler's store or their snapshots: some seeds, and ablations.

``python -m tests.simulation lost`` runs more of both.
"""

from __future__ import annotations

import pytest

from tests.simulation import lost_runs, runner
from tests.simulation.storage import DAMAGES

FIRST = 400_000
SEEDS = 60
#: Those of make test, which may take fewer paths.
BRIEFLY = 3
#: Seeds that once showed a defect: a server, and a scheduler, that knew no parameters ended a worker with
#: UnknownParametersError, and a run that was started again whose base could not be read, while an older one could.
REGRESSIONS = (1082, 700163, 800035)
#: Paths that these seeds must have taken.
PATHS = (
    *lost_runs.KINDS,
    *(f"damaged snapshots: {how}" for how in DAMAGES),
    "ended everywhere",
    "continued without the members of a lost record",
    "continued from an older snapshot",
    "scheduler ended: RunLostError",
    "server ended: ServerLostError",
    "worker ended: RunLostError",
)
#: Safeguards whose absence is detected within a few seeds.
QUICK = (
    "a member whose map is not on record is refused",
    "a new store remembers that the run was lost",
    "a run that is left without a readable snapshot ends",
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seeds", [BRIEFLY, pytest.param(SEEDS, marks=pytest.mark.long)])
def test_some_seeds(seeds: int) -> None:
    print(f"seeds {FIRST} to {FIRST + seeds - 1}")
    total = runner.Summary()
    for part in runner.run_many(
        "lost", [*REGRESSIONS, *range(FIRST, FIRST + seeds)], processes=2 if seeds == SEEDS else 1
    ):
        total.add(part)
    print(total.line)
    assert not total.failures, "\n".join(total.failures)
    untaken = [name for name in PATHS if not total.counts[name] and seeds == SEEDS]
    assert not untaken, f"no seed took these paths: {untaken}"


@pytest.mark.long  # make sim disables each of them, including these.
def test_missing_safeguards_are_seen() -> None:
    missed = [name for name, seeds, _ in runner.hunt_all("lost", QUICK, processes=2) if not seeds]
    assert not missed
