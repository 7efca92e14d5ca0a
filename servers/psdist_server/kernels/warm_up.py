"""Compiling kernels ahead of their use, with progress in the log where it takes long.

The first time on a machine this takes seconds, in which nothing can be updated. The log lines are warnings, so that
``psdist run`` shows them. Of several servers that compile for one cache, one writes them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final

from psdist.compression.compiled import Kernel, compile_all, locked
from psdist_server.kernels.memory import release_compiler

log = logging.getLogger("psdist.server")

#: Loading from the cache takes less.
_FIRST_REPORT_SECONDS: Final = 0.5
_REPORT_SECONDS: Final = 2.5


#: One call at a time: later ones load from the cache.
_lock = threading.Lock()


def warm_up(kernels: Sequence[Kernel], purpose: str) -> None:
    """Compiles ``kernels``, or loads them from the cache. Run it in a thread.

    purpose: what they are for, in a log line.
    """
    with _lock, locked(kernels[0].file("progress"), wait=False) as is_reporter:
        progress = _Progress(len(kernels), purpose)
        thread = threading.Thread(target=progress.report, name="compile-progress", daemon=True)
        # A machine that does much else may take long to load them, too.
        is_reporter = is_reporter and not all(kernel.is_cached for kernel in kernels)
        if is_reporter:
            thread.start()
        try:
            compile_all(kernels, progress.advance)
        finally:
            progress.ended.set()
            if is_reporter:
                thread.join()
    release_compiler()


class _Progress:
    def __init__(self, count: int, purpose: str) -> None:
        self._count, self._purpose, self._done = count, purpose, 0
        self.ended = threading.Event()

    def advance(self) -> None:
        self._done += 1

    def report(self) -> None:
        """Logs until ``ended``."""
        if self.ended.wait(_FIRST_REPORT_SECONDS):
            return
        log.warning("compiling kernels for %s (once on this machine; psdist warmup does it ahead)", self._purpose)
        while not self.ended.wait(_REPORT_SECONDS):
            log.warning("still compiling kernels for %s: %d of %d are done", self._purpose, self._done, self._count)
