"""``psdist status``: shows a run, once as text or JSON, or with ``--watch`` live in panels that keys switch and scroll.

Without ``--scheduler`` the run is the one of the environment, else the one that runs on this machine. The keys of the
JSON form are those of ``monitoring.run_json.status_json``, and stable.
"""

from __future__ import annotations

import asyncio
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from psdist.cli.commands import show
from psdist.cli.target import (
    SchedulerChoice,
    ask,
    ask_on_loop,
    find_target,
    status_and_samples,
    target_flags,
    time_limit,
)
from psdist.settings.exit_codes import OK
from psdist.settings.flags import CommandLine, Flag

if TYPE_CHECKING:
    from psdist.v1 import scheduler_pb2

_WATCH_SECONDS: Final = 1.0


def command_line() -> CommandLine:
    """Return the command line of ``psdist status``."""
    return CommandLine(
        "psdist status",
        "Shows the state of a run. Without flags: the run on this machine.",
        (
            *target_flags(),
            Flag(
                "--watch", "show it until Ctrl-C: on a terminal in panels (pip install textual; the key ? shows "
                "all keys), otherwise again every second", twin=False,
            ),
        ),
    )  # fmt: skip


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Print the status, with --watch until Ctrl-C; returns the exit status."""
    target = find_target(given, environ)
    if given.watch and given.format == "table" and sys.stdin.isatty() and sys.stdout.isatty():
        if find_spec("textual") is not None:
            fetch(target, given.timeout)  # A wrong address or token ends the command before it takes the terminal.
            return asyncio.run(_show_panels(target, given.timeout))
        print("psdist: panels and keys need the package textual: pip install textual", file=sys.stderr)
    try:
        while True:
            _print(given.format, fetch(target, given.timeout), target.dashboard_key)
            if not given.watch:
                return OK
            print(flush=True)
            time.sleep(_WATCH_SECONDS)
    except KeyboardInterrupt:
        if not given.watch:
            raise
        return OK


def _print(form: str, answer: scheduler_pb2.GetStatusResponse, dashboard_key: str) -> None:
    from psdist.monitoring.run_json import status_json

    show(form, status_json(answer), lambda _: print_status(answer, dashboard_key))


def print_status(answer: scheduler_pb2.GetStatusResponse, dashboard_key: str = "") -> None:
    """Print the first panel, below the title and the reasons of waits."""
    from psdist.cli import status_panels
    from psdist.cli.tables import print_lines

    view = status_panels.RunView(dashboard_key)
    view.add(answer)
    print_lines([*status_panels.title(view), *status_panels.notices(view), *status_panels.overview(view, 0).rows])


async def _show_panels(target: SchedulerChoice, timeout_seconds: float) -> int:
    from psdist.cli.status_app import StatusApp

    app = StatusApp(lambda after: ask_on_loop(target, timeout_seconds, status_and_samples(timeout_seconds, after)))
    app.view.dashboard_key = target.dashboard_key
    status = await app.run_async()
    if app.error is not None:
        raise app.error
    return OK if status is None else status


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
