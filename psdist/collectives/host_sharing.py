"""Memory of a group whose ranks are all on one host: each rank offers its own to the others, and maps theirs.

A rank shares once it has mapped the memory of all others, and announces that with each call. Calls before that, and all
calls if any rank cannot share, move over the links. A buffer is registered if all ranks have mapped the memory of all,
on which they agree by a call. Otherwise it is ordinary memory at all of them.

Invariants: Memory of a group is used for no other group, and lasts as long as any rank maps it. So a rank that is late,
or has not noticed that the group has ended, reads the group's data, or waits in vain.
"""

from __future__ import annotations

import asyncio
import logging
import math
import operator
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike

from psdist import addresses
from psdist.collectives.core.host_memory import RegisteredBuffers
from psdist.collectives.core.plans import Array, Bytes, check_dtype
from psdist.errors import DTypeMismatchError, InvalidArgumentError, SharingUnavailableError
from psdist.link import processes
from psdist.link.arenas import GradientArena, reason_of, take_arena
from psdist.off_loop import in_thread
from psdist.types import WorkerEntry
from psdist.v1 import worker_pb2 as pb
from psdist.wire import limits
from psdist.wire.limits import BUFFER_BYTES_MAX, BUFFERS_MAX, DIMENSIONS_MAX

logger = logging.getLogger("psdist")
#: Longest wait for the others' memory: for a rank that hands it to another one first.
MAP_SECONDS: Final = 2 * processes.HANDOVER_SECONDS


def are_on_one_host(members: Sequence[WorkerEntry]) -> bool:
    """True if workers have one address, and are few enough to share memory."""
    hosts = {addresses.parse_address(member.address)[0] for member in members if member.address}
    return 1 < len(members) <= limits.HOST_RANKS_MAX and len(hosts) == 1 and processes.has_waits()


class HostSharing:
    """One memory of each rank of a group, of ``nbytes``.

    number: of the registered buffer, 0 for memory that calls use in turn.
    offer: sends an offer to another rank.
    mapped: called once with the memory of all ranks, or with None if this rank cannot map all.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        nbytes: int,
        offer: Callable[[int, pb.GroupMemory], None],
        mapped: Callable[[list[Bytes] | None], None],
        *,
        number: int = 0,
    ) -> None:
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._nbytes = nbytes
        #: Elements and dtype of the memory of a rank.
        self._shape = -(-nbytes // 4), "float32"
        self._number = number
        self._offer, self._mapped = offer, mapped
        self._arenas: dict[int, GradientArena] = {}
        self._known: set[int] = set()
        self._has_ended = False
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Offer this rank's memory."""
        self._run(self._offer_all())

    def refuse(self, reason: str) -> None:
        """Tell the other ranks that this one cannot share."""
        logger.info("rank %d shares no memory with its group: %s", self._rank, reason)
        for peer in self._others:
            self._offer(peer, pb.GroupMemory(buffer=self._number))
        self._end(None)

    def on_offer(self, peer: int, offer: pb.GroupMemory) -> None:
        """Map a rank's memory. Raises InvalidArgumentError for a second offer."""
        if peer in self._known:
            raise InvalidArgumentError(f"rank {peer} offers its memory twice")
        self._known.add(peer)
        if offer.name:
            self._run(self._take(peer, offer))
        else:
            logger.info("rank %d shares no memory with rank %d", peer, self._rank)
            self._end(None)

    def close(self) -> None:
        """Stop to share."""
        for task in self._tasks:
            task.cancel()
        self._arenas.clear()
        self._end(None)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.add(asyncio.create_task(work, name="psdist host memory"))

    def _end(self, memories: list[Bytes] | None) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._mapped(memories)

    async def _offer_all(self) -> None:
        try:
            own = await in_thread(lambda: GradientArena.create(*self._shape))
        except OSError as error:
            self.refuse(reason_of(error))
            return
        self._add(self._rank, own)
        await asyncio.gather(*(self._hand_over(own, peer) for peer in self._others))

    async def _hand_over(self, own: GradientArena, peer: int) -> None:
        name = ""
        try:
            with processes.listening() as (name, listener):
                self._offer(peer, pb.GroupMemory(name=name, nonce=own.nonce, buffer=self._number))
                async with asyncio.timeout(processes.HANDOVER_SECONDS):
                    (await processes.accept_and_send(listener, own.fd)).close()
        except (SharingUnavailableError, TimeoutError) as error:
            logger.info("rank %d does not take the memory that rank %d shares: %s", peer, self._rank, error)
            if not name:  # There was no offer, for which the peer waits.
                self._offer(peer, pb.GroupMemory(buffer=self._number))

    async def _take(self, peer: int, offer: pb.GroupMemory) -> None:
        try:
            # A rank reads a small part of a buffer, and all of the memory of calls.
            arena, connected = await take_arena(offer.name, *self._shape, prefault=not self._number)
            connected.close()
            if arena.nonce != offer.nonce:
                raise SharingUnavailableError("its nonce is another one")
        except SharingUnavailableError as error:
            logger.info("rank %d does not map the memory of rank %d: %s", self._rank, peer, error.message)
            self._end(None)
            return
        self._add(peer, arena)

    def _add(self, rank: int, arena: GradientArena) -> None:
        self._arenas[rank] = arena
        if len(self._arenas) == len(self._others) + 1:
            memories = [self._arenas[one].flat.view(np.uint8)[: self._nbytes] for one in range(len(self._arenas))]
            self._end(memories)


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
