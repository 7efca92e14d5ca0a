"""``psdist status``: shows a scheduler's report on its run, as tables or as JSON.

Without ``--scheduler`` the run is the one of the environment, else the one that runs on this machine. The keys of the
JSON form are those of ``monitoring.run_json.status_json``, and stable.
"""

from __future__ import annotations

import signal
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from psdist.cli.commands import show
from psdist.cli.target import SchedulerChoice, ask, find_target, target_flags, time_limit
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
    from psdist.cli.status_screen import Screen
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

    def table(status: dict[str, Any]) -> None:
        from psdist.cli.status_table import print_status

        print_status(status)

    show(form, status_json(answer), table)


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
