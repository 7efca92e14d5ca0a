"""Counts of the heartbeats of one session: all of them in the first, and later those that have changed.

A client with 1,024 parameter sets has 2,048 counts, and rarely trains all of its sets between two heartbeats. A stream
loses no message while it lasts, so the scheduler can add the changes to the counts that it holds. Each session has an
object of its own, so that the first heartbeat on a new stream is complete, for the same scheduler or a restarted one.
Pure.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from psdist.v1 import scheduler_pb2 as pb


class ChangedCounts:
    """The counts that this session has sent. enabled: False for a scheduler that takes whole heartbeats only."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._next: dict[str, int] | None = None
        self._pushes: dict[str, int] = {}

    def drop_unchanged(self, heartbeat: pb.SessionRequest.Heartbeat) -> None:
        """Remove the counts that are as in the last heartbeat. This one must be sent next on the session."""
        if not self._enabled:
            return
        counts, partial = heartbeat.activity.next, heartbeat.activity.partial
        pushes = heartbeat.totals.pushes
        before, self._next = self._next, dict(counts)
        pushes_before, self._pushes = self._pushes, dict(pushes)
        if before is not None:
            heartbeat.changed_only = True
            # Those that are sent in part are named, because the scheduler expects their number in the same message.
            _remove(counts, {name: count for name, count in before.items() if name not in partial})
            _remove(pushes, pushes_before)


def _remove(counts: MutableMapping[str, int], known: dict[str, int]) -> None:
    """Remove the counts that are ``known``."""
    for name in [name for name, count in counts.items() if known.get(name) == count]:
        del counts[name]
