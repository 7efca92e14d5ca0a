"""Allocation of registered buffers: each rank offers memory of its own to the others, and maps theirs.

A buffer is registered if all ranks have mapped the memory of all, on which they agree by a call. Otherwise it is
ordinary memory at all of them.
"""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike

from psdist.collectives.core.plan import Array, Bytes
from psdist.collectives.core.reductions import check_dtype
from psdist.collectives.core.registered_buffers import RegisteredBuffers
from psdist.collectives.memory.host_sharing import HostSharing
from psdist.errors import DTypeMismatchError, InvalidArgumentError
from psdist.link import fd_passing
from psdist.v1 import worker_pb2 as pb
from psdist.wire.limits import BUFFER_BYTES_MAX, BUFFERS_MAX, DIMENSIONS_MAX

#: Longest wait for the others' memory: for a rank that hands it to another one first.
MAP_SECONDS: Final = 2 * fd_passing.HANDOVER_SECONDS


@dataclass(frozen=True, slots=True)
class BufferType:
    """Shape and dtype of a buffer."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def checked(cls, shape: int | Sequence[int], dtype: DTypeLike) -> BufferType:
        """Return the type of a buffer. Raises InvalidArgumentError and DTypeMismatchError."""
        try:
            sizes = tuple(map(operator.index, shape if isinstance(shape, Sequence) else (shape,)))
        except TypeError:
            raise InvalidArgumentError(f"shape={shape!r:.60} is no shape: use whole numbers from 0") from None
        if len(sizes) > DIMENSIONS_MAX or any(size < 0 for size in sizes):
            raise InvalidArgumentError(f"shape={shape!r:.60} is no shape: use up to {DIMENSIONS_MAX} numbers from 0")
        try:
            known = np.dtype(dtype)
        except TypeError:
            raise DTypeMismatchError(f"dtype={dtype!r:.60} is not one of numpy") from None
        check_dtype(known)
        if math.prod(max(1, size) for size in sizes) > (elements := BUFFER_BYTES_MAX // known.itemsize):
            raise InvalidArgumentError(
                f"shape={shape!r:.60} is too large: a buffer holds at most {elements} elements of dtype {known.name}"
            )
        return cls(sizes, known)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class BufferAllocator:
    """Buffers of a group at one rank, which are allocated one after another.

    offer: sends an offer to another rank.
    """

    def __init__(
        self, rank: int, size: int, buffers: RegisteredBuffers, offer: Callable[[int, pb.GroupMemory], None]
    ) -> None:
        self._rank, self._size = rank, size
        self._buffers = buffers
        self._offer = offer
        #: Number of the current buffer, or of the last one.
        self._number = 0
        self._sharing: HostSharing | None = None
        self._memories: list[Bytes] | None = None
        self._is_mapped = asyncio.Event()

    def expect(self, nbytes: int) -> None:
        """Begin to take the others' offers for the next buffer. They offer once all ranks have called this."""
        self._number += 1
        self._is_mapped.clear()
        self._sharing = HostSharing(self._rank, self._size, nbytes, self._offer, self._mapped, number=self._number)

    def _mapped(self, memories: list[Bytes] | None) -> None:
        self._memories = memories
        self._is_mapped.set()

    def on_offer(self, peer: int, offer: pb.GroupMemory) -> None:
        """Process a rank's offer. Raises InvalidArgumentError for a buffer that this rank does not expect."""
        if offer.buffer > self._number:
            raise InvalidArgumentError(f"rank {peer} offers buffer {offer.buffer}, and {self._number} is the last one")
        if self._sharing is not None and offer.buffer == self._number:  # Others are late: their buffer was given up.
            self._sharing.on_offer(peer, offer)

    async def map_all(self, *, can_share: bool) -> list[Bytes] | None:
        """Exchange memory with all ranks. Returns that of all, by rank; None if this rank cannot map it."""
        if self._sharing is None:  # A rank is gone.
            return None
        if not can_share or len(self._buffers) >= BUFFERS_MAX:
            self._sharing.refuse(
                f"it has {len(self._buffers)} buffers in this group, of at most {BUFFERS_MAX}, or too many groups do"
            )
            return None
        self._sharing.start()
        try:
            async with asyncio.timeout(MAP_SECONDS):
                await self._is_mapped.wait()
        except TimeoutError:
            return None
        return self._memories

    def register(self, wanted: BufferType, memories: list[Bytes]) -> Array:
        """Register the buffer that all ranks have mapped, and return it. memories: by rank."""
        self._buffers.register(self._number, memories)
        return memories[self._rank].view(wanted.dtype).reshape(wanted.shape)

    def close(self) -> None:
        """Stop to allocate the current buffer. One that was registered remains."""
        if self._sharing is not None:
            self._sharing.close()
        self._sharing = self._memories = None
