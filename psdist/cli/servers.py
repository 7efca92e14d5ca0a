"""``psdist scale servers N`` and ``psdist drain SERVER``: more or fewer servers while a run trains.

The launcher of ``psdist run`` starts those that are missing; elsewhere the output says how to. Surplus servers are
drained: everything is moved away from them first, so that nothing is lost. Both commands may be interrupted and
repeated, since the scheduler remembers what was asked for. The keys of their JSON forms are stable.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from psdist.cli.commands import Leaf, show, values
from psdist.cli.target import SchedulerChoice, ask, find_target, target_flags
from psdist.errors import InternalError, InvalidArgumentError
from psdist.settings.exit_codes import OK
from psdist.settings.flags import CommandLine, integer

if TYPE_CHECKING:
    from psdist.v1.scheduler_pb2 import DrainResponse


# --- scale ------------------------------------------------------------------------------------------------------------


def _scale_line() -> CommandLine:
    return CommandLine(
        "psdist scale",
        "Changes how many servers a run has. Training goes on meanwhile: shards move to new servers, and away "
        "from surplus ones. Workers need no command: psdist-worker joins a run at any time.",
        target_flags(),
        words=("servers", "N"),
        epilog="Example: psdist scale servers 3",
    )


def _scale(given: Namespace, environ: Mapping[str, str]) -> int:
    from psdist.v1 import scheduler_pb2

    what, text = given.words
    if what != "servers":
        raise InvalidArgumentError(f"{what!r} cannot be scaled: only servers can, and workers join by psdist-worker")
    try:
        wanted = integer(1, 1024)(text)
    except ValueError as error:
        raise InvalidArgumentError(f"servers: {error}") from None
    target, request = find_target(given, environ), scheduler_pb2.ScaleRequest(servers=wanted)
    answer = ask(target, given.timeout, lambda call: call("Scale", request, given.timeout))
    report = {
        "servers_before": answer.servers_before,
        "servers_wanted": wanted,
        "drained": list(answer.drained),
        **values(answer, "missing", "launchers"),
    }
    show(given.format, report, lambda _: print(sentences(report, target)))
    return OK


def sentences(report: Mapping[str, Any], target: SchedulerChoice) -> str:
    """The report of ``psdist scale`` for people."""
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


SCALE: Final = Leaf(_scale_line, _scale)


# --- drain ------------------------------------------------------------------------------------------------------------


def _drain_line() -> CommandLine:
    return CommandLine(
        "psdist drain",
        "Moves everything away from a server while training goes on. Ends when the server holds nothing and may be "
        "stopped; under psdist run the launcher stops it.",
        target_flags(),
        words=("SERVER",),
        epilog="Example: psdist drain server-1",
    )


def _drain(given: Namespace, environ: Mapping[str, str]) -> int:
    from psdist.v1 import scheduler_pb2
    from psdist.wire.scheduler_client import last_answer

    server: str = given.words[0]
    said: list[str] = []

    def report(answer: DrainResponse) -> None:
        text = _progress(server, answer)
        if given.format != "json" and text not in said[-1:]:
            said.append(text)
            print(text, flush=True)

    target, request = find_target(given, environ), scheduler_pb2.DrainRequest(server_id=server)
    last = ask(target, given.timeout, lambda call: last_answer(call("Drain", request), report))
    if last is None or not last.drained:
        raise InternalError(f"the scheduler ended the call before {server} was drained: try again")
    show(given.format, {"server": server, "drained": True, "shards_moved": last.shards_total}, lambda _: None)
    return OK


def _progress(server: str, answer: DrainResponse) -> str:
    text = f"{answer.shards_total - answer.shards_left} of {answer.shards_total} shards moved"
    if answer.drained:
        return f"{text}; {server} holds nothing and may be stopped"
    return f"{text}; waiting {answer.waiting_for}" if answer.waiting_for else text


DRAIN: Final = Leaf(_drain_line, _drain)
