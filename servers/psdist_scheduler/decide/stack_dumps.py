"""Requests of ``psdist stacks``: which members were asked, and which have not answered. Pure.

All live members are asked at the same time, on their sessions. Stacks are passed on as they come, so nothing is kept
here.

Invariant: A request ends after ``ANSWER_SECONDS``, or after ``TRACE_BYTES_MAX`` of stacks, and at most
``STACKS_REQUESTS_MAX`` wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from psdist.errors import LimitExceededError
from psdist.wire.limits import STACKS_REQUESTS_MAX, TRACE_BYTES_MAX
from psdist_scheduler.decide.cluster_events import StacksReported, StacksRequested
from psdist_scheduler.decide.effects import Answer, Effect, MemberStacks, StacksCommand, StacksEnded
from psdist_scheduler.decide.members import Membership

#: Time for a member to answer: those of this machine may be asked in another way after it.
ANSWER_SECONDS: Final = 1.5


@dataclass(slots=True)
class _Request:
    """A request in progress. members: those that have not answered, by the session on which they were asked."""

    call: int
    started: float
    members: dict[int, MemberStacks] = field(default_factory=dict)
    bytes: int = 0


class StackDumps:
    """The requests of one run, by number."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._numbers = 0
        self._requests: dict[int, _Request] = {}

    def start(self, event: StacksRequested, now: float) -> list[Effect]:
        """Ask all members. Raises LimitExceededError."""
        if len(self._requests) >= STACKS_REQUESTS_MAX:
            raise LimitExceededError(
                f"{STACKS_REQUESTS_MAX} commands are reading the stacks of this run, which is the limit: try again"
            )
        self._numbers += 1
        request = self._requests[self._numbers] = _Request(event.call, now)
        effects: list[Effect] = [Answer(event.call, MemberStacks(None))]
        for member in (*self._members.servers, *self._members.workers):
            if session := self._members.sessions.call_of(member.member_id):
                request.members[session] = MemberStacks(member)
                effects += [Answer(event.call, MemberStacks(member)), Answer(session, StacksCommand(self._numbers))]
            else:
                effects.append(Answer(event.call, MemberStacks(member, missing="it has no session with the scheduler")))
        return effects + self._advance(now)

    def on_stacks(self, event: StacksReported, now: float) -> list[Effect]:
        """Pass a member's stacks on."""
        request = self._requests.get(event.number)
        asked = request.members.pop(event.call, None) if request is not None else None
        if request is None or asked is None:
            return []
        request.bytes += len(event.stacks)
        return [Answer(request.call, MemberStacks(asked.member, event.stacks)), *self._advance(now)]

    def tick(self, now: float) -> list[Effect]:
        """Give up the members that have had their time."""
        return self._advance(now) if self._requests else []

    def end_call(self, call: int) -> None:
        """Forget the request whose command has gone away."""
        self._requests = {number: one for number, one in self._requests.items() if one.call != call}

    def _advance(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for number, request in list(self._requests.items()):
            is_full = request.bytes > TRACE_BYTES_MAX
            if request.members and not is_full and now - request.started <= ANSWER_SECONDS:
                continue
            del self._requests[number]
            why = f"it did not answer within {ANSWER_SECONDS:g} s"
            if is_full:
                why = f"the others' stacks take over {TRACE_BYTES_MAX} bytes, which is the limit"
            effects += [
                Answer(request.call, MemberStacks(asked.member, missing=why)) for asked in request.members.values()
            ]
            effects.append(Answer(request.call, StacksEnded()))
        return effects
