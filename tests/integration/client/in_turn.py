"""Two parameter sets that train in turn, as the networks of a GAN: the script of ``test_several_sets``.

    psdist run in_turn.py STEPS PACE DIRECTORY D_STEPS

Each iteration makes D_STEPS steps of "D" and one of "G". Every gradient follows from rank, step and the weights of both
sets. A step that is skipped, repeated or reordered therefore changes the last bytes.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np

import psdist

STEPS, PACE, DIRECTORY, D_STEPS = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
SIZE = 3000


def main() -> None:
    """Train to the end, from the run's current step."""
    with psdist.init() as context:
        rank = context.rank
        names = ("D", "G")
        values = [np.linspace(-1, 1, SIZE, dtype=np.float32), np.linspace(1, -1, SIZE, dtype=np.float32)]
        d, g = (
            context.client.parameters(name, {name: value}, psdist.optim.Adam(lr=0.01))
            for name, value in zip(names, values, strict=True)
        )
        weights = {"D": d.pull()["D"], "G": g.pull()["G"]}
        pace = threading.Event()
        print("rank", rank, "begins at", d.step, g.step, flush=True)
        while g.step < STEPS:
            for handle in (*[d] * D_STEPS, g):
                noise = np.random.default_rng((handle.step, rank, handle is g)).standard_normal(SIZE, np.float32)
                gradient = weights["D"] - weights["G"] + noise
                weights[handle.name] = handle.push_pull({handle.name: gradient})[handle.name]
                print("rank", rank, "is at", d.step, g.step, flush=True)
                pace.wait(PACE)
        if rank == 0:
            np.savez(DIRECTORY / "weights.npz", **weights)
        print("rank", rank, "ends", d.step, g.step, flush=True)


if __name__ == "__main__":
    main()
