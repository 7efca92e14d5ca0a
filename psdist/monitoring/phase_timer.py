"""Clock of one client's calls: it divides all of a script's time into phases, and records spans for traces.

* ``COMPUTE``: the script is not in a call of psdist.
* ``PUSH``: it is in a call, and part of the gradient is not sent yet. This includes gathering and compressing it.
* ``WAIT``: it is in a call, everything is sent, and no server has answered during this call. Or servers hold up the
  rest of the gradient, because they still update earlier slices or lack other workers' gradients.
* ``PULL``: it is in a call, and a server has answered during it: the remaining answers arrive and are decoded.

A request is open from its routing to a server until the server has answered. In steps with buckets, requests are open
while the script computes. That time is compute; only the remainder during which the script waits counts as push, wait
or pull.

The script's threads start and end calls. The loop opens requests, and records when they are sent, answered and closed.
Most events do not change the phase, so that no clock is read: a step reads it four times. While a trace is recorded,
each phase and request also becomes a span.

Invariant: The phases add up to the time since the clock was started, regardless of the order of events, provided time
never decreases.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NamedTuple, Self

from psdist.monitoring.metrics import Phase, PhaseTimes
from psdist.monitoring.spans import PHASE_KINDS, Span, SpanKind, SpanSink

_NOT_TRACED: Final = nullcontext()
#: Looked up in each request.
_PUSH, _WAIT, _PULL = Phase.PUSH, Phase.WAIT, Phase.PULL


class Subject(NamedTuple):
    """The step of a parameter set, and the server, that a request concerns."""

    parameters: str
    step: int
    peer: str


class TimedCall:
    """Call of the script, as a reentrant ``with`` block. Made by ``PhaseTimer.call``."""

    __slots__ = ("_phase", "_timer")

    def __init__(self, timer: PhaseTimer, phase: Phase) -> None:
        self._timer = timer
        self._phase = phase

    def __enter__(self) -> Self:
        timer = self._timer
        with timer.lock:
            timer.calls += 1
            if timer.calls == 1:
                timer.without_requests = _PULL if timer.answering else self._phase
                timer.advance()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timer = self._timer
        with timer.lock:
            timer.calls -= 1
            if not timer.calls:
                timer.advance()
                if timer.sinks:
                    timer.emit_steps()


@dataclass(slots=True)
class _RequestTimes:
    """Times of a request; None for those that have not come yet."""

    opened: float
    sent: float | None = None
    answered: float | None = None

    def spans(self, now: float, subject: Subject, *, unsent: bool) -> list[Span]:
        """Return a span for the request, which ends now, and one for each of its parts. unsent: part of its gradient
        was never sent."""
        has_gradient = unsent or self.sent is not None
        sent = now if unsent else self.opened if self.sent is None else self.sent
        answered = now if self.answered is None else max(self.answered, sent)
        parts = [(SpanKind.WAIT, sent, answered), (SpanKind.PULL, answered, now)]
        if has_gradient:
            parts.insert(0, (SpanKind.PUSH, self.opened, sent))
        parameters, step, peer = subject
        whole = (SpanKind.REQUEST, self.opened, now)
        return [
            Span(kind, start, end, parameters, step, peer=peer)
            for kind, start, end in (whole, *(part for part in parts if part[1] < part[2]))
        ]


class TimedRequest:
    """Request to one server. Made by ``PhaseTimer.open_request``, and closed once."""

    __slots__ = ("_answered", "_held_up", "_subject", "_timer", "_times", "_unsent")

    def __init__(self, timer: PhaseTimer, sends: bool, subject: Subject | None) -> None:
        self._timer = timer
        self._unsent = sends
        self._held_up = False
        self._answered = False
        self._subject = subject
        #: Only while a trace is recorded: when the request was opened, sent, and first answered.
        self._times = _RequestTimes(timer.clock()) if timer.sinks and subject is not None else None
        with timer.lock:
            timer.open += 1
            timer.unsent += sends
            if timer.calls and timer.phase is not (_PUSH if sends else _WAIT):
                timer.advance()

    def sent(self) -> None:
        """Record that the gradient was sent. Does nothing without a gradient, or the second time."""
        if not self._unsent:
            return
        if self._held_up:
            self.resumed()
        self._unsent = False
        timer = self._timer
        if self._times is not None:
            self._times.sent = timer.clock()
        with timer.lock:
            timer.unsent -= 1
            if timer.calls and timer.unsent == timer.held_up:
                timer.advance()

    def held_up(self) -> None:
        """Record that the server takes no more of the gradient for now. Does nothing once it is sent or held up."""
        if self._unsent and not self._held_up:
            self._held_up = True
            timer = self._timer
            with timer.lock:
                timer.held_up += 1
                if timer.calls and timer.unsent == timer.held_up:
                    timer.advance()

    def resumed(self) -> None:
        """Record that the gradient is sent again. Does nothing unless it was held up."""
        if self._held_up:
            self._held_up = False
            timer = self._timer
            with timer.lock:
                timer.held_up -= 1
                if timer.calls and timer.unsent == timer.held_up + 1:
                    timer.advance()

    def answered(self) -> None:
        """Record the first answer. Does nothing for later ones."""
        if self._answered:
            return
        self._answered = True
        timer = self._timer
        if self._times is not None:
            self._times.answered = timer.clock()
        with timer.lock:
            timer.answering += 1
            before, timer.without_requests = timer.without_requests, _PULL
            if timer.calls and before is not _PULL:
                timer.advance()

    def close(self) -> None:
        """Record the end of the request."""
        if self._held_up:
            self.resumed()
        timer = self._timer
        with timer.lock:
            timer.open -= 1
            timer.unsent -= self._unsent
            timer.answering -= self._answered
            if timer.calls and (self._unsent or not self._answered):
                timer.advance()
            if self._times is not None and self._subject is not None:
                for span in self._times.spans(timer.clock(), self._subject, unsent=self._unsent):
                    timer.emit(span)


class TracedWork:
    """Work of a step, for a ``with`` block that becomes a span. Made by ``PhaseTimer.work``."""

    def __init__(self, timer: PhaseTimer, kind: SpanKind, parameters: str, step: int) -> None:
        self._timer = timer
        self._what = kind, parameters, step
        self._start = timer.clock()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        timer, (kind, parameters, step) = self._timer, self._what
        with timer.lock:
            timer.emit(Span(kind, self._start, timer.clock(), parameters, step))


class PhaseTimer:
    """Timer of one client. clock: seconds, monotonic; None is the computer's."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.clock = clock or time.monotonic
        #: Guards everything below.
        self.lock = threading.Lock()
        #: The current phase.
        self.phase = Phase.COMPUTE
        #: Calls in progress: nested ones, or those of several threads.
        self.calls = 0
        #: Phase of a call while no request of it is open. PULL as soon as a server has answered.
        self.without_requests = Phase.PUSH
        #: Number of open requests: all, those not fully sent, those of the latter that are held up, and those partly
        #: answered.
        self.open = self.unsent = self.held_up = self.answering = 0
        self._seconds = [0.0] * len(Phase)
        #: Until when the time is divided; None before the start.
        self._since: float | None = None
        self._timed_calls = {phase: TimedCall(self, phase) for phase in (Phase.PUSH, Phase.WAIT)}
        #: Receivers of spans; none unless a trace is recorded.
        self.sinks: tuple[SpanSink, ...] = ()
        #: The phase of the current span, and its start.
        self._span_phase, self._span_start = Phase.COMPUTE, 0.0
        #: Steps that ended in the call in progress: parameter set and number.
        self._ended: list[tuple[str, int]] = []

    def call(self, phase: Phase) -> TimedCall:
        """Return a ``with`` block for a call of the script. phase: its first phase, PUSH or WAIT."""
        return self._timed_calls[phase]

    def open_request(self, *, sends: bool, subject: Subject | None = None) -> TimedRequest:
        """Open a request to one server. sends: it carries a gradient. subject: for traces."""
        return TimedRequest(self, sends, subject)

    def start(self) -> None:
        """Start to count, unless a call has started before."""
        with self.lock:
            if self._since is None:
                self._since = self.clock()

    def times(self) -> PhaseTimes:
        """Return the seconds of each phase since the first call."""
        return PhaseTimes(*self.seconds())

    def seconds(self) -> list[float]:
        """Return the same as ``times`` by ``Phase``, in a fraction of the time. Zeros before the first call."""
        with self.lock:
            if self._since is not None:
                self.advance()
            return self._seconds[:]

    def advance(self) -> None:
        """Add the time until now to the current phase, and enter the next one. The caller holds the lock."""
        now = self.clock()
        since = now if self._since is None else self._since
        self._seconds[self.phase] += max(0.0, now - since)
        self._since = max(now, since)
        if not self.calls:
            self.phase = Phase.COMPUTE
        elif self.unsent:
            self.phase = _WAIT if self.unsent == self.held_up else _PUSH
        elif self.open and self.without_requests is not _PULL:
            self.phase = _WAIT
        else:
            self.phase = self.without_requests
        if self.sinks and self.phase is not self._span_phase:
            self.emit(Span(PHASE_KINDS[self._span_phase], self._span_start, now))
            self._span_phase, self._span_start = self.phase, now

    # --- traces ---

    def add_sink(self, sink: SpanSink) -> None:
        """Pass spans to ``sink`` from now on."""
        with self.lock:
            if not self.sinks:
                self._span_phase, self._span_start = self.phase, self.clock()
                self._ended.clear()
            self.sinks = (*self.sinks, sink)

    def remove_sink(self, sink: SpanSink) -> None:
        """Pass no more spans to ``sink``."""
        with self.lock:
            self.sinks = tuple(one for one in self.sinks if one is not sink)

    def emit(self, span: Span) -> None:
        """Pass a span to all sinks. The caller holds the lock."""
        for sink in self.sinks:
            sink.add(span)

    def work(self, kind: SpanKind, parameters: str, step: int) -> AbstractContextManager[None]:
        """Return a ``with`` block for work on a step, which becomes a span of this kind."""
        return TracedWork(self, kind, parameters, step) if self.sinks else _NOT_TRACED

    def end_step(self, parameters: str, step: int) -> None:
        """Record that a step is complete. It lasts until the end of the call in progress, if there is one."""
        if not self.sinks:
            return
        with self.lock:
            self._ended.append((parameters, step))
            if not self.calls:  # Sent in buckets, and answered while the script computes.
                now = self.clock()
                self.emit(Span(PHASE_KINDS[self._span_phase], self._span_start, now))
                self._span_start = now
                self.emit_steps()

    def emit_steps(self) -> None:
        """Pass the ended steps to all sinks. The script's phases are passed until now. The caller holds the lock."""
        ended, self._ended = self._ended, []
        for parameters, step in ended:
            for sink in self.sinks:
                sink.end_step(parameters, step, self._span_start)


class PushCounter:
    """Counter of one client's answered pushes."""

    def __init__(self) -> None:
        #: By parameter set.
        self.counts: Counter[str] = Counter()
        #: Of the last push: the largest over its slices, in versions.
        self.staleness = 0
        #: Called with the staleness of each push that ended.
        self.on_push: Callable[[int], None] | None = None

    def push_ended(self, parameters: str, staleness: int = 0) -> None:
        """Count an answered push. staleness: the largest over its slices, in versions."""
        self.counts[parameters] += 1
        self.staleness = staleness
        if self.on_push is not None:
            self.on_push(staleness)
