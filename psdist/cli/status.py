"""``psdist status``: shows a scheduler's report on its run, as tables or as JSON.

Without ``--scheduler`` the run is the one of the environment, else the one that runs on this machine. The keys of the
JSON form are those of ``monitoring.run_json.status_json``, and stable.

``Screen`` shows ``--watch`` on the terminal's alternate screen, which leaves nothing in its history. The most important
lines come first, as many as fit: headline and members, servers before workers, each in the order of their numbers. Then
parameter sets, how workers reach servers (a line for each transport and reason), waits, and the newest events. Each
line is cut at the terminal's width. ``screen_lines`` is pure.
"""

from __future__ import annotations

import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from psdist.cli.commands import show
from psdist.cli.status_table import (
    STATE_STYLES,
    clock,
    duration,
    member_state,
    natural,
    print_status,
    rate,
    waits,
    ways,
)
from psdist.cli.target import SchedulerChoice, ask, find_target, target_flags, time_limit
from psdist.cli.terminal import printable, printable_values
from psdist.errors import SchedulerUnreachableError
from psdist.settings.exit_codes import OK, SIGNAL_BASE
from psdist.settings.flags import CommandLine, Flag

if TYPE_CHECKING:
    from psdist.v1 import scheduler_pb2

_WATCH_SECONDS: Final = 1.0


def command_line() -> CommandLine:
    """Return the command line of ``psdist status``."""
    return CommandLine(
        "psdist status",
        "Shows the state of a run. Without flags: the run on this machine.",
        (*target_flags(), Flag("--watch", "show it again every second, until Ctrl-C", twin=False)),
    )


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Print the status, with --watch every second; returns the exit status."""
    target = find_target(given, environ)
    if not given.watch:
        _print(given.format, fetch(target, given.timeout))
        return OK
    if sys.stdout.isatty() and given.format == "table":
        return _watch(target, given.timeout)
    try:
        while True:
            _print(given.format, fetch(target, given.timeout))
            print(flush=True)
            time.sleep(_WATCH_SECONDS)
    except KeyboardInterrupt:
        return OK


def _watch(target: SchedulerChoice, timeout_seconds: float) -> int:
    """Show the status on a terminal until Ctrl-C. If the scheduler stops answering, it may be restarting: the last
    status stays, below a notice."""
    from psdist.monitoring.run_json import status_json

    answer: scheduler_pb2.GetStatusResponse | None = fetch(target, timeout_seconds)
    since = time.monotonic()
    # Otherwise SIGTERM would leave the terminal on its alternate screen.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(SIGNAL_BASE + number))
    try:
        with Screen() as screen:
            while True:
                if answer is not None:
                    since = time.monotonic()
                    screen.show(status_json(answer))
                time.sleep(_WATCH_SECONDS)
                try:
                    answer = fetch(target, timeout_seconds)
                except SchedulerUnreachableError as error:
                    answer = None
                    screen.show_trouble(f"no answer for {time.monotonic() - since:.0f} s: {error}")
    except KeyboardInterrupt:
        return OK


def _print(form: str, answer: scheduler_pb2.GetStatusResponse) -> None:
    from psdist.monitoring.run_json import status_json

    show(form, status_json(answer), print_status)


def fetch(target: SchedulerChoice, timeout_seconds: float) -> scheduler_pb2.GetStatusResponse:
    """Return the scheduler's answer. Raises SchedulerUnreachableError, which says what was tried, or the scheduler's
    error."""
    with time_limit(target, timeout_seconds):
        from psdist.v1 import scheduler_pb2

        request = scheduler_pb2.GetStatusRequest()
        answer: scheduler_pb2.GetStatusResponse = ask(
            target, timeout_seconds, lambda call: call("GetStatus", request, timeout_seconds)
        )
    return answer


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
    rest = [] if status is None else [*_parameters(status), *map(Text, ways(status)), *_waits(status)]
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
            member_state(member),
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


def _waits(status: dict[str, Any]) -> list[Text]:
    attempt = (status["snapshots"] or {}).get("attempt")
    found = [Text(f"snapshot under way: {attempt['phase']}", "yellow")] if attempt else []
    return [*found, *(Text(f"waiting: {wait}", "yellow") for wait in waits(status))]


def _events(events: Iterable[dict[str, Any]]) -> list[Text]:
    return [Text(f"{clock(event['time'])}  {event['text']}", "dim") for event in events]
