"""Waits of this worker: no wait is silent, and the scheduler learns of those that only other workers can end.

``WaitTracker`` has all open waits with their reasons. A reason completes a sentence that begins with "waiting", such as
"for worker-1 (rank 1) to push step 12". Peers may change it. A reason is logged at INFO when it is first given, and at
WARNING when the wait has lasted ``limits.REPORT_WAIT_SECONDS``. It is logged once per reason and again each minute,
however many calls wait for it. Heartbeats carry the open waits, so that ``psdist status`` shows them.

``Activities`` reports the waits of this worker's script that only other workers can end. From these reports the
scheduler detects deadlocks (``MutualWaitError``). Only waits without a time limit are reported, of a script that calls
from one thread. Each report also states the progress of this worker's pushes at the same moment, because the scheduler
needs both together.

``GroupCalls`` are the calls of groups of workers (``psdist.collectives``) that the script has made. A script may have
many under way, and its thread waits in at most one of them. Only that one holds up the script.

Everything here runs on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from psdist.client.core.push_sequence import SnapshotMarks
from psdist.errors import MutualWaitError, PsdistError
from psdist.monitoring.phase_timer import PhaseTimer, PushCounter, Subject, TimedRequest
from psdist.monitoring.tracing import MemberTrace
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import limits

_Task = asyncio.Task[object]
#: Task of the script's call within which a task runs, if that is another one.
_owner: ContextVar[_Task | None] = ContextVar("psdist_group_calls")


@dataclass(frozen=True, slots=True)
class AwaitedCall:
    """A call that other workers must make, too.

    need: returns the call and the workers that have not made it; None if it needs nobody's call.
    fail: ends the call with an error.
    """

    need: Callable[[], pb.Activity.GroupCall | None]
    fail: Callable[[PsdistError], None]


class GroupCalls:
    """Calls of one client that are under way. All of this runs on the loop."""

    def __init__(self) -> None:
        #: By task, the one that the script's thread may wait for, and the call that the task waits for. None means that
        #: the task acts by itself.
        self._tasks: dict[_Task, tuple[_Task, AwaitedCall | None]] = {}
        #: Returns True if a thread of the script waits for the task.
        self.is_awaited: Callable[[_Task], bool] = lambda _: False
        #: Returns True if this worker has not made the call that another one waits for.
        self.lacks: Callable[[pb.CheckCall], bool] = lambda _: True
        #: Ends groups, named by their keys in hexadecimal, with an error.
        self.end: Callable[[Collection[str], PsdistError], None] = lambda _names, _error: None

    def enter(self) -> _Task | None:
        """Begin calls of the current task. Returns the task, for ``leave``; None if they have begun before."""
        task = asyncio.current_task()
        if task is None or task in self._tasks:
            return None
        self._tasks[task] = _owner.get(None) or task, None
        return task

    def leave(self, task: _Task | None) -> None:
        """End what ``enter`` has begun."""
        if task is not None:
            del self._tasks[task]

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Note that the current task makes calls by tasks of its own, which it starts in the ``with`` block."""
        task = self.enter()
        token = _owner.set(asyncio.current_task())
        try:
            yield
        finally:
            _owner.reset(token)  # A task in its own context would be freed late.
            asyncio.get_running_loop().call_soon(self.leave, task)  # After its tasks have entered.

    def begin_wait(self, call: AwaitedCall) -> _Task | None:
        """Record that the current task waits for a call. Returns the task, for ``end_wait``."""
        task = asyncio.current_task()
        if task is not None and task in self._tasks:
            self._tasks[task] = self._tasks[task][0], call
        return task

    def end_wait(self, task: _Task | None) -> None:
        """Record that a task waits no longer. It may have been dropped with its loop."""
        if task is not None and task in self._tasks:
            self._tasks[task] = self._tasks[task][0], None

    @property
    def acts(self) -> bool:
        """True if a task may make another call by itself."""
        return any(call is None for _, call in self._tasks.values())

    def awaited(self) -> AwaitedCall | None:
        """Return a call that the script's thread waits for, and that needs others. None if there is none, or if a task
        may make another one by itself."""
        if self.acts:
            return None
        awaited = (call for owner, call in self._tasks.values() if call is not None and self.is_awaited(owner))
        return next((call for call in awaited if call.need() is not None), None)


logger = logging.getLogger("psdist")

_REPEAT_SECONDS: Final = 60.0
_SENTENCES_MAX: Final = 16


class Wait:
    """One wait, which lasts as long as its ``with`` block. Made by ``WaitTracker.open``."""

    def __init__(
        self, reason: str, tracker: WaitTracker, loop: asyncio.AbstractEventLoop, request: TimedRequest | None = None
    ) -> None:
        self.reason = reason
        self._request = request
        self._tracker = tracker
        self._loop = loop
        self._since = loop.time()
        self._timer = loop.call_later(limits.REPORT_WAIT_SECONDS, self._report)

    def __enter__(self) -> Self:
        self._tracker.open_waits[id(self)] = self
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        del self._tracker.open_waits[id(self)]
        if self._request is not None:
            self._request.close()

    @property
    def seconds(self) -> float:
        """Seconds that the wait has lasted."""
        return self._loop.time() - self._since

    @property
    def sentence(self) -> str:
        """``waiting 12 s for worker-1 (rank 1) to push step 12``."""
        return f"waiting {self.seconds:.0f} s {self.reason}"

    def update_reason(self, reason: str) -> None:
        """Replace the reason, as a peer reported it."""
        if reason == self.reason:
            return
        self.reason = reason
        if self.seconds >= limits.REPORT_WAIT_SECONDS:
            self._warn()
        elif self._is_first(self._tracker.mentioned):
            logger.info("waiting %s", reason)

    def sent(self) -> None:
        """Record that the gradient of the request is handed over."""
        if self._request is not None:
            self._request.sent()

    def held_up(self) -> None:
        """Record that the server takes no more of the gradient for now, and has received all that was sent."""
        if self._request is not None:
            self._request.held_up()

    def resumed(self) -> None:
        """Record that the gradient is sent again. Does nothing unless it was held up."""
        if self._request is not None:
            self._request.resumed()

    def progress(self) -> None:
        """Restart the time limit of silence, because something arrived."""
        if self._request is not None:
            self._request.answered()
        self._since = self._loop.time()
        for logged in (self._tracker.mentioned, self._tracker.reported):
            logged.pop(self.reason, None)

    def _report(self) -> None:
        left = limits.REPORT_WAIT_SECONDS - self.seconds
        if left > 0.001:  # there was progress meanwhile
            self._timer = self._loop.call_later(left, self._report)
            return
        self._warn()
        self._timer = self._loop.call_later(_REPEAT_SECONDS, self._report)

    def _warn(self) -> None:
        if self._is_first(self._tracker.reported):
            logger.warning("%s", self.sentence)

    def _is_first(self, logged: dict[str, float]) -> bool:
        """Return True, and note the time, if no other wait has logged this reason lately."""
        now = self._loop.time()
        # The timers of several waits with one reason end a little after each other.
        if now - logged.get(self.reason, -math.inf) < _REPEAT_SECONDS / 2:
            return False
        for reason in [old for old, at in logged.items() if now - at > _REPEAT_SECONDS]:
            del logged[reason]
        logged[self.reason] = now
        return True


class WaitTracker:
    """Open waits of one client."""

    def __init__(self) -> None:
        #: Waits under way, by their object ids.
        self.open_waits: dict[int, Wait] = {}
        #: When each reason was logged last, at INFO and at WARNING.
        self.mentioned: dict[str, float] = {}
        self.reported: dict[str, float] = {}
        #: Time that the script spends in each phase.
        self.phases = PhaseTimer()
        #: Calls of groups under way.
        self.group_calls = GroupCalls()
        self.trace = MemberTrace(self.phases.add_sink, self.phases.remove_sink)

    def open(self, reason: str) -> Wait:
        """Open a wait, for a ``with`` block, with its first reason."""
        return Wait(reason, self, asyncio.get_running_loop())

    def open_request(self, reason: str, *, sends: bool, subject: Subject | None = None) -> Wait:
        """Open the wait for a server's answer to a request. sends: the request has a gradient. subject: for traces."""
        request = self.phases.open_request(sends=sends, subject=subject)
        return Wait(reason, self, asyncio.get_running_loop(), request)

    def sentences(self) -> list[str]:
        """Return the reasons of long waits with their durations, longest first."""
        long = [wait for wait in self.open_waits.values() if wait.seconds >= limits.REPORT_WAIT_SECONDS]
        long.sort(key=lambda wait: -wait.seconds)
        sentences: dict[str, str] = {}
        for wait in long:
            sentences.setdefault(wait.reason, f"{wait.reason} ({wait.seconds:.0f} s)")
        return list(sentences.values())[:_SENTENCES_MAX]


class ReportedWait:
    """A wait, for a ``with`` block of the waiting task. Raises MutualWaitError if the scheduler reports a deadlock."""

    def __init__(self, activities: Activities, sequence: int, is_for_others: Callable[[], bool], **what: Any) -> None:
        self.sequence = sequence
        self._what = what
        self._is_for_others = is_for_others
        self._activities = activities
        self._error: PsdistError | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0
        self._activities.began(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._activities.ended(self)
        if isinstance(error, MutualWaitError):  # The scheduler refused the call that waits.
            self._activities.end_groups(error)
        if self._error is None or self._task is None:
            return
        if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._error from None

    @property
    def activity(self) -> pb.Activity:
        """The current report of this wait."""
        what = self._what if self._is_for_others() else {}
        return self._activities.message(self.sequence, **what)

    def fail(self, error: PsdistError) -> None:
        """End the wait with ``error``."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()


class Activities:
    """Activity of one client.

    marks: returns the push sequences of this incarnation.
    group_calls: calls of groups under way.
    is_alone: returns True if a single thread makes calls, so that nothing else can end its waits.
    """

    def __init__(self, marks: Callable[[], SnapshotMarks], group_calls: GroupCalls) -> None:
        self._marks = marks
        self._group_calls = group_calls
        self.pushes = PushCounter()
        #: Returns the totals of this client so far.
        self.totals: Callable[[], pb.WorkerTotals | None] = lambda: None
        self.is_alone: Callable[[], bool] = lambda: False
        self._sequence = 0
        self._wait: ReportedWait | None = None
        #: Call of a group in the newest report.
        self._group_call: pb.Activity.GroupCall | None = None

    def message(self, sequence: int, **what: Any) -> pb.Activity:
        """Return a report: the progress of this worker's pushes, and ``what`` it waits for."""
        marks = self._marks()
        return pb.Activity(sequence=sequence, next=marks.next_whole(), partial=marks.partial(), **what)

    def waits(self, *, limited: bool, sent: Callable[[], bool] = lambda: True, **what: Any) -> ReportedWait:
        """Return a wait, for a ``with`` block.

        limited: the wait ends by itself.
        sent: returns True once this worker has sent its part. Before that it does not wait for the other workers.
        what: fields of Activity that say whom it waits for.
        """
        self._sequence += 1
        ends_by_itself = limited or not self.is_alone()
        return ReportedWait(self, self._sequence, lambda: not ends_by_itself and sent(), **what)

    def began(self, wait: ReportedWait) -> None:
        """Record that a wait has begun."""
        self._wait = wait

    def ended(self, wait: ReportedWait) -> None:
        """Record that a wait is over."""
        if self._wait is wait:
            self._wait = None
            self._sequence += 1

    def report(self) -> pb.Activity:
        """Return the report for the next heartbeat."""
        if self._wait is not None:
            self._group_call = None
            return self._wait.activity
        call = self._group_calls.awaited() if self.is_alone() else None
        need = call.need() if call is not None else None
        if need != self._group_call:
            self._group_call = need
            self._sequence += 1
        return self.message(self._sequence) if need is None else self.message(self._sequence, group=need)

    def holds(self, check: pb.CheckCall) -> bool:
        """Return True if this worker lacks the checked call, and the wait of report ``check.sequence`` lasts."""
        report = self.report()
        waits = report.sequence == check.sequence and report.WhichOneof("waits_for") is not None
        return waits and not self._group_calls.acts and self._group_calls.lacks(check)

    def on_mutual_wait(self, sequence: int, error: PsdistError) -> None:
        """End a wait: the scheduler has found that this worker and others wait for each other."""
        if self._wait is not None:
            if self._wait.sequence == sequence:
                self.end_groups(error)
                self._wait.fail(error)
        elif self.report().sequence == sequence and (call := self._group_calls.awaited()) is not None:
            call.fail(error)
            self.end_groups(error)

    def end_groups(self, error: PsdistError) -> None:
        """End the groups whose calls are among the waits of a deadlock. This worker may have made no call of them."""
        names = {value for name, value in error.details.items() if name.startswith("group_")}
        self._group_calls.end(names, error)
