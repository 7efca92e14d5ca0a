"""Progress bars of long commands, on standard error if that is a terminal; elsewhere nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

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
