"""Warnings of the library in a script that configures no logging: on standard error, with the time.

Python itself prints such messages without a time (``logging.lastResort``), which makes it hard to say what happened
first in a run of many processes. As soon as the script, or what it imports, adds a handler of its own to the root or to
the ``psdist`` logger, only that handler is used.
"""

from __future__ import annotations

import logging
import sys

_logger = logging.getLogger("psdist")


class _DefaultHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or _logger.handlers != [self]:
            return
        if sys.stderr is None:  # ``print`` would take standard output.
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # As all handlers do: a message that cannot be printed must not end a training.
            self.handleError(record)


_handler = _DefaultHandler()


def install() -> None:
    """Adds the handler to the ``psdist`` logger; doing so again changes nothing."""
    _logger.addHandler(_handler)
