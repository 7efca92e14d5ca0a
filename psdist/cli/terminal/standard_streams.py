"""Standard input, output and error of a program: streams closed by its caller, and errors of writing them.

Cron wrappers and daemons start programs with closed streams. The first files that such a program opens would get the
numbers 0 to 2, and be read and written as if they were standard streams.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


class UnwritableError(OSError):
    """Standard output or error, which ``filename`` names, cannot be written."""


class _Stream(io.TextIOWrapper):
    """A standard stream that raises UnwritableError, or BrokenPipeError if its reader is gone."""

    def __init__(self, stream: io.TextIOWrapper, title: str) -> None:
        super().__init__(
            stream.buffer,
            stream.encoding,
            stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self._title = title
        # An unreferenced stream would close the buffer, which is now shared.
        self._replaced = stream

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise self._told_apart(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise self._told_apart(error) from None

    def _told_apart(self, error: OSError) -> OSError:
        return (
            error if isinstance(error, BrokenPipeError) else UnwritableError(error.errno, error.strerror, self._title)
        )


def open_closed_streams() -> None:
    """Open /dev/null in place of each closed standard stream. A program calls it before it opens anything."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            # A program that replaces this one by exec inherits it.
            os.set_inheritable(descriptor, True)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def tell_errors_apart() -> None:
    """Raise errors of writing standard output and error as UnwritableError from now on, unlike those of other files."""
    sys.stdout = _watched(sys.stdout, "standard output")
    sys.stderr = _watched(sys.stderr, "standard error")


def _watched(stream: TextIO, title: str) -> TextIO:
    return _Stream(stream, title) if isinstance(stream, io.TextIOWrapper) else stream
