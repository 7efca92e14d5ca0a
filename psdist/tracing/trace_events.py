"""Spans of several members as trace events, the JSON format of Perfetto and chrome://tracing, on one time axis, and the
phases of a worker's recorded steps in numbers.

Every member is a process of the trace. Its spans are on tracks: those of a worker's script, of the steps of each
parameter set, of its work on gradients, and of its requests to each server; on a server, those of each slice. A track
with spans that overlap in part, such as several requests to one server, is divided into several.

Invariant: Of two spans on a track, one contains the other, or they do not overlap. The format requires that.

Format: "Trace Event Format", the document by the authors of chrome://tracing; complete events and metadata only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from psdist.tracing.spans import SpanKind

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
