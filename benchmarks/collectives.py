"""All-reduces over the links of psdist's workers, beside gloo: by size and number of workers, on one host.

    python -m benchmarks.collectives [WORKERS ...]

Each line has the median and the least time of a call at rank 0. The contenders take turns for each number of workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from psdist.addresses import free_port

#: Bytes of an array, and calls.
SIZES: Final = ((1 << 10, 300), (32 << 10, 200), (1 << 20, 50), (16 << 20, 15), (100_000_000, 7))
_CONTENDER: Final = "PSDIST_BENCHMARK_CONTENDER"


def main() -> None:
    """Run all numbers of workers, or this worker's part of one run."""
    if os.environ.get(_CONTENDER) == "psdist":
        _psdist()
    elif os.environ.get(_CONTENDER) == "gloo":
        _gloo()
    else:
        for workers in [int(text) for text in sys.argv[1:]] or [2, 4]:
            _launch("psdist", workers)
            _launch("gloo", workers)


def _launch(contender: str, workers: int) -> None:
    """Start the workers of one contender, and wait for them."""
    environ = {**os.environ, _CONTENDER: contender, "OMP_NUM_THREADS": "1"}
    if contender == "psdist":
        command = [sys.executable, "-m", "psdist", "run", "--nproc-per-node", str(workers), __file__]
        subprocess.run(command, env=environ, check=True)
        return
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1")), "WORLD_SIZE": str(workers)}
    started = [
        subprocess.Popen([sys.executable, __file__], env=environ | place | {"RANK": str(rank)})
        for rank in range(workers)
    ]
    statuses = [process.wait() for process in started]
    if any(statuses):
        raise SystemExit("a worker of gloo failed")


def _psdist() -> None:
    import psdist

    with psdist.init() as context:
        group = context.collectives
        _measure("psdist", context.rank, context.world_size, lambda array: group.all_reduce(array, "max", out=array))


def _gloo() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    _measure(
        "gloo", dist.get_rank(), dist.get_world_size(),
        lambda array: dist.all_reduce(torch.from_numpy(array), dist.ReduceOp.MAX),
    )  # fmt: skip
    dist.destroy_process_group()


def _measure(name: str, rank: int, workers: int, call: Callable[[Any], Any]) -> None:
    """Time the calls of all sizes, and print them at rank 0."""
    for size, count in SIZES:
        array = np.ones(size // 4, np.float32)
        call(array)
        times = []
        for _ in range(count):
            began = time.perf_counter()
            call(array)
            times.append((time.perf_counter() - began) * 1e3)
        if rank == 0:
            median, least = float(np.median(times)), min(times)
            print(f"{name:6} W={workers} {size:>11,} bytes: median {median:9.3f} ms, least {least:9.3f} ms", flush=True)


if __name__ == "__main__":
    main()
