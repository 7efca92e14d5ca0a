"""Memory for the gradients that a primary sends to its replicas.

It is an arena of slots, each large enough for a slice. A replica on this host maps the arena and reads gradients in
place. A slot is free again when nothing references its array: not the machine that stores the update, nor the queue
of a connection, nor a stream whose replica has not acknowledged it. The most recently freed slot is reused first,
because it may still be in a cache.

Invariants: The arena has at most KEPT_BYTES_MAX. Memory that a replica may still read is never written again: if a
stream ends before its replica has acknowledged a gradient, that slot is lost (``lose``), and an arena that has lost
half of its slots is replaced. Without a free slot, gradients get separate memory, which is copied when sent.

``replicator`` limits the number of stored gradients; ``replica_service`` reads the arena.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from psdist.errors import SharingUnavailableError
from psdist.link.arenas import PAGE, GradientArena, reason_of
from psdist.off_loop import off_loop
from psdist.types import Slicing
from psdist.wire.limits import KEPT_BYTES_MAX
from psdist_server.kernels.arrays import Array, Gradient

#: Alignment of slots, in elements: a cache line.
_ALIGNMENT: Final = 16


class UpdateMemory:
    """The memory of one parameter set. shared: True if it may be shared with replicas on this host."""

    def __init__(self, slicing: Slicing, *, shared: bool) -> None:
        self._slot_elements = -(-slicing.slice_elements // _ALIGNMENT) * _ALIGNMENT
        # A slice has at most one update in progress.
        self._slots = min(KEPT_BYTES_MAX // (4 * self._slot_elements), slicing.count)
        self._shared = shared
        self._arena: GradientArena | None = None
        self._making = asyncio.Lock()
        self._free: list[int] = []
        self._lost: list[Gradient] = []
        #: Bytes reserved for updates in progress, by slice.
        self._reserved: dict[int, int] = {}
        self._slicing = slicing

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved for updates that have started and are not sent yet."""
        return sum(self._reserved.values())

    def reserve(self, index: int) -> Array:
        """Return memory for the gradient of the next update of slice ``index``."""
        gradient = self.take(self._slicing.size(index))
        self._reserved[index] = gradient.nbytes
        return gradient

    def cancel(self, indices: Iterable[int]) -> None:
        """End the reservations of these slices, whose updates are sent or dropped."""
        for index in indices:
            self._reserved.pop(index, None)

    def arena(self) -> GradientArena:
        """Return the arena, creating it if needed. Raises SharingUnavailableError."""
        if not self._shared or not self._slots:
            raise SharingUnavailableError("this server shares no memory with others")
        if self._arena is None:
            self._take(self._create())
        assert self._arena is not None
        return self._arena

    async def prepare(self) -> None:
        """Create the arena if needed, in a thread because its memory is cleared. Raises SharingUnavailableError."""
        if self._shared and self._slots and self._arena is None:
            async with self._making:
                if self._arena is None:
                    self._take(await off_loop(self._slots * self._slot_elements, self._create))

    def _create(self) -> GradientArena:
        try:
            return GradientArena.create(self._slots * self._slot_elements, "float32")
        except OSError as error:
            self._shared = False
            raise SharingUnavailableError(reason_of(error)) from None

    def _take(self, arena: GradientArena) -> None:
        self._arena, self._free = arena, list(range(self._slots))

    def take(self, elements: int) -> Array:
        """Return float32[elements] with arbitrary values: a free slot, or separate memory if there is none."""
        if self._arena is None or not self._free:
            return np.empty(elements, np.float32)
        slot, free = self._free.pop(), self._free
        start = slot * self._slot_elements
        # Arrays derived from this one reference it, and not the arena, because its base is not an array.
        whole: Array = np.frombuffer(self._arena.part(start, start + self._slot_elements).data, np.float32)
        weakref.finalize(whole, free.append, slot).atexit = False
        return whole[:elements]

    def offset_of(self, arena: GradientArena, gradient: Gradient) -> int:
        """Return a gradient's offset in the file of ``arena``, in bytes, or 0 if it is elsewhere."""
        if not arena.shareable:  # Detached: later writes reach no file.
            return 0
        offset = gradient.__array_interface__["data"][0] - arena.address
        return PAGE + offset if 0 <= offset < arena.flat.nbytes else 0

    def lose(self, gradients: Sequence[Gradient]) -> bool:
        """Give up gradients that may be read for an unlimited time. Returns True if the arena has lost half of its
        slots."""
        if self._arena is not None:
            self._lost += [one for one in gradients if self.offset_of(self._arena, one)]
        return 2 * len(self._lost) >= max(1, self._slots)

    def renew(self) -> None:
        """Replace this arena by a new one. The old one lives as long as its gradients do."""
        self.close()

    def close(self) -> None:
        """Free the arena. Its gradients stay readable as long as they are referenced."""
        if self._arena is not None:
            self._arena.detach()
        self._arena, self._free, self._lost = None, [], []
