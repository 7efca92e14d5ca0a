"""``psdist top``: shows a run in the terminal, in panels that keys switch, scroll and filter.

``psdist status --watch`` shows less, and needs no further package.
"""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from psdist.cli.status import fetch
from psdist.cli.target import SchedulerChoice, ask_on_loop, find_target, status_and_samples, target_flags
from psdist.errors import ConfigurationError
from psdist.settings.exit_codes import OK
from psdist.settings.flags import CommandLine

if TYPE_CHECKING:
    from psdist.cli.top_app import RunAnswer, TopApp


def command_line() -> CommandLine:
    """Return the command line of ``psdist top``."""
    return CommandLine(
        "psdist top",
        "Shows a run in the terminal: training curves, workers, shards, transports, events, snapshots and waits. "
        "Without flags: the run on this machine. Needs: pip install 'psdist[tui]'.",
        tuple(flag for flag in target_flags() if flag.name != "--format"),
        epilog="The key ? shows all keys, q quits.",
    )


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Show the run until a key or a signal ends it; returns the exit status."""
    make_app = require_textual()
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigurationError("psdist top needs a terminal: without one use psdist status, or psdist status --watch")
    target = find_target(given, environ)
    fetch(target, given.timeout)  # A wrong address or token ends the command before it takes the terminal.
    return asyncio.run(_show(make_app, target, given.timeout))


def require_textual() -> Callable[..., TopApp]:
    """Return the application's class. Raises ConfigurationError if textual is missing."""
    try:
        import textual  # noqa: F401 - an import error is handled below
    except ImportError as error:
        raise ConfigurationError(
            f"psdist top needs the package textual: pip install 'psdist[tui]' ({error}). Without it: psdist status "
            "--watch"
        ) from None
    from psdist.cli.top_app import TopApp

    return TopApp


async def _show(make_app: Callable[..., TopApp], target: SchedulerChoice, timeout_seconds: float) -> int:
    app = make_app(lambda after: _ask(target, timeout_seconds, after))
    status = await app.run_async()
    if app.error is not None:
        raise app.error
    return OK if status is None else status


async def _ask(target: SchedulerChoice, timeout_seconds: float, after: int) -> RunAnswer:
    """Ask once, where a scheduler leads now. Raises SchedulerUnreachableError, or the scheduler's error."""
    from psdist.cli.top_app import RunAnswer
    from psdist.monitoring.run_json import sample_json, status_json

    status, samples = await ask_on_loop(target, timeout_seconds, status_and_samples(timeout_seconds, after))
    return RunAnswer(status_json(status), [sample_json(each) for each in samples], status.time)
