"""``psdist run``: scheduler, servers and workers on this machine. Flags in, ``LocalSettings`` out."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress

from psdist.launcher.local import LocalSettings, run_local
from psdist.launcher.output import said_as_json
from psdist.settings.flags import CONFIG_FLAG, CommandLine, flags_of, read
from psdist.settings.foreign_flags import OF_RUN

SCRIPT_USAGE = "script.py [script arguments]"

EPILOG = (
    "Flags come before the script; arguments after it are the script's. PSDIST_SOME_FLAG also sets --some-flag. "
    "Exit status: the script's; 128+n for signal n; 2 wrong use; 65 a script never connected; 69 no scheduler, or "
    "a storage that cannot be read or written; 70 the state of a dead server is lost; 74 the scripts succeeded, but "
    "the snapshot at the end failed (only with --storage-path); 78 a script passed wrong settings or arguments to "
    "psdist. The same command with the same --run-id resumes from the newest snapshot."
)


def command_line() -> CommandLine:
    """Return the command line of ``psdist run``."""
    return CommandLine(
        "psdist run",
        "Trains on this machine: starts a scheduler, servers, and workers that run the script.",
        (*flags_of(LocalSettings), CONFIG_FLAG),
        SCRIPT_USAGE,
        EPILOG,
        first=("--nproc-per-node", "--nservers", "--replicas", "--run-id", "--storage-path"),
        elsewhere=OF_RUN,
    )


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Train on this machine; returns the exit status."""
    settings = read(LocalSettings, given, command=tuple(given.command))
    hint_misplaced(command_line(), given)
    return run_local(settings, environ)


def hint_misplaced(line: CommandLine, given: Namespace) -> None:
    """Report launcher flags, and a ``--``, that stand after the script, where they have no effect."""
    hint = ""
    if found := line.misplaced(given.command):
        hint = f"{', '.join(found)} after {given.command[0]} went to the script; flags come before it"
    elif given.command[1:2] == ["--"] and not given.no_python:
        hint = f"-- after {given.command[0]} went to the script, too; its arguments need no --"
    if hint:
        with suppress(OSError):  # Train even if the hint cannot be printed.
            as_json = getattr(given, "log_format", "") == "json"
            print(said_as_json(hint) if as_json else f"{line.program}: hint: {hint}", file=sys.stderr, flush=True)
