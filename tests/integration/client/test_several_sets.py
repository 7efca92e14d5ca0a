"""Scripts that train several parameter sets in turn, with real processes. After any interruption they resume at the
start of an iteration for all sets, and workers join all sets there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

import psdist
from tests.support.launched import Run

_SCRIPT = (Path(__file__).with_name("in_turn.py")).read_text()


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    made: list[Run] = []
    yield made
    for run in made:
        run.stop()


def start(path: Path, runs: list[Run], steps: int, d_steps: int, *flags: str) -> Run:
    """Start a run in ``path``, which resumes from its newest snapshot."""
    path.mkdir(exist_ok=True)
    storage = ("--storage-path", str(path / "runs"), "--run-id", path.name)
    run = Run(path, _SCRIPT, str(steps), "0.01", str(path), str(d_steps), flags=(*storage, *flags))
    runs.append(run)
    return run


def end(run: Run, status: int = 0) -> str:
    """Return the output of a run that ends with ``status``."""
    code, text = run.end()
    everything = "".join(run.seen) + text
    assert code == status, everything
    return everything


def undisturbed(path: Path, runs: list[Run], steps: int, d_steps: int) -> bytes:
    """Return the last weights of a run that nobody disturbs."""
    end(start(path, runs, steps, d_steps))
    return final(path)


def final(path: Path) -> bytes:
    """Return the last weights of both sets."""
    with np.load(path / "weights.npz") as weights:
        return weights["D"].tobytes() + weights["G"].tobytes()


@pytest.mark.parametrize("lines", [1, *(pytest.param(lines, marks=pytest.mark.long) for lines in (2, 3))])
def test_a_run_that_is_stopped_in_its_first_iterations_is_saved_between_two(
    tmp_path: Path, runs: list[Run], lines: int
) -> None:
    """Nothing shows yet where an iteration starts: the run trains on until something does."""
    run = start(tmp_path / "stopped", runs, 4000, 1)
    run.until(r"rank 0 is at", lines)
    run.process.send_signal(signal.SIGINT)
    text = end(run, 128 + signal.SIGINT)
    saved = psdist.load_snapshot(str(tmp_path / "stopped" / "runs")).steps
    assert saved["D"] == saved["G"], text


@pytest.mark.long  # The test above saves such runs, test_parts resumes sets at one step, and the simulation has both.
@pytest.mark.parametrize(("d_steps", "interrupts"), [(1, 1), (1, 2), (5, 3)])
def test_interrupted_runs_resume_where_an_iteration_starts(
    tmp_path: Path, runs: list[Run], d_steps: int, interrupts: int
) -> None:
    steps = 40
    expected = undisturbed(tmp_path / "undisturbed", runs, steps, d_steps)
    path = tmp_path / "interrupted"
    for interrupt in range(interrupts):
        run = start(path, runs, steps, d_steps)
        run.until(r"rank 0 is at", 2 * (d_steps + 1))
        for _ in range(1 + interrupt % (d_steps + 1)):  # before, within and after an iteration
            run.until(r"rank 0 is at")
        run.process.send_signal(signal.SIGTERM)
        text = end(run, 128 + signal.SIGTERM)
        saved = psdist.load_snapshot(str(path / "runs")).steps
        assert saved["D"] == d_steps * saved["G"], text
    text = end(start(path, runs, steps, d_steps))
    assert f"rank 0 ends {steps * d_steps} {steps}" in text, text
    assert final(path) == expected, text


def worker_of(run: Run, rank: int) -> psutil.Process:
    """Return the process of a rank's script."""
    scripts = [child for child in run.family.children(recursive=True) if "train.py" in child.cmdline()]
    return next(script for script in scripts if script.environ().get("RANK") == str(rank))


def test_a_worker_that_was_killed_joins_all_sets_in_one_iteration(tmp_path: Path, runs: list[Run]) -> None:
    run = start(tmp_path / "killed", runs, 150, 1, "--max-restarts", "5")
    for _ in range(2):
        run.until(r"rank 1 is at", 20)
        worker_of(run, 1).kill()
        run.until(r"rank 1 begins at")
    text = end(run)
    assert "wait for each other" not in text, text
    assert "rank 0 ends 150 150" in text and "rank 1 ends 150 150" in text, text


@pytest.mark.long  # The test above joins all sets in one iteration; the simulation of sets adds workers, too.
@pytest.mark.parametrize(("counts", "steps"), [((3,), 200), ((3, 2, 4), 600)])
def test_workers_are_added_to_all_sets_in_one_iteration(
    tmp_path: Path, runs: list[Run], counts: tuple[int, ...], steps: int
) -> None:
    run = start(tmp_path / "scaled", runs, steps, 1)
    for workers in counts:
        run.until(r"rank 0 is at", 20)
        scale = [sys.executable, "-m", "psdist.cli.main", "scale", "workers", str(workers)]
        done = subprocess.run(
            scale, cwd=tmp_path / "scaled", env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path / "scaled")},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        if workers > 2:
            rank = run.until(r"rank (\d+) begins at [1-9]")[1]
            run.until(rf"rank {rank} is at", 5)
    text = end(run)
    assert "wait for each other" not in text, text
    assert f"rank 0 ends {steps} {steps}" in text, text


@pytest.mark.long  # The simulation of several sets cuts such snapshots, too.
@pytest.mark.parametrize("d_steps", [1, 5])
def test_periodic_snapshots_are_cut_where_an_iteration_starts(tmp_path: Path, runs: list[Run], d_steps: int) -> None:
    steps = 300 // d_steps
    expected = undisturbed(tmp_path / "undisturbed", runs, steps, d_steps)
    path = tmp_path / "saved"
    run = start(path, runs, steps, d_steps, "--save-interval", "1s", "--keep-last", "50")
    while len(list(path.glob("runs/commits/*"))) < 2:
        run.until(r"rank 0 is at")
    run.stop()  # This end saves nothing.
    # The run may have been killed while it wrote one.
    texts = [file.read_text() for file in (path / "runs" / "commits").iterdir()]
    commits = [json.loads(text) for text in texts if text]
    cuts = [commit["steps"] for commit in commits]
    assert len(cuts) > 1 and all(cut["D"] == d_steps * cut["G"] for cut in cuts), cuts
    text = end(start(path, runs, steps, d_steps))
    assert final(path) == expected, text
