"""Route of a group for the data of large calls: memory that the ranks of one host share, or a chain of hosts.

Which one follows from the members' addresses, so all ranks choose the same one. It is arranged when the group makes its
first large call, and given up when the group ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from psdist.collectives.core import host_memory
from psdist.collectives.core.host_memory import HostMemory, HostMoves
from psdist.collectives.core.machine import COLLECTIVES, CallLane, GroupMachine, MoveData
from psdist.collectives.core.plan import Plan
from psdist.collectives.host_chain import ChainMoves, HostChain, PartOfGroup, hosts_of
from psdist.collectives.memory.host_sharing import HostSharing, are_on_one_host
from psdist.collectives.memory.mover import Mover
from psdist.errors import ClosedError, InternalError, PsdistError
from psdist.types import WorkerEntry
from psdist.v1 import worker_pb2 as pb


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
        self._sharing: HostSharing | None = None
        self._mover: Mover | None = None
        self._chain: HostChain | None = None
        self._task: asyncio.Task[None] | None = None

    def open(self, members: list[WorkerEntry]) -> None:
        """Start to choose a route. members: by rank."""
        self._members = members

    def prepare(self, lane: CallLane, plan: Plan) -> None:
        """Arrange the route for a call that is about to be made, if it is the first one that needs it."""
        is_arranged = self._sharing is not None or self._chain is not None
        if not is_arranged and self._machine.broken is None and lane == COLLECTIVES and host_memory.fits(plan):
            self._share()
            if self._sharing is None and (hosts := hosts_of(self._members)):
                self._chain = HostChain(self._machine.rank, hosts, self._group.make_part, self._group.end)
                self._machine.route = self._chain

    def on_offer(self, peer: int, offer: pb.GroupMemory) -> None:
        """Process a rank's offer of memory. Raises InvalidArgumentError."""
        self._share()
        if self._sharing is not None:
            self._sharing.on_offer(peer, offer)

    def _share(self) -> None:
        """Start to share memory, if all ranks are on this host. Data moves over the links meanwhile."""
        rank, members = self._machine.rank, self._members
        if self._sharing is None and are_on_one_host(members) and self._group.claim_memory():
            self._sharing = HostSharing(rank, len(members), self._group.offer_memory, self._shared)

    def _shared(self, memory: HostMemory) -> None:
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

    def stop(self) -> None:
        """Stop to use the memory of calls, because the group has ended."""
        self._machine.route = None
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
