"""Runs kernels on the slices of one parameter set, in the kernel threads, or on the event loop where slices are small.

Invariants: results are reported on the event loop, each once. The result of a kernel on a slice that was discarded
meanwhile is not reported. A failed kernel is reported to ``fail``, because it concerns all calls that wait for the
slice, and not only the one that started the kernel.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final

from psdist.consistency import BSP
from psdist.types import ParametersEntry
from psdist_server.kernels.pool import KernelPool

#: Slices of at most so many elements are updated on the event loop.
INLINE_ELEMENTS: Final = 1 << 15
#: Added to the priority of work that comes after everything else.
_LAST: Final = 1 << 48


class KernelLauncher:
    """Runs kernels by slice, and knows of which shards some are running.

    fail: called with a description and the error of a kernel that failed.
    """

    def __init__(
        self, entry: ParametersEntry, pool: KernelPool[Any, Any], fail: Callable[[str, BaseException], None]
    ) -> None:
        self._pool = pool
        self._fail = fail
        self._shard_count = max(1, len(entry.shards))
        asynchronous = not isinstance(entry.spec.consistency, BSP)
        self._inline = entry.slicing.slice_elements <= INLINE_ELEMENTS and not asynchronous
        #: Kernels under way by shard, and futures that are done when there are none.
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
        """Runs a kernel on slice ``index``, then calls ``done`` with ``work`` and its result. last: after all other
        work."""
        self._running[index % self._shard_count] += 1
        if not self._inline:
            self._pool.submit(index + last * _LAST, run, (index, work), partial(self._finish, done))
            return
        try:
            (result,) = run([(index, work)])
        except Exception as error:
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
        self._running[shard] -= 1
        if not self._running[shard]:
            for waiting in self._settled.pop(shard, ()):
                if not waiting.done():
                    waiting.set_result(None)

    def discard(self, indices: Collection[int]) -> None:
        """The results of kernels under way on these slices are not reported. Wait until their shards have ``settled``
        before their memory is used for anything else, and then ``readmit`` them."""
        self._discarded.update(indices)

    def readmit(self, indices: Collection[int]) -> None:
        """No kernel runs any more on these discarded slices: those of the future are reported."""
        self._discarded.difference_update(indices)

    async def settled(self, shard: int) -> None:
        """Returns when no kernel runs on slices of ``shard``."""
        while self._running[shard]:
            waiting = asyncio.get_running_loop().create_future()
            self._settled.setdefault(shard, []).append(waiting)
            await waiting

    async def all_settled(self) -> None:
        """Returns when no kernel runs on any slice."""
        for shard in list(self._running):
            await self.settled(shard)
