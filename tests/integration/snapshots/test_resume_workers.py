"""Runs that resume three times in a row with other numbers of workers, from snapshots of each kind: a periodic one and
a requested one after the whole run was killed, the one of a stopped run, and one that the run rolls back to.

Each sample adds 1 to its own weight, so the final weights count how often each was used. Real processes.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import psdist
from tests.support.launched import Run

SIZE, EPOCHS, RANGE = 403, 2, 5
_SCRIPT = """
import json
import os
import pathlib
import signal
import sys
import time
import numpy as np
import psdist

reads, mode, how, at = *sys.argv[1:4], int(sys.argv[4])
SIZE, EPOCHS, RANGE, GLOBAL_BATCH = 403, 2, 5, 12
texts = [np.ones(1 + number % 7) for number in range(SIZE)]
go = pathlib.Path("go")

def snapshots(reason):
    found = pathlib.Path("snapshots").glob("snapshots/*/manifest.json")
    return {path for path in found if json.loads(path.read_text())["reason"] == reason}

def batches(context, weights):
    if reads == "order":  # Batches of all workers together; each takes its part.
        sampler = psdist.data.DistributedSampler(SIZE, num_replicas=1, rank=0, seed=5)
        count = -(-SIZE // GLOBAL_BATCH)
        while weights.step < EPOCHS * count:
            data_epoch, number = divmod(weights.step, count)
            sampler.set_epoch(data_epoch)
            batch = sampler.indices()[GLOBAL_BATCH * number : GLOBAL_BATCH * (number + 1)]
            yield batch[context.rank :: context.world_size]
        return
    data = context.client.dataset("samples", SIZE, RANGE, seed=5, data_epochs=EPOCHS)
    if reads == "leases":
        yield from data
    else:
        batcher = psdist.data.DynamicBatcher(4, buckets=(2, 4, 7), capacity=12)
        yield from (batch.indices for batch in batcher.leased(texts, data))

with psdist.init() as context:
    consistency = psdist.BSP(reduction="sum") if mode == "BSP" else psdist.ASP()
    optimizer = psdist.optim.Adam(0.01) if reads == "order" else psdist.optim.SGD(1.0)
    weights = context.client.parameters("uses", {"w": np.zeros(SIZE, np.float32)}, optimizer, consistency)
    values = weights.pull()["w"]
    print("rank", context.rank, "of", context.world_size, "begins at", weights.version, flush=True)
    reason = "on demand" if how == "request" else "every 4 steps"
    waits = how != "none" and (context.rank == 0 or mode == "ASP")  # In BSP they wait for rank 0 anyway.
    before = snapshots(reason)
    for number, indices in enumerate(batches(context, weights)):
        if context.rank == 0 and number == at:
            if how == "request":
                context.client.request_snapshot()
            elif how == "stop":
                os.kill(os.getppid(), signal.SIGTERM)  # The launcher.
        for _ in range(100 if waits and number > at else 0):  # The data must last until the snapshot, or the signal.
            if how != "stop" and snapshots(reason) - before:
                waits = False
                print("rank", context.rank, "is ready at", weights.version, flush=True)
                while how != "rollback" or not go.exists():
                    if reads == "order":  # The batch was chosen by the step before.
                        time.sleep(0.01)
                    else:
                        weights.pull()
                break
            context.client.status()
        gradient = np.zeros(SIZE, np.float32)
        gradient[indices] = -1.0
        if reads == "order":  # Whole numbers, so that their sum is exact.
            gradient[indices] = np.where(values[indices] > 0.05, 3.0, -1.0 - indices % 5)
        values = weights.push_pull({"w": gradient})["w"]
    assert not waits, "there was no snapshot or signal"
    print("rank", context.rank, "ends", flush=True)
"""


class History:
    """Runs of one script with one storage."""

    def __init__(self, path: Path, reads: str, mode: str) -> None:
        self.path = path
        self._arguments = reads, mode
        self.runs: list[Run] = []

    def life(self, how: str, workers: int, at: int = 0) -> str:
        """Start or resume the run, and end it in this way. Returns its output.

        at: number of batches of rank 0 before it happens.
        """
        flags = ("--storage-path", "snapshots", "--run-id", "uses", "--save-interval", "4", "--max-restarts", "0")
        flags = (*flags, "--keep-last", "50", "--nservers", "1", "--nproc-per-node", str(workers))
        self.path.mkdir(exist_ok=True)
        run = Run(self.path, _SCRIPT, *self._arguments, how, str(at), flags=flags)
        self.runs.append(run)
        if how in ("periodic", "request", "rollback"):
            # All of them, because a kill of the launcher loses the lines that it has not written yet.
            run.until(rf"rank \d of {workers} begins|rank 0 is ready", count=workers + 1)
        if how in ("periodic", "request"):
            run.kill_all()
        if how == "rollback":
            run.child("psdist_server").kill()
            run.until("rolls back to snapshot")
            (self.path / "go").touch()
        status, text = run.end()
        text = "".join(run.seen) + text
        assert "Traceback" not in text, text
        assert (status == 0) == (how in ("none", "rollback")), text
        assert len(re.findall(rf"rank \d of {workers} begins at", text)) == workers, text
        return text

    def result(self) -> tuple[NDArray[np.float32], int]:
        """Return the final weights, and the number of repeated ranges."""
        snapshot = psdist.load_snapshot(str(self.path / "snapshots"))
        manifest = json.loads(
            (self.path / "snapshots" / "snapshots" / snapshot.directory / "manifest.json").read_text()
        )
        repeated = sum(state["position"]["repeated_ranges"] for state in manifest["datasets"])
        return np.asarray(snapshot["w"]), repeated


@pytest.fixture
def history_of(tmp_path: Path) -> Iterator[Callable[..., History]]:
    made: list[History] = []

    def history_of(reads: str, mode: str, name: str = "run") -> History:
        made.append(History(tmp_path / name, reads, mode))
        return made[-1]

    yield history_of
    for history in made:
        for run in history.runs:
            run.stop()


def _disturb(history: History, seed: int | None) -> None:
    """Run the script to its end in four lives. seed: draws how and where they end, and their workers; None for fixed
    ones."""
    lives, places = [("periodic", 2), ("request", 3), ("stop", 1), ("rollback", 2)], [3, 5, 4, 2]
    if seed is not None:
        rng = random.Random(seed)
        hows = rng.sample(["periodic", "request", "stop"], 3)
        lives = [(how, rng.randint(1, 4)) for how in (*hows, "rollback")]
        places = [rng.randint(0, 7) for _ in lives]
    print("seed", seed, lives, places)
    for (how, workers), at in zip(lives, places, strict=True):
        print(history.life(how, workers, at))


@pytest.mark.parametrize("seed", [None, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4))])
@pytest.mark.parametrize("mode", ["BSP", pytest.param("ASP", marks=pytest.mark.long)])
def test_each_leased_sample_is_used_once(history_of: Callable[..., History], mode: str, seed: int | None) -> None:
    history = history_of("leases", mode)
    _disturb(history, seed)
    uses, repeated = history.result()
    assert (uses == EPOCHS).all() and repeated == 0, f"{np.unique(uses, return_counts=True)}, repeated {repeated}"


@pytest.mark.parametrize("seed", [None, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4))])
def test_batches_of_leased_ranges_repeat_only_counted_ranges(
    history_of: Callable[..., History], seed: int | None
) -> None:
    history = history_of("batches", "BSP")
    _disturb(history, seed)
    uses, repeated = history.result()
    assert (uses >= EPOCHS).all() and (uses - EPOCHS).sum() <= RANGE * repeated, f"repeated {repeated}: {uses}"


@pytest.mark.parametrize("seed", [None, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4))])
def test_parts_of_common_batches_give_the_bytes_of_an_undisturbed_run(
    history_of: Callable[..., History], seed: int | None
) -> None:
    undisturbed, history = history_of("order", "BSP", "undisturbed"), history_of("order", "BSP")
    undisturbed.life("none", 2)
    _disturb(history, seed)
    expected, _ = undisturbed.result()
    assert history.result()[0].tobytes() == expected.tobytes()
