"""What this worker's script waits for, where only other workers can end that wait.

From these reports the scheduler finds workers that wait for each other (``MutualWaitError``). Reported are waits
without a time limit, of a script that calls from one thread. Each report also says how far this worker's own pushes
are at the same moment, because the scheduler needs both together. Everything here runs on the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from psdist.client.core.snapshot_marks import SnapshotMarks
from psdist.client.reporting.throughput import Throughput
from psdist.client.session.cluster_view import ClusterView
from psdist.client.session.reachability import Reachability
from psdist.errors import PsdistError
from psdist.v1 import scheduler_pb2 as pb


class ReportedWait:
    """A wait, for a ``with`` block of the task that waits. Raises MutualWaitError where the scheduler reports one."""

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
        if self._error is None or self._task is None:
            return
        if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._error from None

    @property
    def activity(self) -> pb.Activity:
        """The report of this wait as it is now."""
        what = self._what if self._is_for_others() else {}
        return self._activities.message(self.sequence, **what)

    def fail(self, error: PsdistError) -> None:
        """Ends the wait with ``error``."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()


class Activities:
    """The activity of one client. is_alone: whether one thread alone makes calls, which nobody else can end."""

    def __init__(self, pushes: SnapshotMarks, view: ClusterView) -> None:
        self._pushes = pushes
        self.reachability = Reachability(view)
        self.throughput = Throughput()
        self.is_alone: Callable[[], bool] = lambda: False
        self._sequence = 0
        self._wait: ReportedWait | None = None

    def message(self, sequence: int, **what: Any) -> pb.Activity:
        """A report: how far this worker's pushes are, and ``what`` it waits for."""
        return pb.Activity(sequence=sequence, next=self._pushes.next_whole(), partial=self._pushes.partial(), **what)

    def waits(self, *, limited: bool, sent: Callable[[], bool] = lambda: True, **what: Any) -> ReportedWait:
        """Makes a wait, for a ``with`` block.

        limited: the wait ends by itself. sent: whether what the others wait for was sent; before that this worker does
        not wait for them. what: fields of Activity that say for whom it waits.
        """
        self._sequence += 1
        ends_by_itself = limited or not self.is_alone()
        return ReportedWait(self, self._sequence, lambda: not ends_by_itself and sent(), **what)

    def began(self, wait: ReportedWait) -> None:
        """A wait begins."""
        self.throughput.wait_began()
        self._wait = wait

    def ended(self, wait: ReportedWait) -> None:
        """A wait is over."""
        self.throughput.wait_ended()
        if self._wait is wait:
            self._wait = None
            self._sequence += 1

    def report(self) -> pb.Activity:
        """The report for the next heartbeat."""
        if self._wait is None:
            return self.message(self._sequence)
        return self._wait.activity

    def on_mutual_wait(self, sequence: int, error: PsdistError) -> None:
        """Ends a wait: the scheduler has found that this worker and others wait for each other."""
        if self._wait is not None and self._wait.sequence == sequence:
            self._wait.fail(error)
