"""The numbers of a worker's next pushes, as the heartbeats of one session report them. Pure.

The first heartbeat has all of them, and later ones have those that changed (``changed_only``).
"""

from __future__ import annotations

from dataclasses import replace

from psdist.errors import LimitExceededError
from psdist.wire.limits import PARAMETERS_MAX
from psdist_scheduler.events.cluster_events import Heartbeat
from psdist_scheduler.events.snapshot_events import Numbers


class FollowedPushes:
    """The numbers in the last heartbeat of one session, sorted by parameter set."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._next: Numbers = ()

    def complete(self, event: Heartbeat, *, changed_only: bool) -> Heartbeat:
        """Return the heartbeat with all numbers. Raises LimitExceededError if there are too many."""
        if event.activity is None:
            return event
        self._merge(event.activity.next, changed_only)
        if (count := len(self._next)) > PARAMETERS_MAX:
            raise LimitExceededError(
                f"the heartbeats of one session name {count} parameters, over the limit of {PARAMETERS_MAX}"
            )
        if event.activity.next == self._next:
            return event
        return replace(event, activity=replace(event.activity, next=self._next))

    def _merge(self, reported: Numbers, changed_only: bool) -> None:
        before = self._numbers if changed_only else {}
        numbers = before | dict(reported)
        # Updated numbers keep their places, so that only new names need sorting.
        self._numbers = dict(sorted(numbers.items())) if len(numbers) > len(before) else numbers
        if reported or not changed_only:
            self._next = tuple(self._numbers.items())
