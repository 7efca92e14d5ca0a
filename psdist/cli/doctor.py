"""``psdist doctor``: checks this machine and, with ``--connect``, a cluster. One line per check, with the remedy."""

from __future__ import annotations

import asyncio
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Final

from psdist.cli.commands import show
from psdist.cli.doctor_checks import STATUSES, Check, Finding, TimeLimit, warn, worst
from psdist.cli.terminal import printable
from psdist.security.tls import Credentials
from psdist.settings.config import device_text, given_credentials, scheduler_text, storage_text
from psdist.settings.flags import CommandLine, Flag, integer, seconds
from psdist.settings.programs import CREDENTIAL_FLAGS, FORMAT_FLAG

_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def _ports(value: str) -> tuple[int, ...]:
    return tuple(integer(1, 65535)(port) for port in value.split(","))


def command_line() -> CommandLine:
    """Return the command line of ``psdist doctor``."""
    return CommandLine(
        "psdist doctor",
        "Checks versions, cores, memory, limits, directories and names of this machine, and with --connect the way to "
        "a scheduler and its servers.",
        (
            Flag("--connect", "also check the way to this scheduler (of several, HOST:PORT,HOST:PORT) and its servers",
                 scheduler_text, "", "HOST:PORT", twin=False),
            Flag("--storage-path", "also check this storage of snapshots", storage_text, None, "PATH", twin=False),
            Flag("--ports", "also check that these ports are free: 29600,29601", _ports, (), "PORTS", twin=False,
                 shown_default="none"),
            Flag("--server-device", "also check that a server can use this device, such as cuda:0", device_text, "cpu",
                 "NAME", twin=False),
            *CREDENTIAL_FLAGS,
            FORMAT_FLAG,
            Flag("--timeout", "longest wait of each check", seconds(0.01), 10.0, "SECONDS", twin=False),
        ),
        epilog="Exit status: 0 all is well; 1 the worst is a warning; 69 something fails; 2 wrong use.",
    )  # fmt: skip


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Check, print, and return the exit status."""
    credentials = given_credentials(given, environ)
    limit = TimeLimit(given.timeout)
    findings = [*_here(given, limit), *asyncio.run(_cluster(given, credentials))]
    show(given.format, [asdict(finding) for finding in findings], lambda _: _print(findings))
    status = STATUSES[worst(findings)]
    if limit.has_abandoned:
        sys.stdout.flush()
        os._exit(status)  # The interpreter would wait for threads that wait for a dead disk.
    return status


def _here(given: Namespace, limit: TimeLimit) -> Iterator[Finding]:
    """Yield the findings about this machine and the storage."""
    from psdist.cli.doctor_checks import machine_checks

    device = "" if given.server_device == "cpu" else given.server_device
    for check in machine_checks(given.ports, device):
        yield from limit.run(check)
    if given.storage_path == "":
        yield warn(
            "storage",
            "none: no snapshots are taken, and a run that loses its state starts over",
            "name a directory or URL with --storage-path, or run with --replicas 2",
        )
    elif given.storage_path is not None:
        yield from limit.run(_storage(given.storage_path, given.timeout))


def _storage(path: str, timeout_seconds: float) -> Check:
    from psdist.cli.doctor_checks import check_storage

    remedy = "is a disk, network file system or bucket dead? See mount and dmesg, or name another --storage-path"
    return Check("storage", lambda: [asyncio.run(check_storage(path, timeout_seconds))], remedy)


async def _cluster(given: Namespace, credentials: Credentials) -> list[Finding]:
    if not given.connect:
        return []
    from psdist.cli.doctor_cluster import check_cluster

    return [finding async for finding in check_cluster(given.connect, credentials, given.timeout)]


def _print(findings: list[Finding]) -> None:
    from rich.text import Text

    from psdist.cli.status_table import make_console

    console, width = make_console(), max(len(finding.check) for finding in findings)
    for finding in findings:
        text = printable(finding.text)  # It may be from peers.
        line = Text.assemble((f"{finding.level:<5}", _STYLES[finding.level]), f"{finding.check:<{width}}  {text}")
        console.print(line, soft_wrap=True)
        if finding.remedy:
            console.print(Text(f"{'':5}{'':{width}}  remedy: {finding.remedy}", style="dim"), soft_wrap=True)
