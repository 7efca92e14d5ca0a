"""A member's part in a recording: it answers the scheduler's commands, and sends its spans while they are recorded.

Invariant: A recording ends with the session on which it was started.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

from psdist.tracing.messages import spans_to_proto
from psdist.tracing.spans import SpanRecorder
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire.limits import TRACE_SPANS_PER_MESSAGE

#: Pause between two messages with spans.
_SEND_SECONDS: Final = 0.2

Send = Callable[[pb.TraceReport], None]


class MemberTrace:
    """The recording of one member, if there is one. All calls are from the event loop.

    start, stop: called with the recorder when spans are to be recorded, and when they are not any more.
    clock: seconds, the clock of the spans.
    """

    def __init__(
        self,
        start: Callable[[SpanRecorder], None],
        stop: Callable[[SpanRecorder], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._stop = stop
        self._clock = clock
        self._number = 0
        self._recorder: SpanRecorder | None = None
        self._send: Send = lambda report: None
        self._timer: asyncio.TimerHandle | None = None

    def on_command(self, command: pb.TraceCommand, send: Send) -> None:
        """Carry out a command of the scheduler. send: sends an answer on the session that it came on."""
        match command.WhichOneof("kind"):
            case "clock_ns":
                member_ns = round(self._clock() * 1e9)
                clock = pb.TraceReport.Clock(clock_ns=command.clock_ns, member_ns=member_ns, clock_id=clock_id())
                send(pb.TraceReport(number=command.number, clock=clock))
            case "start_steps" if self._recorder is None or command.number != self._number:
                self.end()
                self._number, self._send = command.number, send
                self._recorder = SpanRecorder(command.start_steps)
                self._start(self._recorder)
                self._send_spans(self._recorder)
            case "end" if command.number == self._number:
                self.end()

    def end(self) -> None:
        """Stop recording, and send what is left. Does nothing unless a recording is in progress."""
        if (recorder := self._recorder) is None:
            return
        self._discard(recorder)
        while not self._send_once(recorder, is_last=True):
            pass

    def session_ended(self) -> None:
        """Stop recording: nobody receives the spans any more."""
        if self._recorder is not None:
            self._discard(self._recorder)

    def _discard(self, recorder: SpanRecorder) -> None:
        self._recorder = None
        if self._timer is not None:
            self._timer.cancel()
        self._stop(recorder)

    def _send_spans(self, recorder: SpanRecorder) -> None:
        """Send spans, now and until the recording is complete."""
        if recorder.is_complete:
            self.end()
            return
        self._send_once(recorder)
        self._timer = asyncio.get_running_loop().call_later(_SEND_SECONDS, self._send_spans, recorder)

    def _send_once(self, recorder: SpanRecorder, *, is_last: bool = False) -> bool:
        """Send one message. Returns True if it has everything. is_last: nothing more is recorded."""
        recorded, steps = recorder.recorded, recorder.steps_done
        spans = recorder.take(TRACE_SPANS_PER_MESSAGE)
        message = spans_to_proto(spans)
        is_whole = len(spans) < TRACE_SPANS_PER_MESSAGE
        message.recorded, message.steps_done, message.done = recorded, steps, is_last and is_whole
        self._send(pb.TraceReport(number=self._number, spans=message))
        return is_whole


@cache
def clock_id() -> str:
    """Return a text that processes have in common whose monotonic clocks are one: those of a host, since it was booted,
    and of one time namespace. Without such facts it is this process's own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"process {os.getpid()} {time.time_ns()}"
