"""Spans of time: the bounded buffer in which one process records them, and their form as trace events. Pure.

Times are in seconds of the process's monotonic clock.

Every member is a process of the trace. Its spans are on tracks: those of a worker's script, of the steps of each
parameter set, of its work on gradients, and of its requests to each server; on a server, those of each slice. A track
with spans that overlap in part, such as several requests to one server, is divided into several.

Invariant: Of two spans on a track, one contains the other, or they do not overlap. The format requires that.

Format: "Trace Event Format", the document by the authors of chrome://tracing; complete events and metadata only.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final, NamedTuple, Protocol

from psdist.monitoring.metrics import Phase
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


#: Kind, start and end in nanoseconds of the member's clock, parameters, step, slice (-1 for none), and peer.
WireSpan = tuple[SpanKind, int, int, str, int, int, str]

_PHASES: Final = (SpanKind.COMPUTE, SpanKind.PUSH, SpanKind.WAIT, SpanKind.PULL)
#: Nanoseconds of an eighth of a microsecond.
_EIGHTH: Final = 125
#: Names of kinds whose own name says too little.
_NAMES: Final = {SpanKind.THREAD: "wait for a thread"}


@dataclass(frozen=True, slots=True)
class TracedClock:
    """A member's clock less the scheduler's, and the largest error of that, in nanoseconds.

    clock_id: the same for members that read the same clock.
    """

    offset: int
    uncertainty: int
    clock_id: str


@dataclass(frozen=True, slots=True)
class TracedProcess:
    """A member and its spans. name: for people. details: facts for people that the file states."""

    name: str
    clock: TracedClock
    spans: Sequence[WireSpan]
    details: Mapping[str, Any]


def share_clocks(clocks: Mapping[str, TracedClock]) -> dict[str, TracedClock]:
    """Return the clocks by member, where those with the same ``clock_id`` have the offset that is known best."""
    best: dict[str, TracedClock] = {}
    for clock in clocks.values():
        if clock.clock_id not in best or clock.uncertainty < best[clock.clock_id].uncertainty:
            best[clock.clock_id] = clock
    return {name: replace(clock, offset=best[clock.clock_id].offset) for name, clock in clocks.items()}


def trace_events(processes: Sequence[TracedProcess]) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace. Its time starts with the first span.

    Processes and threads are numbered from 1 on, because process ids of several hosts may be equal.
    """
    starts = [span[1] - process.clock.offset for process in processes for span in process.spans]
    zero, thread = min(starts, default=0), 0
    for number, process in enumerate(processes, 1):
        yield _metadata("process_name", number, 0, name=process.name)
        yield _metadata("process_sort_index", number, 0, sort_index=number)
        tracks: dict[tuple[int, str], list[WireSpan]] = defaultdict(list)
        for span in process.spans:
            tracks[_track(span)].append(span)
        for (_, name), spans in sorted(tracks.items()):
            for lane, members in enumerate(lanes(spans), 1):
                thread += 1
                title = name if lane == 1 else f"{name} ({lane})"
                yield _metadata("thread_name", number, thread, name=title)
                yield _metadata("thread_sort_index", number, thread, sort_index=thread)
                for span in members:
                    yield _event(span, number, thread, zero + process.clock.offset)


class _Lane:
    """Spans in order of their start, each nested in an earlier one or after it."""

    def __init__(self) -> None:
        self.spans: list[WireSpan] = []
        #: Ends of the spans that contain the present time, the innermost last.
        self._open: list[int] = []

    def add(self, span: WireSpan) -> bool:
        """Add a span. Returns False, with nothing done, if another one overlaps it in part."""
        _, start, end, *_ = span
        while self._open and self._open[-1] <= start:
            self._open.pop()
        if self._open and end > self._open[-1]:
            return False
        self.spans.append(span)
        self._open.append(end)
        return True


def lanes(spans: Iterable[WireSpan]) -> list[list[WireSpan]]:
    """Divide spans into as many lists as needed. Two spans of a list are nested or do not overlap."""
    found: list[_Lane] = []
    for span in sorted(spans, key=lambda span: (span[1], -span[2])):
        if not any(lane.add(span) for lane in found):
            found.append(_Lane())
            found[-1].add(span)
    return [lane.spans for lane in found]


def _track(span: WireSpan) -> tuple[int, str]:
    """Return the place and name of a span's track."""
    kind, _, _, parameters, _, slice_index, peer = span
    if slice_index >= 0:
        return 1000 + slice_index, f"{parameters} slice {slice_index}"
    if kind in _PHASES and not peer:
        return 0, "script"
    if kind is SpanKind.STEP:
        return 1, f"steps of {parameters}"
    if peer:
        return 3, f"requests of {parameters} to {peer}"
    return 2, f"gradients of {parameters}"


def _metadata(kind: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}


def _event(span: WireSpan, process: int, thread: int, zero: int) -> dict[str, Any]:
    """Return a complete event, with its times in microseconds.

    Both are rounded to eighths, which are exact in binary: a viewer that multiplies them by 1,000 gets whole numbers,
    so spans that touch do not overlap.
    """
    kind, start, end, parameters, step, slice_index, peer = span
    first, last = (start - zero) // _EIGHTH, (end - zero) // _EIGHTH
    args: dict[str, Any] = {"parameters": parameters} if parameters else {}
    if parameters:
        args["step"] = step
    if slice_index >= 0:
        args["slice"] = slice_index
    if peer:
        args["peer"] = peer
    return {
        "ph": "X",
        "name": _name(kind, step),
        "cat": kind.name.lower(),
        "pid": process,
        "tid": thread,
        "ts": first / 8,
        "dur": (last - first) / 8,
        "args": args,
    }


def _name(kind: SpanKind, step: int) -> str:
    name = _NAMES.get(kind, kind.name.lower())
    return f"{name} {step}" if kind in (SpanKind.STEP, SpanKind.REQUEST) else name


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """Steps of one worker and parameter set. seconds: of one step on average. phases: seconds of each within it."""

    worker: str
    parameters: str
    steps: int
    seconds: float
    phases: dict[str, float]

    def values(self) -> dict[str, Any]:
        """Return the numbers for a program."""
        what = {"worker": self.worker, "parameters": self.parameters, "steps": self.steps, "step_seconds": self.seconds}
        return {**what, "phase_seconds": self.phases}

    def line(self) -> str:
        """Return the numbers for people."""
        parts = ", ".join(
            f"{name} {1000 * seconds:.3g} ms ({100 * seconds / self.seconds:.0f} %)"
            for name, seconds in self.phases.items()
        )
        return f"{self.worker}: {self.steps} steps of {self.parameters!r}, {1000 * self.seconds:.3g} ms each: {parts}"


def summarize(workers: Sequence[TracedProcess]) -> list[WorkerSummary]:
    """Return the means of each worker's complete steps, by parameter set."""
    found = []
    for worker in workers:
        steps = [span for span in worker.spans if span[0] is SpanKind.STEP]
        for parameters in dict.fromkeys(span[3] for span in steps):
            own = [span for span in steps if span[3] == parameters]
            first, last = min(span[1] for span in own), max(span[2] for span in own)
            if last > first:
                phases = _phases(worker.spans, first, last)
                means = {name: nanoseconds / len(own) / 1e9 for name, nanoseconds in phases.items()}
                mean = (last - first) / len(own) / 1e9
                found.append(WorkerSummary(worker.name, parameters, len(own), mean, means))
    return found


def _phases(spans: Sequence[WireSpan], first: int, last: int) -> dict[str, int]:
    """Return the nanoseconds of each phase of the script between two times."""
    found = {kind.name.lower(): 0 for kind in _PHASES}
    for kind, start, end, _, _, _, peer in spans:
        if kind in _PHASES and not peer:
            found[kind.name.lower()] += max(0, min(end, last) - max(start, first))
    return found
