"""Workers that each train a part of one model: snapshots and the end of the run have all parts at one step."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

import psdist
from tests.support.launched import Run

_SCRIPT = (Path(__file__).with_name("in_parts.py")).read_text()


def start(path: Path, runs: list[Run], *words: str, flags: tuple[str, ...] = ()) -> Run:
    """Start a run in ``path``, which resumes from its newest snapshot."""
    path.mkdir(exist_ok=True)
    storage = ("--storage-path", str(path / "runs"), "--run-id", path.name, "--nproc-per-node", "4")
    run = Run(path, _SCRIPT, *words, flags=(*storage, *flags))
    runs.append(run)
    return run


def end(run: Run, status: int = 0) -> str:
    """Return the output of a run that ends with ``status``."""
    code, text = run.end()
    everything = "".join(run.seen) + text
    assert code == status, everything
    return everything


def final(path: Path) -> bytes:
    """Return the last weights of both parts."""
    return b"".join(np.load(path / f"part-{part}.npy").tobytes() for part in (0, 1))


@pytest.mark.parametrize(
    ("policy", "interrupts"),
    [("7", 1), *(pytest.param(policy, 2, marks=pytest.mark.long) for policy in ("7", "1s"))],  # long: other moments
)
def test_parts_are_saved_and_resumed_at_one_step(tmp_path: Path, runs: list[Run], policy: str, interrupts: int) -> None:
    end(start(tmp_path / "undisturbed", runs, "30", str(tmp_path / "undisturbed"), "0", "coupled"))
    path = tmp_path / "interrupted"
    for interrupt in range(interrupts):
        run = start(path, runs, "30", str(path), "0.01", "coupled", flags=("--save-interval", policy))
        run.until(r"is at", 20 + 3 * interrupt)
        run.process.send_signal(signal.SIGTERM)
        text = end(run, 128 + signal.SIGTERM)
        saved = psdist.load_snapshot(str(path / "runs")).steps
        assert saved["part/0"] == saved["part/1"], text
    end(start(path, runs, "30", str(path), "0", "coupled"))
    assert final(path) == final(tmp_path / "undisturbed")


def test_sets_of_workers_that_do_not_wait_for_each_other_are_saved_by_themselves(
    tmp_path: Path, runs: list[Run]
) -> None:
    run = start(tmp_path / "run", runs, "100000", str(tmp_path), "0.01", "apart")
    run.until(r"rank 0 is at 20$")
    run.process.send_signal(signal.SIGTERM)
    text = end(run, 128 + signal.SIGTERM)
    saved = psdist.load_snapshot(str(tmp_path / "run/runs")).steps
    assert saved["part/0"] > saved["part/1"] + 3, text
