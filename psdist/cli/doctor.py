"""``psdist doctor``: checks this machine and, with ``--connect``, a cluster. One line per check, with the remedy."""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from psdist.cli.commands import show
from psdist.cli.terminal import printable
from psdist.launcher.local import STORAGE_DIRECTORY
from psdist.settings.config import given_credentials, scheduler_text
from psdist.settings.flags import CommandLine, Flag, seconds
from psdist.settings.programs import CREDENTIAL_FLAGS, FORMAT_FLAG

if TYPE_CHECKING:
    from psdist.cli.doctor_checks import Finding

_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def command_line() -> CommandLine:
    """Return the command line of ``psdist doctor``."""
    return CommandLine(
        "psdist doctor",
        "Checks this machine (shared memory, load, limits, directories and their disks) and the files of its "
        "credentials, and with --connect the way to a scheduler and its servers: names, ports, TLS, token, versions, "
        "clocks and links.",
        (
            Flag("--connect", "also check the way to this scheduler (of several, HOST:PORT,HOST:PORT) and its servers",
                 scheduler_text, "", "HOST:PORT", twin=False),
            *CREDENTIAL_FLAGS,
            FORMAT_FLAG,
            Flag("--timeout", "longest wait of each check", seconds(0.01), 10.0, "SECONDS", twin=False),
        ),
        epilog="Exit status: 0 all is well; 1 the worst is a warning; 69 something fails; 2 wrong use.",
    )  # fmt: skip


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Check, print, and return the exit status."""
    credentials = given_credentials(given, environ)
    from psdist.cli import doctor_checks as checks

    async def check_all() -> list[Finding]:
        found = [checks.check_shared_directory(), checks.check_load(), *checks.check_limits()]
        temporary, storage = environ.get("TMPDIR") or "/tmp", os.path.join(os.getcwd(), STORAGE_DIRECTORY)
        found.append(checks.check_directory("TMPDIR", temporary, "set another TMPDIR", given.timeout))
        remedy = "pass another --storage-path"
        found.append(checks.check_directory("snapshots", storage, remedy, given.timeout, may_be_made=True))
        if given.connect:
            found += [one async for one in checks.check_cluster(given.connect, credentials, given.timeout)]
        return found

    findings = asyncio.run(check_all())
    show(given.format, [asdict(finding) for finding in findings], lambda _: _print(findings))
    return max(checks.STATUSES[finding.level] for finding in findings)


def _print(findings: list[Finding]) -> None:
    from rich.text import Text

    from psdist.cli.tables import print_lines

    width, lines = max(len(finding.check) for finding in findings), []
    for finding in findings:
        text = printable(finding.text)  # It may be from peers.
        lines.append(
            Text.assemble((f"{finding.level:<5}", _STYLES[finding.level]), f"{finding.check:<{width}}  {text}")
        )
        if finding.remedy:
            lines.append(Text(f"{'':5}{'':{width}}  remedy: {finding.remedy}", style="dim"))
    print_lines(lines)
