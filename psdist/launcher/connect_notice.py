"""Notices that name the workers that have not called ``psdist.init()`` yet. Pure.

A script that imports large packages or loads a data set first prints nothing, and the run seems to hang.

The first notice comes after ``FIRST_SECONDS``, further ones after pauses that double, up to ``LONGEST_PAUSE_SECONDS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

FIRST_SECONDS: Final = 5.0
LONGEST_PAUSE_SECONDS: Final = 60.0
_NAMES_SHOWN: Final = 4


class ConnectNotice:
    """The notices of one run."""

    def __init__(self) -> None:
        self._pause = FIRST_SECONDS
        #: When the next notice is due; None if no worker is missing.
        self._due: float | None = None

    def text(self, ranks: Sequence[int], now: float) -> str:
        """Return the notice that is due now; empty if there is none. ranks: workers that have not registered yet."""
        if not ranks:
            self._due, self._pause = None, FIRST_SECONDS
        elif self._due is None:
            self._due = now + self._pause
        elif now >= self._due:
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
            self._due = now + self._pause
            return f"waiting for {_names(ranks)} to call psdist.init()"
        return ""


def _names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    if len(ranks) > _NAMES_SHOWN:
        return f"workers {', '.join(map(str, ranks[:_NAMES_SHOWN]))} and {len(ranks) - _NAMES_SHOWN} others"
    return f"workers {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
