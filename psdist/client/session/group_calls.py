"""Calls of groups of workers (``psdist.collectives``) that this worker's script has made, for the detection of
deadlocks.

A script may have many calls under way, and its thread waits in at most one of them. Only that one holds up the
script. ``activity`` reports it to the scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from psdist.errors import PsdistError
from psdist.v1 import scheduler_pb2 as pb

_Task = asyncio.Task[object]
#: Task of the script's call within which a task runs, if that is another one.
_owner: ContextVar[_Task | None] = ContextVar("psdist_group_calls")


class AwaitedCall(Protocol):
    """A call that other workers must make, too."""

    def need(self) -> pb.Activity.GroupCall | None:
        """Return the call and the workers that have not made it. None if it needs nobody's call."""

    def fail(self, error: PsdistError) -> None:
        """End the call with ``error``."""


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
