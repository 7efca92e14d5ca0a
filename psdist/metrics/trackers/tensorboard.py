"""Tracker that writes TensorBoard event files, using the package tensorboardX.

It uses tensorboardX's messages and its file writer, but not ``SummaryWriter``, which runs a thread: a launcher that
starts processes must have none.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psdist.errors import ConfigurationError
from psdist.metrics.report import MEASURED


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
            self._directory.mkdir(parents=True, exist_ok=True)
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
