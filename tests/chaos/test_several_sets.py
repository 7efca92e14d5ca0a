"""Two sets in turn, disturbed at arbitrary moments: the last weights are those of the undisturbed run.

INTERRUPTS is the number of interruptions of runs, KILLS the number of killed servers; SEED chooses other moments.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.launched import Run

INTERRUPTS = int(os.environ.get("INTERRUPTS", "3"))
KILLS = int(os.environ.get("KILLS", "3"))
SEED = int(os.environ.get("SEED", "0"))
SCRIPT = (Path(__file__).parent.parent / "integration" / "client" / "in_turn.py").read_text()
STEPS = 120
#: Longest time of one push. It takes a tenth of that on a machine that does nothing else.
PUSH_SECONDS = 0.05


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    made: list[Run] = []
    yield made
    for run in made:
        run.stop()


def start(path: Path, runs: list[Run], d_steps: int, *flags: str, steps: int = STEPS) -> Run:
    """Start a run in ``path``, from its newest snapshot."""
    path.mkdir(exist_ok=True)
    storage = ("--storage-path", str(path / "runs"), "--run-id", path.name)
    run = Run(path, SCRIPT, str(steps), "0.003", str(path), str(d_steps), flags=(*storage, *flags))
    runs.append(run)
    return run


def end(run: Run, path: Path, pushes: int = 0) -> bytes:
    """Return the last weights of both sets. pushes: number of pushes that are still to be made, if it is large."""
    status, text = run.end(240 + pushes * PUSH_SECONDS)
    assert status == 0, "".join(run.seen) + text
    return final(path)


def final(path: Path) -> bytes:
    """Return the last weights of both sets, as left by a run that has ended."""
    with np.load(path / "weights.npz") as weights:
        return weights["D"].tobytes() + weights["G"].tobytes()


def undisturbed(path: Path, runs: list[Run], d_steps: int, steps: int = STEPS) -> bytes:
    """Return the last weights of a run that nobody disturbs."""
    return end(start(path, runs, d_steps, steps=steps), path, steps * (d_steps + 1))


@pytest.mark.long  # Each interrupt is another run.
@pytest.mark.timeout(300 + 60 * INTERRUPTS)
@pytest.mark.parametrize("d_steps", [1, 5])
def test_interrupts_at_arbitrary_moments(tmp_path: Path, runs: list[Run], d_steps: int) -> None:
    rng = random.Random(f"interrupts {d_steps} {SEED}")
    expected = undisturbed(tmp_path / "undisturbed", runs, d_steps)
    left, chain = INTERRUPTS, 0
    while left:
        path, chain = tmp_path / f"chain-{chain}", chain + 1
        ended, said = False, list[str]()
        while left and not ended:
            run = start(path, runs, d_steps)
            begun = run.until(r"rank 0 begins at \d+ (\d+)")
            left_steps = STEPS - int(begun[1])  # 0 after an interrupt between the last step and the end.
            if lines := rng.randrange(max(1, left_steps * (d_steps + 1))):
                run.until(r"rank 0 is at", lines)
            run.process.send_signal(rng.choice((signal.SIGTERM, signal.SIGINT)))
            status, text = run.end()
            ended = status == 0
            assert status in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT), "".join(run.seen) + text
            said += ["".join(run.seen) + text]
            left -= 1
        weights = final(path) if ended else end(start(path, runs, d_steps), path)
        assert weights == expected, f"seed {SEED}, chain {chain}:\n{'-' * 40}".join(["", *said])


@pytest.mark.long  # Each kill rolls the run back to a snapshot.
@pytest.mark.timeout(600 + 150 * KILLS)
@pytest.mark.parametrize("d_steps", [1, 5])
def test_killed_servers_take_all_sets_back_to_one_iteration(tmp_path: Path, runs: list[Run], d_steps: int) -> None:
    rng, steps = random.Random(f"servers {d_steps} {SEED}"), 400 * (1 + KILLS) // d_steps
    expected = undisturbed(tmp_path / "undisturbed", runs, d_steps, steps)
    path = tmp_path / "killed"
    run = start(path, runs, d_steps, "--save-interval", "1s", "--keep-last", "10000", steps=steps)
    for kill in range(KILLS):
        while len(list(path.glob("runs/commits/*"))) < kill + 1:
            run.until(r"rank 0 is at")
        run.until(r"rank 0 is at", rng.randrange(1, 20))
        while not (servers := run.children("psdist_server")):
            run.until(r"rank 0 is at")
        rng.choice(servers).kill()
        # Not "rolls back": a server that a busy machine starts late finds the run continued, and holds nothing.
        run.until(r"server \d+ died")
        run.until(r"rank 0 is at")
    weights = end(run, path, steps * (d_steps + 1))
    assert weights == expected, f"seed {SEED}:\n{''.join(run.seen)}"
    assert any("rolls back to snapshot" in line for line in run.seen)
