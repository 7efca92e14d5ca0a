"""Tables and numbers of the command line, as lines of text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from psdist.cli.terminal import printable
from psdist.launcher.scheduler_calls import size

#: Colours of states.
STATE_STYLES = {"live": "green", "ready": "green", "left": "dim", "lost": "red"}
#: The columns of ``snapshot_row``.
SNAPSHOT_COLUMNS = ("snapshot", "step", "size", "taken", "in", "why")


def table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> list[Text]:
    """Return the lines of a table: its head, and a line for each row. Empty columns are left out.

    Cells are shown literally, without markup. Without rows there are no lines.
    """
    cells = [[Text(printable(cell)) if isinstance(cell, str) else cell for cell in row] for row in rows]
    if not cells:
        return []
    shown = [number for number in range(len(columns)) if any(row[number].plain for row in cells)]
    lines = [[Text(name, "bold") for name in columns], *cells]
    widths = {number: max(line[number].cell_len for line in lines) for number in shown}
    found = []
    for line in lines:
        text = Text()
        for number in shown:
            text.append_text(line[number])
            if number != shown[-1]:
                text.append(" " * (widths[number] - line[number].cell_len + 2))
        text.rstrip()
        found.append(text)
    return found


def print_lines(lines: Iterable[Text], file: IO[str] | None = None) -> None:
    """Print lines of any length, with colours on a terminal."""
    console = Console(file=file, highlight=False)
    for line in lines:
        console.print(line, soft_wrap=True)


def state_text(state: str) -> Text:
    """Return a state in its colour."""
    return Text(state, STATE_STYLES.get(state, "yellow"))


def snapshot_row(one: dict[str, Any]) -> list[str]:
    """Return the cells of a committed snapshot."""
    taken, seconds = moment(one["time"]), f"{one['seconds']:.1f} s"
    return [one["directory"], steps(one["steps"]), size(one["bytes"]), taken, seconds, one["reason"]]


def steps(by_parameters: dict[str, int]) -> str:
    """Return ``100``, or ``encoder 100, head 90`` if parameter sets are at different steps."""
    if len(set(by_parameters.values())) <= 1:
        return ", ".join(str(step) for step in set(by_parameters.values()))
    return ", ".join(f"{name} {step}" for name, step in by_parameters.items())


def rate(per_second: float) -> str:
    """Format a rate per second."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.1f}"


def moment(time: float) -> str:
    """Format seconds since 1970 as local time."""
    return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S")


def clock(time: float) -> str:
    """Format seconds since 1970 as a local time of the day."""
    return datetime.fromtimestamp(time).strftime("%H:%M:%S")


def duration(seconds: float) -> str:
    """Format a number of seconds for people."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{seconds:.1f} s"


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts server-10 after server-9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
