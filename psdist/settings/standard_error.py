"""Standard error of a server program: lines that cannot be written are lost, and change nothing else.

Python's own stream keeps the lines that a full disk refused, tries again when the process ends, and changes its exit
status to 120, by which a launcher or a service manager would restart it. And an error message that fails would end the
process with a traceback's status instead of its own.
"""

from __future__ import annotations

import io
import sys
from contextlib import suppress


class _Lossy(io.TextIOWrapper):
    def write(self, text: str, /) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def lose_unwritable_lines() -> None:
    """Write standard error without a buffer from now on, and ignore errors."""
    stream = sys.stderr
    # A test's stream has no descriptor; that of PYTHONUNBUFFERED is its own raw stream.
    if isinstance(stream, io.TextIOWrapper) and isinstance(stream.buffer, io.BufferedWriter | io.FileIO):
        raw = getattr(stream.buffer, "raw", stream.buffer)
        sys.stderr = _Lossy(raw, stream.encoding, stream.errors, write_through=True)
