"""``psdist doctor``: checks this machine and, with ``--connect``, a cluster. One line per check, with the remedy."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Final

from psdist.cli.commands import show
from psdist.cli.diagnosis.finding import STATUSES, Finding, worst
from psdist.settings.config import address_text, device_text, find_token, storage_text
from psdist.settings.flags import CommandLine, Flag, integer, seconds
from psdist.settings.programs import FORMAT_FLAG, TOKEN_FILE_FLAG

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
            Flag("--connect", "also check the way to this scheduler and its servers", address_text, "", "HOST:PORT",
                 twin=False),
            Flag("--storage-path", "also check this storage of snapshots", storage_text, "", "PATH", twin=False),
            Flag("--ports", "also check that these ports are free: 29600,29601", _ports, (), "PORTS", twin=False,
                 shown_default="none"),
            Flag("--server-device", "also check that a server can use this device, such as cuda:0", device_text, "cpu",
                 "NAME", twin=False),
            TOKEN_FILE_FLAG,
            FORMAT_FLAG,
            Flag("--timeout", "longest wait, but for a disk that hangs", seconds(0.01), 10.0, "SECONDS", twin=False),
        ),
        epilog="Exit status: 0 all is well; 1 the worst is a warning; 69 something fails; 2 wrong use.",
    )  # fmt: skip


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Check, print, and return the exit status."""
    token = find_token(environ, token_file=given.token_file)
    findings = asyncio.run(_check(given, token))
    show(given.format, [asdict(finding) for finding in findings], lambda _: _print(findings))
    return STATUSES[worst(findings)]


async def _check(given: Namespace, token: str) -> list[Finding]:
    return [finding async for finding in _findings(given, token)]


async def _findings(given: Namespace, token: str) -> AsyncIterator[Finding]:
    from psdist.cli.diagnosis.machine import check_machine

    device = "" if given.server_device == "cpu" else given.server_device
    for finding in await asyncio.to_thread(lambda: list(check_machine(given.ports, device))):
        yield finding
    if given.storage_path:
        from psdist.cli.diagnosis.storage_check import check_storage

        yield await check_storage(given.storage_path, given.timeout)
    if given.connect:
        from psdist.cli.diagnosis.cluster import check_cluster

        async for finding in check_cluster(given.connect, token, given.timeout):
            yield finding


def _print(findings: list[Finding]) -> None:
    from rich.text import Text

    from psdist.cli.status_table import make_console

    console, width = make_console(), max(len(finding.check) for finding in findings)
    for finding in findings:
        # Texts may be from peers.
        text = "".join(character if character.isprintable() else "?" for character in finding.text)
        line = Text.assemble((f"{finding.level:<5}", _STYLES[finding.level]), f"{finding.check:<{width}}  {text}")
        console.print(line, soft_wrap=True)
        if finding.remedy:
            console.print(Text(f"{'':5}{'':{width}}  remedy: {finding.remedy}", style="dim"), soft_wrap=True)
