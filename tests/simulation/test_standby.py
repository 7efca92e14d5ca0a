"""Simulated runs with two schedulers: some seeds, and ablations.

``python -m tests.simulation standby`` runs more of both.
"""

from __future__ import annotations

import pytest

from tests.simulation import runner

FIRST = 700_000
SEEDS = 100
#: Those of make test, which may take fewer paths.
BRIEFLY = 3
#: Paths that these seeds must have taken.
PATHS = ("replace scheduler", "a deposed scheduler ended", "resent", "promoted")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seeds", [BRIEFLY, pytest.param(SEEDS, marks=pytest.mark.long)])
def test_some_seeds(seeds: int) -> None:
    print(f"seeds {FIRST} to {FIRST + seeds - 1}")
    total = runner.Summary()
    for part in runner.run_many("standby", range(FIRST, FIRST + seeds), processes=2 if seeds == SEEDS else 1):
        total.add(part)
    print(total.line)
    assert not total.failures, "\n".join(total.failures)
    untaken = [name for name in PATHS if not total.counts[name] and seeds == SEEDS]
    assert not untaken, f"no seed took these paths: {untaken}"


@pytest.mark.long  # make sim disables each of them, including these.
def test_missing_safeguards_are_seen() -> None:
    names = ("each write compares the leader key", "a scheduler stops when its lease has ended")
    missed = [name for name, seeds, _ in runner.hunt_all("standby", names, processes=2) if not seeds]
    assert not missed
