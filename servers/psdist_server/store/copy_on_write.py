"""Copies of slices for a snapshot, made before updates change the slices.

``SliceCopies`` connects the state of the cut (``core.cut_state``), the kernels that copy, and the writer of the files
(``snapshot_writer``), which takes slices in file order. ``UpdateGate`` holds the updates that must wait for copies.
Everything here runs on the event loop.

During training, every slice changes soon after it has reached the cut. So slices are copied as soon as the kernel
threads are otherwise idle.

Invariants: The memory of a copy is reused only when its slice has been written, or the attempt is over and no kernel
uses it. No update waits for an attempt that is over.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Generic, NamedTuple, TypeVar

from psdist_server.core.cut_state import CutState
from psdist_server.core.lags import LagTable
from psdist_server.kernels.arrays import Array, DenseParameters
from psdist_server.kernels.memory import MemoryPool
from psdist_server.kernels.pool import KernelLauncher

U = TypeVar("U")

#: Copies in progress for writers, in addition to those for updates.
WRITER_COPIES: Final = 8
#: Longest time that the writers of one attempt yield to other copies.
REST_SECONDS: Final = 0.25
#: Copies ahead of updates in progress at a time.
_AHEAD: Final = 2


class CopyTarget(NamedTuple):
    """Destination of a slice's copy: weights, then state, one after another. ``copied`` is called on the loop when the
    copy is complete, unless the slice was discarded."""

    memory: Array
    copied: Callable[[], None]


class SliceCopies:
    """Copies of slices for one snapshot attempt, held until they are written.

    A slice is copied before an update changes it, ahead of such an update, or when the writer takes it next.

    pool: memory of the copies.
    resume: called when an update of slice ``index`` may continue; -1 for any slice.
    """

    def __init__(
        self,
        state: CutState,
        pool: MemoryPool,
        dense: DenseParameters,
        kernels: KernelLauncher,
        resume: Callable[[int], None],
    ) -> None:
        self.state = state
        self.pool = pool
        self._dense = dense
        self._kernels = kernels
        self._resume = resume
        self._copies: dict[int, Array] = {}
        #: Lags of the copied slices.
        self.lags = LagTable()
        #: Writers waiting for a slice to reach the cut, or to be copied.
        self._awaited: dict[int, asyncio.Future[None]] = {}
        #: Slices at the cut that will change soon, and the number of them being copied.
        self._ahead: deque[int] = deque()
        self._copying_ahead = 0
        self._is_pumping = False
        #: Slices being copied by updates.
        self._by_updates: set[int] = set()
        #: Writers that are yielding to other copies, and the seconds left for that.
        self._resting: list[asyncio.Future[None]] = []
        self._rest_left = REST_SECONDS
        self.is_over = False

    def copy_for_update(self, index: int) -> CopyTarget | None:
        """Return the memory to which a starting update of slice ``index`` must copy it first, or None."""
        if self.state.is_safe(index):
            return None
        self.state.copy_for_update(index)
        self._by_updates.add(index)
        return CopyTarget(self._acquire(index), partial(self._copied, index))

    def _acquire(self, index: int) -> Array:
        self.lags.set(index, self._dense.lags.of(index))  # No kernel writes the slice before it is copied.
        memory = self._copies[index] = self.pool.acquire(index, self.state.sizes[index] // 4)
        return memory

    def _copied(self, index: int) -> None:
        self.state.copy_finished(index)
        if self.is_over:
            self.pool.release(index)
            return
        self.notify_writer(index)
        self._by_updates.discard(index)
        if not self._is_hurried:
            self._end_rest()
        self._resume(index)

    def copy_ahead(self, indices: Iterable[int] = ()) -> None:
        """Copy slices at the cut that will change soon, when the kernel threads are otherwise idle."""
        self._ahead.extend(indices)
        if self._is_pumping:  # A caller up the stack does this: small slices are copied synchronously.
            return
        self._is_pumping = True
        while self._ahead and self._copying_ahead < _AHEAD and not self.state.budget.is_exhausted and not self.is_over:
            index = self._ahead.popleft()
            if self.state.needs_copy(index):
                self._copying_ahead += 1
                self.state.copy_for_update(index)
                self._submit(index, self._copied_ahead, last=True)
        self._is_pumping = False

    def _copied_ahead(self, index: int) -> None:
        self._copying_ahead -= 1
        self.copy_ahead()
        self._copied(index)

    def _submit(self, index: int, copied: Callable[[int], None], *, last: bool = False) -> None:
        """Copy a slice that no update changes meanwhile. last: after all updates."""
        target = CopyTarget(self._acquire(index), partial(copied, index))
        self._kernels.submit(index, self._copy, target, _on_copied, last)

    def _copy(self, works: Sequence[tuple[int, CopyTarget]]) -> list[None]:
        """Copy slices. Runs in a kernel thread, or on the loop."""
        for index, target in works:
            self._dense.copy_slice(index, target.memory)
        return [None] * len(works)

    def end(self) -> None:
        """End the attempt, which is over or fully written. Nothing waits for it any more; memory is released when the
        kernels that write to it have ended."""
        self.is_over = True
        copying = set(self.state.copying)
        self.state.drop(self.state.sizes)
        for index in self._copies.keys() - copying:
            self.pool.release(index)
        self._copies.clear()
        for future in self._awaited.values():
            future.cancel()
        self._awaited.clear()
        self._end_rest()

    async def take(self, index: int) -> Array:
        """Wait for the copy of slice ``index``, and return it: all its arrays one after another."""
        while index not in self.state.copied:
            if self.state.needs_copy(index):
                self._copy_for_writer(index)
            else:
                await self._awaited.setdefault(index, asyncio.get_running_loop().create_future())
        return self._copies[index]

    def prefetch(self, indices: Sequence[int]) -> None:
        """Start copying those of these slices that need a copy."""
        for index in indices:
            if self.state.needs_copy(index):
                self._copy_for_writer(index)

    def _copy_for_writer(self, index: int) -> None:
        self.state.copy_for_writer(index)
        self._submit(index, self._copied)

    def notify_writer(self, index: int) -> None:
        """Wake a writer that waits for slice ``index``, which has reached the cut or is copied."""
        future = self._awaited.pop(index, None)
        if future is not None and not future.done():
            future.set_result(None)

    def written(self, index: int) -> None:
        """Release the copy that ``take`` returned; it is in its file."""
        self.state.written(index)
        del self._copies[index]
        self.pool.release(index)
        self._resume(-1)
        self.copy_ahead()

    @property
    def _is_hurried(self) -> bool:
        """True if slices are being copied for updates, or ahead of them."""
        return bool(self._by_updates or self._copying_ahead)

    async def rest(self) -> None:
        """Pause the writer while slices are copied that training needs next, because writing would compete for the
        processor. Pauses at most REST_SECONDS in one attempt, and never if the budget is exhausted."""
        loop = asyncio.get_running_loop()
        while self._is_hurried and self._rest_left > 0 and not self.state.budget.is_exhausted:
            began, quiet = loop.time(), loop.create_future()
            self._resting.append(quiet)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._rest_left):
                    await quiet
            self._rest_left -= loop.time() - began

    def _end_rest(self) -> None:
        for future in self._resting:
            if not future.done():
                future.set_result(None)
        self._resting.clear()

    def versions(self, indices: Sequence[int]) -> list[int]:
        """Return the versions at the cut of slices that were taken."""
        return [self.state.versions[index] for index in indices]

    def waiting_for(self) -> str:
        """Return the writer's wait as text, or "" if that is nothing or the storage."""
        index = next((index for index in self._awaited if index not in self.state.versions), None)
        if index is None:
            return ""
        return f"for slice {index} to reach the cut" + (f" at step {self.state.step}" if self.state.step else "")


def _on_copied(target: CopyTarget, _: None) -> None:
    target.copied()


class UpdateGate(Generic[U]):
    """Holds updates that would overwrite slices that a snapshot still needs, until these are copied.

    deliver: carries out a deferred update.
    """

    def __init__(self, deliver: Callable[[U], None]) -> None:
        self._deliver = deliver
        #: Copies of the snapshot being cut.
        self._copies: SliceCopies | None = None
        self._deferred: dict[int, U] = {}
        self._order: list[int] = []
        self._is_resuming = False

    def arm(self, copies: SliceCopies) -> None:
        """Start a cut: updates may have to wait for its ``copies``."""
        self._copies = copies

    def disarm(self) -> None:
        """End the cut; ``resume`` delivers all updates."""
        self._copies = None

    def blocks(self, index: int) -> bool:
        """Return True if an update of slice ``index`` must be deferred."""
        return self._copies is not None and self._copies.state.blocks_update(index)

    def copy_for_update(self, index: int) -> CopyTarget | None:
        """Return the memory to which a starting update of slice ``index`` must copy it first, or None."""
        return self._copies.copy_for_update(index) if self._copies is not None else None

    def defer(self, index: int, update: U) -> None:
        """Hold the update of a slice for which ``blocks`` is True."""
        heapq.heappush(self._order, index)
        self._deferred[index] = update

    def resume(self, index: int = -1) -> None:
        """Deliver the update of slice ``index``, and as many others as may continue, the lowest first."""
        self._resume_one(index)
        if self._is_resuming:  # A caller up the stack does this: small slices are updated synchronously.
            return
        self._is_resuming, order = True, self._order
        try:
            while order and (order[0] not in self._deferred or self._resume_one(order[0])):
                heapq.heappop(order)
        finally:
            self._is_resuming = False

    def _resume_one(self, index: int) -> bool:
        if index not in self._deferred or self.blocks(index):
            return False
        self._deliver(self._deferred.pop(index))
        return True

    @property
    def deferred(self) -> Collection[int]:
        """Slices that have a waiting update."""
        return self._deferred.keys()

    def discard(self, index: int) -> None:
        """Drop the update of slice ``index``."""
        self._deferred.pop(index, None)
