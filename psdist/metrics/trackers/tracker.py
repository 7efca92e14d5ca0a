"""Tracker interface, and a group of trackers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

logger = logging.getLogger("psdist")


class Tracker(Protocol):
    """Destination of metrics: a file, a service, a progress bar."""

    def start(self, run_id: str) -> None:
        """Called once, first. An exception ends the call that registered the tracker."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record one interval.

        values: the script's values, and those of ``psdist.metrics.report.MEASURED``; some may be NaN or infinite.
        step: step of the last report. It may decrease if the run went back to a snapshot.
        """

    def close(self) -> None:
        """Called once, at the end."""


def _warn(tracker: Tracker, error: Exception) -> None:
    logger.warning("%s failed and gets no more metrics", type(tracker).__name__, exc_info=error)


class Trackers:
    """Group of trackers that were started.

    on_error: called with a tracker and the exception that it raised. That tracker gets nothing more.
    """

    def __init__(self, on_error: Callable[[Tracker, Exception], None] = _warn) -> None:
        self._trackers: list[Tracker] = []
        self._on_error = on_error

    def __bool__(self) -> bool:
        return bool(self._trackers)

    def add(self, tracker: Tracker) -> None:
        """Add a tracker."""
        self._trackers.append(tracker)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send an interval to all trackers."""
        for tracker in list(self._trackers):
            try:
                tracker.log(values, step)
            except Exception as error:
                self._trackers.remove(tracker)
                self._on_error(tracker, error)
                with suppress(Exception):
                    tracker.close()

    def close(self) -> None:
        """Close all trackers."""
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            try:
                tracker.close()
            except Exception as error:
                self._on_error(tracker, error)
