"""A member's part in a recording of ``psdist trace``, and OpenTelemetry spans of a worker's steps.

``psdist stacks`` asks in the same way, and is answered here, too.

Spans travel as messages of scheduler.proto.

Invariant: A recording ends with the session on which it was started.

A step is a span, and each phase within it a child. Nothing of OpenTelemetry is imported here: a process with a provider
has imported it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final

from psdist.errors import InvalidArgumentError, LimitExceededError
from psdist.monitoring.spans import PHASE_KINDS, Span, SpanKind, SpanRecorder
from psdist.monitoring.stacks import own_stacks
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire.limits import TEXT_CHARACTERS_MAX, TRACE_SPANS_PER_MESSAGE

#: Pause between two messages with spans.
_SEND_SECONDS: Final = 0.2

Send = Callable[[pb.TraceReport], None]


class MemberTrace:
    """The recording of one member, if there is one. All calls are from the event loop.

    start, stop: called with the recorder when spans are to be recorded, and when they are not any more.
    clock: seconds, the clock of the spans.
    """

    def __init__(
        self,
        start: Callable[[SpanRecorder], None],
        stop: Callable[[SpanRecorder], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._stop = stop
        self._clock = clock
        self._number = 0
        self._recorder: SpanRecorder | None = None
        self._send: Send = lambda report: None
        self._timer: asyncio.TimerHandle | None = None

    def on_command(self, command: pb.TraceCommand, send: Send) -> None:
        """Carry out a command of the scheduler. send: sends an answer on the session that it came on."""
        match command.WhichOneof("kind"):
            case "clock_ns":
                member_ns = round(self._clock() * 1e9)
                clock = pb.TraceReport.Clock(clock_ns=command.clock_ns, member_ns=member_ns, clock_id=clock_id())
                send(pb.TraceReport(number=command.number, clock=clock))
            case "stacks":
                send(pb.TraceReport(number=command.number, stacks=own_stacks()))
            case "start_steps" if self._recorder is None or command.number != self._number:
                self.end()
                self._number, self._send = command.number, send
                self._recorder = SpanRecorder(command.start_steps)
                self._start(self._recorder)
                self._send_spans(self._recorder)
            case "end" if command.number == self._number:
                self.end()

    def end(self) -> None:
        """Stop recording, and send what is left. Does nothing unless a recording is in progress."""
        if (recorder := self._recorder) is None:
            return
        self._discard(recorder)
        while not self._send_once(recorder, is_last=True):
            pass

    def session_ended(self) -> None:
        """Stop recording: nobody receives the spans any more."""
        if self._recorder is not None:
            self._discard(self._recorder)

    def _discard(self, recorder: SpanRecorder) -> None:
        self._recorder = None
        if self._timer is not None:
            self._timer.cancel()
        self._stop(recorder)

    def _send_spans(self, recorder: SpanRecorder) -> None:
        """Send spans, now and until the recording is complete."""
        if recorder.is_complete:
            self.end()
            return
        self._send_once(recorder)
        self._timer = asyncio.get_running_loop().call_later(_SEND_SECONDS, self._send_spans, recorder)

    def _send_once(self, recorder: SpanRecorder, *, is_last: bool = False) -> bool:
        """Send one message. Returns True if it has everything. is_last: nothing more is recorded."""
        recorded, steps = recorder.recorded, recorder.steps_done
        spans = recorder.take(TRACE_SPANS_PER_MESSAGE)
        message = spans_to_proto(spans)
        is_whole = len(spans) < TRACE_SPANS_PER_MESSAGE
        message.recorded, message.steps_done, message.done = recorded, steps, is_last and is_whole
        self._send(pb.TraceReport(number=self._number, spans=message))
        return is_whole


@cache
def clock_id() -> str:
    """Return a text that processes have in common whose monotonic clocks are one: those of a host, since it was booted,
    and of one time namespace. Without such facts it is this process's own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"process {os.getpid()} {time.time_ns()}"


_KINDS = {int(kind): kind for kind in SpanKind}
#: The lists of a message with an entry for each span.
_COLUMNS = ("kinds", "starts", "durations", "steps", "slices", "parameters", "peers")


def spans_to_proto(spans: Sequence[Span]) -> pb.TraceSpans:
    """Return spans as a message, in whole nanoseconds."""
    origin = _nanoseconds(min((span.start for span in spans), default=0.0))
    named = chain.from_iterable((span.parameters, span.peer) for span in spans)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(chain([""], named)))}
    starts = [_nanoseconds(span.start) for span in spans]
    return pb.TraceSpans(
        origin_ns=origin,
        kinds=[int(span.kind) for span in spans],  # type: ignore[misc]  # enums of protobuf are numbers to mypy
        starts=[start - origin for start in starts],
        durations=[max(0, _nanoseconds(span.end) - start) for span, start in zip(spans, starts, strict=True)],
        steps=[span.step for span in spans],
        slices=[span.slice_index + 1 for span in spans],
        parameters=[numbers[span.parameters] for span in spans],
        peers=[numbers[span.peer] for span in spans],
        names=list(numbers),
    )


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def check_spans(message: pb.TraceSpans) -> pb.TraceSpans:
    """Return a peer's message if its spans can be read.

    Raises InvalidArgumentError for lists of different lengths, unknown kinds and unknown names, LimitExceededError for
    too many spans or too long names.
    """
    counts = {len(getattr(message, column)) for column in _COLUMNS}
    if len(counts) > 1:
        raise InvalidArgumentError(f"spans in lists of different lengths, {sorted(counts)}: give one entry a span")
    if (count := max(counts)) > TRACE_SPANS_PER_MESSAGE:
        raise LimitExceededError(f"{count} spans in one message are over the limit of {TRACE_SPANS_PER_MESSAGE}")
    if len(message.names) > 2 * count + 1 or any(len(name) > TEXT_CHARACTERS_MAX for name in message.names):
        raise LimitExceededError(f"{count} spans with {len(message.names)} names, or a name that is too long")
    if unknown := set(message.kinds) - _KINDS.keys():
        raise InvalidArgumentError(f"spans of kind {min(unknown)} are unknown: use those of SpanKind")
    if count and max(max(message.parameters), max(message.peers)) >= len(message.names):
        raise InvalidArgumentError(f"a span refers to a name beyond the {len(message.names)} that the message has")
    return message


def spans_from_proto(message: pb.TraceSpans) -> list[tuple[SpanKind, int, int, str, int, int, str]]:
    """Return the spans of a checked message: kind, start and end in nanoseconds of the member's clock, and the fields
    of ``Span`` that follow them."""
    origin, names = message.origin_ns, message.names
    return [
        (_KINDS[kind], origin + start, origin + start + duration, names[parameters], step, index - 1, names[peer])
        for kind, start, duration, step, index, parameters, peer in zip(
            *(getattr(message, column) for column in _COLUMNS), strict=True
        )
    ]


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
