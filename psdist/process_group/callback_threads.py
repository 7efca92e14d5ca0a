"""Threads that run the callbacks of futures.

A callback may make calls and wait for them. So each callback that runs has a thread of its own, and the loop runs none.
Threads are kept for later callbacks, because the loop would wait until a new one has started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

#: Threads that are kept without a callback.
_KEPT_THREADS: Final = 4


class CallbackThreads:
    """Daemon threads, started as they are needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        #: Threads that wait, and have no callback in the queue.
        self._idle = 0

    def run(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` in a thread. If it raises, ``threading.excepthook`` is called."""
        with self._lock:
            starts = not self._idle
            self._idle -= not starts
        self._queue.put(callback)
        if starts:
            threading.Thread(target=self._serve, name="psdist callbacks", daemon=True).start()

    def _serve(self) -> None:
        is_kept = True
        while is_kept:
            self._queue.get()()
            with self._lock:
                is_kept = self._idle < _KEPT_THREADS
                self._idle += is_kept
