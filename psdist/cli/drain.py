"""``psdist drain SERVER``: moves everything away from a server while training goes on, and waits until that is done.

The command may be ended in between and given again: the scheduler remembers. The keys of the JSON form are stable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from psdist.cli.target import SchedulerChoice, ask, find_target, or_fail, target_flags
from psdist.settings.exit_codes import FAILURE, OK
from psdist.settings.flags import CommandLine, fail

if TYPE_CHECKING:
    from psdist.v1.scheduler_pb2 import DrainResponse


def command_line() -> CommandLine:
    """The flags of ``psdist drain``."""
    return CommandLine(
        "psdist drain",
        "Moves everything away from a server while training goes on. Ends when the server holds nothing and may be "
        "stopped; under psdist run the launcher stops it.",
        target_flags(),
        words=("SERVER",),
        epilog="Example: psdist drain server-1",
    )


def main(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    environ = os.environ if environ is None else environ
    line = command_line()
    given = line.parse(argv, environ)
    server: str = given.words[0]
    target = or_fail(line.program, lambda: find_target(given.scheduler, given.run_id, given.token_file, environ))
    json_wanted = given.format == "json"
    say = (lambda text: None) if json_wanted else _say
    last = or_fail(line.program, lambda: drain(target, server, given.timeout, DrainProgress(server, say)))
    if last is None or not last.drained:
        fail(line.program, f"the scheduler ended the call before {server} was drained: try again", FAILURE)
    if json_wanted:
        print(json.dumps({"server": server, "drained": True, "shards_moved": last.shards_total}, indent=2))
    return OK


def drain(
    target: SchedulerChoice, server: str, timeout_seconds: float, heard: Callable[[DrainResponse], None]
) -> DrainResponse | None:
    """Has a server drained; the scheduler's last answer, None where there was none. ``heard`` gets each."""
    from psdist.v1 import scheduler_pb2

    async def talk(stub: Any, metadata: Any) -> DrainResponse | None:
        last: DrainResponse | None = None
        async for answer in stub.Drain(scheduler_pb2.DrainRequest(server_id=server), metadata=metadata):
            heard(answer)
            last = answer
        return last

    return ask(target, timeout_seconds, talk)


class DrainProgress:
    """Says how far it is, whenever that has changed."""

    def __init__(self, server: str, say: Callable[[str], None]) -> None:
        self._server = server
        self._say = say
        self._said = ""

    def __call__(self, answer: DrainResponse) -> None:
        """Takes one answer."""
        moved = answer.shards_total - answer.shards_left
        text = f"{moved} of {answer.shards_total} shards moved"
        if answer.drained:
            text += f"; {self._server} holds nothing and may be stopped"
        elif answer.waiting_for:
            text += f"; waiting {answer.waiting_for}"
        if text != self._said:
            self._said = text
            self._say(text)


def _say(text: str) -> None:
    print(text, flush=True)
