"""History of a run: its joins, losses, promotions, rollbacks, snapshots and scale requests, numbered and bounded.

``scheduler`` adds the machine's ``LogEvent`` effects that are not about waits, and the store keeps them over restarts.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from itertools import islice

from psdist.wire.limits import EVENTS_MAX
from psdist_scheduler.events.cluster_events import LogEvent
from psdist_scheduler.events.cluster_state import EventRecord


class EventHistory:
    """The newest ``EVENTS_MAX`` events. stored: those that a predecessor of this scheduler has stored, oldest first."""

    def __init__(self, stored: Iterable[EventRecord] = ()) -> None:
        self._records: deque[EventRecord] = deque(stored, maxlen=EVENTS_MAX)
        self._next = self._records[-1].number + 1 if self._records else 1
        self._changed = asyncio.Event()
        #: Events since this scheduler started, by kind.
        self.counts: Counter[str] = Counter()

    def add(self, effect: LogEvent, time: float) -> EventRecord:
        """Add an event, and wake those that follow the history."""
        record = EventRecord(self._next, time, effect.kind, effect.level == "warning", effect.text)
        self._next += 1
        self._records.append(record)
        self.counts[effect.kind] += 1
        self._changed.set()
        self._changed = asyncio.Event()
        return record

    def newest(self, count: int) -> list[EventRecord]:
        """Return the newest ``count`` events, oldest first."""
        return list(islice(self._records, max(0, len(self._records) - count), None))

    def after(self, number: int, count: int) -> list[EventRecord]:
        """Return the first ``count`` kept events after event ``number``, oldest first.

        A number that this history has not reached is of a scheduler that kept no store: then all are new.
        """
        if not self._records:
            return []
        start = max(0, number + 1 - self._records[0].number) if number < self._next else 0
        return list(islice(self._records, start, start + count))

    async def changed(self) -> None:
        """Wait for the next event."""
        await self._changed.wait()
