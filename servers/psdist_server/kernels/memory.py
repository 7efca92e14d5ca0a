"""Memory of the server process. Only arrays and messages may be large, and arrays occupy memory only where they are in
use.

For messages see ``psdist.machine``. Measured on Linux with glibc: 186 MB idle with compiled kernels and without this
module, 118 MB with it; 67 MB if vectors are small and nothing is compiled.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from psdist.address_range import AddressRange
from psdist.errors import LimitExceededError
from psdist.link.arenas import WeightsArena, reason_of
from psdist.types import Slicing

#: Minimum size in bytes of ranges that may use huge pages.
_HUGE_BYTES: Final = 1 << 21
#: Elements of a pool that are touched at a time.
_PREFAULT_ELEMENTS: Final = 4 << 20


class AnonymousMemory:
    """float32[``elements``], zeros. A page takes memory only once it is written to.

    Ranges that are not in use are never written to, and take no memory.
    """

    def __init__(self, elements: int) -> None:
        # Not from the heap, which never returns its memory.
        self._range = AddressRange(4 * elements)
        self.array: NDArray[np.float32] = self._range.view(np.dtype(np.float32), 0, elements)
        self._advise("MADV_NOHUGEPAGE", 0, elements)  # A huge page would extend beyond the range in use.

    def use(self, start: int, stop: int) -> None:
        """Declare that elements [start, stop) will be written to from now on."""
        if 4 * (stop - start) >= _HUGE_BYTES:
            self._advise("MADV_HUGEPAGE", start, stop)

    def prefault(self, start: int, stop: int) -> bool:
        """Allocate memory for elements [start, stop) now, so that no later write has to wait; their values stay. Other
        threads continue meanwhile. Returns False if the system cannot do this."""
        begin, size = _pages(start, stop)
        return size <= 0 or self._range.populate(begin, size)

    def give_back(self, start: int, stop: int) -> None:
        """Free the whole pages in elements [start, stop), which are no longer used and become zeros. Run this in a
        thread for large ranges."""
        self._advise("MADV_NOHUGEPAGE", start, stop)
        begin, size = _pages(start, stop)
        if size > 0:
            self._range.give_back(begin, size)

    def _advise(self, what: str, start: int, stop: int) -> None:
        """Give the kernel advice on the whole pages of a range. Advice that it does not know is skipped."""
        begin, size = _pages(start, stop)
        if size > 0:
            self._range.advise(begin, size, what)


def _pages(start: int, stop: int) -> tuple[int, int]:
    """Return the first byte and the size of the whole pages in elements [start, stop)."""
    begin = -(-4 * start // mmap.PAGESIZE) * mmap.PAGESIZE
    return begin, 4 * stop // mmap.PAGESIZE * mmap.PAGESIZE - begin


class MemoryPool:
    """Memory for up to ``most`` arrays of up to ``elements`` float32 each.

    The array released last is reused first, so that pages are touched once until they are freed (``shrink``).
    """

    def __init__(self, elements: int, most: int) -> None:
        self.shape = elements, most
        self._memory = AnonymousMemory(elements * most)
        self._memory.use(0, elements * most)
        self._free = list(range(most - 1, -1, -1))
        self._used: dict[int, int] = {}

    def acquire(self, key: int, size: int) -> NDArray[np.float32]:
        """Return memory of ``size`` elements, until ``key`` is released. It is from the heap if the pool is
        exhausted."""
        if not self._free:
            return np.empty(size, np.float32)
        place = self._used[key] = self._free.pop()
        return self._memory.array[place * self.shape[0] :][:size]

    def release(self, key: int) -> None:
        """Release the memory of ``key``; nothing may read or write it any more."""
        if (place := self._used.pop(key, None)) is not None:
            self._free.append(place)

    def prefault(self, elements: int) -> None:
        """Touch the memory of ``elements`` elements, as far as the system can. Run this in a thread."""
        size = min(elements, self._memory.array.size)
        for start in range(0, size, _PREFAULT_ELEMENTS):
            if not self._memory.prefault(start, min(start + _PREFAULT_ELEMENTS, size)):
                return

    @property
    def is_used(self) -> bool:
        """True if some of it is acquired."""
        return bool(self._used)

    def shrink(self) -> None:
        """Return all memory to the system, unless some of it is acquired."""
        if not self._used:
            self._free.sort(reverse=True)
            self._memory.give_back(0, self._memory.array.size)
            self._memory.use(0, self._memory.array.size)


class WeightsMemory:
    """The weights of all slices of ``slicing``, and the sequence numbers by which they are read in place.

    They are in an arena (``psdist.link.arenas``) that workers on this host may map, or in plain memory if no arena can
    be made. Invariant: The sequence number of a slice is twice its version, odd while its weights are being written,
    and 1 once its memory is reclaimed.

    array: float32[total]. Replaced if ``hold`` finds no room for an arena.
    sequence: uint64[slices]. Replaced together with ``array``.
    arena: None if there is none, for the reason ``arena_error``.
    """

    def __init__(self, slicing: Slicing) -> None:
        self._slicing = slicing
        self._plain: AnonymousMemory | None = None
        #: Slices that are held, or for which ``make_room`` was called.
        self._with_room: set[int] = set()
        #: Serializes allocating and freeing across threads.
        self._changing = threading.Lock()
        self._is_closed = False
        self.arena: WeightsArena | None = None
        self.arena_error = ""
        try:
            self.arena = WeightsArena.create(slicing.count, slicing.total)
        except OSError as error:
            self._use_plain(error)
        else:
            self.array: NDArray[np.float32] = self.arena.weights
            self.sequence: NDArray[np.uint64] = self.arena.sequence

    def _use_plain(self, error: OSError) -> None:
        self.arena, self.arena_error = None, f"at the server: {reason_of(error)}"
        self._plain = AnonymousMemory(self._slicing.total)
        self.array = self._plain.array
        self.sequence = np.zeros(self._slicing.count, np.uint64)

    def make_room(self, indices: Iterable[int]) -> None:
        """Allocate memory for slices ahead of ``hold``. Run this in a thread: the kernel clears a gigabyte in half a
        second. Raises the same errors as ``hold``."""
        with self._changing:
            new = sorted(set(indices) - self._with_room)
            ranges = joined(self._slicing, new)
            if self.arena is not None:
                try:
                    self.arena.allocate(ranges)
                except OSError as error:
                    if self._with_room:
                        reason = f"at the server: {reason_of(error)}"
                        raise LimitExceededError(f"no room for the weights of more slices: {reason}") from None
                    self.arena.close()
                    self._use_plain(error)
            if self._plain is not None:
                for start, stop in ranges:
                    self._plain.use(start, stop)
            self._with_room.update(new)

    def hold(self, indices: Iterable[int]) -> None:
        """Allocate memory for slices.

        If not even the first slices fit in shared memory, memory of this process replaces it. If later ones do not,
        LimitExceededError is raised.
        """
        if not self._with_room.issuperset(indices):
            self.make_room(indices)

    def release(self, indices: Iterable[int]) -> None:
        """Mark slices as no longer held. Their content stays until it is reclaimed, or they are held again."""
        with self._changing:
            self._with_room.difference_update(indices)

    def reclaim(self, indices: Iterable[int]) -> None:
        """Free the memory of released slices, in whole pages; slices that are held again are skipped. Nothing may read
        them in place any more: later reads return zeros."""
        with self._changing:
            if self._is_closed:
                return
            unused = sorted(set(indices) - self._with_room)
            self.sequence[unused] = 1  # So that no reader mistakes the zeros for weights.
            memory = self.arena or self._plain
            assert memory is not None
            for start, stop in joined(self._slicing, unused):
                memory.give_back(start, stop)

    def close(self) -> None:
        """Free the arena. Workers that have mapped it keep their view."""
        with self._changing:
            if self.arena is not None:
                self.arena.close()
            self._is_closed = True


def joined(slicing: Slicing, indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return the element ranges of ascending slices, with adjacent ranges joined."""
    joined: list[tuple[int, int]] = []
    for index in indices:
        start, stop = slicing.bounds(index)
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


def leave_out() -> None:
    """Hide packages that other packages import if they are installed, and that no server uses. Call this first.

    numba imports scipy for linear algebra (15 MB, 85 modules), and cffi and yaml for foreign functions and a
    configuration file (1 MB). structlog imports rich for the colors of tracebacks (5 MB, 65 modules).
    """
    for name in ("scipy", "rich", "cffi", "yaml"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None: cannot be imported
