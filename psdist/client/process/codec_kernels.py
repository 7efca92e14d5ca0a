"""The kernels that compress gradients, loaded once for a process, in a thread.

numba takes half a second to import and, the first time on a machine, many seconds to compile, while a client must not
miss heartbeats. A client that compresses nothing loads none of it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

_lock = threading.Lock()
_loading: Future[None] | None = None


def load() -> Future[None]:
    """Begins to load, once. Returns the end of it."""
    global _loading
    with _lock:
        if _loading is None:
            _loading = Future()
            # Not a daemon: at exit the interpreter must wait for the compiler, which would crash otherwise.
            threading.Thread(target=_run, args=(_loading,), name="psdist-compile").start()
        return _loading


def interpret_decoders() -> None:
    """Has payloads decoded by numpy until ``load`` has ended, which this begins."""
    from psdist.compression.segments import DECODERS

    for kernel in DECODERS:
        kernel.interpret()
    load()


def _run(loading: Future[None]) -> None:
    try:
        from psdist.compression.compiled import compile_all
        from psdist.compression.segments import KERNELS

        compile_all(KERNELS)
    except BaseException as error:  # Whatever it is, the pushes that wait must have it.
        loading.set_exception(error)
    else:
        loading.set_result(None)
