"""Calls of one group that wait for other ranks to make them, as they are reported to the scheduler.

A rank that lacks a call may have made it, and its announcement is on the way. So the scheduler asks that rank before it
believes in a deadlock. Collectives are compared by their numbers. Of messages, a rank counts those with each other rank
that it has made, and those that the other rank has announced to it: if both are equal, none is on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from psdist.collectives.core.group_key import epoch_of
from psdist.collectives.core.machine import COLLECTIVES, CallLane, GroupMachine, missing_ranks
from psdist.collectives.core.plan import Plan
from psdist.errors import PsdistError
from psdist.types import WorkerEntry
from psdist.v1 import common_pb2
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire.limits import AWAITED_REPORTED_MAX

_RANKS_NAMED: Final = 8


class WaitingGroup(Protocol):
    """A group whose calls wait."""

    def need(self, call_id: int) -> pb.Activity.GroupCall | None:
        """Return the call that must be made before this one ends, and ranks that have not made it; None if all have."""

    def end(self, error: PsdistError) -> None:
        """End the group at all ranks."""


@dataclass(slots=True)
class AwaitedCall:
    """See ``group_calls``."""

    _group: WaitingGroup
    _call_id: int

    def need(self) -> pb.Activity.GroupCall | None:
        """See ``group_calls``."""
        return self._group.need(self._call_id)

    def fail(self, error: PsdistError) -> None:
        """End the call, and with it the group at all ranks."""
        self._group.end(error)


class CallCounts:
    """Calls that this rank has made, and messages that it knows of."""

    def __init__(self) -> None:
        self._collectives = 0
        #: Messages made with each rank, and announced by it, in both directions.
        self._made: Counter[int] = Counter()
        self._heard: Counter[int] = Counter()

    def made(self, lane: CallLane, plan: Plan) -> None:
        """Count a call of this rank."""
        if lane == COLLECTIVES:
            self._collectives += 1
        else:
            self._made.update(plan.peers)

    def heard(self, lane: CallLane, peer: int) -> None:
        """Count a call that another rank has announced."""
        if lane != COLLECTIVES:
            self._heard[peer] += 1

    def lacks(self, check: pb.CheckCall, peer: int) -> bool:
        """Return True if this rank has not made the call that ``peer`` waits for."""
        return (self._made[peer] if check.message else self._collectives) <= check.number

    def need(
        self, machine: GroupMachine, call_id: int, key: bytes, members: Sequence[WorkerEntry]
    ) -> pb.Activity.GroupCall | None:
        """Return the call that must be made before this one ends, and ranks that have not; None if all have."""
        lane, number, call, absent = missing_ranks(machine, call_id)
        if not absent or not members:
            return None
        ranks = [member.rank for member in members]
        named = ", ".join(map(str, ranks[:_RANKS_NAMED])) + (", ..." if len(ranks) > _RANKS_NAMED else "")
        return pb.Activity.GroupCall(
            group=key,
            message=lane != COLLECTIVES,
            number=number if lane == COLLECTIVES else self._heard[absent[0]],
            awaited=[
                common_pb2.WorkerIncarnation(worker_id=members[rank].worker_id, incarnation=members[rank].incarnation)
                for rank in absent[:AWAITED_REPORTED_MAX]
            ],
            text=f"in {call} of group {epoch_of(key)} of ranks {named}",
        )
