"""The kernel pool: threads that run updates, those of the lowest slices first, and tell the event loop what came of it.

Not a ThreadPoolExecutor, because that has no order and makes a future, a lock and a wake-up of the loop for each piece
of work; here everything that ended meanwhile is told in one wake-up. Forward passes read low slices first, so an update
of a low slice that is asked for later still comes before those of higher ones.

Invariants: each piece of work is told once, on the loop that made the pool, in the order in which it ended; nothing is
told after ``close``.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")
#: What a piece of work returned, or the error that it ended with.
Told = Callable[[R | None, BaseException | None], None]


class KernelPool(Generic[R]):
    """``threads`` threads for kernels, and one more that prepares (compiles) while they are at work.

    Made on the event loop that it shall tell.
    """

    def __init__(self, threads: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._work: list[tuple[int, int, Callable[[], R], Told[R]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._ended: list[tuple[Told[R], R | None, BaseException | None]] = []
        self._closed = False
        self._preparing = ThreadPoolExecutor(1, "compile")
        self._threads = [threading.Thread(target=self._run, name=f"kernel-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def prepare(self, work: Callable[[], T]) -> Future[T]:
        """Runs ``work`` in the thread that is not for kernels."""
        return self._preparing.submit(work)

    def submit(self, priority: int, work: Callable[[], R], told: Told[R]) -> None:
        """Runs ``work`` when nothing of a lower ``priority`` is left to run; then calls ``told`` on the loop."""
        with self._changed:
            heapq.heappush(self._work, (priority, next(self._order), work, told))
            self._changed.notify()

    def close(self) -> None:
        """Ends the threads when what they run has ended; what has not begun is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._preparing.shutdown(wait=False, cancel_futures=True)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            work, told = item
            result: R | None = None
            error: BaseException | None = None
            try:
                result = work()
            except BaseException as caught:  # The loop is told of everything; a thread that died would be missed.
                error = caught
            self._tell(told, result, error)
            del item, work, told, result, error  # Else an idle thread would keep the last payloads alive.

    def _next(self) -> tuple[Callable[[], R], Told[R]] | None:
        with self._changed:
            while not self._work and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            _, _, work, told = heapq.heappop(self._work)
            return work, told

    def _tell(self, told: Told[R], result: R | None, error: BaseException | None) -> None:
        with self._changed:
            if self._closed:
                return
            self._ended.append((told, result, error))
            if len(self._ended) > 1:
                return  # The loop has been woken already.
        self._loop.call_soon_threadsafe(self._tell_all)

    def _tell_all(self) -> None:
        with self._changed:
            ended, self._ended = self._ended, []
        if not self._closed:
            for told, result, error in ended:
                self._loop.call_soon(told, result, error)  # So that an error in one does not swallow the others.
