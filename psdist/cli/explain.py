"""``psdist explain``: finds the bottleneck of a run, and names the setting that would change it."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from psdist.cli.commands import show
from psdist.cli.target import SchedulerChoice, ask, find_target, status_and_samples, target_flags, time_limit
from psdist.cli.terminal import printable
from psdist.errors import WaitTimeoutError
from psdist.settings.exit_codes import OK
from psdist.settings.flags import CommandLine, Flag, seconds

if TYPE_CHECKING:
    from psdist.monitoring.explanation import Explanation, Pending

_PAUSE_SECONDS: Final = 1.0


def command_line() -> CommandLine:
    """Return the command line of ``psdist explain``."""
    return CommandLine(
        "psdist explain",
        "Finds the bottleneck of a run (link, server kernel, straggler, script or latency), by which "
        "evidence, and which setting would change it, by how much.",
        (
            *target_flags(),
            Flag("--seconds", "shortest part of the run to look at", seconds(1.0), 10.0, "SECONDS", twin=False),
            Flag(
                "--wait", "longest wait for enough steps; then the reason is given, and the exit status is 1",
                seconds(), 60.0, "SECONDS", twin=False,
            ),
        ),
    )  # fmt: skip


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Print the explanation, once there are enough steps; returns the exit status.

    Raises WaitTimeoutError if there are not, with the reason.
    """
    target = find_target(given, environ)
    try:
        found = _wait(lambda: _explain(target, given.timeout, given.seconds), given.wait)
    except KeyboardInterrupt:
        return OK
    show(given.format, found.as_json(), lambda _: print("\n".join(map(printable, found.sentences))))
    return OK


def _wait(attempt: Callable[[], Explanation | Pending], limit: float) -> Explanation:
    """Return the first explanation. The first reason to wait is printed."""
    from psdist.monitoring.explanation import Explanation

    deadline, said = time.monotonic() + limit, False
    while True:
        found = attempt()
        if isinstance(found, Explanation):
            return found
        if time.monotonic() + _PAUSE_SECONDS > deadline:
            raise WaitTimeoutError(f"nothing to explain within {limit:g} s (--wait): {printable(found.reason)}")
        if not said:
            waiting = f"psdist: waiting for enough steps (up to {limit:g} s): {printable(found.reason)}"
            print(waiting, file=sys.stderr, flush=True)
            said = True
        time.sleep(_PAUSE_SECONDS)


def _explain(target: SchedulerChoice, timeout_seconds: float, seconds: float) -> Explanation | Pending:
    """Ask the scheduler, and explain its answers. Raises SchedulerUnreachableError, or the scheduler's error."""
    with time_limit(target, timeout_seconds):
        from psdist.monitoring.explanation import explain
        from psdist.monitoring.run_json import sample_json, status_json

        status, samples = ask(target, timeout_seconds, status_and_samples(timeout_seconds))
    return explain(status_json(status), [sample_json(one) for one in samples], seconds)
