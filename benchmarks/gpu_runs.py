"""Whole runs with servers on a device, beside runs without: for ``benchmarks.gpu``."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_updates import relative
from psdist.gpu.device import Device

#: Trains by BSP with Adam, and leaves the times of its steps and the weights.
_SCRIPT = """
import json, os, sys, time
import numpy as np
import psdist

rank, steps, count = int(os.environ["RANK"]), int(sys.argv[1]), int(sys.argv[2])
client = psdist.init().client
weights = client.parameters("model", {"w": np.linspace(-1, 1, count, dtype=np.float32)}, psdist.optim.Adam(lr=0.01))
buffers = weights.gradient_buffers()
rng = np.random.default_rng(rank)
noise = rng.standard_normal(count, dtype=np.float32)
values, times = weights.pull(), []
for step in range(steps):
    np.multiply(values["w"], np.float32(0.1), out=buffers["w"])
    buffers["w"] += noise
    began = time.perf_counter()
    values = weights.push_pull(buffers, copy=False)
    times.append(time.perf_counter() - began)
if rank == 0:
    np.save("weights.npy", np.asarray(values["w"]))
    with open("times.json", "w") as file:
        json.dump(times, file)
client.barrier("done")
"""


def whole_runs(device: Device, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Two workers and two servers, without a device and on one: step times, and how far apart the weights are."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("cpu", options.device):
            results[kind] = _run(Path(folder), kind, options)
    (ours, weights), (theirs, expected) = results[options.device], results["cpu"]
    rows: list[dict[str, Any]] = [{"what": kind, "step_seconds": seconds} for kind, (seconds, _) in results.items()]
    same = weights.tobytes() == expected.tobytes()
    apart = relative(weights, expected)
    return [*rows, {"what": "difference", "identical": same, "relative": apart, "step_ratio": ours / theirs}]


def _run(folder: Path, kind: str, options: argparse.Namespace) -> tuple[float, Any]:
    (folder / "train.py").write_text(_SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "psdist.cli.main", "run", "--nservers", "2", "--nproc-per-node", "2"]
    command += ["--server-device", kind, "--storage-path", "none"]
    arguments = ["train.py", str(options.steps), str(options.run_elements)]
    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the run with {kind} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    times = json.loads((folder / "times.json").read_text(encoding="utf-8"))
    return statistics.median(times[len(times) // 3 :]), np.load(folder / "weights.npy")
