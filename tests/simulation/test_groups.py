"""Simulated groups of collectives whose members die and are added: some seeds, and ablations.

``python -m tests.simulation groups`` runs more of both.
"""

from __future__ import annotations

import pytest

from tests.simulation import runner

FIRST = 700_000
SEEDS = 200
#: Those of make test, which may take fewer paths.
BRIEFLY = 4
#: Seeds that once showed a defect: a call that differed while others still confirmed the group, groups left over after
#: joins that failed, workers that were taken in again and again though members could not reach them, and members fewer
#: than ``size_min`` that waited for new workers and did not take them in. Then a frozen worker that alone has the mean
#: of a step, which the others repeat without it; one that is cut off completes a step after them; one that was left out
#: asks a scheduler that has restarted; and one learns of its group from nobody, as its scheduler is gone.
REGRESSIONS = (117, 55, 250, 700035, 802513, 1000110, 1000559, 1003465)
#: Paths that these seeds must have taken.
PATHS = (
    "results of all_reduce",
    "all members admitted new workers",
    "raised: WorkerLostError",
    "raised: ExcludedError",
    "an answer of the scheduler was lost",
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seeds", [BRIEFLY, pytest.param(SEEDS, marks=pytest.mark.long)])
def test_some_seeds(seeds: int) -> None:
    print(f"seeds {FIRST} to {FIRST + seeds - 1}")
    total = runner.Summary()
    for part in runner.run_many(
        "groups", [*REGRESSIONS, *range(FIRST, FIRST + seeds)], processes=2 if seeds == SEEDS else 1
    ):
        total.add(part)
    print(total.line)
    assert not total.failures, "\n".join(total.failures)
    untaken = [name for name in PATHS if not total.counts[name] and seeds == SEEDS]
    assert not untaken, f"no seed took these paths: {untaken}"


@pytest.mark.long  # make sim disables each of them, including these.
@pytest.mark.timeout(400)
def test_missing_safeguards_are_seen() -> None:
    quick = ("messages carry the epoch of their group", "calls are compared")
    missed = [name for name, seeds, _ in runner.hunt_all("groups", quick, processes=2) if not seeds]
    assert not missed
