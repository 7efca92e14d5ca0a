"""Calls that wait for an answer: their owners, and the last reason sent to each. Pure.

A waiting call is sent its reason, or its progress, when that changes, and every ``REPEAT_SECONDS``, so that its peer
can tell a wait from a dead connection. Long waits are logged.

The reasons come from the machines that the calls wait in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from psdist.errors import LimitExceededError
from psdist.wire.limits import REPORT_WAIT_SECONDS, WAITS_PER_MEMBER_MAX
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_state import Member

REPEAT_SECONDS = 2.0


@dataclass(slots=True)
class _Wait:
    """A reason to wait."""

    since: float
    text: str
    reported: str = ""


class WaitingCalls:
    """All waiting calls, and the reasons to wait."""

    def __init__(self) -> None:
        self._owners: dict[int, str] = {}
        #: News that each call was last sent, and the time.
        self._told: dict[int, tuple[ef.Interim | None, float]] = {}
        self._waits: dict[str, _Wait] = {}

    @property
    def texts(self) -> list[str]:
        """One sentence per wait in progress, the oldest first."""
        return [wait.text for wait in sorted(self._waits.values(), key=lambda wait: wait.since)]

    @property
    def all(self) -> tuple[int, ...]:
        """All waiting calls."""
        return tuple(self._owners)

    def check(self, worker: Member) -> None:
        """Raise LimitExceededError if this worker already waits in as many calls as it may."""
        if list(self._owners.values()).count(worker.member_id) >= WAITS_PER_MEMBER_MAX:
            raise LimitExceededError(f"{worker} waits in {WAITS_PER_MEMBER_MAX} calls already, which is the limit")

    def add(self, call: int, member_id: str) -> None:
        """Add a waiting call of this member; empty for a caller that is no member."""
        self._owners[call] = member_id

    def end_call(self, call: int) -> None:
        self._owners.pop(call, None)
        self._told.pop(call, None)

    def of_members(self, members: Collection[str]) -> list[tuple[int, str]]:
        """Return the waiting calls of these members, with the member of each."""
        return [(call, member_id) for call, member_id in self._owners.items() if member_id in members]

    def drop_answered(self, effects: Iterable[ef.Effect]) -> None:
        """Remove the calls that these effects answer for good."""
        for effect in effects:
            match effect:
                case ef.Answer(_, value) if isinstance(value, ef.Interim):
                    pass
                case ef.Answer(call) | ef.Refuse(call):
                    self.end_call(call)

    def report(self, waits: Iterable[ef.Wait], now: float) -> list[ef.Effect]:
        """Send waiting calls their reasons, and log long waits."""
        effects: list[ef.Effect] = []
        before, self._waits = self._waits, {}
        for key, calls, text in waits:
            wait = self._waits[key] = before.get(key) or _Wait(now, text)
            wait.text = text
            if now - wait.since >= REPORT_WAIT_SECONDS and wait.reported != text:
                wait.reported = text
                # Waiting callers report this themselves.
                level: Literal["wait", "call"] = "call" if calls else "wait"
                effects.append(ef.LogEvent(f"{key}: waiting {text}, {now - wait.since:.0f} s so far", level))
            for call in calls:
                effects += self.tell(call, ef.Waiting(text), now)
        return effects

    def tell(self, call: int, news: ef.Interim, now: float, pause: float = 0.0) -> list[ef.Effect]:
        """Send a call its news, unless it knows them. pause: shortest time between two messages."""
        told, at = self._told.get(call, (None, float("-inf")))
        if now - at < (pause if news != told else REPEAT_SECONDS):
            return []
        self._told[call] = news, now
        return [ef.Answer(call, news)]
