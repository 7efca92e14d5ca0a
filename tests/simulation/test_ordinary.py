"""Simulated runs of ordinary life: some seeds, and ablations.

``python -m tests.simulation ordinary`` runs more of both.
"""

from __future__ import annotations

import pytest

from tests.simulation import runner

FIRST = 300_000
SEEDS = 12
#: Those of make test, which may take fewer paths.
BRIEFLY = 1
#: Seeds that take rare paths. If the order of messages changes, other seeds take them. In 4522 a worker that has
#: returned leaves before any server saw it in a map.
RARE = (300043, 4522, 270)
#: Paths that these seeds must have taken.
PATHS = (
    "busy",
    "computed for long",
    "passed a barrier",
    "a barrier's time limit was over",
    "stopped all",
    "stopped some",
    "an exit was lost",
    "a script ended because it was asked to",
    "a circle was found",
    "resumed",
    "began from a snapshot",
    "a worker was told of a snapshot",
    "a server ended without workers",
)
#: Safeguards whose absence is detected within a few seeds.
QUICK = (
    "workers have a lease of their own",
    "an arrival that is withdrawn does not count",
    "workers that end together agree on a step",
    "workers that wait for each other are found",
    "shards are moved from a server that ends when nothing else changes",
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seeds", [BRIEFLY, pytest.param(SEEDS, marks=pytest.mark.long)])
def test_some_seeds(seeds: int) -> None:
    print(f"seeds {FIRST} to {FIRST + seeds - 1}")
    total = runner.Summary()
    for part in runner.run_many(
        "ordinary", [*RARE, *range(FIRST, FIRST + seeds)], processes=2 if seeds == SEEDS else 1
    ):
        total.add(part)
    print(total.line)
    assert not total.failures, "\n".join(total.failures)
    untaken = [name for name in PATHS if not total.counts[name] and seeds == SEEDS]
    assert not untaken, f"no seed took these paths: {untaken}"


@pytest.mark.long  # make sim disables each of them, including these.
def test_missing_safeguards_are_seen() -> None:
    missed = [name for name, seeds, _ in runner.hunt_all("ordinary", QUICK, processes=2) if not seeds]
    assert not missed
