"""Paces events that strangers cause: the first few pass immediately, the others wait their turn. Pure.

A stranger who calls in a closed loop is answered so seldom that the flood costs next to nothing, while somebody with
a wrong token is told immediately. Times are of the caller's clock, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pacer:
    """A queue that releases ``per_second`` events.

    burst: events that pass without a wait after a quiet time. held_max: events that may wait at a time.
    """

    per_second: float
    burst: int
    held_max: int
    #: Release time of the last event, had there been no burst.
    _last: float = float("-inf")

    def wait_seconds(self, now: float) -> float | None:
        """Time until an event that happens now may pass. None if too many wait already; such an event is not queued."""
        gap = 1.0 / self.per_second
        turn = max(self._last, now - self.burst * gap) + gap
        wait = max(0.0, turn - now)
        if wait > self.held_max * gap:
            return None
        self._last = turn
        return wait


@dataclass(slots=True)
class LogPacer:
    """Counts events of a kind that strangers can cause at will, so that the log gets one line each ``seconds``."""

    seconds: float
    _count: int = 0
    _logged: float = float("-inf")

    def note(self, now: float) -> int:
        """Count an event. Returns the number of events since the last line if a line is due, otherwise 0."""
        self._count += 1
        if now - self._logged < self.seconds:
            return 0
        count, self._count, self._logged = self._count, 0, now
        return count
