"""Runs one attempt at a snapshot after another: starts it, follows it, and ends it. Pure.

An attempt is given up when its cut has become impossible, because slices have passed it, or because primaries or (with
marked pushes) members changed. Then the next one immediately aims at a later cut (``Tries``). If a server or the
storage fails, the attempt has failed, and the next one comes at the next interval or request.

Invariants: There is one attempt at a time. Numbers of attempts grow, even over restarts: they begin with the epoch.
Reports about an earlier attempt have no effect. Whatever ends an attempt, all members that were asked are notified.

``schedule`` decides when an attempt is due, ``attempt`` holds its state, ``snapshots`` handles a commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psdist.errors import PsdistError, SnapshotFailedError
from psdist.snapshots.format import CommitRecord, Manifest, directory_name
from psdist_scheduler.datasets.datasets import Datasets
from psdist_scheduler.events import snapshot_events as sn
from psdist_scheduler.events.cluster_events import Answer, Effect, LogEvent
from psdist_scheduler.events.cluster_state import ClusterSettings, Member
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement.registry import ParameterSet
from psdist_scheduler.snapshots.attempt import Attempt, AttemptPhase
from psdist_scheduler.snapshots.catalog import Catalog
from psdist_scheduler.snapshots.cut import AgreedCut
from psdist_scheduler.snapshots.schedule import REFUSALS_MAX, DueSnapshot, EndSnapshot, SnapshotSchedule
from psdist_scheduler.snapshots.waiters import SnapshotWaiters, is_as_saved
from psdist_scheduler.snapshots.worker_states import WorkerStateRegistry, WorkerStateUploads

#: Attempts per epoch. Attempt numbers begin with the epoch.
_ATTEMPTS_PER_EPOCH: Final = 1 << 20
#: An attempt without progress for this long, in seconds, has failed: the storage is stuck.
_SILENCE_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class SnapshotFailures:
    """Failed attempts: their number, and the reason and time of the last one."""

    count: int = 0
    text: str = ""
    at: float = 0.0


@dataclass(slots=True)
class AttemptRunner:
    """The attempt in progress, if any, and the results of earlier ones."""

    _settings: ClusterSettings
    _members: Membership
    _datasets: Datasets
    _catalog: Catalog
    _schedule: SnapshotSchedule
    _waiters: SnapshotWaiters
    _end_snapshot: EndSnapshot
    states: WorkerStateRegistry
    attempt: Attempt | None = None
    failures: SnapshotFailures = SnapshotFailures()
    #: Start of the last attempt whose snapshot contains everything.
    saved_at: float = float("-inf")
    _number: int = 0

    def is_current(self, attempt: int) -> bool:
        return self.attempt is not None and self.attempt.number == attempt

    def validate(self) -> None:
        if self.attempt is not None:
            self.attempt.validate()
            assert self.attempt.number == self._number
            assert all(waiter.attempt in (0, self._number) for waiter in self._waiters)

    def begin(self, due: DueSnapshot, ready: list[ParameterSet], epoch: int, now: float) -> list[Effect]:
        """Start an attempt at the due snapshot, unless it would come after the run's last snapshot."""
        if text := self._end_snapshot.check(due.steps):
            return self._waiters.refuse_all(SnapshotFailedError(text))
        self._number = max(self._number + 1, epoch * _ATTEMPTS_PER_EPOCH)
        version = self._schedule.tries.version
        step = max((due.steps.get(p.name, version(p)) for p in ready), default=0)
        directory = directory_name(step, epoch, self._number % _ATTEMPTS_PER_EPOCH, self._settings.salt)
        kept = WorkerStateUploads(
            dict.fromkeys(self.states.of(ready), False), {p.name: number for number, p in enumerate(ready)}
        )
        cut = AgreedCut(tuple(ready), due.steps)
        self.attempt = Attempt(self._number, directory, due.reason, due.ahead, cut, kept, now)
        self._waiters.assign(self._number)
        return self.attempt.prepare(self.attempt.servers, self._members)

    def on(self, event: sn.Prepared | sn.Marked | sn.Written | sn.PartFailed, now: float) -> list[Effect]:
        """Process a member's report about the attempt."""
        attempt = self.attempt
        sender = self._members.by_session(event.call)
        if attempt is None or attempt.phase is AttemptPhase.COMMITTING:
            return []
        if event.attempt != attempt.number or sender is None:
            return []
        attempt.touch(now)
        match event:
            case sn.Prepared() if attempt.awaits(sender.member_id):
                attempt.on_prepared(event, sender.member_id)
                self._schedule.tries.learn((name, s) for name, s in event.steps_next if name in attempt.cut.steps)
                return [] if None in attempt.servers.values() else self._on_all_prepared(attempt, now)
            case sn.Marked() if attempt.phase is AttemptPhase.MARKING:
                return self._on_marked(attempt, event, sender, now)
            case sn.Written():
                attempt.on_written(event, sender.member_id)
            case sn.PartFailed() if sender.member_id in attempt.servers or sender.member_id in attempt.kept.workers:
                return self.fail(f"{sender.member_id}: {event.text}", now)
        return []

    def on_session(self, member: Member, epoch: int, now: float) -> list[Effect]:
        """Repeat commands to a member with a new session. Those on its previous session, and its reports, may be
        lost."""
        attempt = self.attempt
        if attempt is None and not self._settings.storage:
            return []
        if attempt is None:
            # Attempts of an earlier scheduler are over.
            self._number = max(self._number, epoch * _ATTEMPTS_PER_EPOCH)
            over = sn.End(self._number, False, "no snapshot is under way")
            return [Answer(self._members.sessions.of(member.member_id), over)]
        if attempt.awaits(member.member_id):
            return attempt.prepare([member.member_id], self._members)
        if attempt.phase is AttemptPhase.MARKING and member.identity in attempt.unanswered:
            return attempt.mark([member.identity], self._members)
        takes_part = member.member_id in attempt.servers or member.identity in attempt.cut.marks
        if takes_part and attempt.phase is not AttemptPhase.COMMITTING:
            return self.give_up(f"the session of {member} broke", now)
        return []

    def _on_all_prepared(self, attempt: Attempt, now: float) -> list[Effect]:
        if not all(attempt.servers.values()):
            if not self._schedule.tries.refuse():
                return self.fail(f"servers refused {REFUSALS_MAX} cuts", now)
            return self._abandon(attempt, "a slice has passed the cut")
        if (newest := self._catalog.newest) is not None and self._is_as_newest(attempt):
            self._end(attempt, newest.commit, now)
            over = attempt.end(False, "nothing was trained since the last snapshot", self._members)
            return over + self._waiters.answer_all(attempt.number, sn.Saved(newest.commit, True))
        if attempt.reason == sn.AT_THE_END and (loss := self._catalog.loss(attempt.cut.names)):
            return self.fail(loss, now)
        return attempt.mark(attempt.workers, self._members) if attempt.unanswered else self._take_cut(attempt)

    def _on_marked(self, attempt: Attempt, event: sn.Marked, worker: Member, now: float) -> list[Effect]:
        tries = self._schedule.tries
        if later := attempt.on_marked(event, worker.identity):
            tries.learn(later.items())
            tries.refuse()
            return self.give_up(f"{worker.member_id} has passed the cut", now)
        return [] if attempt.unanswered else self._take_cut(attempt)

    def _is_as_newest(self, attempt: Attempt) -> bool:
        """True if the newest snapshot contains everything in the cut, byte for byte."""
        newest, cut = self._catalog.newest, attempt.cut
        if newest is None or cut.marked or not cut.steps.items() <= newest.commit.steps.items():
            return False
        return is_as_saved(newest.manifest, cut.parameters, self._datasets)

    def _take_cut(self, attempt: Attempt) -> list[Effect]:
        return attempt.take_cut(self._members, self._schedule.tries.known)

    def progress(self, ready: list[ParameterSet], epoch: int, now: float) -> list[Effect]:
        """Give up an attempt that has become impossible, and commit one whose files are complete."""
        effects = self._check(self.attempt, ready, now) if self.attempt is not None else []
        attempt = self.attempt
        if attempt is not None and attempt.is_whole and not self._must_wait_for_data(attempt, now):
            effects += self._commit(attempt, epoch, now)
        return effects

    def _check(self, attempt: Attempt, ready: list[ParameterSet], now: float) -> list[Effect]:
        if attempt.phase is AttemptPhase.COMMITTING:
            return []  # Everything is durable, whoever is present.
        if text := attempt.cut.changed:
            return self.give_up(text, now)
        attempt.kept.forget(self._members.is_live)
        if attempt.phase is AttemptPhase.MARKING and not attempt.unanswered:
            return self._take_cut(attempt)
        if attempt.ahead and not attempt.reached:
            if {p.name for p in ready} != set(attempt.cut.names):
                return self._abandon(attempt, "parameters were created since")
            if self.states.are_new(attempt):
                return self._abandon(attempt, "a worker registered state since")
            if attempt.cut.is_uneven:
                return self._abandon(attempt, "parameters are not trained in step")
            if attempt.phase is not AttemptPhase.PREPARING:
                return []
        return self._check_silence(attempt, now - attempt.moved, now)

    def _check_silence(self, attempt: Attempt, seconds: float, now: float) -> list[Effect]:
        """Give up an attempt that made no progress for ``seconds``."""
        tries = self._schedule.tries
        if seconds > _SILENCE_SECONDS:
            return self.fail(f"nothing was heard for {seconds:.0f} s, waiting {attempt.waiting_for}", now)
        if seconds <= self._settings.lease_seconds or attempt.phase is AttemptPhase.PREPARING:
            return []
        pushes_wait = bool(attempt.cut.marks) and (not attempt.reached or attempt.is_held)
        if attempt.phase is AttemptPhase.MARKING or pushes_wait:
            end = self.give_up if tries.hold() else self.fail
            return end(f"waited too long {attempt.waiting_for}", now)
        if not attempt.reached and not tries.exact:
            tries.aim_exactly(attempt.cut.ahead or attempt.cut.names)
            return self.give_up(f"training is stalled, waiting {attempt.waiting_for}", now)
        return []

    def _must_wait_for_data(self, attempt: Attempt, now: float) -> bool:
        """True if a worker may yet report a range as used before the cut. Workers that wait in a request have reported
        all."""
        told = {waiter.worker.member_id for waiter in self._waiters.workers if waiter.worker is not None}
        undecided = [worker for worker in self._datasets.undecided(attempt.cut.bound) if worker not in told]
        waited = attempt.wait_for_data(undecided, now)
        return bool(undecided) and waited < self._settings.lease_seconds

    def _commit(self, attempt: Attempt, epoch: int, now: float) -> list[Effect]:
        try:
            manifest = Manifest(
                run_id=self._settings.run_id,
                directory=attempt.directory,
                epoch=epoch,
                time=0.0,
                reason=attempt.reason,
                configuration={
                    "workers": len(self._members.workers),
                    "servers": len(self._members.servers),
                    "replicas": self._settings.replicas,
                    "policy": self._settings.policy.text,
                },
                parameters=attempt.cut.states(attempt.written),
                datasets=self._datasets.states(attempt.cut.bound),
                states=attempt.kept.files,
            )
        except PsdistError as error:
            return self.fail(str(error), now)
        attempt.commit()
        self._catalog.begin(attempt.directory)
        return [sn.WriteCommit(attempt.number, self._catalog.highest + 1, manifest, now - attempt.began)]

    def committed(self, commit: CommitRecord, now: float) -> list[Effect]:
        """End the attempt, whose snapshot now exists."""
        attempt = self.attempt
        assert attempt is not None
        self._end(attempt, commit, now)
        over = attempt.end(True, "", self._members)
        return over + self._waiters.answer_all(attempt.number, sn.Saved(commit))

    def give_up(self, reason: str, now: float) -> list[Effect]:
        """Give up the attempt. Another one follows immediately if it is wanted, unless there were too many."""
        attempt = self.attempt
        assert attempt is not None
        return self._abandon(attempt, reason) if self._schedule.tries.retry() else self.fail(reason, now)

    def replace(self, reason: str) -> list[Effect]:
        """Make way for another attempt, unless the current one is being committed."""
        attempt = self.attempt
        return [] if attempt is None or attempt.phase is AttemptPhase.COMMITTING else self._abandon(attempt, reason)

    def fail(self, text: str, now: float) -> list[Effect]:
        """Fail the attempt: refuse the callers that wait for it. Training, if any, continues."""
        attempt = self.attempt
        assert attempt is not None
        self.failures = SnapshotFailures(self.failures.count + 1, text, now)
        self._end(attempt, None, now)
        effects = attempt.end(False, text, self._members) + self._removed(attempt)
        continues = "; training continues" if self._members.workers else ""
        effects.append(LogEvent(f"the snapshot of step {attempt.cut.step} failed: {text}{continues}", "warning"))
        error = SnapshotFailedError(f"the snapshot failed: {text}{continues}")
        return effects + self._waiters.refuse_all(error, attempt.number)

    def _abandon(self, attempt: Attempt, reason: str) -> list[Effect]:
        self.attempt = None
        self._waiters.assign(0)
        return [*attempt.end(False, reason, self._members), *self._removed(attempt)]

    def _end(self, attempt: Attempt, commit: CommitRecord | None, now: float) -> None:
        """Clean up after an attempt that ended for good.

        commit: the snapshot that contains it; None if it failed.
        """
        self.attempt = None
        self.saved_at = attempt.began if commit is not None else self.saved_at
        self._end_snapshot.ended(attempt.number, commit)
        self._schedule.attempt_ended(attempt, now)

    def _removed(self, attempt: Attempt) -> list[Effect]:
        """Remove files that may have been written, but not those that the storage may be committing."""
        is_written = attempt.phase is AttemptPhase.CUTTING
        return [self._catalog.remove_directory(attempt.directory)] if is_written else []
