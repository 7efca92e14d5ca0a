"""``psdist warmup``: compiles every kernel, so that the first run on this machine does not wait for the compiler."""

from __future__ import annotations

import time
from itertools import count

from psdist_server.kernels.memory import leave_out


def main() -> None:
    """Compiles what is not in the cache yet, and prints how far that is."""
    leave_out()  # Before numba is imported.
    from psdist.compression.compiled import Kernel, compile_all
    from psdist_server.kernels import fused, kernels

    everything = {*kernels.KERNELS, *(value for value in vars(fused).values() if isinstance(value, Kernel))}
    begin, done = time.monotonic(), count(1)
    print(f"compiling {len(everything)} kernels: those that are in the cache already take no time", flush=True)
    in_order = sorted(everything, key=lambda kernel: kernel.__name__)
    compile_all(in_order, lambda: print(f"{next(done)} of {len(everything)}", flush=True))
    print(f"all kernels are ready after {time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
