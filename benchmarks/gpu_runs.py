"""Whole runs with servers on a device, beside runs without one: for ``benchmarks.gpu``."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_updates import relative
from psdist.device.device import Device

_ROOT = Path(__file__).resolve().parents[1]
#: Time limits of a run, and of compiling all kernels of the processor.
_RUN_SECONDS, _WARMUP_SECONDS = 180, 900
#: Trains in BSP with Adam, and writes the times of its steps and the weights.
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
    """Run two workers and two servers, without a device and on one.

    Returns step times and differences of the weights.
    """
    results = {}
    _psdist("warmup", folder=_ROOT, timeout=_WARMUP_SECONDS)  # Else they start by interpreting.
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
    given = ["run", "--nservers", "2", "--nproc-per-node", "2", "--server-device", kind, "--storage-path", "none"]
    given += ["train.py", str(options.steps), str(options.run_elements)]
    _psdist(*given, folder=folder, timeout=_RUN_SECONDS)
    times = json.loads((folder / "times.json").read_text(encoding="utf-8"))
    return statistics.median(times[len(times) // 3 :]), np.load(folder / "weights.npy")


def _psdist(*given: str, folder: Path, timeout: float) -> None:
    """Run ``psdist`` of this checkout, installed or not. Raises RuntimeError if it fails or takes longer."""
    paths = [str(_ROOT), str(_ROOT / "servers"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "psdist.cli.main", *given]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        said = f"{error.stdout!s:.4000}\n{error.stderr!s:.4000}"
        raise RuntimeError(f"{' '.join(given)} did not end within {timeout:g} s:\n{said}") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(given)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
