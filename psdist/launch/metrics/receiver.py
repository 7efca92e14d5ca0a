"""The pipe by which the workers of a launcher report metrics: one for all of them, which they inherit.

Invariants: a worker never waits, because its end does not block, and a line fits into the pipe whole or not at all.
What is no line of metrics is left out.
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
    """Both ends of the pipe. on_interval: gets what workers report; on_malformed: why a line cannot be read."""

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
        """What tells a worker of the pipe. With its inode, so that it is not taken for another one of that number."""
        return {"PSDIST_METRICS_PIPE": f"{self.descriptor}:{os.fstat(self.descriptor).st_ino}"}

    def start(self) -> None:
        """Reads on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._read)

    def close(self) -> None:
        """Reads what is left, and closes the pipe."""
        if self._loop is not None:
            self._loop.remove_reader(self._reader)
        while self._read():
            pass
        os.close(self._reader)
        os.close(self.descriptor)

    def _read(self) -> bool:
        """Takes what there is, up to some bytes. Returns whether there was anything."""
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
