"""``psdist stacks``: where the code of all members of a run stands, for finding what hangs.

The scheduler asks all members. Those of this machine that do not answer, because their interpreter is held, are made to
write their stacks by a signal.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from psdist.cli.target import SchedulerChoice, ask, find_target, target_flags, time_limit
from psdist.cli.terminal import printable
from psdist.errors import SchedulerUnreachableError
from psdist.settings.exit_codes import OK
from psdist.settings.flags import CommandLine

if TYPE_CHECKING:
    from psdist.v1 import scheduler_pb2 as pb

#: Time for signalled members to write their stacks, and between two looks.
_DUMP_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.05
#: ROLE_WORKER, without an import of the messages.
_WORKER: Final = 2
_FROZEN: Final = "its process is stopped, as by SIGSTOP or a debugger"


def command_line() -> CommandLine:
    """Return the command line of ``psdist stacks``."""
    return CommandLine(
        "psdist stacks",
        "Shows the Python stacks of the threads and asyncio tasks of the scheduler, servers and workers of a run. It "
        "needs the run's own token, or one of the role admin: stacks show the user's code.",
        target_flags(),
    )


@dataclass(slots=True)
class _Found:
    """The arrived stacks, by member id; empty for the scheduler, which comes first."""

    run_id: str = ""
    members: dict[str, pb.TraceMember] = field(default_factory=dict)
    stacks: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def on_answer(self, answer: pb.GetStacksResponse) -> None:
        """Store an answer of the scheduler."""
        self.run_id = self.run_id or answer.run_id
        name = answer.member.member_id
        if answer.HasField("member"):
            self.members[name] = answer.member
        if answer.stacks:
            self.stacks[name] = answer.stacks
        if answer.member.missing:
            self.missing[name] = answer.member.missing

    def heading(self, name: str) -> str:
        """Return the title of a member."""
        if not name:
            return f"scheduler of run {self.run_id}"
        member = self.members[name]
        rank = f" (rank {member.rank})" if member.role == _WORKER else ""
        return f"{name}{rank}, pid {member.pid} on {member.host or 'an unknown host'}"


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Print the stacks; returns the exit status. Raises the scheduler's error."""
    target, found = find_target(given, environ), _Found()
    with time_limit(target, given.timeout + _DUMP_SECONDS):
        _receive(target, given, found)
    _dump_silent(found)
    names = ["", *sorted(found.members, key=lambda name: (found.members[name].role == _WORKER, len(name), name))]
    if given.format == "json":
        print(json.dumps([_values(found, name) for name in names]))
        return OK
    for name in names:
        shown = found.stacks.get(name) or f"  no stacks: {found.missing.get(name, 'it did not answer')}\n"
        print(f"=== {printable(found.heading(name))} ===")
        print("\n".join(printable(line) for line in shown.splitlines()), end="\n\n")
    return OK


def _values(found: _Found, name: str) -> dict[str, Any]:
    member = found.members.get(name)
    place = {} if member is None else {"host": member.host, "pid": member.pid}
    return {
        "member": name or "scheduler",
        **place,
        "stacks": found.stacks.get(name, ""),
        "missing": "" if name in found.stacks else found.missing.get(name, "it did not answer"),
    }


def _receive(target: SchedulerChoice, given: Namespace, found: _Found) -> None:
    """Receive all answers. Raises the scheduler's error, SchedulerUnreachableError after the command's time limit."""
    from psdist.v1 import scheduler_pb2 as pb

    async def receive(call: Callable[..., AsyncIterator[Any]]) -> None:
        try:
            async with asyncio.timeout(given.timeout):
                async for answer in call("GetStacks", pb.GetStacksRequest(run_id=given.run_id), None):
                    found.on_answer(answer)
        except TimeoutError:
            if not found.stacks:
                raise SchedulerUnreachableError(
                    f"no scheduler answers at {target.address} ({target.origin}; tried for {given.timeout:g} s)"
                ) from None

    ask(target, given.timeout, receive)


def _dump_silent(found: _Found) -> None:
    """Get the stacks of members of this machine that have not answered."""
    from psdist.link import processes
    from psdist.monitoring.stacks import Dump

    dumps: dict[str, Dump] = {}
    for name, member in found.members.items():
        if name in found.stacks:
            continue
        if member.host != socket.gethostname():
            found.missing[name] = f"{found.missing.get(name, 'it did not answer')}: try again on {member.host}"
            continue
        try:
            dumps[name] = Dump(member.pid, found.run_id, name)
        except (LookupError, OSError):
            found.missing[name] = f"{found.missing.get(name, 'it did not answer')}: nor is its process found here"
            continue
        if processes.is_stopped(member.pid):
            found.missing[name] = _FROZEN
            del dumps[name]
    until = time.monotonic() + _DUMP_SECONDS
    while dumps and time.monotonic() < until:
        for name, dump in list(dumps.items()):
            if text := dump.read():
                found.stacks[name] = f"{text}(by a signal: its event loop does not run)\n"
                del dumps[name]
        time.sleep(_LOOK_SECONDS)  # The files of other processes cannot be waited for.
