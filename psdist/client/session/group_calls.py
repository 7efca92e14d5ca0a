"""Calls of groups of workers (``psdist.collectives``) that this worker's script has made, for the detection of
deadlocks.

A script may have many calls under way, and its thread waits in at most one of them. Only that one holds up the
script. ``activity`` reports it to the scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from psdist.errors import PsdistError
from psdist.v1 import scheduler_pb2 as pb


class AwaitedCall(Protocol):
    """A call that other workers must make, too."""

    def need(self) -> pb.Activity.GroupCall | None:
        """Return the call and the workers that have not made it. None if it needs nobody's call."""

    def fail(self, error: PsdistError) -> None:
        """End the call with ``error``."""


class GroupCalls:
    """Calls of one client that are under way. All of this runs on the loop."""

    def __init__(self) -> None:
        #: By task, the call that it waits for; None while the task acts by itself.
        self._tasks: dict[asyncio.Task[object], AwaitedCall | None] = {}
        #: Returns True if a thread of the script waits for the task.
        self.is_awaited: Callable[[asyncio.Task[object]], bool] = lambda _: False
        #: Returns True if this worker has not made the call that another one waits for.
        self.lacks: Callable[[pb.CheckCall], bool] = lambda _: True

    def enter(self) -> asyncio.Task[object] | None:
        """Begin calls of the current task. Returns the task, for ``leave``; None if they have begun before."""
        task = asyncio.current_task()
        if task is None or task in self._tasks:
            return None
        self._tasks[task] = None
        return task

    def leave(self, task: asyncio.Task[object] | None) -> None:
        """End what ``enter`` has begun."""
        if task is not None:
            del self._tasks[task]

    def wait(self, call: AwaitedCall | None) -> None:
        """Record that the current task waits for a call; None once it waits no longer."""
        task = asyncio.current_task()
        if task is not None and task in self._tasks:
            self._tasks[task] = call

    @property
    def acts(self) -> bool:
        """True if a task may make another call by itself."""
        return None in self._tasks.values()

    def awaited(self) -> AwaitedCall | None:
        """Return the call that the script's thread waits for. None if a task may make another one by itself."""
        if self.acts:
            return None
        return next((call for task, call in self._tasks.items() if self.is_awaited(task)), None)
