"""``psdist trace``: records some steps of a run at all of its members, and writes a file for Perfetto.

Ctrl-C ends the recording early. The file then holds all that had arrived. It is written beside its place and moved
there once it is complete, so an earlier file is replaced only by a whole one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from psdist.cli.commands import written_whole
from psdist.cli.target import SchedulerChoice, ask, find_target, target_flags
from psdist.cli.terminal import printable
from psdist.errors import InvalidArgumentError, SchedulerUnreachableError
from psdist.settings.exit_codes import OK
from psdist.settings.flags import CommandLine, Flag, integer, text
from psdist.wire.limits import TRACE_STEPS_MAX

if TYPE_CHECKING:
    from psdist.monitoring.spans import WorkerSummary
    from psdist.v1 import scheduler_pb2 as pb

#: Shortest time between two lines on progress.
_PROGRESS_SECONDS: Final = 1.0
#: ROLE_WORKER, without an import of the messages.
_WORKER: Final = 2
_VIEWERS: Final = "https://ui.perfetto.dev or chrome://tracing"


def command_line() -> CommandLine:
    """Return the command line of ``psdist trace``."""
    return CommandLine(
        "psdist trace",
        "Records the next steps of a running training at all workers and servers: compute, encode, push, queue, apply, "
        f"replicate, pull and wait, on one time axis. Writes trace events for {_VIEWERS}, and prints where the time of "
        "a step went. Ctrl-C ends the recording early.",
        (
            Flag(
                "--steps", "steps that each worker records", integer(1, TRACE_STEPS_MAX), 20, "NUMBER", twin=False,
            ),
            Flag(
                "--out", "file to write, which replaces an earlier one; - for standard output", text, "trace.json",
                "FILE", twin=False,
            ),
            *target_flags(),
        ),
    )  # fmt: skip


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Record and write the file; returns the exit status.

    Raises InvalidArgumentError for a file that cannot be written, before anything is recorded, and the scheduler's
    error if nothing was recorded.
    """
    target, recording = find_target(given, environ), Recording(given.steps)
    is_piped = given.out == "-"
    with nullcontext(sys.stdout) if is_piped else written_whole(Path(given.out), ", or - for standard output") as file:
        try:
            _record(target, given, recording)
        except KeyboardInterrupt:
            recording.reason = "ended by Ctrl-C"
        except SchedulerUnreachableError as error:
            if not any(map(recording.has_spans, recording.members)):
                raise
            recording.reason = f"the scheduler is gone, so spans may be missing: {error}"
        if not (traced := recording.processes()):
            why = "; ".join(recording.warnings()) or "no member sent spans"
            raise InvalidArgumentError(f"nothing was recorded ({why})")
        from psdist.monitoring.spans import summarize

        count = _write(file, traced, recording.facts())
        summary = summarize([process for process in traced if process.details["role"] == "worker"])
    with redirect_stdout(sys.stderr) if is_piped else nullcontext():
        _tell(recording, summary, count, given)
    return OK


def _record(target: SchedulerChoice, given: Namespace, recording: Recording) -> None:
    """Receive spans into ``recording`` until it ends. Raises the scheduler's error."""
    from psdist.v1 import scheduler_pb2 as pb

    request = pb.TraceRequest(run_id=given.run_id, steps=given.steps)

    async def receive(call: Callable[..., AsyncIterator[Any]]) -> None:
        answers = aiter(call("Trace", request, None))
        try:
            async with asyncio.timeout(given.timeout):
                recording.on_answer(await anext(answers))
        except TimeoutError:
            raise SchedulerUnreachableError(
                f"no scheduler answers at {target.address} ({target.origin}; tried for {given.timeout:g} s)"
            ) from None
        shown = float("-inf")
        async for answer in answers:
            if answer.waiting_for and time.monotonic() - shown >= _PROGRESS_SECONDS:
                shown = time.monotonic()
                print(f"psdist: recording, waiting {printable(answer.waiting_for)}", file=sys.stderr)
            recording.on_answer(answer)

    ask(target, given.timeout, receive)


@dataclass(slots=True)
class Recording:
    """The arrived part of a recording of ``steps`` steps. reason: why it ended early; empty if it did not."""

    steps: int
    members: dict[str, pb.TraceMember] = field(default_factory=dict)
    spans: dict[str, list[pb.TraceSpans]] = field(default_factory=lambda: defaultdict(list))
    reason: str = ""

    def on_answer(self, answer: pb.TraceResponse) -> None:
        """Store an answer of the scheduler."""
        if answer.HasField("member"):
            self.members[answer.member.member_id] = answer.member
        elif answer.HasField("spans"):
            self.spans[answer.member_id].append(answer.spans)
        elif answer.ended:
            self.reason = answer.reason

    def processes(self) -> list[Any]:
        """Return the members with spans and a clock, as ``TracedProcess``: workers by rank, then servers."""
        from psdist.monitoring.spans import TracedClock, TracedProcess, share_clocks
        from psdist.monitoring.tracing import spans_from_proto

        timed = {name: member for name, member in self.members.items() if member.HasField("offset_ns")}
        clocks = share_clocks({
            name: TracedClock(member.offset_ns, member.uncertainty_ns, member.clock_id)
            for name, member in timed.items()
        })  # fmt: skip
        traced = [(member.role != _WORKER, member.rank, name) for name, member in timed.items()]
        return [
            TracedProcess(
                f"{name} (rank {rank})" if not is_server else name,
                clocks[name],
                [span for message in self.spans[name] for span in spans_from_proto(message)],
                self._details(name, clocks[name].offset),
            )
            for is_server, rank, name in sorted(traced)
            if self.has_spans(name)
        ]

    def has_spans(self, name: str) -> bool:
        """True if a span of a member has arrived. Members also tell how many there are."""
        return any(message.kinds for message in self.spans[name])

    def _details(self, name: str, offset: int) -> dict[str, Any]:
        member = self.members[name]
        return {
            "member": name,
            "role": "worker" if member.role == _WORKER else "server",
            "host": member.host,
            "pid": member.pid,
            "clock_offset_us": offset / 1000,
            "clock_uncertainty_us": member.uncertainty_ns / 1000,
            "spans_lost": self.lost(name),
        }

    def lost(self, name: str) -> int:
        """Return the number of a member's spans that did not arrive, because its buffer was full or a session broke."""
        recorded = max((message.recorded for message in self.spans[name]), default=0)
        return max(0, recorded - sum(len(message.kinds) for message in self.spans[name]))

    def facts(self) -> dict[str, Any]:
        """Return facts about the recording, for the file."""
        members = [self._details(name, member.offset_ns) for name, member in sorted(self.members.items())]
        return {"recorder": "psdist trace", "ended_early": self.reason, "members": members, "notes": self.warnings()}

    def warnings(self) -> list[str]:
        """Return a sentence for each gap in the file."""
        found = [self.reason] if self.reason else []
        for name, member in sorted(self.members.items()):
            if member.missing:
                found.append(f"{name} is recorded in part or not at all: {printable(member.missing)}")
            elif not member.HasField("offset_ns"):
                found.append(f"{name} is left out: its clock was not compared yet")
            elif member.done and member.role == _WORKER and member.steps < self.steps:
                found.append(f"{name} recorded {member.steps} of {self.steps} steps")
            if lost := self.lost(name):
                found.append(f"{lost} spans of {name} are lost: its buffer was full. Record fewer steps")
        return found


def _write(file: IO[str], traced: list[Any], facts: Mapping[str, Any]) -> int:
    """Write the trace, an event per line. Returns the number of its spans."""
    from psdist.monitoring.spans import trace_events

    file.write('{"traceEvents":[\n')
    for number, event in enumerate(trace_events(traced)):
        file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
    file.write(f'\n],"displayTimeUnit":"ms","otherData":{json.dumps(facts)}}}\n')
    return sum(len(process.spans) for process in traced)


def _tell(recording: Recording, summary: list[WorkerSummary], count: int, given: Namespace) -> None:
    """Print the result: the time of a step by phase, and the gaps."""
    if given.format == "json":
        workers = [worker.values() for worker in summary]
        print(json.dumps({"out": given.out, "spans": count, "workers": workers, "notes": recording.warnings()}))
        return
    for worker in summary:
        print(worker.line())
    for warning in recording.warnings():
        print(f"psdist: {warning}", file=sys.stderr)
    print(f"{count} spans in {given.out}: open it with {_VIEWERS}")
