"""``python -m tests.fuzz``: fuzz the decoders of segments, with and without bounds checks.

NUMBA_BOUNDSCHECK=1 makes numba check every index, far more slowly; it needs a separate cache (NUMBA_CACHE_DIR).
"""

from __future__ import annotations

import argparse
import os
import time

from tests.fuzz.segments import CODECS, fuzz


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--inputs", type=int, default=10_000_000, help="for each kind of segment")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    checked = "with" if os.environ.get("NUMBA_BOUNDSCHECK") == "1" else "without"
    print(f"{options.inputs} inputs for each kind of segment, {checked} checks of bounds", flush=True)
    for name, codecs in CODECS.items():
        begin = time.monotonic()
        outcomes = fuzz(codecs, options.inputs, options.seed)
        ended = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        print(f"{name:10} {ended}; {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
