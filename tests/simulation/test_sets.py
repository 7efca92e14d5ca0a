"""Simulated runs with several parameter sets: some seeds, and ablations.

``python -m tests.simulation sets`` runs more of both.
"""

from __future__ import annotations

import pytest

from tests.simulation import runner

FIRST = 500_000
SEEDS = 34
#: Those of make test, which may take fewer paths.
BRIEFLY = 1
#: Seeds that once showed a defect: pushes held forever at the end of a declared iteration, sets that a rejoined worker
#: left an iteration apart, a report before all sets had entered, a cut of sets that were not all opened, a successor of
#: the last server that was refused forever, gradients of a lost course, sets opened by an expelled worker before it was
#: back in its former sets, a circle of calls of rejoining workers with some calls still in flight, sets without members
#: that two workers returned to in different iterations.
REGRESSIONS = (2, 0, 8, 9, 17, 29, 610293, 600188, 610095, 1406, 600427, 630221, 700239)
#: Paths that these seeds must have taken.
PATHS = (
    "iterations started",
    "cuts where an iteration starts",
    "weights as of a run that nobody disturbed",
    "began from a snapshot",
    "stopped all",
    "stopped some",
    "left after whole iterations",
    "kill worker",
    "join worker",
    "dropped",
    "joined again",
)
#: Safeguards whose absence is detected within a few seeds.
QUICK = ("workers that end are held where an iteration starts", "all sets are joined together")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seeds", [BRIEFLY, pytest.param(SEEDS, marks=pytest.mark.long)])
def test_some_seeds(seeds: int) -> None:
    print(f"seeds {FIRST} to {FIRST + seeds - 1}")
    total = runner.Summary()
    known = REGRESSIONS if seeds == SEEDS else REGRESSIONS[-BRIEFLY:]
    for part in runner.run_many("sets", [*known, *range(FIRST, FIRST + seeds)], processes=2 if seeds == SEEDS else 1):
        total.add(part)
    print(total.line)
    assert not total.failures, "\n".join(total.failures)
    untaken = [name for name in PATHS if not total.counts[name] and seeds == SEEDS]
    assert not untaken, f"no seed took these paths: {untaken}"


@pytest.mark.long  # make sim disables each of them, including these.
def test_missing_safeguards_are_seen() -> None:
    missed = [name for name, seeds, _ in runner.hunt_all("sets", QUICK, processes=2) if not seeds]
    assert not missed
