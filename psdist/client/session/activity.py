"""The waits of this worker's script that only other workers can end.

From these reports the scheduler detects workers that wait for each other (``MutualWaitError``). Only waits without a
time limit are reported, of a script that calls from one thread. Each report also states the progress of this worker's
pushes at the same moment, because the scheduler needs both together. Everything here runs on the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from psdist.client.core.snapshot_marks import SnapshotMarks
from psdist.client.reporting.throughput import Throughput
from psdist.client.session.cluster_view import ClusterView
from psdist.client.session.group_calls import GroupCalls
from psdist.client.session.reachability import Reachability
from psdist.errors import MutualWaitError, PsdistError
from psdist.v1 import scheduler_pb2 as pb


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

    def __init__(self, marks: Callable[[], SnapshotMarks], view: ClusterView, group_calls: GroupCalls) -> None:
        self._marks = marks
        self._group_calls = group_calls
        self.reachability = Reachability(view)
        self.throughput = Throughput()
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
        self.throughput.wait_began()
        self._wait = wait

    def ended(self, wait: ReportedWait) -> None:
        """Record that a wait is over."""
        self.throughput.wait_ended()
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
