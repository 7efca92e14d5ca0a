"""The kernels that compress gradients, loaded once for a process, in a thread.

numba takes half a second to import, while a client must not miss heartbeats. A client that compresses nothing loads
none of it. The first time on a machine another process compiles the kernels, and numpy does their work until then, with
the same bytes: neither the first push nor the end of a script waits for the compiler (``background_compiler``).
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

_lock = threading.Lock()
_loading: Future[None] | None = None


def load() -> Future[None]:
    """Begins to load, once. Returns a future that is done when gradients can be compressed."""
    global _loading
    with _lock:
        if _loading is None:
            _loading = Future()
            # Not a daemon: at exit the interpreter must wait for the import, which would crash otherwise.
            threading.Thread(target=_run, args=(_loading,), name="psdist-import").start()
        return _loading


def interpret_decoders() -> None:
    """Has payloads decoded by numpy until ``load`` has ended, which this begins."""
    from psdist.compression.segments import DECODERS

    for kernel in DECODERS:
        kernel.interpret()
    load()


def _run(loading: Future[None]) -> None:
    try:
        from psdist.compression.background_compiler import of_workers
        from psdist.compression.segments import KERNELS

        of_workers().begin(KERNELS, "compressed gradients").result()
    except BaseException as error:  # Whatever it is, the pushes that wait must have it.
        loading.set_exception(error)
    else:
        loading.set_result(None)
