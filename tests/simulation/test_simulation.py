"""The whole cluster under simulated faults: some seeds, the same seeds in another process, and ablations.

``make sim`` runs more of all.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from psdist.wire import convert
from tests.simulation import runner, scenario
from tests.simulation.options import CUT_OFF, REPLICATED, SINGLE, draw

ROOT = Path(__file__).resolve().parents[2]
FIRST = 100_000
SEEDS = 20
#: Those of make test, and as many of the regressions.
BRIEFLY = 3
#: Number of runs in each half of the leak test.
RUNS = 16
#: Seeds that once showed a defect of psdist or of the simulation: in the network's order, lives of workers, servers
#: drained early, copies given up too early, drains without workers, confirmations, ends of memberships, late answers,
#: empty entries of duplicate tables, commits of expelled workers, long cuts and consecutive pauses.
REGRESSIONS = (
    642, 3476, 4025, 7471, 3137, 3318, 3516, 4917, 5634, 7010, 11017, 6761, 9619, 11507, 13694, 41421, 200866, 201004,
    201891, 311078, 2000039, 2000432, 2000442, 2002761, 2003633, 5001113,
)  # fmt: skip
#: Number of seeds within which every path must have been taken. One seed in a hundred takes some of them; any change to
#: the order of messages changes which.
SEEDS_MAX = 3000
#: Paths that one seed in a few thousand takes, with faults that make them likely.
RARE = {
    "a filling is in doubt": ("a filling is in doubt", "kill server"),
    "a join met a new primary": ("join worker", "kill server"),
    "disk lost a write": ("kill scheduler",),
}
#: Interesting paths, besides the faults themselves, that these seeds must have taken.
PATHS = (
    "keepalive",
    "stalled",
    "resent",
    "dropped",
    "copies compared",
    "lags compared",
    "skipped",
    "tables compared",
    "drained",
    "promoted",
    "demoted",
    "term above 1",
    "a copy began",
    "a copy was complete",
    "a stream resumed from the replica's state",
    "a primary heard that it is none",
    "a contribution came again",
    "a push came again",
    "a first step was refused",
    "workers joined together",
    CUT_OFF,
    "cut off for longer than a lease",
    "trained on beside a cut",
    "worker lost: no path",
    "server lost: no path",
    "followed: map_difference",
    "told: FencedError",
    "told: StaleEpochError",
    "told: StaleTermError",
    *(f"cut: {shape}" for shape in ("request", "response", "flight")),
)


@pytest.mark.parametrize("seeds", [BRIEFLY, pytest.param(SEEDS, marks=pytest.mark.long)])
def test_some_seeds(seeds: int) -> None:
    known, total = REGRESSIONS if seeds == SEEDS else REGRESSIONS[-BRIEFLY:], runner.Summary()
    for part in runner.run_many("", [*known, *range(FIRST, FIRST + seeds)], processes=2 if seeds == SEEDS else 1):
        total.add(part)
    print(f"{total.line}, from {FIRST} on")
    assert not total.failures, "\n".join(total.failures)


@pytest.mark.long  # Hundreds of runs, which show something about the simulation.
@pytest.mark.timeout(900)
def test_every_path_is_taken() -> None:
    """Run seeds until every path was taken."""
    seeds, total = [*REGRESSIONS, *range(FIRST, FIRST + SEEDS_MAX)], runner.Summary()
    for part in runner.run_many("", seeds, processes=2):
        total.add(part)
        untaken = [n for n in (*SINGLE, *REPLICATED, *PATHS) if not total.counts[n] and n not in RARE]
        if total.failures or not untaken:
            break
    print(f"{total.line}, from {FIRST} on")
    assert not total.failures, "\n".join(total.failures)
    assert not untaken, f"no seed took these paths: {untaken}"


def _until_taken(path: str) -> tuple[str, str]:
    """Run seeds with the faults of a path until one takes it. Returns the path and its failure, empty for none."""
    for seed in range(FIRST, FIRST + SEEDS_MAX):
        options = replace(draw(seed), servers=3, workers=3, replicas=2, lives=7, faults=RARE[path], fault_count=5)
        result = scenario.run(seed, options)
        if result.violations or result.counts[path]:
            return path, result.text if result.violations else ""
    return path, "no seed took it"


@pytest.mark.long  # Thousands of runs.
@pytest.mark.timeout(900)
def test_rare_paths() -> None:
    with multiprocessing.get_context("spawn").Pool(2, runner.prepare) as pool:
        failures = [(path, failure) for path, failure in pool.imap_unordered(_until_taken, RARE) if failure]
    assert not failures


def _left_behind(runs: int) -> tuple[Counter[str], int]:
    """Return the objects, by type, and the number of memory blocks that remain after ``2 * runs`` seeds beyond those
    that remain after ``runs``. Call in a prepared process."""
    counts = []
    for half in range(2):
        for seed in range(FIRST + half * runs, FIRST + (half + 1) * runs):
            scenario.run(seed)
        for cached in convert.CACHED:
            cached.cache_clear()
        gc.collect()
        types = (type(thing) for thing in gc.get_objects())
        counts.append((Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in types), sys.getallocatedblocks()))
    (before, blocks_before), (after, blocks_after) = counts
    return after - before, blocks_after - blocks_before


@pytest.mark.long  # Checks the simulation.
def test_runs_leave_nothing_behind() -> None:
    """Check that runs leave no objects behind. Otherwise each further seed would take a process more time. A run has
    thousands of objects at its end. Caches that are filled once, such as Python's for abstract types, may fill late."""
    with multiprocessing.get_context("spawn").Pool(1, runner.prepare) as pool:
        objects, blocks = pool.apply(_left_behind, (RUNS,))
    assert objects.total() < 10 * RUNS, objects.most_common(10)
    assert blocks < 50 * RUNS


def _hashes(python: str, hash_seed: str) -> str:
    command = [python, "-m", "tests.simulation", "--hashes", "--first", str(FIRST), "--seeds", "2"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "servers")])
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    hashes = _hashes(sys.executable, "1")
    assert len(set(hashes.splitlines())) == 2
    assert _hashes(sys.executable, "2") == hashes


def _python(version: str) -> str:
    """Return a Python interpreter with psdist's dependencies, or skip the test if none exists."""
    python = shutil.which(f"python{version}")
    needed = "import grpc, google.protobuf, numpy, numba, structlog, psutil, xxhash, uvloop, ml_dtypes"
    if python is None or subprocess.run([python, "-c", needed], capture_output=True, check=False).returncode:
        pytest.skip(f"no Python {version} that has what psdist needs")
    return python


def test_a_seed_gives_the_same_run_in_newer_pythons() -> None:
    """Compare two newer versions. 3.11 differs: its asyncio takes more steps in ``gather`` and ``wait_for``."""
    assert _hashes(_python("3.12"), "0") == _hashes(_python("3.13"), "1")
