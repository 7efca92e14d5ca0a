"""A training whose weights identify every step: the script of ``test_interrupts``.

    psdist run interrupted.py STEPS PACE DIRECTORY

Each worker adds 1 to an element of its own in every step of "counts". If a step was applied without a worker, its
element is 0, and those of the others are more than 1. "dense" is updated by Adam, with gradients that follow from rank,
step and weights, so its bytes show every earlier difference. Each worker writes the number of its answered steps to
DIRECTORY, and rank 0 writes the weights after each step.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np

import psdist

STEPS, PACE, DIRECTORY = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
DENSE = 3000


def main() -> None:
    """Train to the end, from the run's current step."""
    with psdist.init() as context:
        rank, world = context.rank, context.world_size
        zeros = np.zeros(STEPS * world, np.float32)
        counts = context.client.parameters("counts", {"counts": zeros}, psdist.optim.SGD(lr=1.0))
        dense = context.client.parameters(
            "dense", {"dense": np.linspace(-1, 1, DENSE, dtype=np.float32)}, psdist.optim.Adam(lr=0.01)
        )
        answered = np.memmap(DIRECTORY / f"answered-{rank}", np.int64, "r+" if exists(rank) else "w+", shape=(2,))
        values = dense.pull()["dense"]
        pace = threading.Event()
        states = np.lib.format.open_memmap(DIRECTORY / "states.npy", "r+") if rank == 0 else None
        while dense.step < STEPS:
            if counts.step == dense.step:
                mine = np.zeros_like(zeros)
                mine[counts.step * world + rank] = -world
                counts.push_pull({"counts": mine})
                answered[0] = counts.step
            step = dense.step
            noise = np.random.default_rng((step, rank)).standard_normal(DENSE, np.float32)
            values = dense.push_pull({"dense": values + noise})["dense"]
            answered[1] = dense.step
            if states is not None:
                states[dense.step] = values
            pace.wait(PACE)


def exists(rank: int) -> bool:
    """True if this rank has run before."""
    return (DIRECTORY / f"answered-{rank}").exists()


if __name__ == "__main__":
    main()
