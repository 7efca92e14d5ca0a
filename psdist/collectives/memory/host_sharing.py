"""Memory of a group whose ranks are all on one host: each rank offers its own to the others, and maps theirs.

A rank shares once it has mapped the memory of all others, and announces that with each call. Calls before that, and all
calls if any rank cannot share, move over the links.

Invariants: Memory of a group is used for no other group, and lasts as long as any rank maps it. So a rank that is late,
or has not noticed that the group has ended, reads the group's data, or waits in vain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import numpy as np

from psdist import addresses
from psdist.collectives.core.host_memory import HostMemory, memory_bytes
from psdist.errors import InvalidArgumentError, SharingUnavailableError
from psdist.link import fd_passing, futex
from psdist.link.arenas import take_arena
from psdist.off_loop import in_thread
from psdist.types import WorkerEntry
from psdist.v1 import worker_pb2 as pb
from psdist.wire import limits
from psdist.wire.shm import GradientArena, reason_of

logger = logging.getLogger("psdist")


def are_on_one_host(members: Sequence[WorkerEntry]) -> bool:
    """True if workers have one address, and are few enough to share memory."""
    hosts = {addresses.parse_address(member.address)[0] for member in members if member.address}
    return 1 < len(members) <= limits.HOST_RANKS_MAX and len(hosts) == 1 and futex.is_available()


class HostSharing:
    """Memory of one group at one rank.

    offer: sends an offer to another rank.
    ready: called once with the memory of all ranks, when it is mapped.
    """

    def __init__(
        self, rank: int, size: int, offer: Callable[[int, pb.GroupMemory], None], ready: Callable[[HostMemory], None]
    ) -> None:
        self._rank, self._size = rank, size
        #: Elements and dtype of the memory of a rank.
        self._shape = memory_bytes(size) // 4, "float32"
        self._offer, self._ready = offer, ready
        self._arenas: dict[int, GradientArena] = {}
        self._known: set[int] = set()
        self._tasks = {asyncio.create_task(self._offer_all(), name="psdist host memory")}

    def on_offer(self, peer: int, offer: pb.GroupMemory) -> None:
        """Map a rank's memory. Raises InvalidArgumentError for a second offer."""
        if peer in self._known:
            raise InvalidArgumentError(f"rank {peer} offers its memory twice")
        self._known.add(peer)
        self._tasks.add(asyncio.create_task(self._take(peer, offer), name="psdist host memory"))

    def close(self) -> None:
        """Stop to share."""
        for task in self._tasks:
            task.cancel()
        self._arenas.clear()

    async def _offer_all(self) -> None:
        try:
            own = await in_thread(lambda: GradientArena.create(*self._shape))
        except OSError as error:
            logger.info("rank %d shares no memory with its group: %s", self._rank, reason_of(error))
            return
        self._add(self._rank, own)
        others = [rank for rank in range(self._size) if rank != self._rank]
        await asyncio.gather(*(self._hand_over(own, peer) for peer in others))

    async def _hand_over(self, own: GradientArena, peer: int) -> None:
        try:
            with fd_passing.listening() as (name, listener):
                self._offer(peer, pb.GroupMemory(name=name, nonce=own.nonce))
                async with asyncio.timeout(fd_passing.HANDOVER_SECONDS):
                    (await fd_passing.accept_and_send(listener, own.fd)).close()
        except (SharingUnavailableError, TimeoutError) as error:
            logger.info("rank %d does not take the memory that rank %d shares: %s", peer, self._rank, error)

    async def _take(self, peer: int, offer: pb.GroupMemory) -> None:
        try:
            arena, connected = await take_arena(offer.name, *self._shape)
            connected.close()
            if arena.nonce != offer.nonce:
                raise SharingUnavailableError("its nonce is another one")
        except SharingUnavailableError as error:
            logger.info("rank %d does not map the memory of rank %d: %s", self._rank, peer, error.message)
            return
        self._add(peer, arena)

    def _add(self, rank: int, arena: GradientArena) -> None:
        self._arenas[rank] = arena
        if len(self._arenas) == self._size:
            memories = [self._arenas[rank].flat.view(np.uint8) for rank in range(self._size)]
            self._ready(HostMemory(self._rank, memories))
