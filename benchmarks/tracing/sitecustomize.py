"""Imported by every Python of a run that has this directory on its path: tells on SIGUSR2 what Python has allocated.

The figures, of ``tracemalloc`` (which ``PYTHONTRACEMALLOC`` starts), go to the file ``<pid>.json`` of the directory
``BENCH_TRACES``; the peak begins anew with each. So processes are watched that know nothing of benchmarks.
"""

import gc
import json
import os
import signal
import tracemalloc
from pathlib import Path
from types import FrameType


def tell(number: int, frame: FrameType | None) -> None:
    """Writes the figures; the file appears complete."""
    gc.collect()  # what waits for the collector is not kept
    current, peak = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    draft = Path(os.environ["BENCH_TRACES"], f"{os.getpid()}.draft")
    draft.write_text(json.dumps({"current": current, "peak": peak}))
    draft.rename(draft.with_suffix(".json"))


if "BENCH_TRACES" in os.environ and tracemalloc.is_tracing():
    signal.signal(signal.SIGUSR2, tell)
