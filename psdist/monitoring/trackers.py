"""Destinations of metrics. A script registers a ``Tracker`` by ``context.add_tracker``; the launcher creates its own.

``JsonLinesTracker`` writes lines of JSON, ``TensorBoardTracker`` event files. The latter uses tensorboardX's messages
and its file writer (extra ``tensorboard``), but not ``SummaryWriter``, which runs a thread: a launcher that starts
processes must have none. Scripts import them from ``psdist.trackers``.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, Protocol

from psdist.errors import ConfigurationError
from psdist.machine import make_directory
from psdist.monitoring.metrics import MEASURED, progress_line

logger = logging.getLogger("psdist")


class Tracker(Protocol):
    """Destination of metrics: a file, a service, a progress bar."""

    def start(self, run_id: str) -> None:
        """Called once, first. An exception ends the call that registered the tracker."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record one interval.

        values: the script's values, and those of ``psdist.monitoring.metrics.MEASURED``; some may be NaN or infinite.
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


class JsonLinesTracker:
    """Appends a line per interval: ``time`` in seconds since 1970, ``step``, and the values by name.

    Numbers that JSON lacks (NaN, infinities) become null. Each line is flushed to the system.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._file: IO[str] | None = None

    def start(self, run_id: str) -> None:
        """Open the file, and create its directory. Raises ConfigurationError if that fails."""
        try:
            make_directory(self._path.parent)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"metrics cannot be written to {self._path}: {error.strerror}") from None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append a line. Raises OSError."""
        assert self._file is not None, "start was not called"
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"time": round(time.time(), 3), "step": step, **finite}, allow_nan=False)
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class TensorBoardTracker:
    """Writes an event file into ``directory``. TensorBoard shows it beside those of earlier runs there.

    The script's values are scalars with their own names; psdist's measurements are in the group ``psdist``.
    Raises ConfigurationError if tensorboardX is not installed, or unusable.
    """

    def __init__(self, directory: Path | str) -> None:
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2, summary_pb2
        except Exception as error:  # Some versions are incompatible with the installed protobuf.
            raise ConfigurationError(
                f"TensorBoard files need tensorboardX: pip install -U tensorboardX ({error})"
            ) from None
        self._directory = Path(directory)
        self._make_writer = EventsWriter
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._writer: Any = None

    def start(self, run_id: str) -> None:
        """Create the directory. Raises ConfigurationError if it is not writable."""
        try:
            make_directory(self._directory)
            with tempfile.TemporaryFile(dir=self._directory):
                pass
        except OSError as error:
            raise ConfigurationError(
                f"TensorBoard files cannot be written to {self._directory}: {error.strerror}"
            ) from None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write the values. Raises OSError."""
        if self._writer is None:
            self._writer = self._make_writer(str(self._directory / "events"), f".{os.getpid()}")
            # TensorBoard then hides values of this step and later ones that an earlier run wrote and this one resumed
            # from.
            restart = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(step, session_log=restart)
        scalars = [
            self._summaries.Summary.Value(tag=f"psdist/{name}" if name in MEASURED else name, simple_value=value)
            for name, value in values.items()
        ]
        self._write(step, summary=self._summaries.Summary(value=scalars))
        self._writer.flush()

    def _write(self, step: int, **what: Any) -> None:
        self._writer.write_event(self._events.Event(wall_time=time.time(), step=step, **what))

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


#: Interval between plain lines.
PLAIN_SECONDS: Final = 10.0


class ProgressTracker:
    """Shows one line per interval, at most every ``seconds``.

    show: called with a line, and True if it is the last one.
    shows_last: True to show the last line at the end even if it was shown before.
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
        """Start. The first line is shown ``seconds`` later, unless a newer one replaces it."""
        self._next = self._clock() + (0.0 if self._shows_last else self._seconds)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Show a line if it is due."""
        self._line = progress_line(values, step)
        if (now := self._clock()) >= self._next:
            self._next = now + self._seconds
            self._show(self._line, False)
            self._line = self._line if self._shows_last else ""

    def close(self) -> None:
        """Show the last line."""
        if self._line:
            self._show(self._line, True)
