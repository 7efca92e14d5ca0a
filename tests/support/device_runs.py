"""Run whose servers are on devices, and the digests of its weights."""

from __future__ import annotations

import re

from tests.support.launched import Run

TRAIN = """
import hashlib, os, sys
import numpy as np
import psdist

rank, steps, clip, count = int(os.environ["RANK"]), int(sys.argv[1]), float(sys.argv[2]), 300_000
client = psdist.init().client
weights = client.parameters(
    "model", {"w": np.linspace(-1, 1, count, dtype=np.float32)}, psdist.optim.Adam(lr=0.01, max_grad_norm=clip),
    slice_elements=int(sys.argv[3]))
values = weights.pull()
while weights.step < steps:
    rng = np.random.default_rng([rank, weights.step])
    gradient = {"w": values["w"] * 0.1 + rng.standard_normal(count, dtype=np.float32)}
    values = weights.push_pull(gradient, copy=weights.step % 2 == 0)
    print(f"rank {rank} made step {weights.step} {hashlib.sha256(values['w'].tobytes()).hexdigest()}", flush=True)
"""


def ended(run: Run) -> str:
    status, text = run.end()
    everything = "".join(run.seen) + text
    assert status == 0, everything
    assert "Traceback" not in everything, everything
    return everything


def digests_of(text: str, step: int) -> set[str]:
    """Return the digests of both workers' weights after ``step`` steps."""
    found = re.findall(rf"rank \d made step {step} (\w{{64}})", text)
    assert len(found) == 2, text
    return set(found)
