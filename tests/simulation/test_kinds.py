"""Some seeds of each kind of simulated run. ``python -m tests.simulation`` runs more, and removes each safeguard.

The general kind and the one with snapshots have files of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.simulation import lost_runs, runner
from tests.simulation.storage import DAMAGES

#: Seeds of ``make test``, which may take fewer paths: the newest that once showed a defect, and two others.
BRIEFLY = 3


@dataclass(frozen=True)
class Kind:
    """Seeds of a kind of runs.

    known: seeds that once showed a defect, or take rare paths.
    paths: paths that the seeds must have taken.
    """

    first: int
    seeds: int
    known: tuple[int, ...]
    paths: tuple[str, ...]


KINDS = {
    # Ordinary life. In 4522 a worker that has returned leaves before any server saw it in a map.
    "ordinary": Kind(
        300_000,
        12,
        (300043, 4522, 270),
        (
            *("busy", "computed for long", "passed a barrier", "a barrier's time limit was over", "stopped all"),
            *("stopped some", "an exit was lost", "a script ended because it was asked to", "a deadlock was found"),
            *("resumed", "began from a snapshot", "a worker was told of a snapshot"),
            "a server ended without workers",
        ),
    ),
    # Losses of the scheduler's store or of snapshots. Defects: a server, and a scheduler, that knew no parameters ended
    # a worker with UnknownParametersError, and a run was started again whose base could not be read, while an older
    # one could.
    "lost": Kind(
        400_000,
        60,
        (1082, 700163, 800035),
        (
            *lost_runs.KINDS,
            *(f"damaged snapshots: {how}" for how in DAMAGES),
            *("ended everywhere", "continued without the members of a lost record"),
            *("continued from an older snapshot", "scheduler ended: RunLostError", "server ended: ServerLostError"),
            "worker ended: RunLostError",
        ),
    ),
    # Several parameter sets. Defects: pushes held forever at the end of a declared iteration, sets that a rejoined
    # worker left an iteration apart, a report before all sets had entered, a cut of sets that were not all opened, a
    # successor of the last server that was refused forever, gradients of a lost course, sets opened by an expelled
    # worker before it was back in its former sets, a circle of calls of rejoining workers with some calls still in
    # flight, sets without members that two workers returned to in different iterations.
    "sets": Kind(
        500_000,
        34,
        (2, 0, 8, 9, 17, 29, 610293, 600188, 610095, 1406, 600427, 630221, 700239),
        (
            *("iterations started", "cuts where an iteration starts", "weights as of a run that nobody disturbed"),
            *("began from a snapshot", "stopped all", "stopped some", "left after whole iterations", "kill worker"),
            *("join worker", "dropped", "joined again"),
        ),
    ),
    # Scripts that write weights. In the known seeds workers are expelled between a write and its push.
    "writes": Kind(
        700_000,
        40,
        (44, 71),
        (
            *("wrote", "wrote something else", "joined without a write", "refused for different writes"),
            *("wrote again after a refusal", "steps with writes checked", "last writes checked", "a write was dropped"),
            *("snapshots compared", "began from a snapshot", "copies compared", "promoted", "resent"),
            "joined again by a pull",
        ),
    ),
    # Groups of collectives whose members die and are added. Defects: a call that differed while others still confirmed
    # the group, groups left over after joins that failed, workers that were taken in again and again though members
    # could not reach them, and members fewer than ``size_min`` that waited for new workers and did not take them in.
    # Then a frozen worker that alone has the mean of a step, which the others repeat without it; one that is cut off
    # completes a step after them; one that was left out asks a scheduler that has restarted; and one learns of its
    # group from nobody, as its scheduler is gone.
    "groups": Kind(
        700_000,
        200,
        (117, 55, 250, 700035, 802513, 1000110, 1000559, 1003465),
        (
            *("results of all_reduce", "all members admitted new workers", "raised: WorkerLostError"),
            *("raised: ExcludedError", "an answer of the scheduler was lost"),
        ),
    ),
    # Two schedulers.
    "standby": Kind(700_000, 100, (), ("replace scheduler", "a deposed scheduler ended", "resent", "promoted")),
}


@pytest.mark.parametrize("name", KINDS)
def test_three_seeds(name: str) -> None:
    kind = KINDS[name]
    total = _run(name, [*range(kind.first, kind.first + BRIEFLY), *kind.known[-1:]][-BRIEFLY:], processes=1)
    assert not total.failures, "\n".join(total.failures)


@pytest.mark.long  # More of the same.
@pytest.mark.parametrize("name", KINDS)
def test_all_paths_are_taken(name: str) -> None:
    kind = KINDS[name]
    total = _run(name, [*kind.known, *range(kind.first, kind.first + kind.seeds)], processes=2)
    assert not total.failures, "\n".join(total.failures)
    untaken = [path for path in kind.paths if not total.counts[path]]
    assert not untaken, f"no seed took these paths: {untaken}"


def _run(name: str, seeds: list[int], processes: int) -> runner.Summary:
    total = runner.Summary()
    for part in runner.run_many(name, seeds, processes=processes):
        total.add(part)
    print(f"{total.line}, from {KINDS[name].first} on")
    return total
