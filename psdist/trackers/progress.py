"""Metrics as a progress line."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from psdist.metrics.progress_line import progress_line

#: Between two plain lines.
PLAIN_SECONDS: Final = 10.0


class ProgressTracker:
    """Shows a line for an interval, but not more often than every ``seconds``.

    show: shows a line; True with it says that it is the last.
    shows_last: shows the last line at the end, even where it was shown before; else only if it was not.
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
        """Begins. The first line comes ``seconds`` later, unless it is replaced by the next."""
        self._next = self._clock() + (0.0 if self._shows_last else self._seconds)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Shows a line if it is time."""
        self._line = progress_line(values, step)
        if (now := self._clock()) >= self._next:
            self._next = now + self._seconds
            self._show(self._line, False)
            self._line = self._line if self._shows_last else ""

    def close(self) -> None:
        """Shows the last line."""
        if self._line:
            self._show(self._line, True)
