"""Parts of a model: sets of some workers each, in one iteration because the workers exchange values. The script of
``test_parts``.

    psdist run --nproc-per-node 4 in_parts.py STEPS DIRECTORY PACE IS_COUPLED

Workers 0 and 1 train "part/0", workers 2 and 3 train "part/1". Every gradient follows from rank, step and the weights
of both parts, so a step of one part that is skipped or repeated changes the last bytes.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

import psdist
from psdist.errors import LateWorkerError

STEPS, DIRECTORY, PACE, IS_COUPLED = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "coupled"


def main() -> None:
    """Train to the end, from the run's current step."""
    with psdist.init() as context:
        rank, part = context.rank, context.rank // 2
        replicas = context.subset([2 * part, 2 * part + 1])
        assert (replicas.rank, replicas.world_size) == (rank % 2, 2)
        start = np.linspace(-1, 1, 3000, dtype=np.float32) + part
        name = f"w{part}"
        handle = replicas.client.parameters(f"part/{part}", {name: start}, psdist.optim.Adam(lr=0.01))
        weights = handle.pull()[name]
        group, pace = context.new_group([rank % 2, rank % 2 + 2]), threading.Event()
        if IS_COUPLED:
            assert context.common_step(handle.step) == handle.step
        else:
            with suppress(LateWorkerError):
                context.common_step(part)
                raise AssertionError("parts at steps 0 and 1 have a common step")
        print("rank", rank, "begins at", handle.step, flush=True)
        while handle.step < STEPS:
            others = group.all_reduce(weights) if IS_COUPLED else weights
            noise = np.random.default_rng((handle.step, rank)).standard_normal(3000, np.float32)
            pace.wait(PACE * (1 + 9 * part))  # Part 0 has mostly made one step more than part 1.
            weights = handle.push_pull({name: weights + others + noise})[name]
            print("rank", rank, "is at", handle.step, flush=True)
        if rank % 2 == 0:
            np.save(DIRECTORY / f"part-{part}.npy", weights)
        assert replicas.collectives.all_reduce(1) == 2


if __name__ == "__main__":
    main()
