"""The weights of a parameter set on one server, and the sequence numbers by which they are read in place.

They lie in an arena (``psdist.wire.shm``) that workers on this host may map, or in plain memory where there can be no
arena. They are virtual over the whole vector: only ranges that are held take memory.

Invariant: the sequence number of a slice is twice its version, odd while its weights are written, and 1 once its memory
is reclaimed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psdist.errors import LimitExceededError
from psdist.types import Slicing
from psdist.wire.shm import WeightsArena, reason_of
from psdist_server.kernels.memory import AnonymousMemory


class WeightsMemory:
    """Memory for all slices of ``slicing``.

    array: float32[total]. sequence: uint64[slices]. Both are others once ``hold`` has found no room for an arena.
    arena: None where there is none, for the reason ``arena_error``.
    """

    def __init__(self, slicing: Slicing) -> None:
        self._slicing = slicing
        self._plain: AnonymousMemory | None = None
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

    def hold(self, ranges: Sequence[tuple[int, int]], *, is_first: bool) -> None:
        """Gives ranges of elements memory. Where an arena has no room for them there will be no arena if they are the
        first; else raises LimitExceededError."""
        if self.arena is not None:
            try:
                self.arena.allocate(ranges)
            except OSError as error:
                if not is_first:
                    reason = f"at the server: {reason_of(error)}"
                    raise LimitExceededError(f"the weights of more slices have no room: {reason}") from None
                self.arena.close()
                self._use_plain(error)
        if self._plain is not None:
            for start, stop in ranges:
                self._plain.use(start, stop)

    def reclaim(self, indices: Sequence[int], ranges: Sequence[tuple[int, int]]) -> None:
        """Gives the memory of slices back, which are these ranges, whole pages of it. Nothing may read them in place
        any more: what is read there afterwards is zeros."""
        if self._is_closed:
            return
        self.sequence[list(indices)] = 1  # So that no reader takes the zeros for weights.
        memory = self.arena or self._plain
        assert memory is not None
        for start, stop in ranges:
            memory.give_back(start, stop)

    def close(self) -> None:
        """Gives the arena back; workers that have it mapped keep their view."""
        if self.arena is not None:
            self.arena.close()
        self._is_closed = True
