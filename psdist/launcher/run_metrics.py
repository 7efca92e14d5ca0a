"""The metrics of a launcher's workers: received on a pipe, combined, shown, and written to files.

All workers inherit the same pipe. Each sends its reports of an interval together, and workers' intervals end at
different moments. What arrived is combined once every worker of the previous combination has sent an interval, and
after two intervals at the latest.

Invariants: a worker never blocks, because its end is non-blocking, and a line fits into the pipe whole or not at all.
Anything that is not a line of metrics is dropped.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, get_args

from psdist.errors import MalformedPayloadError
from psdist.launcher.output import Output
from psdist.monitoring.metrics import WorkerInterval, from_line, last_step, summarize
from psdist.monitoring.trackers import (
    PLAIN_SECONDS,
    JsonLinesTracker,
    ProgressTracker,
    TensorBoardTracker,
    Tracker,
    Trackers,
)
from psdist.settings.config import METRICS_INTERVAL_SECONDS, ProgressName
from psdist.settings.flags import one_of, seconds, setting
from psdist.settings.programs import OUTPUT_TITLE
from psdist.wire.limits import METRIC_LINE_BYTES_MAX

#: Shortest time between two updates of the line on a terminal.
_REFRESH_SECONDS: Final = 0.1
#: Workers' reports of one moment arrive within this time, even if the interval is shorter.
_LEAST_PATIENCE_SECONDS: Final = 0.2


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """Destinations of metrics."""

    tensorboard: Path | None = setting(
        "write TensorBoard files of reported metrics to DIR/RUN_ID (pip install tensorboardX)", Path, None, "DIR",
        group=OUTPUT_TITLE,
    )  # fmt: skip
    progress: ProgressName = setting(
        "progress line of reported metrics: auto (in place on a terminal), plain or off",
        one_of(*get_args(ProgressName)), "auto", "HOW", group=OUTPUT_TITLE,
    )  # fmt: skip
    metrics_interval_seconds: float = setting(
        "interval over which reported metrics are aggregated", seconds(), METRICS_INTERVAL_SECONDS, group=OUTPUT_TITLE
    )


class RunMetrics:
    """The metrics of one launcher's workers. Raises ConfigurationError if a file cannot be written.

    name: name of the run, and of its directory for TensorBoard.
    log_directory: directory of the file ``metrics.jsonl``; None writes no such file.
    ranks: ranks of the workers at the start.
    part: name of this node, such as ``node-1``, which separates its files from those of other nodes; empty without
        them.
    """

    def __init__(
        self, options: MetricsOptions, name: str, log_directory: Path | None, ranks: Iterable[int], part: str = ""
    ) -> None:
        self._options = options
        self._name = name
        self._expected = set(ranks)
        self._intervals: dict[int, WorkerInterval] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._console: Output | None = None
        self._warned = False
        self._closed = False
        self._trackers = Trackers(self._on_error)
        if log_directory is not None:
            self._add(JsonLinesTracker(log_directory / f"metrics{part and '-'}{part}.jsonl"))
        if options.tensorboard is not None:
            self._add(TensorBoardTracker(options.tensorboard / name / part))
        self._receiver = MetricsReceiver(self._on_interval, self._on_malformed)
        #: The pipe's end that workers inherit.
        self.descriptor = self._receiver.descriptor

    @property
    def environment(self) -> dict[str, str]:
        """Variables that workers need to report."""
        return self._receiver.environment | {"PSDIST_METRICS_INTERVAL": f"{self._options.metrics_interval_seconds:g}"}

    def start(self, console: Output) -> None:
        """Start receiving on the running loop, and showing the reports."""
        self._console = console
        if self._options.progress != "off":
            in_place = self._options.progress == "auto" and console.is_terminal
            pause = _REFRESH_SECONDS if in_place else PLAIN_SECONDS
            self._add(ProgressTracker(partial(_show, console, in_place), pause, shows_last=in_place))
        self._receiver.start()

    def close(self) -> None:
        """Process the last reports, and close files and the progress line. A second call has no effect."""
        if not self._closed:
            self._closed = True
            self._receiver.close()
            self._flush()
            self._trackers.close()

    def _add(self, tracker: Tracker) -> None:
        tracker.start(self._name)
        self._trackers.add(tracker)

    def _on_interval(self, interval: WorkerInterval) -> None:
        before = self._intervals.get(interval.rank)
        self._intervals[interval.rank] = interval if before is None else before.followed_by(interval)
        if self._closed:
            return
        if self._expected <= self._intervals.keys():
            self._flush()
        elif self._timer is None:
            patience = max(_LEAST_PATIENCE_SECONDS, 2 * self._options.metrics_interval_seconds)
            self._timer = asyncio.get_running_loop().call_later(patience, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._intervals:
            intervals = [interval for _, interval in sorted(self._intervals.items())]
            self._expected = set(self._intervals)
            self._intervals.clear()
            self._trackers.log(summarize(intervals), last_step(intervals))

    def _on_malformed(self, error: MalformedPayloadError) -> None:
        if self._console is not None and not self._warned:
            self._warned = True
            self._console.say(f"{error.message}; such lines are ignored (reported once)")

    def _on_error(self, tracker: Tracker, error: Exception) -> None:
        if self._console is not None:
            reason = error.strerror if isinstance(error, OSError) else error
            self._console.say(f"{type(tracker).__name__} no longer receives metrics: {reason}")


def _show(console: Output, in_place: bool, line: str, is_last: bool) -> None:
    """Show a progress line. The last one stays on the screen."""
    if in_place:
        console.show_progress("" if is_last else line)
    if is_last or not in_place:
        console.say(line)


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
