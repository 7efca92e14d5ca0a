"""The pipe on which the workers of a launcher report metrics. All of them inherit the same one.

Invariants: a worker never blocks, because its end is non-blocking, and a line fits into the pipe whole or not at all.
Anything that is not a line of metrics is dropped.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

from psdist.errors import MalformedPayloadError
from psdist.metrics.interval import WorkerInterval
from psdist.metrics.interval_lines import from_line
from psdist.wire.limits import METRIC_LINE_BYTES_MAX

_READ_BYTES: Final = 64 << 10


class MetricsReceiver:
    """Both ends of the pipe.

    on_interval: called with each worker's report.
    on_malformed: called with the reason why a line cannot be read.
    """

    def __init__(
        self, on_interval: Callable[[WorkerInterval], None], on_malformed: Callable[[MalformedPayloadError], None]
    ) -> None:
        self._on_interval = on_interval
        self._on_malformed = on_malformed
        self._reader, self.descriptor = os.pipe()
        for descriptor in (self._reader, self.descriptor):
            os.set_blocking(descriptor, False)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rest = b""

    @property
    def environment(self) -> dict[str, str]:
        """Variable that passes the pipe to a worker. It contains the inode, so that another descriptor of the same
        number is not mistaken for it."""
        return {"PSDIST_METRICS_PIPE": f"{self.descriptor}:{os.fstat(self.descriptor).st_ino}"}

    def start(self) -> None:
        """Start reading on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._read)

    def close(self) -> None:
        """Read the remaining data, and close the pipe."""
        if self._loop is not None:
            self._loop.remove_reader(self._reader)
        while self._read():
            pass
        os.close(self._reader)
        os.close(self.descriptor)

    def _read(self) -> bool:
        """Process up to ``_READ_BYTES`` of available data. Returns True if there was any."""
        try:
            data = os.read(self._reader, _READ_BYTES)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > METRIC_LINE_BYTES_MAX:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._take(line)
        return bool(data)

    def _take(self, line: bytes) -> None:
        try:
            interval = from_line(line)
        except MalformedPayloadError as error:
            self._on_malformed(error)
        else:
            self._on_interval(interval)
