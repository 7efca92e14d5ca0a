"""A member's part in a recording: commands in any order, and an end with the session."""

from __future__ import annotations

import asyncio

from psdist.monitoring.spans import Span, SpanKind, SpanRecorder
from psdist.monitoring.tracing import MemberTrace, clock_id
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire.limits import TRACE_SPANS_PER_MESSAGE


class Member:
    """A member that records into ``recorder``, if that is set. now: its clock."""

    def __init__(self) -> None:
        self.recorder: SpanRecorder | None = None
        self.now = 12.5
        self.trace = MemberTrace(self.start, self.stop, lambda: self.now)
        self.sent: list[pb.TraceReport] = []
        self.stopped = asyncio.Event()

    def start(self, recorder: SpanRecorder) -> None:
        assert self.recorder is None
        self.recorder = recorder

    def stop(self, recorder: SpanRecorder) -> None:
        assert self.recorder is recorder
        self.recorder = None
        self.stopped.set()

    def command(self, number: int = 1, **kind: int) -> None:
        command = pb.TraceCommand(number=number, **kind)
        self.trace.on_command(command, lambda report: self.sent.append(report))

    def record(self, count: int) -> None:
        assert self.recorder is not None
        for _ in range(count):
            self.recorder.add(Span(SpanKind.APPLY, 1.0, 2.0))

    def take(self) -> list[tuple[int, int, bool]]:
        """Return and forget the sent reports: spans in each, spans so far, and True for the last one."""
        sent, self.sent = self.sent, []
        return [(len(one.spans.kinds), one.spans.recorded, one.spans.done) for one in sent]


async def test_the_clock_is_answered_immediately() -> None:
    member = Member()
    member.command(3, clock_ns=77)
    (report,) = member.sent
    clock = report.clock
    assert (report.number, clock.clock_ns, clock.member_ns) == (3, 77, 12_500_000_000)
    assert clock.clock_id == clock_id() != ""


async def test_the_rest_is_sent_at_the_end_in_messages_of_limited_size() -> None:
    member = Member()
    member.command(start_steps=0)
    assert member.take() == [(0, 0, False)], "the first report is immediate"
    member.record(TRACE_SPANS_PER_MESSAGE + 5)
    member.command(number=2, end=True)
    assert member.recorder is not None and not member.sent, "the end of another recording"
    member.command(end=True)
    member.command(end=True)
    most = TRACE_SPANS_PER_MESSAGE
    assert member.take() == [(most, most + 5, False), (5, most + 5, True)]
    assert member.recorder is None


async def test_a_repeated_start_changes_nothing_and_another_one_replaces_the_recording() -> None:
    member = Member()
    member.command(start_steps=5)
    member.record(1)
    member.command(start_steps=5)
    member.command(number=2, start_steps=5)
    assert member.take() == [(0, 0, False), (1, 1, True), (0, 0, False)]
    member.trace.session_ended()


async def test_a_worker_ends_by_itself_after_its_steps() -> None:
    member = Member()
    member.command(start_steps=1)
    assert member.recorder is not None
    for step in (1, 2):
        member.recorder.end_step("mlp", step, float(step))
    async with asyncio.timeout(60):
        await member.stopped.wait()
    assert member.take()[-1] == (1, 1, True)


async def test_a_recording_ends_with_its_session() -> None:
    member = Member()
    member.command(start_steps=0)
    member.trace.session_ended()
    member.trace.session_ended()
    member.trace.end()
    assert member.recorder is None and member.take() == [(0, 0, False)]
