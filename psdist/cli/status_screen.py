"""The screen of ``psdist status --watch`` on a terminal: the most important lines first, as many as fit.

Headline and members come first, servers before workers, each in the order of their numbers. Then parameter sets, how
workers reach servers (a line for each transport and reason), waits, and the newest events in the remaining lines. Each
line is cut at the terminal's width. ``screen_lines`` is pure; ``Screen`` shows them on the terminal's alternate screen,
which leaves nothing in its history.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from psdist.cli.status_table import STATE_STYLES, duration, rate
from psdist.cli.terminal.printable import printable, printable_values

_GAP: Final = "  "


class Screen:
    """A terminal on which each status replaces the previous one, without flicker."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._shown: dict[str, Any] | None = None

    def show(self, status: dict[str, Any]) -> None:
        """Show the JSON form of a status."""
        self._shown = printable_values(status)
        self._update("")

    def show_trouble(self, text: str) -> None:
        """Show why there is no newer status, above the last one."""
        self._update(printable(text))

    def _update(self, trouble: str) -> None:
        width, height = self._console.size
        self._live.update(Group(*screen_lines(self._shown, width, height, trouble)), refresh=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)


def screen_lines(status: dict[str, Any] | None, width: int, height: int, trouble: str = "") -> list[Text]:
    """Return the lines of a screen, at most ``height`` of at most ``width`` columns.

    status: the JSON form; None before the first one.
    trouble: why it is not the newest; empty if it is.
    """
    first = [Text(trouble, "red")] if trouble else []
    if status is not None:
        first += _head(status)
    rest = [] if status is None else [*_parameters(status), *_transports(status), *_waits(status)]
    members = [] if status is None else _members(status["members"], height - len(first) - min(len(rest), 3))
    found = [*first, *members, *rest]
    events = _events(status["events"] if status is not None else [])
    room = height - len(found)
    found += events[-room:] if room > 0 else []
    for line in found:
        line.plain = line.plain.replace("\n", " ")  # Reasons may quote errors of other libraries.
        line.no_wrap, line.overflow = True, "ellipsis"
        line.truncate(width, overflow="ellipsis")
    return found[:height]


def _head(status: dict[str, Any]) -> list[Text]:
    uptime, copies = duration(status["uptime_seconds"]), status["replicas"]
    facts = f"up {uptime}, {copies} {'copies' if copies > 1 else 'copy'} of each shard, epoch {status['epoch']}"
    return [Text(f"{status['run_id']}: {status['phase']}", "bold"), Text(f"{facts}, psdist {status['version']}")]


def _members(members: list[dict[str, Any]], room: int) -> list[Text]:
    """Return a line for each member. If there are too many, those that are not live come first, and the others are
    counted."""
    ordered = sorted(members, key=lambda member: (member["role"] != "server", natural(member["id"])))
    rows = [
        (
            member["id"],
            "draining" if member["state"] == "live" and member["draining"] else member["state"],
            ", ".join(map(rate, member["steps_per_second"].values())),
            "" if member["waiting_share"] is None else f"{member['waiting_share']:.0%}",
            member["reason"] or member["address"] or member["host"],
        )
        for member in ordered
    ]
    shown = _aligned(("member", "state", "steps/s", "waiting", "where, or why not"), rows)
    if len(shown) <= max(room, 2):
        return shown
    title, *each = shown
    kept = sorted(range(len(each)), key=lambda number: (rows[number][1] == "live", number))[: max(room - 2, 0)]
    return [title, *(each[number] for number in sorted(kept)), Text(f"and {len(each) - len(kept)} more members", "dim")]


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts server-10 after server-9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _aligned(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Text]:
    """Return rows below their titles. The second column is a state, shown in its colour."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    found = [Text(_GAP.join(cell.ljust(size) for cell, size in zip(titles, widths, strict=True)), "bold")]
    for row in rows:
        line = Text()
        for number, (cell, size) in enumerate(zip(row, widths, strict=True)):
            style = STATE_STYLES.get(cell, "yellow") if number == 1 else ""
            line.append(cell.ljust(size) + _GAP, style)
        found.append(line)
    return found


def _parameters(status: dict[str, Any]) -> list[Text]:
    return [
        Text(
            f"{one['name']} ({one['optimizer']}, {one['consistency']}) {one['state']}, "
            f"version {'?' if one['version_min'] is None else one['version_min']}, {rate(one['steps_per_second'])} "
            f"steps/s, {one['elements']:,} elements"
        )
        for one in status["parameters"]
    ]


def _transports(status: dict[str, Any]) -> list[Text]:
    """Return one line per transport and reason, with its number of connections."""
    ways = Counter((one["transport"], one["reason"]) for member in status["members"] for one in member["connections"])
    return [
        Text(f"{transport}: {count} connection{'s' * (count > 1)}" + (f", {reason}" if reason else ""))
        for (transport, reason), count in sorted(ways.items())
    ]


def _waits(status: dict[str, Any]) -> list[Text]:
    waits = list(status["waiting_for"])
    waits += [f"{member['id']} waits {reason}" for member in status["members"] for reason in member["waiting_for"]]
    attempt = (status["snapshots"] or {}).get("attempt")
    found = [Text(f"snapshot under way: {attempt['phase']}", "yellow")] if attempt else []
    return [*found, *(Text(f"waiting: {wait}", "yellow") for wait in dict.fromkeys(waits))]


def _events(events: Iterable[dict[str, Any]]) -> list[Text]:
    return [
        Text(f"{datetime.fromtimestamp(event['time']).strftime('%H:%M:%S')}  {event['text']}", "dim")
        for event in events
    ]
