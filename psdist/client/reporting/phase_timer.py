"""Clock of one client's calls: ``PhaseClock`` with real time, for the script's threads and the loop's.

A step reads the clock four times, when its phase changes. The script's thread starts and ends calls. The loop opens
requests, and records when they are sent, answered and closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from psdist.metrics.phases import Phase, PhaseClock, PhaseTimes


class TimedCall:
    """Call of the script, as a reentrant ``with`` block. Made by ``PhaseTimer.call``."""

    __slots__ = ("_phase", "_timer")

    def __init__(self, timer: PhaseTimer, phase: Phase) -> None:
        self._timer = timer
        self._phase = phase

    def __enter__(self) -> Self:
        timer = self._timer
        with timer.lock:
            if timer.machine.begin_call(self._phase):
                timer.machine.advance(timer.clock())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timer = self._timer
        with timer.lock:
            if timer.machine.end_call():
                timer.machine.advance(timer.clock())


class TimedRequest:
    """Request to one server. Made by ``PhaseTimer.open_request``, and closed once."""

    __slots__ = ("_answered", "_timer", "_unsent")

    def __init__(self, timer: PhaseTimer, sends: bool) -> None:
        self._timer = timer
        self._unsent = sends
        self._answered = False
        with timer.lock:
            if timer.machine.open_request(sends=sends):
                timer.machine.advance(timer.clock())

    def sent(self) -> None:
        """Record that the gradient was sent. Does nothing without a gradient, or the second time."""
        if self._unsent:
            self._unsent = False
            timer = self._timer
            with timer.lock:
                if timer.machine.sent():
                    timer.machine.advance(timer.clock())

    def answered(self) -> None:
        """Record the first answer. Does nothing for later ones."""
        if not self._answered:
            self._answered = True
            timer = self._timer
            with timer.lock:
                if timer.machine.answered():
                    timer.machine.advance(timer.clock())

    def close(self) -> None:
        """Record the end of the request."""
        timer = self._timer
        with timer.lock:
            if timer.machine.close_request(unsent=self._unsent, answered=self._answered):
                timer.machine.advance(timer.clock())


class PhaseTimer:
    """Timer of one client. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.machine = PhaseClock()
        self.lock = threading.Lock()
        self._calls = {phase: TimedCall(self, phase) for phase in (Phase.PUSH, Phase.WAIT)}

    def call(self, phase: Phase) -> TimedCall:
        """Return a ``with`` block for a call of the script. phase: its first phase, PUSH or WAIT."""
        return self._calls[phase]

    def open_request(self, *, sends: bool) -> TimedRequest:
        """Open a request to one server. sends: it carries a gradient."""
        return TimedRequest(self, sends)

    def start(self) -> None:
        """Start to count, unless a call has started before."""
        with self.lock:
            self.machine.start(self.clock())

    def times(self) -> PhaseTimes:
        """Return the seconds of each phase since the first call."""
        with self.lock:
            return self.machine.times(self.clock())

    def seconds(self) -> list[float]:
        """Return the same as ``times`` by ``Phase``, in a fraction of the time."""
        with self.lock:
            return self.machine.seconds(self.clock())
