"""Scripts that train several parameter sets in turn, with real processes. After any interruption they resume at the
start of an iteration for all sets, and workers join all sets there."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

import psdist
from tests.support.launched import Run

_SCRIPT = (Path(__file__).with_name("in_turn.py")).read_text()


def start(path: Path, runs: list[Run], steps: int, *flags: str) -> Run:
    """Start a run in ``path``, which resumes from its newest snapshot."""
    path.mkdir(exist_ok=True)
    storage = ("--storage-path", str(path / "runs"), "--run-id", path.name)
    run = Run(path, _SCRIPT, str(steps), "0.01", str(path), "1", flags=(*storage, *flags))
    runs.append(run)
    return run


def end(run: Run, status: int = 0) -> str:
    """Return the output of a run that ends with ``status``."""
    code, text = run.end()
    everything = "".join(run.seen) + text
    assert code == status, everything
    return everything


@pytest.mark.parametrize("lines", [1, *(pytest.param(lines, marks=pytest.mark.long) for lines in (2, 3))])
def test_a_run_that_is_stopped_in_its_first_iterations_is_saved_between_two(
    tmp_path: Path, runs: list[Run], lines: int
) -> None:
    """Nothing shows yet where an iteration starts: the run trains on until something does."""
    run = start(tmp_path / "stopped", runs, 4000)
    run.until(r"rank 0 is at", lines)
    run.process.send_signal(signal.SIGINT)
    text = end(run, 128 + signal.SIGINT)
    saved = psdist.load_snapshot(str(tmp_path / "stopped" / "runs")).steps
    assert saved["D"] == saved["G"], text


def worker_of(run: Run, rank: int) -> psutil.Process:
    """Return the process of a rank's script."""
    scripts = [child for child in run.family.children(recursive=True) if "train.py" in child.cmdline()]
    return next(script for script in scripts if script.environ().get("RANK") == str(rank))


def test_a_worker_that_was_killed_joins_all_sets_in_one_iteration(tmp_path: Path, runs: list[Run]) -> None:
    run = start(tmp_path / "killed", runs, 150, "--max-restarts", "5")
    for _ in range(2):
        run.until(r"rank 1 is at", 20)
        worker_of(run, 1).kill()
        run.until(r"rank 1 begins at")
    text = end(run)
    assert "wait for each other" not in text, text
    assert "rank 0 ends 150 150" in text and "rank 1 ends 150 150" in text, text
