"""Imported by every Python of a run that has this directory on its path: reports Python's allocations on SIGUSR2, and
with ``PSDIST_LOOP_MONITOR`` long iterations of event loops (``benchmarks.loop_monitor``).

The figures of allocations, of ``tracemalloc`` (which ``PYTHONTRACEMALLOC`` starts), are written to the file
``<pid>.json`` of the directory ``BENCH_TRACES``; each report resets the peak. Processes need not know about benchmarks
to be watched.
"""

import gc
import json
import os
import signal
import tracemalloc
from pathlib import Path
from types import FrameType


def tell(number: int, frame: FrameType | None) -> None:
    """Write the figures; the file appears complete."""
    gc.collect()  # garbage does not count
    current, peak = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    draft = Path(os.environ["BENCH_TRACES"], f"{os.getpid()}.draft")
    draft.write_text(json.dumps({"current": current, "peak": peak}))
    draft.rename(draft.with_suffix(".json"))


if "BENCH_TRACES" in os.environ and tracemalloc.is_tracing():
    signal.signal(signal.SIGUSR2, tell)

if "PSDIST_LOOP_MONITOR" in os.environ:
    from benchmarks.loop_monitor import install

    install()
