"""Runs that are interrupted at random moments and resume: each snapshot is of a step that all workers have made, and
the weights are those of the uninterrupted run, byte for byte.

``INTERRUPTS`` in the environment is the number of interrupts of each kind, ``SEED`` selects their moments.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import psdist

INTERRUPTS = int(os.environ.get("INTERRUPTS", "4"))
SEED = int(os.environ.get("SEED", "0"))
SCRIPT = Path(__file__).with_name("interrupted.py")
#: Steps of a run, and minimum seconds of each: several interrupts come before its end.
STEPS, PACE = 400, 0.01
LATEST_SECONDS, END_SECONDS = 6.0, 120.0


@dataclass
class Chain:
    """One run that resumes after each interrupt."""

    path: Path
    workers: int
    name: str
    #: The dense weights after each step of the run that nobody interrupted.
    states: np.ndarray
    output: list[str] = field(default_factory=list)

    def start(self) -> subprocess.Popen[bytes]:
        """Start the run, from its beginning or its newest snapshot, in a process group of its own."""
        self.path.mkdir(exist_ok=True)
        if not (self.path / "states.npy").exists():
            np.save(self.path / "states.npy", np.zeros_like(self.states))
        log = (self.path / "log").open("ab")
        command = [
            *(sys.executable, "-m", "psdist.cli.main", "run", "--nservers", "2", "--run-id", self.name),
            *("--nproc-per-node", str(self.workers), "--storage-path", str(self.path / "runs")),
            *(str(SCRIPT), str(STEPS), str(PACE), str(self.path)),
        ]
        environment = os.environ | {"XDG_RUNTIME_DIR": str(self.path)}
        with log:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def interrupted(self, kind: str, seconds: float) -> int:
        """Return the exit status of a run, which is limited to this many seconds."""
        begin = self.size()
        process = self.start()
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        if kind == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        elif process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        status = process.wait(END_SECONDS)
        # Before the launcher has started any work the interpreter ends in its own way.
        return status if self.size() > begin and "psdist: run" in self.log(begin) else 0

    def size(self) -> int:
        """Return how many bytes were printed."""
        return (self.path / "log").stat().st_size if (self.path / "log").exists() else 0

    def log(self, begin: int = -6000) -> str:
        """Return the end of the processes' output."""
        return (self.path / "log").read_text("utf-8", "replace")[begin:]

    def check(self) -> int:
        """Check that the newest snapshot has all answered steps of all workers. Returns its step, 0 for none."""
        answered = [np.fromfile(file, np.int64) for file in self.path.glob("answered-*")]
        most = [max((int(row[number]) for row in answered), default=0) for number in (0, 1)]
        if not list(self.path.glob("runs/commits/*")):
            assert most == [0, 0], (most, self.log())
            return 0
        snapshot = psdist.load_snapshot(str(self.path / "runs"))
        counts, dense = snapshot.steps["counts"], snapshot.steps.get("dense", 0)
        assert counts >= most[0] and dense >= most[1], (counts, dense, most, self.log())
        expected = np.zeros(STEPS * self.workers, np.float32)
        expected[: counts * self.workers] = 1
        assert np.array_equal(snapshot["counts"], expected), self.log()
        assert dense in (counts, counts - 1), (dense, counts, self.log())
        if dense:
            assert snapshot["dense"].tobytes() == self.states[dense].tobytes(), self.log()
        return dense


@pytest.fixture(scope="module", params=[2, 4])
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, np.ndarray]:
    """A number of workers, and the weights after each step of their run."""
    path = tmp_path_factory.mktemp("undisturbed")
    chain = Chain(path, request.param, "undisturbed", np.zeros((STEPS + 1, 3000), np.float32))
    assert chain.start().wait(END_SECONDS) == 0, chain.log()
    chain.states = np.load(path / "states.npy")
    assert chain.check() == STEPS
    return request.param, chain.states


@pytest.mark.long
@pytest.mark.timeout(300 + 60 * INTERRUPTS)
@pytest.mark.parametrize("kind", ["SIGTERM", "SIGINT to the group"])
def test_every_interrupt_leaves_an_exact_snapshot(
    undisturbed: tuple[int, np.ndarray], kind: str, tmp_path: Path
) -> None:
    workers, states = undisturbed
    seed = f"{kind} {workers} {SEED}"
    print("seed", seed)
    rng = random.Random(seed)
    left, number = INTERRUPTS, 0
    while left:
        chain = Chain(tmp_path / str(number), workers, f"chain-{number}", states)
        number += 1
        step = 0
        while step < STEPS and left:
            status = chain.interrupted(kind, LATEST_SECONDS * rng.random())
            assert status in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT), (status, chain.log())
            before, step = step, chain.check()
            assert step >= before, (before, step, chain.log())
            left -= 1
        assert chain.start().wait(END_SECONDS) == 0, chain.log()
        assert chain.check() == STEPS
