"""``psdist scale servers N``, ``psdist scale workers N`` and ``psdist drain SERVER``, while a run trains.

The launcher of ``psdist run`` starts missing servers and workers; without one, the output says how to. Surplus servers
are drained: everything is moved away from them first, so that nothing is lost. Surplus workers end after their push.
All commands may be interrupted and repeated, since the scheduler remembers the request. The keys of their JSON forms
are stable.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from psdist.cli.commands import Leaf, show
from psdist.cli.target import SchedulerChoice, ask, find_target, target_flags, time_limit
from psdist.cli.terminal import count_bar
from psdist.errors import InternalError, InvalidArgumentError
from psdist.settings.exit_codes import OK
from psdist.settings.flags import CommandLine, integer

if TYPE_CHECKING:
    from psdist.v1.scheduler_pb2 import DrainResponse, ScaleRequest


#: Longest wait for a launcher to connect.
_LAUNCHER_SECONDS: Final = 4.0


# --- scale ------------------------------------------------------------------------------------------------------------


def _scale_line() -> CommandLine:
    return CommandLine(
        "psdist scale",
        "Changes the number of servers or workers while the run trains. Shards move to new servers, and away from "
        "surplus ones; new workers join at a later step, and surplus ones end after their push. Only workers of the "
        "launcher, psdist run, are counted and stopped, not those of psdist-worker.",
        target_flags(),
        words=("servers|workers", "N"),
        epilog="Examples: psdist scale servers 3; psdist scale workers 4",
    )


def _scale(given: Namespace, environ: Mapping[str, str]) -> int:
    what, text = given.words
    if what not in ("servers", "workers"):
        raise InvalidArgumentError(f"{what!r} cannot be scaled: only servers and workers can")
    try:
        wanted = integer(1, 1024)(text)
    except ValueError as error:
        raise InvalidArgumentError(f"{what}: {error}") from None
    target, request = find_target(given, environ), _request(what, wanted)
    answer = _ask_to_scale(target, given.timeout, request)
    launchers, until = answer.launchers, time.monotonic() + _LAUNCHER_SECONDS
    while not launchers and time.monotonic() < until:  # It starts watching some seconds after its run starts.
        time.sleep(0.25)  # No event announces it to this command.
        launchers = _ask_to_scale(target, given.timeout, request).launchers
    if what == "workers":
        report = {"workers_wanted": wanted, "workers_before": answer.workers_before, "launchers": launchers}
        show(given.format, report, lambda _: print(_workers(report, target)))
        return OK
    report = {
        "servers_before": answer.servers_before,
        "servers_wanted": wanted,
        "drained": list(answer.drained),
        "missing": answer.missing,
        "launchers": launchers,
    }
    show(given.format, report, lambda _: print(sentences(report, target)))
    return OK


def _ask_to_scale(target: SchedulerChoice, timeout: float, request: ScaleRequest) -> Any:
    with time_limit(target, timeout):
        return ask(target, timeout, lambda call: call("Scale", request, timeout))


def _request(what: str, wanted: int) -> ScaleRequest:
    from psdist.v1.scheduler_pb2 import ScaleRequest

    return ScaleRequest(servers=wanted) if what == "servers" else ScaleRequest(workers=wanted)


def _workers(report: Mapping[str, Any], target: SchedulerChoice) -> str:
    """Format the report of ``psdist scale workers`` for people."""
    before, wanted = report["workers_before"], report["workers_wanted"]
    line = f"workers: {before} in the run, {wanted} wanted of its launcher"
    if report["launchers"]:
        return f"{line}\nthe launcher of the run starts and stops its own until it has {wanted}"
    return (
        f"{line}\nno launcher watches this run, so start or stop them by hand: psdist-worker --scheduler "
        f"{target.address} (with Compose: docker-compose up --scale worker={wanted})"
    )


def sentences(report: Mapping[str, Any], target: SchedulerChoice) -> str:
    """Format the report of ``psdist scale`` for people."""
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
        "Moves everything away from a server while training continues. Ends when the server is empty and may be "
        "stopped; under psdist run the launcher stops it.",
        target_flags(),
        words=("SERVER",),
        epilog="Example: psdist drain server-1",
    )


def _drain(given: Namespace, environ: Mapping[str, str]) -> int:
    from psdist.v1 import scheduler_pb2
    from psdist.wire.scheduler_connection import last_answer

    server: str = given.words[0]
    target, request = find_target(given, environ), scheduler_pb2.DrainRequest(server_id=server)
    with _drain_progress(server, given.format) as report:
        last = ask(target, given.timeout, lambda call: last_answer(call("Drain", request), report))
    if last is None or not last.drained:
        raise InternalError(f"the scheduler ended the call before {server} was drained: try again")
    result = {"server": server, "drained": True, "shards_moved": last.shards_total}
    show(given.format, result, lambda _: print(_progress(server, last), flush=True))
    return OK


@contextmanager
def _drain_progress(server: str, form: str) -> Iterator[Callable[[DrainResponse], None]]:
    """Yield a function that shows an answer: in a bar on a terminal, else as a line if it differs from the last. The
    result is not shown."""
    if form == "json":
        yield lambda answer: None
    elif sys.stdout.isatty() and sys.stderr.isatty():
        with count_bar(f"draining {server}", "shards") as bar:
            yield lambda answer: bar(answer.shards_total - answer.shards_left, answer.shards_total, _reason(answer))
    else:
        said: list[str] = []

        def report(answer: DrainResponse) -> None:
            text = _progress(server, answer)
            if text not in said[-1:] and not answer.drained:
                said.append(text)
                print(text, flush=True)

        yield report


def _reason(answer: DrainResponse) -> str:
    return f"waiting {answer.waiting_for}" if answer.waiting_for else ""


def _progress(server: str, answer: DrainResponse) -> str:
    text = f"{answer.shards_total - answer.shards_left} of {answer.shards_total} shards moved"
    if answer.drained:
        return f"{text}; {server} holds nothing and may be stopped"
    return f"{text}; {reason}" if (reason := _reason(answer)) else text


DRAIN: Final = Leaf(_drain_line, _drain)
