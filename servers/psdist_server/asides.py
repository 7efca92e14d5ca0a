"""Asides: the copies that a snapshot has made of slices before they change, in one holding.

``HoldingCut`` stands between the machine of the cut (``snapshots``), the kernels that copy (``applier``) and the writer
of the files (``saver``), which takes slices in the order of its files. Everything here runs on the event loop.

Invariants: memory of a copy is used again only when its slice was written, and given back when the attempt is over. No
update waits for an attempt that is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from psdist_server.applier import Applier, Aside
from psdist_server.dense import Array
from psdist_server.memory import AnonymousMemory
from psdist_server.records import Life, SliceRecord
from psdist_server.snapshots import Cut, Room

#: Copies that the writer has under way beside those that updates ask for.
_WRITER_COPIES: Final = 4


class Asides:
    """Memory for copies, of ``elements`` each, at most ``most`` at a time. What was given back is used again first, so
    that pages are touched once."""

    def __init__(self, elements: int, most: int) -> None:
        self._elements = elements
        self._memory = AnonymousMemory(elements * most)
        self._memory.use(0, elements * most)
        self._free: list[int] = []
        self._touched = 0
        self._most = most
        self._used: dict[int, int] = {}

    def take(self, index: int, size: int) -> Array:
        """Memory of ``size`` elements for a copy of slice ``index``."""
        if not self._free and self._touched == self._most:
            return np.empty(size, np.float32)
        if self._free:
            place = self._free.pop()
        else:
            place, self._touched = self._touched, self._touched + 1
        self._used[index] = place
        return self._memory.array[place * self._elements :][:size]

    def give_back(self, index: int) -> None:
        """The copy of slice ``index`` is not needed any more, and nothing reads or writes it."""
        if (place := self._used.pop(index, None)) is not None:
            self._free.append(place)


class HoldingCut:
    """The cut of one attempt in one holding.

    step: BSP: that of the cut, else None. array_elements: of all arrays together, by slice that is served here. record:
    of a slice as the shard machine has it. fail: is told why the cut cannot be had.
    """

    def __init__(
        self,
        step: int | None,
        array_elements: Mapping[int, int],
        room: Room,
        applier: Applier,
        record: Callable[[int], SliceRecord],
        fail: Callable[[str], None],
    ) -> None:
        self.machine = Cut(step, {index: 4 * size for index, size in array_elements.items()}, room)
        self._elements = array_elements
        self._applier = applier
        self._record = record
        self.fail = fail
        largest = max(array_elements.values(), default=1)
        most = min(len(array_elements), room.limit // (4 * largest) + 1) + _WRITER_COPIES
        self._asides = Asides(largest, most)
        self._copies: dict[int, Array] = {}
        #: Who waits for a slice to be copied.
        self._awaited: dict[int, asyncio.Future[None]] = {}
        self.is_over = False

    # --- what updates ask ---------------------------------------------------------------------------------------------

    def must_wait(self, index: int) -> bool:
        """See Guard."""
        return self.machine.must_wait(index)

    def copy_for_update(self, index: int) -> Aside | None:
        """See Guard."""
        if self.machine.is_safe(index):
            return None
        self.machine.copy_for_update(index)
        return self._aside(index)

    def _aside(self, index: int) -> Aside:
        memory = self._copies[index] = self._asides.take(index, self._elements[index])
        return Aside(memory, lambda: self._copied(index))

    def _copied(self, index: int) -> None:
        self.machine.copied(index)
        if not self.is_over:
            self._wake(index)
            self._applier.resume()

    # --- what the holding tells ---------------------------------------------------------------------------------------

    def look(self, indices: Iterable[int]) -> list[int]:
        """Slices, of which no update is under way, that are ripe now and were not before."""
        ripe = []
        try:
            for index in indices:
                if not self.is_over and self.machine.look(index, self._record(index)):
                    ripe.append(index)
                    self._wake(index)
        except ValueError as error:
            self.fail(str(error))
        return ripe

    def agree(self, following: Mapping[Life, int]) -> None:
        """SSP and ASP: the first push of each life that is not in the snapshot; ``look`` at all slices then."""
        self.machine.following = following

    def drop(self, indices: Iterable[int]) -> None:
        """These slices are served elsewhere."""
        self.machine.drop(indices)

    def end(self) -> None:
        """The attempt is over, or everything is written: nothing waits for it any more, and its memory is given back
        when the kernels that write to it have ended."""
        self.is_over = True
        self.machine.drop(self.machine.sizes)
        self._copies.clear()
        for future in self._awaited.values():
            future.cancel()
        self._awaited.clear()

    def _wake(self, index: int) -> None:
        future = self._awaited.pop(index, None)
        if future is not None and not future.done():
            future.set_result(None)

    # --- what the writer asks -----------------------------------------------------------------------------------------

    async def take(self, index: int) -> Array:
        """The copy of slice ``index``: all its arrays one after another. Waits until it is ripe and copied."""
        machine = self.machine
        while index not in machine.aside:
            if index in machine.versions and index not in machine.copying:
                self._copy(index)
            else:
                await self._awaited.setdefault(index, asyncio.get_running_loop().create_future())
        return self._copies[index]

    def prefetch(self, indices: Sequence[int]) -> None:
        """Has slices copied that can be and that nobody copied yet."""
        for index in indices:
            machine = self.machine
            if index in machine.versions and index not in machine.copying and index not in machine.aside:
                self._copy(index)

    def _copy(self, index: int) -> None:
        self.machine.copy_for_writer(index)
        self._applier.copy(index, self._aside(index))

    def written(self, index: int) -> None:
        """The copy that ``take`` gave is in its file."""
        self.machine.written(index)
        del self._copies[index]
        self._asides.give_back(index)
        self._applier.resume()

    def versions(self, indices: Sequence[int]) -> list[int]:
        """Versions at the cut of slices that were taken."""
        return [self.machine.versions[index] for index in indices]

    def waiting_for(self) -> str:
        """What the writer waits for; "" where that is nothing, or the storage."""
        index = next(iter(self._awaited), None)
        if index is None or index in self.machine.versions:
            return ""
        return f"for slice {index} to reach the cut" + (f" at step {self.machine.step}" if self.machine.step else "")

    def is_kept_back(self) -> bool:
        """Whether an update waits for this snapshot to be written."""
        return any(self._applier.is_kept_back(index) for index in self.machine.sizes)
