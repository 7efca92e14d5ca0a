"""Compiles kernels into numba's cache.

Without arguments every one, those of workers that compress too, which is ``psdist warmup``: then the first run on this
machine has them at once. Some processes share that work. With the names of kernels these only, at low priority, and no
longer than standard input is open: for ``background_compiler``, and for those processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from itertools import count
from typing import Final

from psdist_server.kernels.memory import leave_out

_NICENESS: Final = 19
#: At most; each has a compiler in memory.
_PROCESSES: Final = 4


def main() -> None:
    """Compiles what is not in the cache yet, and prints how far that is."""
    leave_out()  # Before numba is imported.
    names = sys.argv[1:]
    if names:
        # An interrupt goes to the whole group of processes: this one has nothing to clean up, and ends at once.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.nice(_NICENESS)
        threading.Thread(target=_end_with_input, daemon=True).start()
    from psdist.compression import segments
    from psdist.compression.compiled import Kernel, compile_all
    from psdist_server.kernels import encoded, fused, kernels

    all_fused = (value for value in vars(fused).values() if isinstance(value, Kernel))
    known = {*kernels.KERNELS, *encoded.KERNELS, *all_fused, *segments.KERNELS}
    everything = [kernel for kernel in known if not names or kernel.__name__ in names]
    begin, done = time.monotonic(), count(1)
    print(f"compiling {len(everything)} kernels: those that are in the cache already take no time", flush=True)
    in_order = sorted(everything, key=lambda kernel: kernel.__name__)
    with ExitStack() as stack:
        if not names and not all(kernel.is_cached for kernel in everything):
            _share([kernel.__name__ for kernel in in_order], stack)
        compile_all(in_order, lambda: print(f"{next(done)} of {len(everything)}", flush=True))
    print(f"all kernels are ready after {time.monotonic() - begin:.1f} s", flush=True)
    if names:
        os._exit(0)  # A thread reads standard input: the interpreter would abort on the lock that it holds.


def _share(names: list[str], stack: ExitStack) -> None:
    """Starts processes that compile some of these kernels: one for each further core. They end with ``stack``."""
    command = [sys.executable, "-m", "psdist_server.kernels", *names]
    for _ in range(min(_PROCESSES, len(os.sched_getaffinity(0))) - 1):
        stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))


def _end_with_input() -> None:
    """Ends the process when whoever started it is gone."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
