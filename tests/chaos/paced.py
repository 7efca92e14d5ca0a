"""A training whose weights show whether each step counted once, and which measures its longest pause.

    python paced.py RANK WORKERS STEPS PACE MODE

Gradients are whole numbers, so that the sum of ASP does not depend on the order. Prints one line of JSON at the end.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time

import numpy as np

import psdist

RANK, WORKERS, STEPS, PACE, MODE = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
ELEMENTS = 50_000


def main() -> None:
    """Train to the end."""
    consistency = psdist.BSP() if MODE == "bsp" else psdist.ASP()
    with psdist.init() as context:
        handle = context.client.parameters(
            "w", {"w": np.zeros(ELEMENTS, np.float32)}, psdist.optim.SGD(lr=1.0), consistency, slice_elements=5000
        )
        handle.pull()
        context.client.barrier("begin")
        longest, pause_at, before, pace = 0.0, 0, time.monotonic(), threading.Event()
        for step in range(STEPS):
            gradient = np.full(ELEMENTS, 2.0 * (1 + step % 3), np.float32)
            gradient[step % ELEMENTS] += 2.0 * RANK
            handle.push_pull({"w": gradient})
            now = time.monotonic()
            if step > 10 and now - before > longest:
                longest, pause_at = now - before, step
            before = now
            pace.wait(PACE)
        context.client.barrier("end")
        weights = handle.pull()["w"]
        context.client.barrier("read")
    digest = hashlib.sha256(weights.tobytes()).hexdigest()
    print(json.dumps({"digest": digest, "first": float(weights[0]), "pause": longest, "at": pause_at}), flush=True)


if __name__ == "__main__":
    main()
