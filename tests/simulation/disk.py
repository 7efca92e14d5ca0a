"""Simulated disk of the scheduler: a crash leaves a prefix of its writes.

A write takes virtual time, and is durable when it is done. If the process is killed meanwhile, the write in progress
may or may not be on the disk. A transaction is stored whole or not at all, as SQLite promises. A restarted scheduler
reads all durable changes back through the real store.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from psdist.errors import LeadershipLostError
from psdist_scheduler.decide.cluster_state import EventRecord, StoredState
from psdist_scheduler.decide.effects import Persist
from psdist_scheduler.run_store import SqliteStore
from tests.simulation.loop import Node, SimLoop, set_done, set_error

#: Time after which a write of a frozen process is tried again.
_PAUSED_SECONDS = 0.05


class Disk:
    """One disk, or etcd if several schedulers write to it. seconds: least and most time of a write."""

    def __init__(self, rng: random.Random, run_id: str, seconds: tuple[float, float]) -> None:
        self.seconds = seconds
        self.run_id = run_id
        self.durable: list[Persist] = []
        self.under_way: list[Writing] = []
        self.rng = rng
        self.lost = 0
        #: Number of the scheduler that may write.
        self.leader = 0
        #: Called once a write has begun.
        self.on_begin: Callable[[], None] | None = None

    def new_leader(self) -> int:
        """Return the number of the scheduler that may write from now on: the lease of the one before has ended."""
        self.leader += 1
        return self.leader

    def is_led_by(self, number: int) -> bool:
        """True if the scheduler ``number`` may write: the comparison of each transaction."""
        return number == self.leader

    def crash(self, node: Node) -> None:
        """Handle the death of a process that may be writing."""
        is_kept = True
        for writing in [one for one in self.under_way if one.node is node]:
            self.under_way.remove(writing)
            writing.over = True
            is_kept = is_kept and self.rng.random() < 0.5
            if is_kept and self.is_led_by(writing.leader):
                self.durable.append(writing.changes)
            elif not is_kept:
                self.lost += 1


class Writing:
    """A write in progress. ``SimLoop.run_in_executor`` begins it."""

    def __init__(self, disk: Disk, changes: Persist, leader: int) -> None:
        self.changes = changes
        self.over = False
        self.node: Node | None = None
        self._disk = disk
        self.leader = leader

    def begin(self, loop: SimLoop, node: Node, future: asyncio.Future[Any]) -> None:
        """Complete ``future`` when the write is durable."""
        disk, self.node = self._disk, node
        disk.under_way.append(self)
        delay = disk.rng.uniform(*disk.seconds)
        loop.call_later(delay, self._done, loop, node, future, context=loop.world.context)
        if disk.on_begin is not None:
            loop.call_later(0.0, disk.on_begin, context=loop.world.context)

    def _done(self, loop: SimLoop, node: Node, future: asyncio.Future[Any]) -> None:
        if self.over:
            return
        if self.leader and node.paused:  # Frozen before it has sent the transaction.
            loop.call_later(_PAUSED_SECONDS, self._done, loop, node, future, context=loop.world.context)
            return
        self.over = True
        self._disk.under_way.remove(self)
        if not self._disk.is_led_by(self.leader):
            loop.trace(f"refused {self.changes.epoch}")
            error = LeadershipLostError("another scheduler has taken the leader key")
            loop.call_on(node, set_error, future, error)
            return
        self._disk.durable.append(self.changes)
        loop.trace(f"durable {self.changes.epoch}")
        loop.call_on(node, set_done, future)


class DiskStore:
    """The scheduler's store on a ``Disk``. leader: number of its scheduler, if there are several."""

    def __init__(self, disk: Disk, leader: int = 0) -> None:
        self._disk = disk
        self._leader = leader

    def check(self) -> None:
        """See ``Store``. The next scheduler leads when the lease has ended by this one's clock, too."""
        if self._leader != self._disk.leader:
            raise LeadershipLostError("the lease has ended")

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
        return Writing(self._disk, changes, self._leader)

    def close(self) -> None:
        """Do nothing."""
