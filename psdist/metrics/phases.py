"""Clock that divides all of a script's time into phases.

* ``COMPUTE``: the script is not in a call of psdist.
* ``PUSH``: it is in a call, and part of the gradient is not sent yet. This includes gathering and compressing it.
* ``WAIT``: it is in a call, everything is sent, and no server has answered during this call. Or servers hold up the
  rest of the gradient, because they still update earlier slices or lack other workers' gradients.
* ``PULL``: it is in a call, and a server has answered during it: the remaining answers arrive and are decoded.

A request is open from its routing to a server until the server has answered. In steps with buckets, requests are open
while the script computes. That time is compute; only the remainder during which the script waits counts as push, wait
or pull.

Invariant: The phases add up to the time since the clock was started, regardless of the order of events, provided
``now`` never decreases.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from enum import IntEnum


class Phase(IntEnum):
    """Activity of a script, as an index into ``PhaseTimes``."""

    COMPUTE = 0
    PUSH = 1
    WAIT = 2
    PULL = 3


#: Looked up in each request.
_PUSH, _WAIT, _PULL = Phase.PUSH, Phase.WAIT, Phase.PULL


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds spent in each phase."""

    compute: float = 0.0
    push: float = 0.0
    wait: float = 0.0
    pull: float = 0.0

    @property
    def total(self) -> float:
        """Time that was divided."""
        return self.compute + self.communication

    @property
    def communication(self) -> float:
        """Time that the script spent waiting in psdist."""
        return self.push + self.wait + self.pull

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: PhaseTimes) -> PhaseTimes:
        """Return the times since ``other``, an earlier reading of the same clock."""
        return PhaseTimes(*(max(0.0, a - b) for a, b in zip(astuple(self), astuple(other), strict=True)))


class PhaseClock:
    """Clock of one script's time, beginning with ``start`` or the first change of phase.

    Each event returns True if the phase may change. Then ``advance`` must follow immediately with the time, in seconds
    of a monotonic clock. Most events change nothing, so that no clock is read.
    """

    def __init__(self) -> None:
        self._seconds = [0.0] * len(Phase)
        self._phase = Phase.COMPUTE
        self._since: float | None = None
        #: Calls in progress: nested ones, or those of several threads.
        self._calls = 0
        #: Phase of a call while no request of it is open. PULL as soon as a server has answered.
        self._without_requests = Phase.PUSH
        #: Number of open requests: all, those not fully sent, those of the latter that are held up, and those partly
        #: answered.
        self._open = 0
        self._unsent = 0
        self._held_up = 0
        self._answering = 0

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return self._phase

    @property
    def is_in_call(self) -> bool:
        """True while the script is in a call."""
        return self._calls > 0

    # --- events ---

    def begin_call(self, phase: Phase) -> bool:
        """Record that the script calls psdist.

        phase: first phase of the call, PUSH or WAIT.
        """
        self._calls += 1
        if self._calls > 1:
            return False
        self._without_requests = Phase.PULL if self._answering else phase
        return True

    def end_call(self) -> bool:
        """Record that a call has returned."""
        self._calls -= 1
        return not self._calls

    def open_request(self, *, sends: bool) -> bool:
        """Record a request to a server.

        sends: True if it carries a gradient.
        """
        self._open += 1
        self._unsent += sends
        return self._calls > 0 and self._phase is not (_PUSH if sends else _WAIT)

    def sent(self) -> bool:
        """Record that a request's gradient was sent."""
        self._unsent -= 1
        return self._calls > 0 and self._unsent == self._held_up

    def held_up(self) -> bool:
        """Record that a request's server takes no more of its gradient for now."""
        self._held_up += 1
        return self._calls > 0 and self._unsent == self._held_up

    def resumed(self) -> bool:
        """Record that the gradient of a request that was held up is sent again, or that the request ends."""
        self._held_up -= 1
        return self._calls > 0 and self._unsent == self._held_up + 1

    def answered(self) -> bool:
        """Record the first answer to a request."""
        self._answering += 1
        before, self._without_requests = self._without_requests, _PULL
        return self._calls > 0 and before is not _PULL

    def close_request(self, *, unsent: bool, answered: bool) -> bool:
        """Record the end of a request.

        unsent: True if ``sent`` was due but never called.
        answered: True if ``answered`` was called.
        """
        self._open -= 1
        self._unsent -= unsent
        self._answering -= answered
        return self._calls > 0 and (unsent or not answered)

    # --- time ---

    def start(self, now: float) -> None:
        """Start counting, unless that has been done."""
        if self._since is None:
            self._since = now

    def advance(self, now: float) -> None:
        """Add the time until ``now`` to the current phase, and enter the next one."""
        since = now if self._since is None else self._since
        self._seconds[self._phase] += max(0.0, now - since)
        self._since = max(now, since)
        self._phase = self._next_phase()

    def times(self, now: float) -> PhaseTimes:
        """Return the seconds spent in each phase since the start."""
        return PhaseTimes(*self.seconds(now))

    def seconds(self, now: float) -> list[float]:
        """Return the same as ``times`` by ``Phase``, in a fraction of the time. It does not start the clock."""
        if self._since is not None:
            self.advance(now)
        return self._seconds[:]

    def _next_phase(self) -> Phase:
        if not self._calls:
            return Phase.COMPUTE
        if self._unsent:
            return Phase.WAIT if self._unsent == self._held_up else Phase.PUSH
        if self._open and self._without_requests is not Phase.PULL:
            return Phase.WAIT
        return self._without_requests
