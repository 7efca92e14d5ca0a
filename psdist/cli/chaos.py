"""``psdist chaos``: injects faults into real processes on this machine, and counts what was lost and what was repeated.

Each run starts a scheduler, servers and workers of its own. ``--suite`` makes one run for each promise. Exit status 1
says that something was not as promised. The keys of the JSON form are stable.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from psdist.errors import ConfigurationError
from psdist.settings.config import TransportName
from psdist.settings.exit_codes import FAILURE, OK, SIGNAL_BASE, USAGE
from psdist.settings.flags import CommandLine, Flag, fail, integer, one_of, seconds

if TYPE_CHECKING:
    from psdist.chaos.report import ChaosReport
    from psdist.chaos.run import ChaosSettings

_PROGRAM = "psdist chaos"


def command_line() -> CommandLine:
    """The flags of ``psdist chaos``."""
    from psdist.chaos.injections import FAULTS

    kinds = "; ".join(f"{name}: {fault.what}" for name, fault in FAULTS.items())
    return CommandLine(
        _PROGRAM,
        "Injects faults into a run of its own on this machine, and counts lost and repeated updates.",
        (
            Flag("--fault", "what to do", one_of(*FAULTS), "server-kill", "NAME"),
            Flag("--kills", "how often, one after the other", integer(0, 100_000), 100, "N"),
            Flag("--consistency", "bsp, ssp or asp", one_of("bsp", "ssp", "asp"), "bsp", "NAME"),
            Flag("--nservers", "servers", integer(1, 64), 3, "N"),
            Flag("--nproc", "workers", integer(1, 64), 2, "N"),
            Flag("--replicas", "copies of each shard", integer(1, 3), 2, "R"),
            Flag("--failure-timeout", "silence after which a server, or a frozen worker, is dead", seconds(0.05), 2.0,
                 "SECONDS"),
            Flag("--down", "how long a scheduler stays down and workers are busy, and most that others are frozen or "
                 "cut off", seconds(), 4.0, "SECONDS"),
            Flag("--pace", "least time from one push to the next", seconds(), 0.002, "SECONDS"),
            Flag("--transport", "auto, grpc or shm", one_of(*get_args(TransportName)), "auto", "NAME"),
            Flag("--seed", "of targets and moments", integer(0), 0, "N"),
            Flag("--no-compare", "leave the undisturbed run out, with which BSP is compared byte for byte"),
            Flag("--suite", "one run for each promise; --kills is the most of each"),
            Flag("--format", "table or json", one_of("table", "json"), "table", "FORMAT"),
        ),
        epilog=f"Faults: {kinds}.",
    )  # fmt: skip


def main(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    given = command_line().parse(argv, os.environ if environ is None else environ)
    if given.nservers < given.replicas:
        fail(_PROGRAM, f"--nservers {given.nservers} cannot hold --replicas {given.replicas} copies", USAGE)
    try:
        return _suite(given) if given.suite else _single(given)
    except ConfigurationError as error:
        fail(_PROGRAM, str(error), USAGE)


def _single(given: Namespace) -> int:
    from psdist.chaos.report import table

    report = _run(_settings(given))
    print(json.dumps(report.as_json(), indent=2) if given.format == "json" else table(report))
    return OK if report.good else FAILURE


def _suite(given: Namespace) -> int:
    from psdist.chaos import suite

    results = []
    for case in suite.CASES:
        if reason := case.missing():
            _say(f"left out: {case.name}: {reason}")
            continue
        _say(f"== {case.name}: {case.target}")
        results.append(suite.judge(case, _run(case.settings(_settings(given)))))
    if given.format == "json":
        print(json.dumps([result.as_json() for result in results], indent=2))
    else:
        print("\n".join(result.row for result in results))
    return OK if all(result.met for result in results) else FAILURE


def _run(settings: ChaosSettings) -> ChaosReport:
    import asyncio

    from psdist.chaos.run import ChaosRun

    async def run() -> ChaosReport:
        # So that its processes and its network go with it.
        task = asyncio.create_task(ChaosRun(settings, _say).run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await task

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise SystemExit(SIGNAL_BASE + signal.SIGTERM) from None


def _settings(given: Namespace) -> ChaosSettings:
    from psdist.chaos.run import ChaosSettings

    return ChaosSettings(
        fault=given.fault,
        kills=given.kills,
        mode=given.consistency,
        servers=given.nservers,
        workers=given.nproc,
        replicas=given.replicas,
        lease_seconds=given.failure_timeout,
        down_seconds=given.down,
        seed=given.seed,
        pace_seconds=given.pace,
        transport=given.transport,
        compare=not given.no_compare,
    )


def _say(text: str) -> None:
    print(f"{_PROGRAM}: {text}", file=sys.stderr, flush=True)
