"""Recordings of spans for ``psdist trace``: who records, when everything was sent, and the members' clocks. Pure.

All live members start to record at the same time. A worker ends by itself after the wanted steps. Once all workers are
done or gone, the servers end, too. Spans are passed on as they come, so nothing is kept here.

The clock of a member is compared in several round trips, one after the other. If a message took equally long in both
directions, the member read its clock in the middle of the round trip; otherwise at most half of the round trip before
or after that. The shortest round trip counts.

Invariants: One recording at a time. A member that is gone, or does not answer, delays the end by ``ANSWER_SECONDS`` at
most. Each recording ends after ``TRACE_SECONDS_MAX``, or after ``TRACE_BYTES_MAX`` of spans.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from psdist.errors import InvalidArgumentError, NotMemberError, TraceInProgressError
from psdist.wire.limits import TRACE_BYTES_MAX, TRACE_SECONDS_MAX, TRACE_STEPS_MAX
from psdist_scheduler.decide.cluster_events import ClockReported, SpansReported, TraceRequested
from psdist_scheduler.decide.cluster_state import name_some
from psdist_scheduler.decide.effects import (
    Answer,
    Effect,
    MemberSpans,
    TraceCommand,
    TracedMember,
    TraceEnded,
    Waiting,
)
from psdist_scheduler.decide.members import Membership

#: Round trips by which a member's clock is compared.
CLOCK_ROUNDS: Final = 16
#: Time for a member to start recording, and to send the rest at the end.
ANSWER_SECONDS: Final = 5.0


@dataclass(slots=True)
class _TracePart:
    """A member's part in the recording. session: the call on which it received the start."""

    session: int
    state: TracedMember
    has_started: bool = False
    rounds: int = 0

    @property
    def is_over(self) -> bool:
        return self.state.done or bool(self.state.missing)


@dataclass(slots=True)
class _Recording:
    """A recording in progress. ending: when the members were asked to end; None before."""

    call: int
    number: int
    steps: int
    started: float
    parts: dict[str, _TracePart] = field(default_factory=dict)
    ending: float | None = None
    reason: str = ""
    bytes: int = 0
    progress: str = ""


class Traces:
    """The recordings of one run."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._numbers = 0
        self._recording: _Recording | None = None

    def tick(self, now: float) -> list[Effect]:
        """Notice members that are gone or silent, and the time limit."""
        recording = self._recording
        if recording is None:
            return []
        for member_id, part in recording.parts.items():
            if not part.is_over and (reason := self._missing(recording, member_id, part, now)):
                part.state = replace(part.state, missing=reason)
        effects: list[Effect] = []
        if now - recording.started > TRACE_SECONDS_MAX:
            effects = self._end_all(recording, f"{TRACE_SECONDS_MAX:g} s are over, which is the limit", now)
        effects += self._advance(recording, now)
        progress = _progress(recording)
        if self._recording is not None and progress != recording.progress:
            recording.progress = progress
            effects.append(Answer(recording.call, Waiting(progress)))
        return effects

    def end_call(self, call: int) -> list[Effect]:
        """End the recording whose command has gone away."""
        recording = self._recording
        if recording is None or recording.call != call:
            return []
        self._recording = None
        return _commands(recording, "end")

    def start(self, event: TraceRequested, now: float) -> list[Effect]:
        """Start a recording. Raises InvalidArgumentError, NotMemberError without live members, and
        TraceInProgressError."""
        if not 1 <= event.steps <= TRACE_STEPS_MAX:
            raise InvalidArgumentError(f"{event.steps} steps cannot be recorded: give 1 to {TRACE_STEPS_MAX}")
        if (earlier := self._recording) is not None:
            raise TraceInProgressError(
                f"a recording of {earlier.steps} steps began {now - earlier.started:.0f} s ago, and waits "
                f"{_progress(earlier)}: wait for its end, or end that psdist trace by Ctrl-C"
            )
        if not self._members.workers:
            raise NotMemberError("no worker is in the run, so there are no steps to record: start the workers first")
        self._numbers += 1
        recording = self._recording = _Recording(event.call, self._numbers, event.steps, now)
        for member in (*self._members.workers, *self._members.servers):
            session = self._members.sessions.call_of(member.member_id)
            missing = "" if session else "it has no session with the scheduler"
            recording.parts[member.member_id] = _TracePart(session, TracedMember(member, missing=missing))
        states: list[Effect] = [Answer(event.call, part.state) for part in recording.parts.values()]
        return [*states, *_commands(recording, "start"), *_commands(recording, "clock")]

    def _part_of(self, call: int, number: int) -> _TracePart | None:
        """Return the part of the member that reports on session ``call``; None if its recording is over."""
        recording, member_id = self._recording, self._members.sessions.member_of(call)
        if recording is None or recording.number != number:
            return None
        part = recording.parts.get(member_id)
        return part if part is not None and part.session == call and not part.state.done else None

    def on_spans(self, event: SpansReported, now: float) -> list[Effect]:
        """Process a member's spans."""
        part, recording = self._part_of(event.call, event.number), self._recording
        if part is None or recording is None:
            return []
        part.has_started = True
        recorded, steps = max(part.state.recorded, event.recorded), max(part.state.steps, event.steps)
        part.state = replace(part.state, recorded=recorded, steps=steps, done=event.done, missing="")
        effects: list[Effect] = [Answer(recording.call, MemberSpans(part.state.member.member_id, event.data))]
        recording.bytes += len(event.data)
        if recording.bytes > TRACE_BYTES_MAX:
            effects += self._end_all(recording, f"its spans take over {TRACE_BYTES_MAX} bytes, which is the limit", now)
        return effects + (self._advance(recording, now) if event.done else [])

    def on_clock(self, event: ClockReported) -> list[Effect]:
        """Process a member's answer about its clock."""
        part, recording = self._part_of(event.call, event.number), self._recording
        if part is None or recording is None or event.received < event.sent:
            return []
        part.rounds += 1
        uncertainty = (event.received - event.sent + 1) // 2
        if part.state.offset_ns is None or uncertainty < part.state.uncertainty_ns:
            offset = event.member - (event.sent + event.received) // 2
            part.state = replace(part.state, offset_ns=offset, uncertainty_ns=uncertainty, clock_id=event.clock_id)
        if part.rounds < CLOCK_ROUNDS:
            return [Answer(event.call, TraceCommand(recording.number, "clock"))]
        return [Answer(recording.call, part.state)] if part.rounds == CLOCK_ROUNDS else []

    def _missing(self, recording: _Recording, member_id: str, part: _TracePart, now: float) -> str:
        """Return why nothing more of a member comes; empty if that is not certain."""
        member = self._members.get(member_id)
        if member is None or not member.live or member.incarnation != part.state.member.incarnation:
            is_gone = member is not None and member.incarnation == part.state.member.incarnation
            return f"it {member.state_text}" if is_gone and member is not None else "it was replaced"
        if self._members.sessions.call_of(member_id) != part.session:
            return "its session with the scheduler broke"
        if not part.has_started and now - recording.started > ANSWER_SECONDS:
            return f"it did not start to record within {ANSWER_SECONDS:g} s; is it frozen, or of an older version?"
        if recording.ending is not None and now - recording.ending > ANSWER_SECONDS:
            return f"it did not send the rest within {ANSWER_SECONDS:g} s"
        return ""

    def _end_all(self, recording: _Recording, reason: str, now: float) -> list[Effect]:
        """Tell all members to end, before all steps are recorded."""
        if recording.ending is not None:
            return []
        recording.ending, recording.reason = now, reason
        return _commands(recording, "end")

    def _advance(self, recording: _Recording, now: float) -> list[Effect]:
        """End the servers' recordings once the workers' are over, and then the whole recording."""
        effects: list[Effect] = []
        workers = [part for part in recording.parts.values() if part.state.member.role == "worker"]
        if recording.ending is None and all(part.is_over for part in workers):
            recording.ending = now
            effects += _commands(recording, "end")
        if recording.ending is not None and all(part.is_over for part in recording.parts.values()):
            self._recording = None
            effects += [Answer(recording.call, part.state) for part in recording.parts.values()]
            if not recording.reason and not any(part.state.done for part in workers):
                recording.reason = "all workers are gone"
            effects.append(Answer(recording.call, TraceEnded(recording.reason)))
        return effects


def _commands(recording: _Recording, kind: str) -> list[Effect]:
    """Return a command to each member whose part is not over."""
    command = {
        "start": TraceCommand(recording.number, "start", recording.steps),
        "clock": TraceCommand(recording.number, "clock"),
        "end": TraceCommand(recording.number, "end"),
    }[kind]
    return [Answer(part.session, command) for part in recording.parts.values() if not part.is_over]


def _progress(recording: _Recording) -> str:
    """Return the wait of a recording, as text that begins with "for"."""
    parts = [part.state for part in recording.parts.values() if not part.is_over]
    workers = [state for state in parts if state.member.role == "worker"]
    if recording.ending is not None or not workers:
        return f"for {name_some([state.member.member_id for state in parts])} to send the rest"
    slowest = min(workers, key=lambda state: state.steps)
    return f"for {slowest.member} to complete step {slowest.steps + 1} of {recording.steps}"
