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
    """Pauses that double from 50 ms to 1 s, each shortened by up to half, so that clients do not come in step."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._ceiling = FIRST_SECONDS

    def next_seconds(self) -> float:
        """The next pause, in seconds."""
        pause = self._ceiling * (1.0 - 0.5 * self._rng.random())
        self._ceiling = min(self._ceiling * 2, LONGEST_SECONDS)
        return pause

    def reset(self) -> None:
        """Something went well: the next pause is short again."""
        self._ceiling = FIRST_SECONDS
