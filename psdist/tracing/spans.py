"""Spans of time, and the bounded buffer in which one process records them.

Times are in seconds of the process's monotonic clock.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import NamedTuple, Protocol

from psdist.metrics.interval import Phase
from psdist.wire.limits import TRACE_SPANS_MAX


class SpanKind(IntEnum):
    """Activity during a span. The numbers are those of the messages; see SpanKind of scheduler.proto."""

    COMPUTE = 1
    PUSH = 2
    WAIT = 3
    PULL = 4
    STEP = 5
    GATHER = 6
    ENCODE = 7
    REQUEST = 8
    QUEUE = 9
    THREAD = 10
    COMBINE = 11
    APPLY = 12
    REPLICATE = 13


#: Kind of the span that the script spends in a phase.
PHASE_KINDS = {phase: SpanKind[phase.name] for phase in Phase}


class Span(NamedTuple):
    """Activity from ``start`` to ``end``.

    parameters: name of the parameter set; empty if it concerns none.
    step: step or version that it belongs to; 0 if there is none.
    slice_index: -1 if it concerns none.
    peer: member at the other side; empty if it concerns none.
    """

    kind: SpanKind
    start: float
    end: float
    parameters: str = ""
    step: int = 0
    slice_index: int = -1
    peer: str = ""


class SpanSink(Protocol):
    """Receiver of a worker's spans, whose calls do not overlap."""

    def add(self, span: Span) -> None:
        """Receive a span that has ended. Phases of the script name no parameters."""

    def end_step(self, parameters: str, step: int, now: float) -> None:
        """Record that a step of a parameter set has ended, after its phases."""


class SpanRecorder:
    """Spans of one process, at most ``TRACE_SPANS_MAX`` that are not taken yet. Further ones are counted and dropped.

    steps: complete steps of one parameter set after which the recording is complete; 0 for no limit. The first step
        that ends only marks the beginning of the next one.

    Calls that add spans must not overlap each other. ``take`` may overlap them, because a deque is safe for that.
    """

    def __init__(self, steps: int = 0) -> None:
        self._steps = steps
        self._spans: deque[Span] = deque()
        #: Number of spans so far, including dropped ones.
        self.recorded = 0
        #: Number of complete steps, of the parameter set with the most.
        self.steps_done = 0
        #: By parameter set, the end of its last step, and its number of complete steps.
        self._ends: dict[str, tuple[float, int]] = {}

    @property
    def is_complete(self) -> bool:
        """True once all wanted steps are recorded. Spans that end later are ignored."""
        return 0 < self._steps <= self.steps_done

    def add(self, span: Span) -> None:
        """Record a span."""
        if self.is_complete:
            return
        self.recorded += 1
        if len(self._spans) < TRACE_SPANS_MAX:
            self._spans.append(span)

    def end_step(self, parameters: str, step: int, now: float) -> None:
        """Record the end of a step."""
        before, done = self._ends.get(parameters, (None, -1))
        if before is not None:
            self.add(Span(SpanKind.STEP, before, now, parameters, step))
        self._ends[parameters] = now, done + 1
        self.steps_done = max(self.steps_done, done + 1)

    def take(self, count: int) -> list[Span]:
        """Remove and return the oldest spans, at most ``count``."""
        return [self._spans.popleft() for _ in range(min(count, len(self._spans)))]
