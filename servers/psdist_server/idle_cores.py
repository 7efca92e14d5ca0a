"""Idle cores of this host, for the prediction of what more kernel threads would do."""

from __future__ import annotations

import time
from typing import Final

import psutil

from psdist.cgroups import usable_cores

#: A shorter period says little: the kernel counts in hundredths of a second.
_SECONDS_MIN: Final = 0.25


class IdleCores:
    """Mean number of this host's cores that do nothing, over the time between two calls: no more than this process may
    use."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # Starts the first period.
        self._since = time.monotonic()
        self._newest: float | None = None

    def measure(self) -> float | None:
        """Return the mean of the last period of a quarter of a second or more; None before the first one has passed."""
        now = time.monotonic()
        if now - self._since >= _SECONDS_MIN:
            self._since = now
            idle = (psutil.cpu_count() or 1) * (1 - psutil.cpu_percent() / 100)
            self._newest = min(idle, usable_cores())
        return self._newest
