"""``python -m tests.chaos``: injects faults into real processes on this machine, and counts lost and repeated updates.

Each run starts a separate scheduler, servers and workers. ``--suite`` makes one run for each promise. Exit status 1
means that a promise was broken.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping

from psdist.cli.commands import call, show
from psdist.errors import ConfigurationError
from psdist.settings.exit_codes import FAILURE, OK, SIGNAL_BASE
from psdist.settings.flags import CommandLine, Flag, flags_of, one_of, read
from psdist.settings.programs import FORMAT_FLAG
from tests.support.chaos import suite
from tests.support.chaos.injections import FAULTS
from tests.support.chaos.report import ChaosReport, table
from tests.support.chaos.run import ChaosRun
from tests.support.chaos.settings import ChaosSettings

_PROGRAM = "python -m tests.chaos"


def command_line() -> CommandLine:
    """Return the command line of ``python -m tests.chaos``."""
    kinds = "; ".join(f"{name}: {fault.what}" for name, fault in FAULTS.items())
    return CommandLine(
        _PROGRAM,
        "Injects faults into a separate run on this machine, and counts lost and repeated updates.",
        (
            Flag("--fault", "fault to inject (see below)", one_of(*FAULTS), ChaosSettings.fault, "NAME"),
            *flags_of(ChaosSettings),
            Flag("--no-compare", "omit the undisturbed run whose weights BSP must equal byte for byte"),
            Flag("--suite", "one run for each promise; --kills is the largest number of faults of each"),
            FORMAT_FLAG,
        ),
        epilog=f"Faults: {kinds}.",
    )  # fmt: skip


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Run one case or the suite; returns the exit status."""
    if given.nservers < given.replicas:
        raise ConfigurationError(f"--nservers {given.nservers} cannot hold --replicas {given.replicas} copies")
    return _suite(given) if given.suite else _single(given)


def _single(given: Namespace) -> int:
    report = _run(_settings(given))
    show(given.format, report.as_json(), lambda _: print(table(report)))
    return OK if report.good else FAILURE


def _suite(given: Namespace) -> int:
    results = []
    for case in suite.CASES:
        if reason := case.missing():
            _say(f"skipped {case.name}: {reason}")
            continue
        _say(f"== {case.name}: {case.target}")
        results.append(suite.Result(case, _run(case.settings(_settings(given)))))
    rows = "\n".join(result.row for result in results)
    show(given.format, [result.as_json() for result in results], lambda _: print(rows))
    return OK if all(result.met for result in results) else FAILURE


def _run(settings: ChaosSettings) -> ChaosReport:
    async def run() -> ChaosReport:
        # Cancel the run, so that it removes its processes and its network.
        task = asyncio.create_task(ChaosRun(settings, _say).run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await task

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise SystemExit(SIGNAL_BASE + signal.SIGTERM) from None


def _settings(given: Namespace) -> ChaosSettings:
    return read(ChaosSettings, given, fault=given.fault, compare=not given.no_compare)


def _say(text: str) -> None:
    print(f"{_PROGRAM}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(call(sys.modules[__name__], sys.argv[1:], os.environ))
