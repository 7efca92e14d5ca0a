"""Route of a group for the data of large calls: memory that the ranks of one host share, or a chain of hosts.

Which one follows from the members' addresses, so all ranks choose the same one. It is arranged when the group makes its
first large call, and given up when the group ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Protocol

import numpy as np

from psdist.collectives import calls
from psdist.collectives.core import host_memory
from psdist.collectives.core.host_memory import HostMemory, HostMoves
from psdist.collectives.core.machine import COLLECTIVES, CallLane, GroupMachine, MoveData
from psdist.collectives.core.plan import Array, Bytes, Plan
from psdist.collectives.core.registered_buffers import RegisteredBuffers
from psdist.collectives.host_chain import ChainMoves, HostChain, PartOfGroup, hosts_of
from psdist.collectives.memory.buffers import MAP_SECONDS, BufferAllocator, BufferType
from psdist.collectives.memory.host_sharing import HostSharing, are_on_one_host
from psdist.collectives.memory.mover import Mover
from psdist.errors import ClosedError, InternalError, PsdistError
from psdist.types import WorkerEntry
from psdist.v1 import worker_pb2 as pb
from psdist.wire import limits


class RoutedGroup(Protocol):
    """The group of a route."""

    def claim_memory(self) -> bool:
        """Return True if the group may share memory of the host, until ``return_memory``."""

    def return_memory(self) -> None:
        """Let another group share memory."""

    def offer_memory(self, peer: int, offer: pb.GroupMemory) -> None:
        """Offer memory to a rank."""

    def make_part(self, ranks: Sequence[int], name: str) -> PartOfGroup:
        """Make a group of some of the ranks. Raises LimitExceededError."""

    def end(self, error: PsdistError) -> None:
        """End the group at all ranks."""


class DataRoute:
    """Route of one group at one rank, in whose machine it is set once this rank can go it."""

    def __init__(self, group: RoutedGroup, machine: GroupMachine) -> None:
        self._group = group
        self._machine = machine
        self._members: list[WorkerEntry] = []
        self._buffers = RegisteredBuffers(machine.rank)
        self._allocator = BufferAllocator(machine.rank, machine.size, self._buffers, group.offer_memory)
        self._sharing: HostSharing | None = None
        #: Set once ``_sharing`` has mapped all memory, or cannot.
        self._arranged = asyncio.Event()
        self._mover: Mover | None = None
        self._chain: HostChain | None = None
        self._task: asyncio.Task[None] | None = None

    def open(self, members: list[WorkerEntry]) -> None:
        """Start to choose a route. members: by rank."""
        self._members = members

    @cached_property
    def _is_one_host(self) -> bool:
        return are_on_one_host(self._members)

    @cached_property
    def _hosts(self) -> list[range]:
        return hosts_of(self._members)

    def prepare(self, lane: CallLane, plan: Plan) -> None:
        """Arrange the route for a call that is about to be made, if it is the first one that needs it."""
        needs_route = self._sharing is None and self._chain is None and self._machine.broken is None
        if needs_route and self._members and lane == COLLECTIVES and host_memory.fits(plan):
            self._share()
            if self._sharing is None and self._hosts:
                self._chain = HostChain(self._machine.rank, self._hosts, self._group.make_part, self._group.end)
                self._machine.route = self._chain
        if plan.whole is not None:
            plan.position = self._buffers.position_of(plan.whole[0])

    async def allocate(self, wanted: BufferType, call: Callable[[Plan], Awaitable[None]]) -> Array:
        """Return a buffer of zeros, registered if all ranks can map that of each. call: makes a call of the group.

        Raises the error that ends the group.
        """
        rank, size = self._machine.rank, self._machine.size
        self._allocator.expect(wanted.nbytes)
        try:
            await call(calls.allocate_buffer(rank, size, wanted.shape, wanted.dtype.name))
            if self._is_one_host and wanted.nbytes >= limits.BUFFER_BYTES_MIN:
                self._share()
                memories = await self._allocator.map_all(can_share=self._sharing is not None)
                # Results need the memory of calls, too.
                agreed = np.array([memories is not None and await self._is_arranged()])
                await call(calls.all_reduce(rank, size, agreed, agreed, "band"))
                if memories is not None and agreed[0]:
                    return self._allocator.register(wanted, memories)
            return np.zeros(wanted.shape, wanted.dtype)
        except asyncio.CancelledError:
            self._group.end(ClosedError(f"rank {rank} gave up allocate_buffer, so that the group has ended", rank=rank))
            raise
        finally:
            self._allocator.close()

    def on_offer(self, peer: int, offer: pb.GroupMemory) -> None:
        """Process a rank's offer of memory. Raises InvalidArgumentError."""
        if offer.buffer:
            self._allocator.on_offer(peer, offer)
            return
        self._share()
        if self._sharing is not None:
            self._sharing.on_offer(peer, offer)

    def _share(self) -> None:
        """Start to share memory, if all ranks are on this host. Data moves over the links meanwhile."""
        rank, members = self._machine.rank, self._members
        if self._sharing is None and self._is_one_host and self._group.claim_memory():
            nbytes = host_memory.memory_bytes(len(members))
            self._sharing = HostSharing(rank, len(members), nbytes, self._group.offer_memory, self._mapped)
            self._sharing.start()

    async def _is_arranged(self) -> bool:
        """Wait until memory for calls was arranged. Returns False if it cannot be."""
        with suppress(TimeoutError):
            async with asyncio.timeout(MAP_SECONDS):
                await self._arranged.wait()
        return self._mover is not None

    def _mapped(self, memories: list[Bytes] | None) -> None:
        self._arranged.set()
        if memories is not None:
            memory = HostMemory(self._machine.rank, memories, self._buffers)
            self._machine.route, self._mover = memory, Mover(memory)

    def move(self, effect: MoveData, moved: Callable[[int], None]) -> None:
        """Carry out an effect. moved: called with the id of the call, unless the movement fails or is stopped."""
        if isinstance(effect.moves, HostMoves) and self._mover is not None:
            self._mover.start(effect.moves, partial(self._ended, effect.call_id, moved))
        elif isinstance(effect.moves, ChainMoves) and self._chain is not None:
            self._task = asyncio.create_task(self._chain.all_reduce(effect.moves.plan), name="psdist host chain")
            self._task.add_done_callback(partial(self._chain_ended, effect.call_id, moved))

    def _chain_ended(self, call_id: int, moved: Callable[[int], None], task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._ended(call_id, moved, task.exception())

    def _ended(self, call_id: int, moved: Callable[[int], None], error: BaseException | None) -> None:
        if error is None:
            moved(call_id)
        elif not isinstance(error, PsdistError):  # Errors of a chain have ended the group.
            self._group.end(InternalError(f"rank {self._machine.rank} could not move its data: {error!r}"))

    def on_lost(self) -> None:
        """Stop to wait for the memory of a rank that is gone."""
        self._allocator.close()
        self._arranged.set()

    def stop(self) -> None:
        """Stop to use the memory of calls, because the group has ended."""
        self._machine.route = None
        self._allocator.close()
        self._buffers.clear()
        if self._mover is not None:
            self._mover.stop()
        if self._sharing is not None:
            self._sharing.close()
            self._group.return_memory()
        if self._chain is not None:
            self._chain.abandon(self._machine.broken or ClosedError("the group has ended"))
        if self._task is not None:
            self._task.cancel()
        self._sharing = self._mover = self._chain = self._task = None
