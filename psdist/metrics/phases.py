"""What a script's time goes into: a clock that divides all of it into phases.

* ``COMPUTE``: the script is in no call of psdist.
* ``PUSH``: it is in a call, and something of the gradient is not handed over yet. This includes gathering and
  compressing it.
* ``WAIT``: it is in a call, everything is handed over, and no server has answered in this call yet.
* ``PULL``: it is in a call, and a server has answered in it: the rest of the answers comes, and is decoded.

A request is open from when it is routed to a server until that server has answered. In steps in buckets requests are
open while the script computes. That time is compute, and only what is left of them when the script waits counts as
push, wait or pull.

Invariant: the phases add up to the time since the clock was started, whatever the order of events, as long as ``now``
never goes back.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from enum import IntEnum


class Phase(IntEnum):
    """What a script is doing, as an index of ``PhaseTimes``."""

    COMPUTE = 0
    PUSH = 1
    WAIT = 2
    PULL = 3


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds of each phase."""

    compute: float = 0.0
    push: float = 0.0
    wait: float = 0.0
    pull: float = 0.0

    @property
    def total(self) -> float:
        """The time that was divided."""
        return self.compute + self.communication

    @property
    def communication(self) -> float:
        """The time for which the script stood still in psdist."""
        return self.push + self.wait + self.pull

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: PhaseTimes) -> PhaseTimes:
        """The times since ``other``, which is an earlier reading of the same clock."""
        return PhaseTimes(*(max(0.0, a - b) for a, b in zip(astuple(self), astuple(other), strict=True)))


class PhaseClock:
    """Divides the time of one script, from the first event on. ``now`` is in seconds, by any monotonic clock."""

    def __init__(self) -> None:
        self._seconds = [0.0] * len(Phase)
        self._phase = Phase.COMPUTE
        self._since: float | None = None
        #: Calls under way: one within another, or those of several threads.
        self._calls = 0
        #: The phase of a call while no request of it is open. PULL as soon as a server has answered.
        self._without_requests = Phase.PUSH
        #: Open requests: all, those not handed over, and those of which something was answered.
        self._open = 0
        self._unsent = 0
        self._answering = 0

    @property
    def is_started(self) -> bool:
        """Whether there was an event."""
        return self._since is not None

    def start(self, now: float) -> None:
        """Begins to count, unless it has begun."""
        if self._since is None:
            self._since = now

    def begin_call(self, phase: Phase, now: float) -> None:
        """The script calls psdist. phase: what it does there first, PUSH or WAIT."""
        self._calls += 1
        if self._calls == 1:
            self._without_requests = Phase.PULL if self._answering else phase
            self._update(now)

    def end_call(self, now: float) -> None:
        """The call is over."""
        self._calls -= 1
        self._update(now)

    def open_request(self, now: float, *, sends: bool) -> None:
        """A request goes to a server. sends: it has a gradient."""
        self._open += 1
        self._unsent += sends
        self._update(now)

    def sent(self, now: float) -> None:
        """The gradient of a request was handed over."""
        self._unsent -= 1
        self._update(now)

    def answered(self, now: float) -> None:
        """The first answer to a request came."""
        self._answering += 1
        self._without_requests = Phase.PULL
        self._update(now)

    def close_request(self, now: float, *, unsent: bool, answered: bool) -> None:
        """A request is over. unsent: ``sent`` was due and never came. answered: ``answered`` came."""
        self._open -= 1
        self._unsent -= unsent
        self._answering -= answered
        self._update(now)

    def times(self, now: float) -> PhaseTimes:
        """The seconds of each phase since the start."""
        self._update(now)
        return PhaseTimes(*self._seconds)

    def _update(self, now: float) -> None:
        """Counts the time since the last event to its phase, and determines the next one."""
        if self._since is None:
            self._since = now
        self._seconds[self._phase] += max(0.0, now - self._since)
        self._since = max(now, self._since)
        self._phase = self._next_phase()

    def _next_phase(self) -> Phase:
        if not self._calls:
            return Phase.COMPUTE
        if self._unsent:
            return Phase.PUSH
        if self._open and self._without_requests is not Phase.PULL:
            return Phase.WAIT
        return self._without_requests
