"""Watch over the ranks of one group: ends the group when a rank that a call needs gives no sign of life."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from psdist.collectives.core.machine import GroupMachine, needed_ranks
from psdist.collectives.core.silence import LOOKS
from psdist.collectives.mesh import Mesh
from psdist.errors import ClosedError, PsdistError, WorkerLostError
from psdist.types import WorkerEntry


class SilenceWatch:
    """Watch of one group at one rank.

    limit: seconds without a sign of life after which a rank is lost; None leaves that to its lease.
    lose: ends the group with an error at all ranks. A silent rank learns of it when it wakes.
    takes_any: returns True if this rank waits for a message of any rank.
    """

    def __init__(
        self,
        mesh: Mesh,
        machine: GroupMachine,
        limit: float | None,
        lose: Callable[[PsdistError], None],
        takes_any: Callable[[], bool],
    ) -> None:
        self._mesh = mesh
        self._machine = machine
        self._limit = math.inf if limit is None else limit
        self._lose = lose
        self._takes_any = takes_any
        self._members: Sequence[WorkerEntry] = ()
        self._timer: asyncio.TimerHandle | None = None

    def open(self, members: Sequence[WorkerEntry]) -> None:
        """Set the members, by rank."""
        self._members = members
        self.start()

    def start(self) -> None:
        """Watch until no call needs another rank, and none waits for a message of any rank."""
        if self._members and self._timer is None and math.isfinite(self._limit):
            self._timer = asyncio.get_running_loop().call_later(self._limit / LOOKS, self._look)

    def stop(self) -> None:
        """Stop to watch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        # A message of any rank might have been that of a rank which is lost.
        needed = self._machine.peers if self._takes_any() else needed_ranks(self._machine)
        for rank in needed:
            if reason := self._reason(rank):
                self._lose(WorkerLostError(f"rank {rank} is gone: {reason}", rank=rank))
                return
        if needed:
            self.start()

    def _reason(self, rank: int) -> str:
        member = self._members[rank]
        identity = member.worker_id, member.incarnation
        return self._mesh.liveness.check(identity, self._mesh.link(member), self._limit)

    def unreachable(self) -> list[int]:
        """Look at the other ranks that are in the run. Returns those that are gone, or silent."""
        return [rank for rank in self._machine.peers if self._mesh.knows(self._members[rank]) and self._reason(rank)]

    @property
    def closed(self) -> list[int]:
        """Ranks that have closed the group, or given up a call of it. Ranks that pass this on are not among them."""
        ended = {rank: error for rank, error in self._machine.lost.items() if isinstance(error, ClosedError)}
        return [rank for rank, error in ended.items() if error.details.get("rank") == str(rank)]
