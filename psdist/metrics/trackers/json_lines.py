"""Tracker that writes metrics as lines of JSON to a file."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from psdist.errors import ConfigurationError


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
            self._path.parent.mkdir(parents=True, exist_ok=True)
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
