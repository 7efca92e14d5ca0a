"""The callback seam of metrics, and several trackers as one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

logger = logging.getLogger("psdist")


class Tracker(Protocol):
    """What gets metrics: a file, a service, a progress bar."""

    def start(self, run_id: str) -> None:
        """Called once, before anything else. What it raises ends the call that registered the tracker."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One interval. values: the script's, and those of ``psdist.metrics.report.MEASURED``; some may be NaN or
        infinite. step: of the last report; it may be lower than before where the run went back to a snapshot."""

    def close(self) -> None:
        """Called once, at the end."""


def _warn(tracker: Tracker, error: Exception) -> None:
    logger.warning("%s gets no more metrics, because it failed", type(tracker).__name__, exc_info=error)


class Trackers:
    """Hands values to trackers that were started. on_error: told why one failed, which gets nothing more."""

    def __init__(self, on_error: Callable[[Tracker, Exception], None] = _warn) -> None:
        self._trackers: list[Tracker] = []
        self._on_error = on_error

    def __bool__(self) -> bool:
        return bool(self._trackers)

    def add(self, tracker: Tracker) -> None:
        """One more."""
        self._trackers.append(tracker)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Hands an interval to all."""
        for tracker in list(self._trackers):
            try:
                tracker.log(values, step)
            except Exception as error:
                self._trackers.remove(tracker)
                self._on_error(tracker, error)
                with suppress(Exception):
                    tracker.close()

    def close(self) -> None:
        """Closes all."""
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            try:
                tracker.close()
            except Exception as error:
                self._on_error(tracker, error)
