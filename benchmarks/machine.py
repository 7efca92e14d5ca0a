"""The machine that figures belong to: processor, cores, memory and its speed, versions."""

from __future__ import annotations

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from psdist.version import __version__

PACKAGES = ("grpcio", "numpy", "numba", "torch", "uvloop")
_COPY_BYTES = 1 << 27


def processor() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def copy_gigabytes_per_second(threads: int) -> float:
    """Return the bytes read and written by memcpy on ``threads`` concurrent threads; the best of five."""
    arrays = [(np.ones(_COPY_BYTES, np.uint8), np.ones(_COPY_BYTES, np.uint8)) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            begin = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(*pair), arrays))
            best = max(best, 2 * threads * _COPY_BYTES / (time.perf_counter() - begin) / 1e9)
    return best


def versions() -> dict[str, str]:
    """Versions of the libraries that matter, if installed."""
    found = {"python": platform.python_version(), "psdist": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def facts() -> dict[str, Any]:
    """All facts on the machine."""
    cores = len(os.sched_getaffinity(0))
    return {
        "processor": processor(),
        "cores": cores,
        "memory_gigabytes": round(psutil.virtual_memory().total / 1e9),
        "copy_gigabytes_per_second": {count: copy_gigabytes_per_second(count) for count in sorted({1, cores})},
        "system": f"{platform.system()} {platform.release()}",
        "load": os.getloadavg()[0],
        "versions": versions(),
    }
