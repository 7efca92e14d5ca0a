"""``psdist events``: prints the history of a run, and with ``--follow`` what happens next.

The scheduler keeps the history in its store. While it restarts, ``--follow`` waits for it and then continues without a
gap.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from psdist.cli.target import SchedulerChoice, ask, find_target, target_flags
from psdist.cli.terminal import printable
from psdist.errors import SchedulerUnreachableError
from psdist.monitoring.run_json import values
from psdist.settings.exit_codes import OK
from psdist.settings.flags import CommandLine, Flag, integer

if TYPE_CHECKING:
    from psdist.v1.scheduler_pb2 import EventStatus

#: Pause between two attempts to reach a scheduler that restarts.
_RETRY_SECONDS: Final = 0.5


def command_line() -> CommandLine:
    """Return the command line of ``psdist events``."""
    return CommandLine(
        "psdist events",
        "Prints the history of a run: members that joined, left or were lost, promotions, rollbacks, snapshots, scale "
        "requests, and problems that lasted. The scheduler keeps the newest 10,000 events. --format json prints one "
        "object per line.",
        (
            *target_flags(),
            Flag(
                "--follow", "continue with new events until Ctrl-C, or until no scheduler answers for --timeout",
                twin=False,
            ),
            Flag(
                "--after", "print only events after this number; all, if the history has not reached it", integer(0), 0,
                "NUMBER", twin=False,
            ),
        ),
    )  # fmt: skip


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Print the events; returns the exit status."""
    target, printer = find_target(given, environ), _Printer(given.format, given.after)
    try:
        if given.follow:
            _follow(target, given.timeout, printer)
        else:
            _ask(target, given.timeout, printer, follow=False)
    except KeyboardInterrupt:
        pass
    return OK


class _Printer:
    """Prints each event once. after: number of the last event that is not printed."""

    def __init__(self, form: str, after: int) -> None:
        self._show: Callable[[EventStatus], str] = _json if form == "json" else line
        self.after = after

    def show(self, event: EventStatus) -> None:
        self.after = event.number
        print(self._show(event), flush=True)


def _follow(target: SchedulerChoice, timeout_seconds: float, printer: _Printer) -> None:
    """Print events until no scheduler answers for ``timeout_seconds``. Raises SchedulerUnreachableError."""
    lost_at: float | None = None
    while True:
        before = printer.after
        try:
            _ask(target, timeout_seconds, printer, follow=True)
        except SchedulerUnreachableError as error:
            now = time.monotonic()
            if lost_at is None or printer.after != before:
                print(f"psdist: the scheduler does not answer; waiting for its restart: {error}", file=sys.stderr)
                lost_at = now
            if now - lost_at >= timeout_seconds:
                raise
        time.sleep(_RETRY_SECONDS)  # The scheduler is away, and may be back at any time.


def _ask(target: SchedulerChoice, timeout_seconds: float, printer: _Printer, *, follow: bool) -> None:
    from psdist.v1 import scheduler_pb2

    request = scheduler_pb2.WatchEventsRequest(after=printer.after, follow=follow)

    async def read(call: Callable[..., AsyncIterator[Any]]) -> None:
        async for answer in call("WatchEvents", request, None if follow else timeout_seconds):
            for event in answer.events:
                printer.show(event)

    ask(target, timeout_seconds, read)


def line(event: EventStatus) -> str:
    """Return an event as a line for people: its number, local time, kind and text. Parts of the text are from members,
    and may not control the terminal."""
    at = datetime.fromtimestamp(event.time).strftime("%Y-%m-%d %H:%M:%S")
    return f"{event.number:>5}  {at}  {'!' if event.warning else ' '} {event.kind:<15} {printable(event.text)}"


def _json(event: EventStatus) -> str:
    return json.dumps(values(event, "number", "time", "kind", "warning", "text"))
