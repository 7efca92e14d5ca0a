"""Warnings of the library in a script that configures no logging: on standard error, with the time.

Python itself prints such messages without a time (``logging.lastResort``), which makes it hard to see the order of
events in a run of many processes. As soon as the script, or a module that it imports, adds a handler to the root or to
the ``psdist`` logger, only that handler is used.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress

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


class _DefaultHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))

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
