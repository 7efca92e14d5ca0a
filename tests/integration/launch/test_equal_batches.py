"""Workers that train on the same batches are warned in their own log, and others are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launched import Run

#: Without an end of its own, so that the warning cannot come too late: the test waits for it.
_SCRIPT = """
import sys
import numpy as np
import psdist
kind = sys.argv[1]
with psdist.init() as context:
    batches = np.random.default_rng(0 if kind == "equal" else context.rank)
    weights = context.client.parameters("w", {"w": np.zeros((100, 100), np.float32)}, psdist.optim.SGD(lr=0.1))
    flags = context.client.parameters("flags", {"flags": np.zeros(100, np.float32)}, psdist.optim.Mean())
    steps = 0
    while kind == "equal" or steps < 200:
        weights.push_pull({"w": batches.normal(size=(100, 100)).astype(np.float32)})
        flags.push_pull({"flags": np.ones(100, np.float32)})
        steps += 1
"""
_FLAGS = ("--nservers", "2", "--storage-path", "none", "--max-restarts", "0")


@pytest.mark.parametrize("transport", ["shm", "grpc", pytest.param("tcp", marks=pytest.mark.long)])
def test_workers_with_the_same_batches_are_warned_once(tmp_path: Path, transport: str) -> None:
    with Run(tmp_path, _SCRIPT, "equal", flags=_FLAGS, transport=transport) as run:
        line = run.until("same batches").string
    assert "ranks 0 and 1 push the same gradients of 'w'" in line and "[worker 0]" in line, line
    assert "DistributedSampler" in line and "rank::" in line and "LeasedDataLoader" in line


def test_workers_with_their_own_batches_are_not_warned(tmp_path: Path) -> None:
    code, text = Run.ended(tmp_path, _SCRIPT, "own", flags=_FLAGS)
    assert code == 0 and "same" not in text, text
