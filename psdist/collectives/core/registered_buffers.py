"""Registered buffers of a group at one rank: arrays of equal size, one at each rank, which all ranks of the host map.

An all-reduce reads its contributions in place if they are at one position of one buffer at all ranks. Each rank
announces the position of its array with the call, and all of them compare the announcements.

Invariants: A buffer has one number at all ranks, and is registered at all of them or at none. It stays registered at a
rank as long as any array there refers to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from psdist.collectives.core.header import NOWHERE, BufferPosition
from psdist.collectives.core.plan import Array, Bytes


@dataclass(frozen=True, slots=True)
class _Buffer:
    """One buffer. address, size: of this rank's memory. others: that of the other ranks."""

    address: int
    size: int
    others: dict[int, Bytes]


class RegisteredBuffers:
    """Buffers of one group at ``rank``. They may end in any thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._buffers: dict[int, _Buffer] = {}

    def __len__(self) -> int:
        return len(self._buffers)

    def register(self, number: int, memories: Sequence[Bytes]) -> None:
        """Register a buffer until no array refers to this rank's memory. memories: by rank, of equal sizes."""
        own = memories[self._rank]
        others = {rank: memory for rank, memory in enumerate(memories) if rank != self._rank}
        self._buffers[number] = _Buffer(own.ctypes.data, own.nbytes, others)
        weakref.finalize(_owner(own), self._buffers.pop, number, None).atexit = False

    def position_of(self, array: Array) -> BufferPosition:
        """Return the position of a contiguous array; ``NOWHERE`` unless it lies wholly in a registered buffer."""
        address = array.ctypes.data
        for number, buffer in list(self._buffers.items()):
            offset = address - buffer.address
            if array.nbytes and 0 <= offset <= buffer.size - array.nbytes:
                return BufferPosition(number, offset)
        return NOWHERE

    def contributions(self, position: BufferPosition, own: Array) -> list[Array]:
        """Return the arrays at a position by rank. own: this rank's, of one dimension."""
        others = self._buffers[position.number].others
        part = slice(position.offset, position.offset + own.nbytes)
        arrays = {rank: memory[part].view(own.dtype) for rank, memory in others.items()}
        return [arrays.get(rank, own) for rank in range(len(others) + 1)]

    def clear(self) -> None:
        """Forget all buffers, which remain ordinary memory."""
        self._buffers.clear()


def _owner(array: Bytes) -> Array:
    """Return the array that all views of some memory refer to."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
