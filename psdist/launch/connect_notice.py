"""Says which workers have not called ``psdist.init()`` yet: a long import, or loading of a data set, is silent. Pure.

The first notice comes after ``FIRST_SECONDS``, further ones after pauses that double, up to ``PAUSE_SECONDS_MAX``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

FIRST_SECONDS: Final = 5.0
PAUSE_SECONDS_MAX: Final = 60.0
_NAMED_MAX: Final = 4


class ConnectNotice:
    """The notices of one run."""

    def __init__(self) -> None:
        self._pause = FIRST_SECONDS
        #: When the next notice is due; None while nobody is waited for.
        self._due: float | None = None

    def text(self, ranks: Sequence[int], now: float) -> str:
        """The notice that is due now; empty if there is none. ranks: workers that have not registered yet."""
        if not ranks:
            self._due, self._pause = None, FIRST_SECONDS
        elif self._due is None:
            self._due = now + self._pause
        elif now >= self._due:
            self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)
            self._due = now + self._pause
            return f"waiting for {_names(ranks)} to call psdist.init()"
        return ""


def _names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    if len(ranks) > _NAMED_MAX:
        return f"workers {', '.join(map(str, ranks[:_NAMED_MAX]))} and {len(ranks) - _NAMED_MAX} others"
    return f"workers {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
