"""Worker's end of the pipe to its launcher: writes one line at a time and never waits."""

from __future__ import annotations

import os
import stat

from psdist.errors import ConfigurationError


class MetricsPipe:
    """Inherited pipe. text: ``DESCRIPTOR:INODE``, as the launcher names it.

    ``is_open`` is False if this process lacks the pipe, for example because a program between launcher and script
    closed it. Raises ConfigurationError for a text of another form.
    """

    def __init__(self, text: str) -> None:
        descriptor, _, inode = text.partition(":")
        if not all(part.isascii() and part.isdigit() for part in (descriptor, inode)):
            raise ConfigurationError(f"PSDIST_METRICS_PIPE={text!r:.80} is not DESCRIPTOR:INODE: leave it unset")
        self._descriptor = int(descriptor)
        self.is_open = self._is_inherited(int(inode))
        if self.is_open:
            os.set_blocking(self._descriptor, False)
            os.set_inheritable(self._descriptor, False)

    def _is_inherited(self, inode: int) -> bool:
        try:
            found = os.fstat(self._descriptor)
        except (OSError, OverflowError):
            return False
        return stat.S_ISFIFO(found.st_mode) and found.st_ino == inode

    def send(self, line: bytes) -> bool:
        """Write a line of at most ``METRIC_LINE_BYTES_MAX`` bytes.

        Returns False if nothing was written because the pipe is full, or if it has no reader any more.
        """
        if not self.is_open:
            return False
        try:
            return os.write(self._descriptor, line) == len(line)
        except BlockingIOError:
            return False
        except OSError:
            self.is_open = False
            return False
