"""``psdist scale servers N``: sets how many servers a run has, while it trains.

The launcher of ``psdist run`` starts those that are missing; elsewhere the output says how to. Surplus servers are
drained, so that nothing is lost. The keys of the JSON form are stable.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from psdist.cli.commands import show
from psdist.cli.target import SchedulerChoice, ask, find_target, target_flags
from psdist.errors import InvalidArgumentError
from psdist.settings.exit_codes import OK
from psdist.settings.flags import CommandLine, integer


def command_line() -> CommandLine:
    """The flags of ``psdist scale``."""
    return CommandLine(
        "psdist scale",
        "Changes how many servers a run has. Training goes on meanwhile: shards move to new servers, and away "
        "from surplus ones. Workers need no command: psdist-worker joins a run at any time.",
        target_flags(),
        words=("servers", "N"),
        epilog="Example: psdist scale servers 3",
    )


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Changes the number of servers; the exit status."""
    what, text = given.words
    if what != "servers":
        raise InvalidArgumentError(f"{what!r} cannot be scaled: only servers can, and workers join by psdist-worker")
    try:
        count = integer(1, 1024)(text)
    except ValueError as error:
        raise InvalidArgumentError(f"servers: {error}") from None
    target = find_target(given, environ)
    show(given.format, scale(target, count, given.timeout), lambda report: print(sentences(report, target)))
    return OK


def scale(target: SchedulerChoice, servers: int, timeout_seconds: float) -> dict[str, Any]:
    """Sets the number at the scheduler. Returns its answer with stable keys."""
    from psdist.v1 import scheduler_pb2

    async def talk(stub: Any, metadata: Any) -> Any:
        request = scheduler_pb2.ScaleRequest(servers=servers)
        return await stub.Scale(request, metadata=metadata, timeout=timeout_seconds)

    answer = ask(target, timeout_seconds, talk)
    return {
        "servers_before": answer.servers_before,
        "servers_wanted": servers,
        "drained": list(answer.drained),
        "missing": answer.missing,
        "launchers": answer.launchers,
    }


def sentences(report: Mapping[str, Any], target: SchedulerChoice) -> str:
    """The report for people."""
    wanted, drained, missing = report["servers_wanted"], ", ".join(report["drained"]), report["missing"]
    lines = [f"servers: {report['servers_before']} before, {wanted} wanted"]
    if missing and report["launchers"]:
        lines.append(f"the launcher of the run starts {missing}")
    elif missing:
        lines.append(
            f"no launcher watches this run, so start {missing} by hand: psdist-server --scheduler {target.address} "
            f"(with Compose: docker-compose up --scale server={wanted})"
        )
    if drained and report["launchers"]:
        lines.append(f"drained, then stopped by the launcher of the run: {drained}")
    elif drained:
        lines.append(f"drained: {drained}; stop each once psdist status shows that it holds no shards")
    return "\n".join(lines)
