"""Compile kernels into numba's cache.

Without arguments, compile every kernel, including those that workers use for compression. This is ``psdist warmup``:
the next run on this machine finds them cached. Several processes share the work. With kernel names as arguments,
compile only these, at low priority, and stop when standard input is closed. ``BackgroundCompiler`` and those processes
use this form.
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

from psdist.machine import usable_cores
from psdist_server.kernels.memory import leave_out

_NICENESS: Final = 19
#: Limit on compiling processes, because each holds a compiler in memory.
_PROCESSES: Final = 4


def main() -> None:
    """Compile the kernels that are not cached yet, and print progress."""
    leave_out()  # Before numba is imported.
    names = sys.argv[1:]
    if names:
        # An interrupt reaches the whole process group. This process has nothing to clean up and exits immediately.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.nice(_NICENESS)
        threading.Thread(target=_end_with_input, daemon=True).start()
    from psdist.compression import segments
    from psdist.compression.kernel_runtime import compile_all
    from psdist_server.kernels import means
    from psdist_server.kernels.updates import UPDATES

    known = {*means.KERNELS, *means.ENCODED_KERNELS, *UPDATES.values(), *segments.KERNELS}
    wanted = [kernel for kernel in known if not names or kernel.__name__ in names]
    # In the order of the arguments: what a run needs first comes first.
    wanted.sort(key=lambda kernel: (names.index(kernel.__name__) if names else 0, kernel.__name__))
    begin, done = time.monotonic(), count(1)
    print(f"compiling {len(wanted)} kernels (cached ones take no time)", flush=True)
    with ExitStack() as stack:
        if not names and not all(kernel.is_cached for kernel in wanted):
            _share([kernel.__name__ for kernel in wanted], stack)
        compile_all(wanted, lambda: print(f"{next(done)} of {len(wanted)}", flush=True))
    print(f"all kernels are ready after {time.monotonic() - begin:.1f} s", flush=True)
    if names:
        os._exit(0)  # A thread is reading standard input; at a normal exit the interpreter would abort on its lock.


def _share(names: list[str], stack: ExitStack) -> None:
    """Start processes that compile some of these kernels, one for each further core. They end with ``stack``."""
    command = [sys.executable, "-m", "psdist_server.kernels", *names]
    for _ in range(min(_PROCESSES, usable_cores()) - 1):
        stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))


def _end_with_input() -> None:
    """End the process when its parent is gone."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
