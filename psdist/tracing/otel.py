"""OpenTelemetry spans of a worker's steps, if the script's process has a tracer provider.

A step is a span, and each phase within it a child. Nothing of OpenTelemetry is imported here: a process with a provider
has imported it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from typing import Any, Final

from psdist.tracing.spans import PHASE_KINDS, Span

logger = logging.getLogger("psdist")

#: Phases that are kept until their step ends. A step in hundreds of buckets has more; the oldest are left out.
_PHASES_KEPT: Final = 1024
_PHASES: Final = frozenset(PHASE_KINDS.values())


class StepTracer:
    """Sink of a worker's spans that passes its steps to a tracer.

    api: the module ``opentelemetry.trace``.
    attributes: attributes of each step's span.
    wall_offset: seconds since 1970 less the time of the worker's clock.

    A tracer that fails is reported once and not used any more, since training must continue.
    """

    def __init__(self, api: Any, attributes: dict[str, str], wall_offset: float) -> None:
        self._api = api
        self._tracer = api.get_tracer("psdist")
        self._attributes = attributes
        self._wall_offset = wall_offset
        self._phases: deque[Span] = deque(maxlen=_PHASES_KEPT)
        #: End of the last step by parameter set.
        self._ends: dict[str, float] = {}
        self._has_failed = False

    def add(self, span: Span) -> None:
        """Keep a phase of the script until its step ends."""
        if span.kind in _PHASES and not span.peer:
            self._phases.append(span)

    def end_step(self, parameters: str, step: int, now: float) -> None:
        """Emit the span of a step and of its phases. The first step of a parameter set only begins the next one."""
        start = self._ends.get(parameters)
        self._ends[parameters] = now
        if start is None or self._has_failed:
            return
        try:
            self._emit(parameters, step, start, now)
        except Exception as error:  # Training continues without the tracer.
            self._has_failed = True
            logger.warning("OpenTelemetry receives no more steps, because its tracer failed: %r", error)
        earliest = min(self._ends.values())
        while self._phases and self._phases[0].end <= earliest:
            self._phases.popleft()

    def _emit(self, parameters: str, step: int, start: float, end: float) -> None:
        attributes = {**self._attributes, "psdist.parameters": parameters, "psdist.step": step}
        whole = self._tracer.start_span("psdist.step", start_time=self._wall_ns(start), attributes=attributes)
        context = self._api.set_span_in_context(whole)
        for phase in self._phases:
            first, last = max(phase.start, start), min(phase.end, end)
            if first < last:
                name = f"psdist.{phase.kind.name.lower()}"
                self._tracer.start_span(name, context, start_time=self._wall_ns(first)).end(self._wall_ns(last))
        whole.end(self._wall_ns(end))

    def _wall_ns(self, seconds: float) -> int:
        return round((seconds + self._wall_offset) * 1e9)


def step_tracer(run_id: str, worker_id: str) -> StepTracer | None:
    """Return the tracer of a worker's steps; None if the process has no tracer provider."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None or isinstance(api.get_tracer_provider(), api.ProxyTracerProvider | api.NoOpTracerProvider):
        return None
    attributes = {"psdist.run": run_id, "psdist.worker": worker_id}
    return StepTracer(api, attributes, time.time() - time.monotonic())
