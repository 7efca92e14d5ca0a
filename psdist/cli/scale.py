"""``psdist scale servers N``: how many servers a run shall have, while it trains.

The launcher of ``psdist run`` starts those that are missing; elsewhere the answer says how to. Servers that are too
many are drained, which takes its time, and nothing is lost. The keys of the JSON form are stable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from psdist.cli.target import SchedulerChoice, ask, find_target, or_fail, target_flags
from psdist.settings.exit_codes import OK
from psdist.settings.flags import CommandLine, fail, integer


def command_line() -> CommandLine:
    """The flags of ``psdist scale``."""
    return CommandLine(
        "psdist scale",
        "Changes how many servers a run has. Training goes on meanwhile: shards move to servers that come, and away "
        "from those that go. Workers need no command: psdist-worker joins a run at any time.",
        target_flags(),
        words=("servers", "N"),
        epilog="Example: psdist scale servers 3",
    )


def main(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    environ = os.environ if environ is None else environ
    line = command_line()
    given = line.parse(argv, environ)
    what, text = given.words
    if what != "servers":
        fail(line.program, f"{what!r} cannot be scaled: only servers can, and workers join by psdist-worker")
    try:
        count = integer(1, 1024)(text)
    except ValueError as error:
        fail(line.program, f"servers: {error}")
    target = or_fail(line.program, lambda: find_target(given.scheduler, given.run_id, given.token_file, environ))
    report = or_fail(line.program, lambda: scale(target, count, given.timeout))
    print(json.dumps(report, indent=2) if given.format == "json" else sentences(report, target))
    return OK


def scale(target: SchedulerChoice, servers: int, timeout_seconds: float) -> dict[str, Any]:
    """Tells the scheduler; its answer with stable keys."""
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
