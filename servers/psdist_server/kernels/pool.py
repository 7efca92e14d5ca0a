"""Threads that run kernels, lowest slices first, and the launcher of one parameter set.

A ThreadPoolExecutor has no order, and creates a future, a lock and a wake-up of the loop for each work item. Here a
thread takes several items at a time if many are waiting, and one wake-up reports all finished items. Forward passes
read low slices first, so an update of a low slice runs before those of higher ones, even if it was submitted later.

Invariants: Each work item is reported once, on the loop that created the pool, in the order in which it finished. Items
that finish after ``close`` are not reported.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final

from psdist.consistency import BSP
from psdist.off_loop import off_loop
from psdist.types import ParametersEntry

#: Runs several work items and returns the result of each.
Run = Callable[[Sequence[Any]], Sequence[Any]]
#: Called with a work item and its result, or the error that it raised.
Done = Callable[[Any, Any, BaseException | None], None]

#: Largest batch of one thread. More would leave other threads idle and delay answers.
BATCH_MAX: Final = 16
#: Largest slices, in elements, that are updated on the event loop.
INLINE_ELEMENTS: Final = 1 << 15
#: Added to the priority of work that runs after everything else.
_LAST: Final = 1 << 48


class KernelPool:
    """Pool of ``threads`` kernel threads. Create it on the event loop that receives the results."""

    def __init__(self, threads: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[int, int, Run, Any, Done]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._ended: list[tuple[Done, Any, Any, BaseException | None]] = []
        self._closed = False
        self._threads = [threading.Thread(target=self._serve, name=f"kernel-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def threads(self) -> int:
        """Number of threads."""
        return len(self._threads)

    def submit(self, priority: int, run: Run, work: Any, done: Done) -> None:
        """Run ``work`` by ``run``, possibly together with other work for the same ``run``, once no work of a lower
        ``priority`` is left; then call ``done`` on the loop."""
        with self._changed:
            heapq.heappush(self._waiting, (priority, next(self._order), run, work, done))
            self._changed.notify()

    def close(self) -> None:
        """End the threads after their current work. Waiting work is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while batch := self._next():
            run = batch[0][0]
            results: Sequence[Any] = [None] * len(batch)
            error: BaseException | None = None
            try:
                results = run([work for _, work, _ in batch])
            except BaseException as caught:  # Report everything, since nothing would notice a dead thread.
                error = caught
            self._report([(done, work, result, error) for (_, work, done), result in zip(batch, results, strict=True)])
            del batch, run, results, error  # Otherwise an idle thread would keep the last payloads alive.

    def _next(self) -> list[tuple[Run, Any, Done]]:
        """Return the next batch for one thread; empty when the pool is closed."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                return []
            share = min(BATCH_MAX, max(1, len(self._waiting) // (2 * len(self._threads))))
            batch = [heapq.heappop(self._waiting)[2:]]
            while len(batch) < share and self._waiting and self._waiting[0][2] == batch[0][0]:
                batch.append(heapq.heappop(self._waiting)[2:])
            return batch

    def _report(self, ended: list[tuple[Done, Any, Any, BaseException | None]]) -> None:
        with self._changed:
            if self._closed:
                return
            self._ended += ended
            if len(self._ended) > len(ended):
                return  # The loop has already been woken.
        self._loop.call_soon_threadsafe(self._report_all)

    def _report_all(self) -> None:
        with self._changed:
            ended, self._ended = self._ended, []
        if not self._closed:
            for done, work, result, error in ended:
                self._loop.call_soon(done, work, result, error)  # So that an error in one does not skip the others.


class KernelLauncher:
    """Runs kernels on the slices of one parameter set, in the kernel threads, or on the event loop if slices are small.
    Tracks which shards have kernels running.

    Invariants: Results are reported on the event loop, each once. The result of a kernel on a slice that was discarded
    meanwhile is not reported. A failed kernel is reported to ``fail``, because it concerns all calls that wait for
    the slice, not only the one that started the kernel.

    fail: called with a description and the error of a failed kernel.
    """

    def __init__(self, entry: ParametersEntry, pool: KernelPool, fail: Callable[[str, BaseException], None]) -> None:
        self._pool = pool
        self._fail = fail
        self._shard_count = max(1, len(entry.shards))
        asynchronous = not isinstance(entry.spec.consistency, BSP)
        self._inline = entry.slicing.slice_elements <= INLINE_ELEMENTS and not asynchronous
        #: Running kernels by shard, and futures that complete when there are none.
        self._running: Counter[int] = Counter()
        self._settled: dict[int, list[asyncio.Future[None]]] = {}
        self._discarded: set[int] = set()

    def submit(
        self,
        index: int,
        run: Callable[[Sequence[Any]], Sequence[Any]],
        work: Any,
        done: Callable[[Any, Any], None],
        last: bool = False,
    ) -> None:
        """Run a kernel on slice ``index``, then call ``done`` with ``work`` and its result. last: run it after all
        other work."""
        self._running[index % self._shard_count] += 1
        if not self._inline:
            self._pool.submit(index + last * _LAST, run, (index, work), partial(self._finish, done))
            return
        try:
            (result,) = run([(index, work)])
        except Exception as error:  # Reported like an error of a pool thread.
            self._finish(done, (index, work), None, error)
        else:
            self._finish(done, (index, work), result, None)

    def _finish(
        self, done: Callable[[Any, Any], None], work: tuple[int, Any], result: Any, error: BaseException | None
    ) -> None:
        index, given = work
        shard = index % self._shard_count
        if index in self._discarded:
            pass
        elif error is not None:
            self._fail(f"the update of slice {index}", error)
        else:
            done(given, result)
        self._ended(shard)

    async def write(self, index: int, elements: int, work: Callable[[], None]) -> None:
        """Run ``work``, which writes ``elements`` numbers to slice ``index``, in a thread if they are many. ``settled``
        waits for it."""
        shard = index % self._shard_count
        self._running[shard] += 1
        try:
            await off_loop(elements, work, waits=not self._inline)
        finally:
            self._ended(shard)

    def _ended(self, shard: int) -> None:
        self._running[shard] -= 1
        if not self._running[shard]:
            for waiting in self._settled.pop(shard, ()):
                if not waiting.done():
                    waiting.set_result(None)

    def discard(self, indices: Collection[int]) -> None:
        """Stop reporting the results of running kernels on these slices. Wait until their shards have ``settled``
        before reusing their memory, and then ``readmit`` them."""
        self._discarded.update(indices)

    def readmit(self, indices: Collection[int]) -> None:
        """Report kernels on these discarded slices again. None of the old ones may be running."""
        self._discarded.difference_update(indices)

    async def settled(self, shard: int) -> None:
        """Wait until no kernel runs on slices of ``shard``."""
        while self._running[shard]:
            waiting = asyncio.get_running_loop().create_future()
            self._settled.setdefault(shard, []).append(waiting)
            await waiting

    async def all_settled(self) -> None:
        """Wait until no kernel runs on any slice."""
        for shard in list(self._running):
            await self.settled(shard)
