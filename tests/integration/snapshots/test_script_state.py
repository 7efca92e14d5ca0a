"""Scripts with state of several kinds: stopped in several ways and resumed, they end with the weights of an undisturbed
run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launched import Run

STEPS = 30
_SCRIPT = """
import hashlib
import os
import random
import signal
import sys
import threading
import numpy as np
import psdist

how, at = sys.argv[1], int(sys.argv[2])

with psdist.init() as context:
    weights = context.client.parameters("p", {"w": np.ones(50, np.float32)}, psdist.optim.Adam(0.1))
    random.seed(context.rank)
    np.random.seed(context.rank)
    state = {"taken": np.zeros(1, np.int64), "average": np.zeros(50), "buffer": np.zeros((4, 50)), "level": np.ones(1),
             "scale": np.full(1, 1024.0), "good": np.zeros(1, np.int64)}
    weights.keep_state(lambda: state, state.update, random_generators=True)
    data = np.random.default_rng(7).normal(size=(30, 50))
    values, is_stopped = weights.pull()["w"], False
    while weights.step < 30:
        state["average"] += 0.1 * (values - state["average"])  # Of the weights of this step.
        taken = int(state["taken"][0])
        state["taken"] += 1
        sample = data[taken] * state["level"][0] + np.random.normal(size=50) + random.random()
        state["buffer"][taken % 4] = sample
        gradient = state["buffer"].mean(0) + state["average"] + values
        state["level"] += np.abs(gradient).mean() < 3  # A curriculum.
        scaled = (gradient * state["scale"][0]).astype(np.float16)
        finite = bool(np.isfinite(scaled).all())
        gradient = scaled.astype(np.float32) / np.float32(state["scale"][0]) if finite else np.zeros(50, np.float32)
        state["good"][0] = (state["good"][0] + 1) % 3 if finite else 0
        state["scale"] *= 0.5 if not finite else 2 if state["good"][0] == 0 else 1
        if context.rank == 0 and taken == at:
            if how == "request":
                context.client.request_snapshot()
            if how == "snapshot":
                context.client.snapshot()
            os.kill(os.getppid(), signal.SIGTERM)  # The launcher.
            is_stopped = True
        if is_stopped:  # The launcher may be slower than the steps that are left.
            threading.Event().wait(0.3)
        values = weights.push_pull({"w": gradient})["w"]
        assert weights.step == int(state["taken"][0]) and weights.statistics().dropped == 0
    print("rank", context.rank, "ends with", hashlib.sha256(values.tobytes()).hexdigest(), flush=True)
"""


@pytest.mark.parametrize("hows", [("request", "snapshot", "stop"), pytest.param(("stop",) * 3, marks=pytest.mark.long)])
def test_a_script_that_was_stopped_three_times_ends_with_the_same_weights(tmp_path: Path, hows: tuple[str]) -> None:
    def run(name: str, *arguments: str) -> list[str]:
        flags = ("--storage-path", name, "--run-id", name, "--save-interval", "4", "--max-restarts", "0")
        _, text = Run.ended(tmp_path, _SCRIPT, *arguments, flags=flags)
        assert "AssertionError" not in text, text
        return re.findall(r"ends with (\w+)", text)

    expected = run("undisturbed", "none", "-1")
    assert len(expected) == 2 and expected[0] == expected[1]
    for how, at in zip(hows, ("6", "13", "21"), strict=True):
        assert run("stopped", how, at) == []
    assert run("stopped", "none", "-1") == expected
