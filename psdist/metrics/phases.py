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


#: They are used in each request.
_PUSH, _WAIT, _PULL = Phase.PUSH, Phase.WAIT, Phase.PULL


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
    """Divides the time of one script, from ``start`` on, or from the first change of phase.

    Each event returns whether the phase may change. If so, ``advance`` must follow at once with the time, in seconds by
    any monotonic clock; most events change none, so that no clock has to be read.
    """

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

    # --- events ---

    def begin_call(self, phase: Phase) -> bool:
        """The script calls psdist. phase: what it does there first, PUSH or WAIT."""
        self._calls += 1
        if self._calls > 1:
            return False
        self._without_requests = Phase.PULL if self._answering else phase
        return True

    def end_call(self) -> bool:
        """The call is over."""
        self._calls -= 1
        return not self._calls

    def open_request(self, *, sends: bool) -> bool:
        """A request goes to a server. sends: it has a gradient."""
        self._open += 1
        self._unsent += sends
        return self._calls > 0 and self._phase is not (_PUSH if sends else _WAIT)

    def sent(self) -> bool:
        """The gradient of a request was handed over."""
        self._unsent -= 1
        return self._calls > 0 and not self._unsent

    def answered(self) -> bool:
        """The first answer to a request came."""
        self._answering += 1
        before, self._without_requests = self._without_requests, _PULL
        return self._calls > 0 and before is not _PULL

    def close_request(self, *, unsent: bool, answered: bool) -> bool:
        """A request is over. unsent: ``sent`` was due and never came. answered: ``answered`` came."""
        self._open -= 1
        self._unsent -= unsent
        self._answering -= answered
        return self._calls > 0 and (unsent or not answered)

    # --- time ---

    def start(self, now: float) -> None:
        """Begins to count, unless it has begun."""
        if self._since is None:
            self._since = now

    def advance(self, now: float) -> None:
        """Counts the time until now to the phase so far, and enters the next one."""
        since = now if self._since is None else self._since
        self._seconds[self._phase] += max(0.0, now - since)
        self._since = max(now, since)
        self._phase = self._next_phase()

    def times(self, now: float) -> PhaseTimes:
        """The seconds of each phase since the start."""
        self.advance(now)
        return PhaseTimes(*self._seconds)

    def _next_phase(self) -> Phase:
        if not self._calls:
            return Phase.COMPUTE
        if self._unsent:
            return Phase.PUSH
        if self._open and self._without_requests is not Phase.PULL:
            return Phase.WAIT
        return self._without_requests
