"""How long to wait before the next attempt. Pure: the randomness is an argument.

Not here: what may be tried again (``data_path``, ``scheduler_session``).
"""

from __future__ import annotations

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
