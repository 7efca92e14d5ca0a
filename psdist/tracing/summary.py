"""Phases of a worker's recorded steps, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psdist.tracing.spans import SpanKind
from psdist.tracing.trace_events import TracedProcess, WireSpan

_PHASES = (SpanKind.COMPUTE, SpanKind.PUSH, SpanKind.WAIT, SpanKind.PULL)


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
