"""Pauses: before the next attempt, and before strangers are answered. Pure: randomness and time are arguments.

Not here: what may be tried again (``data_path``, ``scheduler_session``), whom a pause holds up (``auth``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

FIRST_SECONDS: Final = 0.05
LONGEST_SECONDS: Final = 1.0


class Random(Protocol):
    """What is needed of ``random.Random``."""

    def random(self) -> float:
        """A number in [0, 1)."""


class Backoff:
    """Pauses that double from 50 ms to ``longest`` seconds, each shortened by up to half, so that clients do not come
    in step."""

    def __init__(self, rng: Random, longest: float = LONGEST_SECONDS) -> None:
        self._rng = rng
        self._longest = longest
        self._ceiling = min(FIRST_SECONDS, longest)

    @classmethod
    def of_session(cls, rng: Random, heartbeat_seconds: float) -> Backoff:
        """The pauses of a member whose session broke. Its lease goes on: it tries several times before that is over."""
        return cls(rng, min(LONGEST_SECONDS, heartbeat_seconds))

    def next_seconds(self) -> float:
        """The next pause, in seconds."""
        pause = self._ceiling * (1.0 - 0.5 * self._rng.random())
        self._ceiling = min(self._ceiling * 2, self._longest)
        return pause

    def reset(self) -> None:
        """Something went well: the next pause is short again."""
        self._ceiling = min(FIRST_SECONDS, self._longest)


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
