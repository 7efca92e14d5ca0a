"""Simulated disk of the scheduler: a crash leaves a prefix of its writes.

A write takes virtual time, and is durable when it is done. If the process is killed meanwhile, the write in progress
may or may not be on the disk. A transaction is stored whole or not at all, as SQLite promises. A restarted scheduler
reads all durable changes back through the real store.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

from psdist_scheduler.events.cluster_events import Persist
from psdist_scheduler.events.cluster_state import EventRecord, StoredState
from psdist_scheduler.stores.sqlite_store import SqliteStore
from tests.simulation.loop import Node, SimLoop


class Disk:
    """One disk. seconds: least and most time of a write."""

    def __init__(self, rng: random.Random, run_id: str, seconds: tuple[float, float]) -> None:
        self.seconds = seconds
        self.run_id = run_id
        self.durable: list[Persist] = []
        self.under_way: list[Writing] = []
        self.rng = rng
        self.lost = 0

    def crash(self) -> None:
        """Handle the death of the writing process."""
        for writing in self.under_way:
            writing.over = True
            if self.rng.random() < 0.5:
                self.durable.append(writing.changes)
            else:
                self.lost += 1
                break
        self.under_way.clear()


class Writing:
    """A write in progress. ``SimLoop.run_in_executor`` begins it."""

    def __init__(self, disk: Disk, changes: Persist) -> None:
        self.changes = changes
        self.over = False
        self._disk = disk

    def begin(self, loop: SimLoop, node: Node, future: asyncio.Future[Any]) -> None:
        """Complete ``future`` when the write is durable."""
        disk = self._disk
        disk.under_way.append(self)
        delay = disk.rng.uniform(*disk.seconds)
        loop.call_later(delay, self._done, loop, node, future, context=loop.world.context)

    def _done(self, loop: SimLoop, node: Node, future: asyncio.Future[Any]) -> None:
        if not self.over:
            self.over = True
            self._disk.under_way.remove(self)
            self._disk.durable.append(self.changes)
            loop.trace(f"durable {self.changes.epoch}")
            loop.call_on(node, future.set_result, None)


class DiskStore:
    """The scheduler's store on a ``Disk``."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def load(self) -> StoredState | None:
        """Return the durable state, read by the real store."""
        store = SqliteStore(Path(":memory:"), self._disk.run_id)
        try:
            for changes in self._disk.durable:
                store.write(changes)
            return store.load()
        finally:
            store.close()

    #: The history of a run decides nothing.
    keeps_events = False

    def load_events(self) -> list[EventRecord]:
        """Return no history."""
        return []

    def write(self, changes: Persist) -> Any:
        """Begin a write."""
        return Writing(self._disk, changes)

    def close(self) -> None:
        """Do nothing."""
