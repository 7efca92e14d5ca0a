"""Tracker that shows metrics as a progress line."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from psdist.metrics.progress_line import progress_line

#: Interval between plain lines.
PLAIN_SECONDS: Final = 10.0


class ProgressTracker:
    """Shows one line per interval, at most every ``seconds``.

    show: called with a line, and True if it is the last one.
    shows_last: True to show the last line at the end even if it was shown before.
    """

    def __init__(
        self,
        show: Callable[[str, bool], None],
        seconds: float,
        *,
        shows_last: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._show = show
        self._seconds = seconds
        self._shows_last = shows_last
        self._clock = clock
        self._next = 0.0
        self._line = ""

    def start(self, run_id: str) -> None:
        """Start. The first line is shown ``seconds`` later, unless a newer one replaces it."""
        self._next = self._clock() + (0.0 if self._shows_last else self._seconds)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Show a line if it is due."""
        self._line = progress_line(values, step)
        if (now := self._clock()) >= self._next:
            self._next = now + self._seconds
            self._show(self._line, False)
            self._line = self._line if self._shows_last else ""

    def close(self) -> None:
        """Show the last line."""
        if self._line:
            self._show(self._line, True)
