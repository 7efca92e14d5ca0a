"""Streams of a console program: closed, full and broken ones, text from peers, and a progress bar.

Cron wrappers and daemons start programs with closed streams. The first files that such a program opens would get the
numbers 0 to 2, and be read and written as if they were standard streams.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO


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


def printable(text: str) -> str:
    """Return ``text`` in one line: with a space for each line break, and a question mark for each other character that
    is not printable."""
    return "".join(one if one.isprintable() else " " if one.isspace() else "?" for one in text)


def printable_values(value: Any) -> Any:
    """Return a JSON value whose texts are all ``printable``."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): printable_values(one) for key, one in value.items()}
    return [printable_values(one) for one in value] if isinstance(value, list) else value


if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn


@contextmanager
def bytes_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes the bytes done and the total, 0 if unknown. The bar labelled ``what`` shows them with
    rate and time left."""
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    with _bar(what, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as update:
        yield lambda done, total: update(done, total, "")


@contextmanager
def count_bar(what: str, unit: str, console: Console | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function that takes the count done, the total and a note, such as the reason of a wait. The bar shows
    them with the time left.

    unit: the counted things, in the plural.
    console: where the bar is shown; standard error by default.
    """
    from rich.progress import MofNCompleteColumn, TextColumn, TimeRemainingColumn

    note = TextColumn("{task.fields[note]}", markup=False)
    with _bar(what, MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn(), note, console=console) as update:
        yield update


@contextmanager
def _bar(
    what: str, *columns: ProgressColumn, console: Console | None = None
) -> Iterator[Callable[[int, int, str], None]]:
    if console is None and not sys.stderr.isatty():
        yield lambda done, total, note: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    shown = (TextColumn("{task.description}", markup=False), BarColumn(), *columns)
    with Progress(*shown, console=console or Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, note="")
        yield lambda done, total, note: bar.update(task, completed=done, total=total or None, note=note)
