"""``psdist drain SERVER``: moves everything away from a server while training goes on, and waits until that is done.

The command may be interrupted and repeated: the scheduler remembers the drain. The keys of the JSON form are stable.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from psdist.cli.target import SchedulerChoice, ask, find_target, target_flags
from psdist.errors import InternalError
from psdist.launch.final_snapshot import last_answer
from psdist.settings.exit_codes import OK
from psdist.settings.flags import CommandLine

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


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Drains a server and waits for the end of that; the exit status."""
    server: str = given.words[0]
    json_wanted = given.format == "json"
    say = (lambda text: None) if json_wanted else _say
    last = drain(find_target(given, environ), server, given.timeout, DrainProgress(server, say))
    if last is None or not last.drained:
        raise InternalError(f"the scheduler ended the call before {server} was drained: try again")
    if json_wanted:
        print(json.dumps({"server": server, "drained": True, "shards_moved": last.shards_total}, indent=2))
    return OK


def drain(
    target: SchedulerChoice, server: str, timeout_seconds: float, on_answer: Callable[[DrainResponse], None]
) -> DrainResponse | None:
    """Has a server drained. Returns the scheduler's last answer, None where there was none; ``on_answer`` gets each."""
    from psdist.v1 import scheduler_pb2

    async def talk(stub: Any, metadata: Any) -> DrainResponse | None:
        return await last_answer(stub.Drain(scheduler_pb2.DrainRequest(server_id=server), metadata=metadata), on_answer)

    return ask(target, timeout_seconds, talk)


class DrainProgress:
    """Says how far the drain is, whenever that has changed."""

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
