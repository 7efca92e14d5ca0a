"""Compiles kernels into numba's cache.

Without arguments every one, which is ``psdist warmup``: then the first run on this machine has them at once. With the
names of kernels these only, at low priority, and no longer than standard input is open: for ``warm_up``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from itertools import count
from typing import Final

from psdist_server.kernels.memory import leave_out

_NICENESS: Final = 19


def main() -> None:
    """Compiles what is not in the cache yet, and prints how far that is."""
    leave_out()  # Before numba is imported.
    names = sys.argv[1:]
    if names:
        os.nice(_NICENESS)
        threading.Thread(target=_end_with_input, daemon=True).start()
    from psdist.compression.compiled import Kernel, compile_all
    from psdist_server.kernels import encoded, fused, kernels

    all_fused = (value for value in vars(fused).values() if isinstance(value, Kernel))
    known = {*kernels.KERNELS, *encoded.KERNELS, *all_fused}
    everything = [kernel for kernel in known if not names or kernel.__name__ in names]
    begin, done = time.monotonic(), count(1)
    print(f"compiling {len(everything)} kernels: those that are in the cache already take no time", flush=True)
    in_order = sorted(everything, key=lambda kernel: kernel.__name__)
    compile_all(in_order, lambda: print(f"{next(done)} of {len(everything)}", flush=True))
    print(f"all kernels are ready after {time.monotonic() - begin:.1f} s")


def _end_with_input() -> None:
    """Ends the process when whoever started it is gone."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
