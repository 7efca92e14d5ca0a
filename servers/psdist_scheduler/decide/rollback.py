"""Rolling back to a snapshot: all parameter sets, data sets and workers together. Pure.

Shards without another replica are lost with their server. If a snapshot has all parameter sets that are in use, and
workers are present that need them, the whole run continues from it, in one epoch. Parameter sets gather again, under
higher terms and the next generation. Data sets return to their positions in the snapshot. All incarnations of workers
end, because their knowledge of steps and leases is no longer true. Without such a snapshot the run ends everywhere with
``ServerLostError``: the training progress is gone.

The run rolls back to the newest committed snapshot. While the storage is committing one, nobody knows which that is,
and the loss waits (``losses``). Only if the storage does not answer for too long does the run use the previous
snapshot. If the newer one is committed nevertheless before anything is placed, the run rolls back once more, to that
one. If it is committed later, it belongs to a history that was given up and never announced, and it is not kept.

A snapshot that cannot be loaded is given up for the previous one. If none is left, or the storage does not answer for
``PATIENCE_SECONDS``, the run ends everywhere with an error that names each snapshot and why it failed (``cluster``).

Loading is done by ``snapshot_catalog``; ``snapshot_io`` finds snapshots in the storage.
"""

from __future__ import annotations

from dataclasses import dataclass

from psdist.errors import ServerLostError, SnapshotCorruptError
from psdist.types import Restore
from psdist_scheduler.decide.cluster_state import group
from psdist_scheduler.decide.effects import Broadcast, Effect, LogEvent
from psdist_scheduler.decide.joins import Joins
from psdist_scheduler.decide.leased_datasets import Datasets
from psdist_scheduler.decide.losses import PATIENCE_SECONDS
from psdist_scheduler.decide.members import WENT_BACK, Membership
from psdist_scheduler.decide.parameter_sets import ParameterSet, Registry, name_shards
from psdist_scheduler.decide.shard_placement import after_loss
from psdist_scheduler.decide.snapshot_events import CommitFound, HistoryRead, LoadFailed, RolledBack
from psdist_scheduler.decide.snapshots import Snapshots


@dataclass(slots=True)
class Rollback:
    """Rolls all parts of a run back."""

    _registry: Registry
    _joins: Joins
    _members: Membership
    _datasets: Datasets
    _snapshots: Snapshots
    #: Time since which the storage has not answered though a snapshot is needed; None otherwise.
    _unread_since: float | None = None
    #: Shards lost with each server, when the run last rolled back; empty if it only resumed.
    _loss_text: str = ""

    def roll_back_if_lost(self, epoch: int, now: float) -> list[Effect]:
        """Roll back if that is necessary and possible. Ends the run if no snapshot in the storage can be read.

        epoch: the epoch that will show it.
        """
        catalog = self._snapshots.catalog
        if not (catalog.newest or catalog.unreadable) or not self._is_needed():
            return []
        if catalog.newest is None:
            if catalog.doubt or catalog.is_searching:
                return []
            self._loss_text = self._losses()
            return self._fail(catalog.unreadable)
        return self.roll_back(catalog.newest, epoch, now) if self._target is not None else []

    @property
    def text(self) -> str:
        """Sentence about lost shards and the remedy; empty if none are lost. Without workers nobody needs them: those
        that join next make the run roll back."""
        text = self._registry.lost_text
        if not text or self._members.workers or self._registry.resume.failed is not None or self._target is None:
            return text
        lost = "; ".join(p.lost for p in self._registry.placed if p.lost)
        return f"{lost}: the run rolls back to snapshot {self._target.commit.directory} once a worker joins"

    @property
    def _target(self) -> CommitFound | None:
        """The newest snapshot, if it has all parameter sets."""
        newest = self._snapshots.catalog.newest
        names = {p.name for p in self._registry.all if p.state == "ready"}
        return newest if newest is not None and names <= newest.commit.steps.keys() else None

    def end_if_lost(self) -> None:
        """End the run if shards are lost for good: no snapshot has them, and workers need them."""
        text, catalog = self._registry.lost_text, self._snapshots.catalog
        is_unknown = catalog.newest is None and (self._snapshots.doubt or catalog.is_searching)
        if text and self._members.workers and not is_unknown:
            self._registry.resume.fail(ServerLostError(text))

    def _is_needed(self) -> bool:
        """True if shards are lost that nobody else holds, and workers need them."""
        if not self._members.workers or not (self._members.changed or self._registry.lost_text):
            return False
        return any(self._is_lost(p) for p in self._registry.placed)

    def _is_lost(self, p: ParameterSet) -> bool:
        shards = [after_loss(shard, self._members.has) for shard in p.entry.shards]
        return any(shard.lost for shard in shards) and (p.entry.ready or not self._members.staying)

    def roll_back(self, found: CommitFound, epoch: int, now: float, why: str = "") -> list[Effect]:
        """Roll all parameter sets, data sets and workers back to a snapshot, in one epoch.

        why: the reason; empty for lost shards.

        Incarnations of workers end, because their knowledge of steps and leases is no longer true.
        """
        placed = self._registry.placed
        if not why:
            why = self._loss_text = self._losses()
        lost = tuple((p.name, found.commit.steps.get(p.name, 0), p.version) for p in placed if p.state != "loading")
        steps = ", ".join(f"{name!r} from step {step}" for name, step in found.commit.steps.items())
        text = f"{why}: the run rolls back to snapshot {found.commit.directory} and continues with {steps}"
        term = max((shard.term for p in placed for shard in p.entry.shards), default=0)
        effects = self._snapshots.roll_back(now)
        self._registry.resume.go_to(found, term, epoch, now)
        knowing = {m.identity for p in placed for m in p.entry.members} | self._datasets.holders
        self._registry.reset_to_gathering()
        self._joins.clear()
        self._datasets.go_back(found.manifest.datasets)
        lost = tuple((name, first, max(first, until)) for name, first, until in lost)
        effects += [LogEvent(text, "warning", "rollback"), Broadcast(RolledBack(found.commit.directory, lost, text))]
        # A worker without a session learns of the end of its incarnation when it returns.
        for worker in list(self._members.workers):
            if self._members.sessions.call_of(worker.member_id) or worker.identity in knowing:
                effects += self._members.end(worker.member_id, "lost", WENT_BACK, now)[1]
        return effects

    def _losses(self) -> str:
        return "; ".join(self._loss(p) for p in self._registry.placed if self._is_lost(p))

    def _loss(self, p: ParameterSet) -> str:
        shards = enumerate(p.entry.shards)
        gone = group((s.primary.server_id, n) for n, s in shards if after_loss(s, self._members.has).lost)
        return "; ".join(
            f"{server} is lost and held {name_shards(n)} of {p.name!r} alone" for server, n in gone.items()
        )

    def on_load_failed(self, event: LoadFailed) -> list[Effect]:
        """Process a server's failure to load a snapshot. The previous one is tried.

        If the server's storage does not answer, that one could not be loaded either, and the run ends.
        """
        server = self._members.sessions.member_of(event.call)
        p = self._registry.get(event.parameters)
        if not server or p is None or p.state != "loading" or event.generation != p.entry.generation:
            return []
        text = f"{server} cannot load {p.name!r} from snapshot {event.restore.directory}: {event.text}"
        catalog, directory = self._snapshots.catalog, event.restore.directory
        if not is_same_snapshot(event.restore, p.entry.restore) or directory in catalog.bad:
            return [LogEvent(text, "warning")]
        if event.unreachable:
            return self._fail({directory: f"{server}: {event.text}"})
        return [
            LogEvent(f"{text}; trying the previous one", "warning"),
            catalog.give_up(directory, f"{server}: {event.text}"),
        ]

    def on_history_read(self, event: HistoryRead, epoch: int, now: float) -> list[Effect]:
        """Process the content of the storage. Sets that are loading a bad snapshot roll back to the previous one."""
        snapshots, resume = self._snapshots, self._registry.resume
        if event.history is not None:
            resume.read(event.history.base)
        snapshots.catalog.on_read(event.history)
        if event.history is None:
            return [LogEvent(f"the storage cannot be read: {event.error}", "warning"), *self._lose_patience(event, now)]
        self._unread_since = None
        effects: list[Effect] = [
            LogEvent(f"skipped unreadable snapshot: {text}", "warning") for text in event.history.skipped
        ]
        restore = resume.base.restore
        if restore is None or (restore.directory not in snapshots.catalog.bad and resume.found is not None):
            return effects
        waits = [p for p in self._registry.all if p.state == "loading"]
        if resume.found is not None and not waits:
            return effects
        if snapshots.catalog.newest is not None:
            why = f"snapshot {restore.directory} cannot be loaded"
            return effects + self.roll_back(snapshots.catalog.newest, epoch, now, why)
        return effects + self._fail({restore.directory: "it is missing"} | snapshots.catalog.unreadable)

    def _lose_patience(self, event: HistoryRead, now: float) -> list[Effect]:
        """End the run if it needs a snapshot, and the storage has not answered for ``PATIENCE_SECONDS``."""
        resume, catalog = self._registry.resume, self._snapshots.catalog
        if not (resume.unread or catalog.is_searching):
            self._unread_since = None
            return []
        if self._unread_since is None:
            self._unread_since = now
        if now - self._unread_since < PATIENCE_SECONDS:
            return []
        directory = resume.base.restore.directory if resume.base.restore is not None else "(unknown)"
        return self._fail({directory: event.error})

    def _fail(self, failures: dict[str, str]) -> list[Effect]:
        """End the run everywhere, because no snapshot can be loaded.

        failures: reason per snapshot, besides those given up before.
        """
        resume, tried = self._registry.resume, failures | self._snapshots.catalog.bad
        each = "; ".join(f"{directory} ({why})" for directory, why in tried.items())
        remedy = "look at them with `psdist snapshot verify`, or start afresh under another --run-id and --storage-path"
        if self._loss_text:
            text = f"{self._loss_text}, and no snapshot can be loaded: {each}"
            resume.fail(ServerLostError(f"{text}; {remedy}. With --replicas 2 a lost server costs nothing"))
        else:
            resume.fail(SnapshotCorruptError(f"the snapshots to resume from cannot be loaded: {each}; {remedy}"))
        return []


def is_same_snapshot(one: Restore, other: Restore | None) -> bool:
    """Return True if both name the same snapshot, no matter how much of it is loaded."""
    return other is not None and (one.directory, one.manifest_digest) == (other.directory, other.manifest_digest)
