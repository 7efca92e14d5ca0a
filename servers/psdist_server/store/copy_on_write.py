"""The copies of slices that a snapshot takes before the slices change, in one parameter store.

``CutState`` stands between the machine of the cut (``cut``), the kernels that copy (``applier``) and the writer of the
files (``snapshot_writer``), which takes slices in the order of its files. Everything here runs on the event loop,
except ``CopyPool.prefault``.

While training goes on, every slice changes soon after it is at the cut. So slices are copied as soon as nothing else is
to be done. Their memory is touched ahead of time, because touching memory for the first time takes longer than the
copy.

Invariants: the memory of a copy is used again only when its slice has been written, or the attempt is over and no
kernel uses it. No update waits for an attempt that is over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import numpy as np

from psdist_server.core.cut import SnapshotCut
from psdist_server.core.records import Producer, SliceRecord
from psdist_server.kernels.arrays import Array
from psdist_server.kernels.memory import AnonymousMemory
from psdist_server.store.applier import Applier, Aside

#: Copies that writers have under way beside those that updates ask for.
WRITER_COPIES: Final = 8
#: The longest that the writers of one attempt let copies go first.
REST_SECONDS: Final = 0.25
#: Copies ahead of updates that are under way at a time.
_AHEAD: Final = 2
#: Elements of memory that are made ready at a time.
_POPULATE_ELEMENTS: Final = 4 << 20


class CopyPool:
    """Memory for copies of up to ``elements`` each, at most ``most`` at a time. What was given back is used again
    first, so that pages are touched once, until they are given back to the system (``shrink``)."""

    def __init__(self, elements: int, most: int) -> None:
        self.shape = elements, most
        self._memory = AnonymousMemory(elements * most)
        self._memory.use(0, elements * most)
        self._free = list(range(most - 1, -1, -1))
        self._used: dict[int, int] = {}

    def take(self, index: int, size: int) -> Array:
        """Memory of ``size`` elements for a copy of slice ``index``."""
        if not self._free:
            return np.empty(size, np.float32)
        place = self._used[index] = self._free.pop()
        return self._memory.array[place * self.shape[0] :][:size]

    def give_back(self, index: int) -> None:
        """The copy of slice ``index`` is not needed any more, and nothing writes it."""
        if (place := self._used.pop(index, None)) is not None:
            self._free.append(place)

    def prefault(self, elements: int) -> None:
        """Makes memory for so many elements ready, as far as the system can. In a thread."""
        size = min(elements, self._memory.array.size)
        for start in range(0, size, _POPULATE_ELEMENTS):
            if not self._memory.prefault(start, min(start + _POPULATE_ELEMENTS, size)):
                return

    @property
    def is_used(self) -> bool:
        """Whether there are copies, or some are being made."""
        return bool(self._used)

    def shrink(self) -> None:
        """Gives all memory back to the system, unless some of it is in use."""
        if not self._used:
            self._free.sort(reverse=True)
            self._memory.give_back(0, self._memory.array.size)
            self._memory.use(0, self._memory.array.size)


class CutState:
    """The cut of one attempt in one holding.

    machine: what is known of the cut, of all slices that are served here. pool: memory for copies. record: of a slice
    as the shard machine has it. fail: is told why the cut cannot be had.
    """

    def __init__(
        self,
        machine: SnapshotCut,
        pool: CopyPool,
        applier: Applier,
        record: Callable[[int], SliceRecord],
        fail: Callable[[str], None],
    ) -> None:
        self.machine = machine
        self.fail = fail
        self._pool = pool
        self._applier = applier
        self._record = record
        self._copies: dict[int, Array] = {}
        #: Who waits for a slice to be copied.
        self._awaited: dict[int, asyncio.Future[None]] = {}
        #: Slices that are ripe, and perhaps not copied, where updates go on; and how many of them are being copied.
        self._ahead: deque[int] = deque()
        self._copying_ahead = 0
        self._is_pumping = False
        #: Slices that updates are copying, who waits for there to be none, and seconds that writers may
        #: still rest.
        self._by_updates: set[int] = set()
        self._resting: list[asyncio.Future[None]] = []
        self._rest_left = REST_SECONDS
        self.is_over = False

    # --- what updates ask ---------------------------------------------------------------------------------------------

    def blocks_update(self, index: int) -> bool:
        """See Guard."""
        return self.machine.blocks_update(index)

    def copy_for_update(self, index: int) -> Aside | None:
        """See Guard."""
        if self.machine.is_safe(index):
            return None
        self.machine.copy_for_update(index)
        self._by_updates.add(index)
        return self._aside(index)

    def _aside(self, index: int) -> Aside:
        size = self.machine.sizes[index] // 4
        memory = self._copies[index] = self._pool.take(index, size)
        return Aside(memory, partial(self._copied, index))

    def _copied(self, index: int) -> None:
        self.machine.copied(index)
        if self.is_over:
            self._pool.give_back(index)
            return
        self._wake(index)
        self._by_updates.discard(index)
        if not self._is_hurried:
            self._end_rest()
        self._applier.resume(index)

    # --- what the store reports ---------------------------------------------------------------------------------------

    def look(self, indices: Iterable[int]) -> list[int]:
        """Slices, of which no update is under way, that are ripe now and were not before."""
        at_cut = []
        try:
            for index in indices:
                if not self.is_over and self.machine.look(index, self._record(index)):
                    at_cut.append(index)
                    self._wake(index)
        except ValueError as error:
            self.fail(str(error))
        return at_cut

    def agree(self, following: Mapping[Producer, int]) -> None:
        """SSP and ASP: the first push of each producer that is not in the snapshot; ``look`` at all slices then."""
        self.machine.following = following

    def copy_ahead(self, indices: Iterable[int] = ()) -> None:
        """These slices are ripe and will change soon: they are copied when nothing else is to be done."""
        self._ahead.extend(indices)
        if self._is_pumping:  # Further out, where small slices are copied at once.
            return
        self._is_pumping = True
        while self._ahead and self._copying_ahead < _AHEAD and not self.machine.room.is_full and not self.is_over:
            index = self._ahead.popleft()
            if self.machine.is_untouched(index):
                self._copying_ahead += 1
                self.machine.copy_for_update(index)
                aside = self._aside(index)
                self._applier.copy(index, Aside(aside.memory, partial(self._copied_ahead, index)), True)
        self._is_pumping = False

    def _copied_ahead(self, index: int) -> None:
        self._copying_ahead -= 1
        self.copy_ahead()
        self._copied(index)

    def end(self) -> None:
        """The attempt is over, or everything is written: nothing waits for it any more, and its memory is free when the
        kernels that write to it have ended."""
        self.is_over = True
        copying = set(self.machine.copying)
        self.machine.drop(self.machine.sizes)
        for index in self._copies.keys() - copying:
            self._pool.give_back(index)
        self._copies.clear()
        for future in self._awaited.values():
            future.cancel()
        self._awaited.clear()
        self._end_rest()

    def _end_rest(self) -> None:
        for future in self._resting:
            if not future.done():
                future.set_result(None)
        self._resting.clear()

    def _wake(self, index: int) -> None:
        future = self._awaited.pop(index, None)
        if future is not None and not future.done():
            future.set_result(None)

    # --- what the writer asks -----------------------------------------------------------------------------------------

    @property
    def _is_hurried(self) -> bool:
        """Whether slices are being copied for updates, or ahead of them."""
        return bool(self._by_updates or self._copying_ahead)

    async def rest(self) -> None:
        """Waits while slices are copied that training needs next: writing would take the processor from that. Not for
        long altogether, and not where there is no room for more copies."""
        loop = asyncio.get_running_loop()
        while self._is_hurried and self._rest_left > 0 and not self.machine.room.is_full:
            began, quiet = loop.time(), loop.create_future()
            self._resting.append(quiet)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._rest_left):
                    await quiet
            self._rest_left -= loop.time() - began

    async def take(self, index: int) -> Array:
        """The copy of slice ``index``: all its arrays one after another. Waits until it is ripe and copied."""
        while index not in self.machine.aside:
            if self.machine.is_untouched(index):
                self._copy(index)
            else:
                await self._awaited.setdefault(index, asyncio.get_running_loop().create_future())
        return self._copies[index]

    def prefetch(self, indices: Sequence[int]) -> None:
        """Has slices copied that can be and that nobody copied yet."""
        for index in indices:
            if self.machine.is_untouched(index):
                self._copy(index)

    def _copy(self, index: int) -> None:
        self.machine.copy_for_writer(index)
        self._applier.copy(index, self._aside(index))

    def written(self, index: int) -> None:
        """The copy that ``take`` gave is in its file."""
        self.machine.written(index)
        del self._copies[index]
        self._pool.give_back(index)
        self._applier.resume()
        self.copy_ahead()

    def versions(self, indices: Sequence[int]) -> list[int]:
        """Versions at the cut of slices that were taken."""
        return [self.machine.versions[index] for index in indices]

    def waiting_for(self) -> str:
        """What the writer waits for; "" where that is nothing, or the storage."""
        index = next((index for index in self._awaited if index not in self.machine.versions), None)
        if index is None:
            return ""
        return f"for slice {index} to reach the cut" + (f" at step {self.machine.step}" if self.machine.step else "")

    def is_kept_back(self) -> bool:
        """Whether an update waits for this snapshot to be written."""
        return bool(self._applier.kept_back)
