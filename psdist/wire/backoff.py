"""Pauses between attempts, and before answers to strangers: callers without the run's token. Pure: randomness and time
are arguments.

The callers decide what to retry (``delivery``, ``member_session``) and which calls to pace (``auth``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

FIRST_SECONDS: Final = 0.05
LONGEST_SECONDS: Final = 1.0
#: Longest pause of a member that looks for the scheduler at several addresses: until it has a session it gets no map.
_SEARCHING_SECONDS: Final = 0.15


class Random(Protocol):
    """Subset of ``random.Random`` that ``Backoff`` needs."""

    def random(self) -> float:
        """Return a number in [0, 1)."""


class Backoff:
    """Exponential backoff: pauses double from 50 ms to ``longest`` seconds. Each is shortened by a random factor of up
    to one half, so that clients do not retry in lockstep."""

    def __init__(self, rng: Random, longest: float = LONGEST_SECONDS) -> None:
        self._rng = rng
        self._longest = longest
        self._ceiling = min(FIRST_SECONDS, longest)

    @classmethod
    def for_session(cls, rng: Random, heartbeat_seconds: float, *, has_standby: bool = False) -> Backoff:
        """Return the backoff of a member whose session broke. It allows several attempts within the lease.

        has_standby: True if each attempt goes to another one of several addresses.
        """
        return cls(rng, min(_SEARCHING_SECONDS if has_standby else LONGEST_SECONDS, heartbeat_seconds))

    def next_seconds(self) -> float:
        """Return the next pause, in seconds."""
        pause = self._ceiling * (1.0 - 0.5 * self._rng.random())
        self._ceiling = min(self._ceiling * 2, self._longest)
        return pause

    def reset(self) -> None:
        """Restart with a short pause, after a success."""
        self._ceiling = min(FIRST_SECONDS, self._longest)


@dataclass(slots=True)
class Pacer:
    """Queue that releases ``per_second`` events.

    burst: number of events that pass without waiting after a quiet period.
    held_max: largest number of waiting events.
    """

    per_second: float
    burst: int
    held_max: int
    #: Release time of the last event if bursts were not allowed.
    _last: float = float("-inf")

    def wait_seconds(self, now: float) -> float | None:
        """Return the time until an event at ``now`` may pass, or None if too many already wait. A rejected event is not
        queued."""
        gap = 1.0 / self.per_second
        turn = max(self._last, now - self.burst * gap) + gap
        wait = max(0.0, turn - now)
        if wait > self.held_max * gap:
            return None
        self._last = turn
        return wait


class FailureLimit:
    """Addresses with too many failures: a burst, which decays at a fixed rate. One success forgives all of them.

    per_second, burst: of each address.
    addresses_max: number of addresses that are remembered; one more forgets the one that failed first.
    """

    def __init__(self, per_second: float, burst: int, addresses_max: int) -> None:
        self._per_second, self._burst, self._addresses_max = per_second, burst, addresses_max
        #: Failures of each address that have not decayed, and the time of that count.
        self._failed: dict[str, tuple[float, float]] = {}

    def is_exceeded(self, address: str, now: float) -> bool:
        """True if connections of this address are to be refused now."""
        return self._count(address, now) >= self._burst

    def fail(self, address: str, now: float) -> None:
        """Count a failure."""
        self._failed[address] = self._count(address, now) + 1, now
        if len(self._failed) > self._addresses_max:
            del self._failed[next(iter(self._failed))]

    def succeed(self, address: str) -> None:
        """Forgive an address, which has a member."""
        self._failed.pop(address, None)

    def _count(self, address: str, now: float) -> float:
        count, since = self._failed.get(address, (0.0, now))
        return max(0.0, count - self._per_second * (now - since))


@dataclass(slots=True)
class LogPacer:
    """Rate limit for log lines that strangers can trigger: counts events and releases one line per ``seconds``."""

    seconds: float
    _count: int = 0
    _logged: float = float("-inf")

    def note(self, now: float) -> int:
        """Count an event. Return the number of events since the last line if a line is due, otherwise 0."""
        self._count += 1
        if now - self._logged < self.seconds:
            return 0
        count, self._count, self._logged = self._count, 0, now
        return count
