"""The run's snapshots: requests, due snapshots, and their results. Pure.

A request waits (``waiters``) until a snapshot contains everything that its caller knows of. A due snapshot
(``schedule``) is attempted (``attempt_runner``) as soon as its preconditions hold. The catalog lists what the storage
has committed, and then deletes what is no longer kept.

A worker that waits in its request makes no push, so the cut must be reachable without one.

Invariant: A waiting caller is answered by a snapshot with everything that the caller knows of.

Files are written by ``snapshot_io``; see ``rollback`` for rolling back, ``restore_point`` for what a run starts from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from psdist.errors import NoStorageError, SnapshotFailedError
from psdist_scheduler.datasets.datasets import Datasets
from psdist_scheduler.events import snapshot_events as sn
from psdist_scheduler.events.cluster_events import Effect, LogEvent, Wait
from psdist_scheduler.events.cluster_state import ClusterSettings
from psdist_scheduler.events.worker_events import Caller
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement.alignment import Alignment
from psdist_scheduler.placement.registry import ParameterSet, Registry
from psdist_scheduler.snapshots import waiters
from psdist_scheduler.snapshots.attempt import AttemptPhase
from psdist_scheduler.snapshots.attempt_runner import AttemptRunner
from psdist_scheduler.snapshots.catalog import Catalog
from psdist_scheduler.snapshots.cut import floor, is_stepped
from psdist_scheduler.snapshots.schedule import DueSnapshot, EndSnapshot, EndState, SnapshotSchedule
from psdist_scheduler.snapshots.waiters import SnapshotWaiter, SnapshotWaiters
from psdist_scheduler.snapshots.worker_states import WorkerStateRegistry

_REASON_CHARACTERS: Final = 200
#: Name under which workers are held.
_NAME: Final = "snapshot"


class Snapshots:
    """All snapshots of one run."""

    def __init__(
        self,
        settings: ClusterSettings,
        registry: Registry,
        members: Membership,
        datasets: Datasets,
        alignment: Alignment,
        history: sn.History | None,
        now: float,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._members = members
        self._datasets = datasets
        self._alignment = alignment
        self.catalog = Catalog(registry.resume, history)
        self.schedule = SnapshotSchedule(settings.policy, now)
        self.waiters = SnapshotWaiters()
        self.end_snapshot = EndSnapshot()
        parts = (self.catalog, self.schedule, self.waiters, self.end_snapshot, WorkerStateRegistry(members))
        self.runner = AttemptRunner(settings, members, datasets, *parts)

    @property
    def enabled(self) -> bool:
        return bool(self._settings.storage)

    @property
    def doubt(self) -> str:
        """Why the newest snapshot is not known, as text that begins with "for"; empty if it is known."""
        return self.catalog.doubt if self.enabled else ""

    @property
    def may_leave(self) -> bool:
        """True if workers that stop together may leave."""
        return self.end_snapshot.is_safe(self.runner.attempt)

    @property
    def saves_at_end(self) -> bool:
        """True if something could be saved when the run ends, and the policy wants that."""
        able = self.enabled and self.catalog.known and self._settings.policy.at_end and not self.catalog.replaced
        return able and not self._lacking and not self._registry.lost_text

    @property
    def has_unsaved(self) -> bool:
        """True if something was trained, or may have been, that no snapshot contains and that is to be saved at the
        end.

        Values that are already lost do not count.
        """
        if not self.enabled or not self._settings.policy.at_end or self._registry.lost_text:
            return False
        if self.end_snapshot.state is EndState.TAKEN:
            return False
        return not self.catalog.known or self.schedule.has_trained(self._ready, self.catalog.saved_steps)

    def waits(self) -> Iterator[Wait]:
        """Yield key, calls and reason of each wait. The calls are notified by ``progress``."""
        attempt = self.runner.attempt
        if attempt is not None and (not attempt.ahead or attempt.reached):
            yield "snapshot", [], attempt.waiting_for
        elif self.waiters:
            yield "snapshot", [], self._obstacle

    def validate(self) -> None:
        assert all(w.worker is None or self._members.is_live(*w.worker.identity) for w in self.waiters)
        self.catalog.validate()
        self.runner.validate()

    def save(self, event: sn.Save, now: float) -> list[Effect]:
        """Add a caller's request for a snapshot. Raises WrongRunError, FencedError, NoStorageError and
        SnapshotFailedError."""
        self._members.check_run(event.run_id)
        worker = None
        if event.worker_id:
            worker = self._members.check_caller(Caller(event.run_id, event.worker_id, event.incarnation))
        if not self.enabled:
            raise NoStorageError("this run has no storage: start it by psdist run, with --storage-path DIR or URL")
        if self._settings.unwritable:
            raise NoStorageError(self._settings.unwritable)
        if self.catalog.replaced:
            raise SnapshotFailedError(self.catalog.replaced)
        reason = (event.reason or "on demand")[:_REASON_CHARACTERS]
        if worker is not None and reason == sn.AT_THE_END and not self._settings.policy.at_end:
            raise SnapshotFailedError("this run takes no snapshot at its end")
        return self._add(SnapshotWaiter(event.call, worker, dict(event.next), reason), now)

    def save_before_the_end(self, call: int, server: str, now: float) -> list[Effect]:
        """Save first if a server wants to leave whose values would be lost with it.

        A snapshot is taken if there is anything that no snapshot contains, and one in progress is finished.
        """
        if self.end_snapshot.state is EndState.TAKEN:
            return []
        attempt = self.runner.attempt
        under_way = attempt is not None and server in attempt.servers and not (attempt.ahead and not attempt.reached)
        trained = self.saves_at_end and self.schedule.has_trained(self._ready, self.catalog.saved_steps)
        if not under_way and not trained:
            return []
        return self._add(SnapshotWaiter(call, None, {}, sn.AT_THE_END, drains=True), now)

    def save_for_the_end(self, steps: dict[str, int]) -> list[Effect]:
        """Take a snapshot now, unless nothing was trained since the newest one.

        All workers are stopped and about to leave. steps: final step of each BSP parameter set.
        """
        self.end_snapshot.forget()
        if not self.saves_at_end:
            return []
        newest, ready = self.catalog.newest, self._ready
        # Servers may not have reported the newest version of parameter sets without steps yet.
        known = newest is not None and all(is_stepped(p) for p in ready)
        if newest is None or not known or self.schedule.has_trained(ready, self.catalog.saved_steps, steps):
            self.end_snapshot.want(steps)
        else:
            self.end_snapshot.be(newest.commit)
        return self.runner.replace("the run is being stopped")

    def _add(self, waiter: SnapshotWaiter, now: float) -> list[Effect]:
        attempt = self.runner.attempt
        if attempt is None:
            self.waiters.add(waiter, 0)
            return []
        place = "joins" if attempt.number == self.end_snapshot.attempt else waiters.place(waiter, attempt)
        self.waiters.add(waiter, attempt.number if place == "joins" else 0)
        if place != "supersedes":
            return []
        self.schedule.tries.aim_near()
        return self.runner.give_up("another is wanted now", now)

    def on_committed(self, event: sn.Committed, now: float) -> tuple[list[Effect], sn.CommitFound | None]:
        """Process a commit. Returns also the snapshot that the run must roll back to, if any.

        It must if the committed snapshot belongs to a history that was given up while the storage was stuck, and
        nothing is placed yet.
        """
        found = sn.CommitFound(event.commit, event.manifest)
        if self.runner.is_current(event.attempt) or self._registry.resume.is_of_this_course(found):
            return self._committed(found, event.attempt, now), None
        if any(p.record for p in self._registry.all):
            self.catalog.add(found, wanted=False)
            return [sn.Prune((event.commit,))], None
        return self._committed(found, event.attempt, now), found

    def on_commit_failed(self, event: sn.CommitFailed, now: float) -> list[Effect]:
        """Process a failed commit. The snapshot does not exist, or nobody knows whether it does."""
        self.catalog.fail(event)
        return self.runner.fail(event.text, now) if self.runner.is_current(event.attempt) else []

    def rolled_back(self, now: float) -> list[Effect]:
        """Give up the attempt in progress, which a rollback has made meaningless."""
        effects = self.runner.give_up("the run goes back to a snapshot", now) if self.runner.attempt else []
        self.schedule.rolled_back()
        self.end_snapshot.forget()
        return effects

    def _committed(self, found: sn.CommitFound, attempt: int, now: float) -> list[Effect]:
        commit = found.commit
        loss = self.catalog.loss(commit.steps)
        self.catalog.add(found)
        steps = ", ".join(f"{name!r} at step {step}" for name, step in commit.steps.items())
        size = f"{commit.bytes / 1e6:.1f} MB in {commit.seconds:.2f} s"
        effects: list[Effect] = [LogEvent(f"snapshot {commit.directory} ({commit.reason}): {steps}, {size}")]
        effects += [LogEvent(loss, "warning")] if loss else []
        if self.runner.is_current(attempt):
            effects += self.runner.committed(commit, now)
        return effects + self.catalog.prune(self._settings.policy, {self._registry.base_in_use})

    def progress(self, epoch: int, now: float) -> list[Effect]:
        """Advance everything that is due by now."""
        if not self.enabled:
            return []
        effects = self.catalog.read_if_due(now)
        ready, attempt = self._ready, self.runner.attempt
        cut = attempt.cut if attempt is not None else None
        self._datasets.used_ranges.forget_before(lambda worker: floor(cut, ready, worker), self._members.is_live)
        effects += self.runner.progress(ready, epoch, now)
        if (under_way := self.runner.attempt) is not None and under_way.phase >= AttemptPhase.CUTTING:
            self._alignment.release(_NAME)
        if self.runner.attempt is None and self.catalog.known:
            effects += self._start_due(ready, epoch, now)
        attempt = self.runner.attempt
        if attempt is None:
            return effects + self.waiters.notify(self._obstacle, 0, 0, now)
        return effects + self.waiters.notify(attempt.waiting_for, *attempt.bytes, now)

    def _start_due(self, ready: list[ParameterSet], epoch: int, now: float) -> list[Effect]:
        effects = self._serve_waiters(ready)
        end = self.end_snapshot
        if self._obstacle or self.catalog.replaced or end.state is EndState.TAKEN:
            return effects
        alignment = self._alignment
        is_even = alignment.is_even is not False if alignment.applies else alignment.is_opened
        due = self.schedule.due(ready, self.waiters, end, self.catalog.saved_steps, now, is_even=is_even)
        if due is None:
            self._alignment.release(_NAME)
        elif end.state is not EndState.WANTED:
            due = self._aligned(due)
        if due is not None:
            effects += self.runner.begin(due, ready, epoch, now)
        if end.state is EndState.WANTED and self.runner.attempt is not None:
            end.try_by(self.runner.attempt.number)
        return effects

    def _aligned(self, due: DueSnapshot) -> DueSnapshot | None:
        """Return the due snapshot, cut where an iteration starts for all sets; None until the workers are held there.

        A script that requests a snapshot itself determines the cut by its call.
        """
        alignment = self._alignment
        asked = any(waiter.worker is not None for waiter in self.waiters)
        if not alignment.applies or asked or (due.ahead and alignment.is_even):
            alignment.release(_NAME)
            return due
        alignment.want(_NAME)
        if (vector := alignment.vector) is None or (due.ahead and alignment.is_even is not False):
            return None
        if any(self.schedule.tries.known.get(name, 0) > step for name, step in vector.items()):
            alignment.restart()  # A server has passed the position.
            return None
        return None if due.ahead else DueSnapshot(due.steps | vector, due.reason)

    def _serve_waiters(self, ready: list[ParameterSet]) -> list[Effect]:
        """Answer the callers that the newest snapshot serves, and refuse those that no snapshot can serve."""
        effects: list[Effect] = []
        newest, hopeless, is_back = self.catalog.newest, self._hopeless(ready), self._is_back(ready)
        for waiter in self.waiters:
            if self.end_snapshot.commit is not None:
                effects += self.waiters.answer(waiter, sn.Saved(self.end_snapshot.commit))
            elif newest is not None and (is_back or waiters.serves(newest, waiter, ready, self._datasets)):
                effects += self.waiters.answer(waiter, sn.Saved(newest.commit, True))
            elif hopeless is not None:
                effects += self.waiters.refuse(waiter, hopeless)
        return effects

    @property
    def _ready(self) -> list[ParameterSet]:
        return [p for p in self._registry.all if p.state == "ready" and p.entry.shards]

    @property
    def _obstacle(self) -> str:
        """Why no attempt can start now, as text that begins with "for"; empty if one can."""
        return self._lacking or (self.doubt if self.catalog.committing else "")

    @property
    def _lacking(self) -> str:
        """Why there is nothing to save yet, as text that begins with "for"; empty if there is."""
        if not self.catalog.known:
            return self.doubt
        if loading := [p.name for p in self._registry.all if p.state == "loading"]:
            return f"for {loading[0]!r} to be loaded from the snapshot before"
        return "" if self._ready else "for parameters to be ready"

    def _is_back(self, ready: list[ParameterSet]) -> bool:
        """Return True if the run rolled back to the newest snapshot, and nothing trainable exists yet."""
        gathering = not any(p.record for p in self._registry.all)
        return not ready and gathering and self._registry.resume.base.restore is not None

    def _hopeless(self, ready: list[ParameterSet]) -> SnapshotFailedError | None:
        if self.catalog.replaced:
            return SnapshotFailedError(self.catalog.replaced)
        if lost := self._registry.lost_text:
            return SnapshotFailedError(f"there is nothing whole to save: {lost}")
        if not ready and not any(p.state == "loading" for p in self._registry.all):
            return SnapshotFailedError("there are no parameters to save yet: create them first")
        return None
