"""Calls of one group that wait for other ranks to make them, as they are reported to the scheduler.

A rank that lacks a call may have made it, and its announcement is on the way. So the scheduler asks that rank before it
believes in a deadlock. Collectives are compared by their numbers. Of messages, a rank counts those with each other rank
that it has made, and those that the other rank has announced to it: if both are equal, none is on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

    def need_message(self, tag: int) -> pb.Activity.GroupCall | None:
        """Return the message that any other rank has to send, and these ranks; None if one has, or is gone."""

    def end(self, error: PsdistError) -> None:
        """End the group at all ranks."""


@dataclass(slots=True)
class AwaitedCall:
    """See ``AwaitedCall``."""

    _group: WaitingGroup
    _call_id: int

    def need(self) -> pb.Activity.GroupCall | None:
        """See ``AwaitedCall``."""
        return self._group.need(self._call_id)

    def fail(self, error: PsdistError) -> None:
        """End the call, and with it the group at all ranks."""
        self._group.end(error)


@dataclass(frozen=True, slots=True)
class AwaitedMessage:
    """Wait for a message with this tag from any rank. See ``AwaitedCall``."""

    _group: WaitingGroup
    _tag: int

    def need(self) -> pb.Activity.GroupCall | None:
        """See ``AwaitedCall``."""
        return self._group.need_message(self._tag)

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
        #: Waits for messages of any rank.
        self._takers = 0

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

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Count a wait for a message of any rank, in a ``with`` block."""
        self._takers += 1
        try:
            yield
        finally:
            self._takers -= 1

    @property
    def takes_any(self) -> bool:
        """True if this rank waits for a message of any rank."""
        return self._takers > 0

    def lacks(self, check: pb.CheckCall, peer: int) -> bool:
        """Return True if this rank has not made the call that ``peer`` waits for, and does not make it by itself.

        A wait for a message of any rank takes those of ``peer`` that are on the way.
        """
        if check.message and self.takes_any and not 0 < check.next <= self._heard[peer] + 1:
            return False
        return (self._made[peer] if check.message else self._collectives) <= check.number

    def need(
        self, machine: GroupMachine, call_id: int, key: bytes, members: Sequence[WorkerEntry]
    ) -> pb.Activity.GroupCall | None:
        """Return the call that must be made before this one ends, and ranks that have not; None if all have."""
        lane, number, call, absent = missing_ranks(machine, call_id)
        if not absent or not members:
            return None
        return pb.Activity.GroupCall(
            group=key,
            message=lane != COLLECTIVES,
            number=number if lane == COLLECTIVES else self._heard[absent[0]],
            next=0 if lane == COLLECTIVES else self._made[absent[0]] + 1,
            awaited=[_identity(members[rank]) for rank in absent[:AWAITED_REPORTED_MAX]],
            text=f"in {call} {_group_text(key, members)}",
        )

    def need_message(
        self, machine: GroupMachine, tag: int, key: bytes, members: Sequence[WorkerEntry]
    ) -> pb.Activity.GroupCall | None:
        """Return the message that any other rank has to send, and these ranks; None if one has, or is gone.

        All of them are reported or none: the wait lasts only while each of them is held up.
        """
        if machine.error is not None or machine.lost or not members or len(machine.peers) > AWAITED_REPORTED_MAX:
            return None
        if machine.announced(tag) is not None:
            return None
        sources = [
            pb.Activity.GroupCall.Source(
                worker=_identity(members[rank]), number=self._heard[rank], next=self._made[rank] + 1
            )
            for rank in machine.peers
        ]
        text = f"in recv_any(tag={tag}) {_group_text(key, members)}"
        return pb.Activity.GroupCall(group=key, message=True, sources=sources, text=text)


def _identity(member: WorkerEntry) -> common_pb2.WorkerIncarnation:
    return common_pb2.WorkerIncarnation(worker_id=member.worker_id, incarnation=member.incarnation)


def _group_text(key: bytes, members: Sequence[WorkerEntry]) -> str:
    ranks = [member.rank for member in members]
    named = ", ".join(map(str, ranks[:_RANKS_NAMED])) + (", ..." if len(ranks) > _RANKS_NAMED else "")
    return f"of group {epoch_of(key)} of ranks {named}"
