"""Time from the command to the first step: ``python -m benchmarks.startup``.

Runs ``psdist run --nservers 2 --nproc-per-node 2 examples/digits.py`` several times and measures when the worker
reports its first step. The first run may have to compile kernels and is reported separately. It asserts nothing, and
its figures are those of this machine at this moment.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMAND = ["psdist.cli.main", "run", "--nservers", "2", "--nproc-per-node", "2", "examples/digits.py", "--epochs", "1"]


def first_step_seconds() -> float:
    """Return the seconds from starting the command to the line about the first step."""
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", *COMMAND], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines = []
        seconds = None
        for line in process.stdout:
            lines.append(line)
            if seconds is None and "first step" in line:
                seconds = time.perf_counter() - begin
    if process.returncode != 0 or seconds is None:
        raise SystemExit(f"the run failed with status {process.returncode}:\n{''.join(lines)}")
    return seconds


def main() -> None:
    """Measure and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=first_step_seconds.__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs after the first")
    parser.add_argument("--json", type=Path, help="write the results there too")
    options = parser.parse_args()
    first = first_step_seconds()
    times = [first_step_seconds() for _ in range(options.rounds)]
    result = {"first_s": first, "median_s": statistics.median(times), "worst_s": max(times), "all_s": times}
    print(f"first run {first:.2f} s; then median {result['median_s']:.2f} s, worst {result['worst_s']:.2f} s")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
