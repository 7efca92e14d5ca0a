"""Simulated runs whose scripts write weights: some seeds, and ablations.

``python -m tests.simulation writes`` runs more of both.
"""

from __future__ import annotations

import pytest

from tests.simulation import runner

FIRST = 700_000
SEEDS = 40
#: Those of make test, which may take fewer paths.
BRIEFLY = 3
#: Seeds in which workers are expelled between a write and its push.
EXPELLED = (44, 71)
#: Paths that these seeds must have taken.
PATHS = (
    "wrote",
    "wrote something else",
    "joined without a write",
    "refused for different writes",
    "wrote again after a refusal",
    "steps with writes checked",
    "last writes checked",
    "a write was dropped",
    "snapshots compared",
    "began from a snapshot",
    "copies compared",
    "promoted",
    "resent",
    "joined again by a pull",
)
#: Safeguards whose absence is detected within a few seeds.
QUICK = ("a write counts in one update", "copies get what was written", "a refused push is withdrawn")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seeds", [BRIEFLY, pytest.param(SEEDS, marks=pytest.mark.long)])
def test_some_seeds(seeds: int) -> None:
    print(f"seeds {FIRST} to {FIRST + seeds - 1}")
    total = runner.Summary()
    for part in runner.run_many(
        "writes", [*EXPELLED, *range(FIRST, FIRST + seeds)], processes=2 if seeds == SEEDS else 1
    ):
        total.add(part)
    print(total.line)
    assert not total.failures, "\n".join(total.failures)
    untaken = [name for name in PATHS if not total.counts[name] and seeds == SEEDS]
    assert not untaken, f"no seed took these paths: {untaken}"


@pytest.mark.long  # make sim disables each of them, including these.
def test_missing_safeguards_are_seen() -> None:
    missed = [name for name, seeds, _ in runner.hunt_all("writes", QUICK, processes=2) if not seeds]
    assert not missed
