"""Events, answers and commands about recordings of spans (``psdist trace``).

Frozen dataclasses, as in ``cluster_events``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from psdist_scheduler.events.cluster_state import Member


@dataclass(frozen=True, slots=True)
class TraceRequested:
    """Request to record this number of steps."""

    call: int
    run_id: str
    steps: int


@dataclass(frozen=True, slots=True)
class SpansReported:
    """A member's report on its session ``call``.

    data: its spans, as a message.
    recorded, steps: numbers of spans and of complete steps so far.
    done: True if nothing more comes.
    """

    call: int
    number: int
    data: bytes
    recorded: int
    steps: int
    done: bool


@dataclass(frozen=True, slots=True)
class ClockReported:
    """A member's answer on its session ``call`` to a question about its clock. Times in nanoseconds.

    sent, received: time of this scheduler when it asked, and when the answer came.
    member: time of the member in between.
    """

    call: int
    number: int
    sent: int
    member: int
    received: int
    clock_id: str


@dataclass(frozen=True, slots=True)
class TraceCommand:
    """To a member, on its session: see TraceCommand of scheduler.proto."""

    number: int
    kind: Literal["start", "end", "clock"]
    steps: int = 0


@dataclass(frozen=True, slots=True)
class MemberSpans:
    """Spans of one member, as a message."""

    member_id: str
    data: bytes


@dataclass(frozen=True, slots=True)
class TracedMember:
    """State of a member in a recording; see TraceMember of scheduler.proto. missing: why nothing more of it comes."""

    member: Member
    offset: int | None = None
    uncertainty: int = 0
    clock_id: str = ""
    recorded: int = 0
    steps: int = 0
    done: bool = False
    missing: str = ""


@dataclass(frozen=True, slots=True)
class TraceProgress:
    """Wait of a recording, as text that begins with "for"."""

    text: str


@dataclass(frozen=True, slots=True)
class TraceEnded:
    """End of a recording. reason: why it ended early; empty if all steps were recorded."""

    reason: str


TraceEvent = TraceRequested | SpansReported | ClockReported
TraceAnswer = MemberSpans | TracedMember | TraceProgress
