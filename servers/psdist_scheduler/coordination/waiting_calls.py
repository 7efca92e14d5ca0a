"""Calls that wait for an answer: whose they are, and what each was told last. Pure.

A call that waits is told its reason when the reason changes, and every ``REPEAT_SECONDS``, so that its peer can tell a
wait from a dead connection. What has waited for long is logged.

Invariant: only a call that waits was told to wait.

Not here: why something waits (the machines that it waits in).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from psdist.errors import LimitExceededError
from psdist.wire.limits import REPORT_WAIT_SECONDS, WAITS_PER_MEMBER_MAX
from psdist_scheduler.events import cluster_events as ev
from psdist_scheduler.events.records import Member
from psdist_scheduler.events.snapshot_events import Saving

REPEAT_SECONDS = 2.0


@dataclass(slots=True)
class _Wait:
    """Something that somebody waits for."""

    since: float
    text: str
    reported: str = ""


class WaitingCalls:
    """All calls that wait. waits: by key, what is waited for."""

    def __init__(self) -> None:
        self._owners: dict[int, str] = {}
        #: By call, the reason that it was told last, and when.
        self._told: dict[int, tuple[str, float]] = {}
        self._waits: dict[str, _Wait] = {}

    @property
    def texts(self) -> list[str]:
        """One sentence per wait in progress, the oldest first."""
        return [wait.text for wait in sorted(self._waits.values(), key=lambda wait: wait.since)]

    @property
    def all(self) -> tuple[int, ...]:
        """All calls that wait."""
        return tuple(self._owners)

    def check(self, worker: Member) -> None:
        """Raises LimitExceededError where this worker waits in as many calls as it may."""
        if list(self._owners.values()).count(worker.member_id) >= WAITS_PER_MEMBER_MAX:
            raise LimitExceededError(f"{worker} waits in {WAITS_PER_MEMBER_MAX} calls already, which is the limit")

    def add(self, call: int, member_id: str) -> None:
        """A call of this member waits; empty where it is nobody's."""
        self._owners[call] = member_id

    def end(self, call: int) -> None:
        self._owners.pop(call, None)
        self._told.pop(call, None)

    def of(self, members: Collection[str]) -> list[tuple[int, str]]:
        """Waiting calls of these members, and whose each is."""
        return [(call, member_id) for call, member_id in self._owners.items() if member_id in members]

    def settle(self, effects: Iterable[ev.Effect]) -> None:
        """Calls that were answered for good do not wait any more."""
        for effect in effects:
            match effect:
                case ev.Answer(_, ev.Upload() | ev.Draining() | ev.ScaleNews() | Saving()):
                    pass
                case ev.Answer(call) | ev.Refuse(call):
                    self.end(call)

    def report(self, waits: Iterable[ev.Wait], now: float) -> list[ev.Effect]:
        """Tells the calls that wait why, and notes what has waited for long."""
        effects: list[ev.Effect] = []
        before, self._waits = self._waits, {}
        for key, calls, text in waits:
            wait = self._waits[key] = before.get(key) or _Wait(now, text)
            wait.text = text
            if now - wait.since >= REPORT_WAIT_SECONDS and wait.reported != text:
                wait.reported = text
                # Those whose calls wait report it themselves.
                level: Literal["wait", "call"] = "call" if calls else "wait"
                effects.append(ev.LogEvent(f"{key}: waiting {text}, {now - wait.since:.0f} s so far", level))
            for call in calls:
                told, at = self._told.get(call, ("", float("-inf")))
                if told != text or now - at >= REPEAT_SECONDS:
                    self._told[call] = text, now
                    effects.append(ev.Answer(call, ev.Waiting(text)))
        return effects

    def validate(self) -> None:
        assert self._told.keys() <= self._owners.keys(), "a call was told to wait that does not wait"
