"""Mark by which a worker tells its launcher that it has joined a process group of all workers, which it cannot rejoin.

The mark is an empty file beside ``PSDIST_CONNECTED_FILE``. Its time is that of the newest group.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_SUFFIX: Final = ".group"


def mark() -> None:
    """Record that this process has made a group of all workers."""
    if connected_file := os.environ.get("PSDIST_CONNECTED_FILE", ""):
        with suppress(OSError):  # The launcher then restarts a worker that waits for others in vain.
            Path(connected_file + _SUFFIX).touch()


def age(connected_file: Path) -> float | None:
    """Return the seconds since the process that was given this file made its newest group; None if it made none."""
    with suppress(OSError):
        return max(0.0, time.time() - Path(str(connected_file) + _SUFFIX).stat().st_mtime)
    return None
