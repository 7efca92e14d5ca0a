"""Warnings of the library in a script that configures no logging: on standard error, with the time.

Python itself prints such messages without a time (``logging.lastResort``), which makes it hard to see the order of
events in a run of many processes. As soon as the script, or a module that it imports, adds a handler to the root or to
the ``psdist`` logger, only that handler is used.

With ``PSDIST_LOG_FORMAT=json`` each line is a JSON object with the fields of the servers' lines (``psdist.logs``), and
the worker's step. ``peer`` names the one member or address that a message is about.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime

_logger = logging.getLogger("psdist")


def print_line(text: str) -> None:
    """Print a line on standard error. If that fails, as on a full disk, the line is lost and the program continues.

    Python's own stream would keep the line, try again at the script's end, and change its exit status to 120.
    """
    stream = sys.stderr
    if stream is None:  # ``print`` would take standard output.
        return
    own = sys.__stderr__
    with suppress(Exception):
        if own is None or stream is not own:  # A notebook's, or a test's.
            print(text, file=stream, flush=True)
            return
        own.flush()
        os.write(own.fileno(), f"{text}\n".encode(own.encoding, "backslashreplace"))


#: Returns the fields of this process's open client: run, id, incarnation and step.
_fields: Callable[[], Mapping[str, str | int | None]] = dict


def identify(fields: Callable[[], Mapping[str, str | int | None]]) -> None:
    """Set the function that returns the identity of this worker."""
    global _fields
    _fields = fields


class _JsonFormatter(logging.Formatter):
    """One JSON object per message, with the fields of the servers' lines."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"event": record.getMessage(), "level": record.levelname.lower(), "logger": record.name}
        line["timestamp"] = datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if peer := getattr(record, "peer", ""):
            line["peer"] = peer
        known = {name: value for name, value in _fields().items() if value not in ("", None)}
        return json.dumps({**line, "role": "worker", **known})


class _DefaultHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        as_json = os.environ.get("PSDIST_LOG_FORMAT") == "json"
        console = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
        self.setFormatter(_JsonFormatter() if as_json else console)

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or _logger.handlers != [self]:
            return
        try:
            print_line(self.format(record))
        except Exception:  # As in all handlers: a message that cannot be formatted must not end a training.
            self.handleError(record)


_handler = _DefaultHandler()


def install() -> None:
    """Add the handler to the ``psdist`` logger; a second call changes nothing."""
    _logger.addHandler(_handler)
