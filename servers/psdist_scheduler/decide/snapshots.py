"""The run's snapshots: requests, one attempt after another, and their results. Pure.

A request waits (``snapshot_schedule``) until a snapshot contains everything that its caller knows of. A due snapshot
(``snapshot_schedule``) is attempted as soon as its preconditions hold. The catalog lists what the storage has
committed, and then deletes what is no longer kept.

A worker that waits in its request makes no push, so the cut must be reachable without one.

An attempt is given up when its cut has become impossible, because slices have passed it, or because primaries or (with
marked pushes) members changed. Then the next one immediately aims at a later cut. If a server or the storage fails, the
attempt has failed, and the next one comes at the next interval or request.

Invariants: A waiting caller is answered by a snapshot with everything that the caller knows of. There is one attempt at
a time. Numbers of attempts grow, even over restarts: they begin with the epoch. Reports about an earlier attempt have
no effect. Whatever ends an attempt, all members that were asked are notified.

Files are written by ``snapshot_io``; see ``rollback`` for rolling back, ``snapshot_catalog`` for the start of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from psdist.errors import NoStorageError, PsdistError, SnapshotFailedError
from psdist.snapshots.format import CommitRecord, directory_name
from psdist_scheduler.decide import snapshot_events as sn
from psdist_scheduler.decide import snapshot_schedule
from psdist_scheduler.decide.alignment import Alignment
from psdist_scheduler.decide.cluster_state import ClusterSettings, EndStep, Identity, Member
from psdist_scheduler.decide.effects import Draining, Effect, LogEvent, Wait
from psdist_scheduler.decide.leased_datasets import Datasets
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.parameter_sets import ParameterSet, Registry
from psdist_scheduler.decide.snapshot_attempt import (
    Attempt,
    AttemptPhase,
    DueSnapshot,
    WorkerStateRegistry,
    WorkerStateUploads,
    make_manifest,
)
from psdist_scheduler.decide.snapshot_catalog import Catalog
from psdist_scheduler.decide.snapshot_schedule import (
    HOLDER,
    REFUSALS_MAX,
    EndSnapshot,
    EndState,
    SnapshotSchedule,
    SnapshotWaiter,
    SnapshotWaiters,
)
from psdist_scheduler.decide.waits import WaitingCalls

_REASON_CHARACTERS: Final = 200
#: Attempts per epoch. Attempt numbers begin with the epoch.
_ATTEMPTS_PER_EPOCH: Final = 1 << 20
#: Shortest pause in seconds between two messages to a waiting caller.
_NEWS_SECONDS: Final = 0.2
#: An attempt without progress for this long, in seconds, has failed: the storage is stuck.
_SILENCE_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class SnapshotFailures:
    """Failed attempts: their number, and the reason and time of the last one."""

    count: int = 0
    text: str = ""
    at: float = 0.0


class Snapshots:
    """All snapshots of one run, and the attempt in progress."""

    def __init__(
        self,
        settings: ClusterSettings,
        registry: Registry,
        members: Membership,
        datasets: Datasets,
        alignment: Alignment,
        calls: WaitingCalls,
        history: sn.History | None,
        now: float,
        ends: Sequence[EndStep] = (),
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._members = members
        self._datasets = datasets
        self._alignment = alignment
        self._calls = calls
        self.catalog = Catalog(registry.resume, history)
        self.schedule = SnapshotSchedule(settings.policy, now)
        self.waiters = SnapshotWaiters()
        self.end_snapshot = EndSnapshot(ends)
        self.states = WorkerStateRegistry(members)
        self.attempt: Attempt | None = None
        self.failures = SnapshotFailures()
        #: Start of the last attempt whose snapshot contains everything.
        self.saved_at = float("-inf")
        self._number = 0

    def waits(self) -> Iterator[Wait]:
        """Yield key, calls and reason of each wait. The calls are notified by ``progress``."""
        attempt = self.attempt
        if attempt is not None and (not attempt.due.ahead or attempt.reached):
            yield "snapshot", [], attempt.waiting_for
        elif self.waiters:
            yield "snapshot", [], self.obstacle

    def validate(self) -> None:
        assert all(w.worker is None or self._members.is_live(*w.worker.identity) for w in self.waiters)
        self.catalog.validate()
        if self.attempt is not None:
            self.attempt.validate()
            assert self.attempt.number == self._number
            assert all(waiter.attempt in (0, self._number) for waiter in self.waiters)

    # --- preconditions ------------------------------------------------------------------------------------------------

    @property
    def is_enabled(self) -> bool:
        """True if the run has a storage."""
        return bool(self._settings.storage)

    @property
    def ready(self) -> list[ParameterSet]:
        """Parameter sets that can be saved."""
        return [p for p in self._registry.all if p.state == "ready" and p.entry.shards]

    @property
    def doubt(self) -> str:
        """Why the newest snapshot is not known, as text that begins with "for"; empty if it is known."""
        return self.catalog.doubt if self.is_enabled else ""

    @property
    def obstacle(self) -> str:
        """Why no attempt can start now, as text that begins with "for"; empty if one can."""
        return self._lacking or (self.doubt if self.catalog.committing else "")

    @property
    def saves_at_end(self) -> bool:
        """True if something could be saved when the run ends, and the policy wants that."""
        is_able = self.is_enabled and self.catalog.known and self._settings.policy.at_end
        return is_able and not (self.catalog.replaced or self._lacking or self._registry.lost_text)

    @property
    def has_unsaved(self) -> bool:
        """True if something was trained, or may have been, that no snapshot contains and that is to be saved at the
        end.

        Values that are already lost do not count.
        """
        if not self.is_enabled or not self._settings.policy.at_end or self._registry.lost_text:
            return False
        if self.end_snapshot.state is EndState.TAKEN:
            return False
        return not self.catalog.known or self.schedule.has_trained(self.ready, self.catalog.saved_steps)

    @property
    def _is_back(self) -> bool:
        """True if the run rolled back to the newest snapshot, and nothing trainable exists yet."""
        is_gathering = not any(p.record for p in self._registry.all)
        return not self.ready and is_gathering and self._registry.resume.base.restore is not None

    @property
    def _hopeless(self) -> SnapshotFailedError | None:
        """Why no snapshot will ever be taken of the current state; None if one may be."""
        if self.catalog.replaced:
            return SnapshotFailedError(self.catalog.replaced)
        if lost := self._registry.lost_text:
            return SnapshotFailedError(f"there is nothing whole to save: {lost}")
        if not self.ready and not any(p.state == "loading" for p in self._registry.all):
            return SnapshotFailedError("there are no parameters to save yet: create them first")
        return None

    @property
    def _lacking(self) -> str:
        """Why there is nothing to save yet, as text that begins with "for"; empty if there is."""
        if not self.catalog.known:
            return self.doubt
        if loading := [p.name for p in self._registry.all if p.state == "loading"]:
            return f"for {loading[0]!r} to be loaded from the snapshot before"
        return "" if self.ready else "for parameters to be ready"

    # --- requests -----------------------------------------------------------------------------------------------------

    def save(self, event: sn.Save, now: float) -> list[Effect]:
        """Add a caller's request for a snapshot. Raises FencedError, NoStorageError and SnapshotFailedError."""
        worker = self._members.check_caller(event.caller) if event.caller is not None else None
        if not self.is_enabled:
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
        attempt = self.attempt
        under_way = attempt is not None and server in attempt.servers and (attempt.reached or not attempt.due.ahead)
        trained = self.saves_at_end and self.schedule.has_trained(self.ready, self.catalog.saved_steps)
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
        newest, ready = self.catalog.newest, self.ready
        # Servers may not have reported the newest version of parameter sets without steps yet.
        known = newest is not None and all(p.is_stepped for p in ready)
        if newest is None or not known or self.schedule.has_trained(ready, self.catalog.saved_steps, steps):
            self.end_snapshot.want(steps)
        else:
            self.end_snapshot.set_taken(newest.commit)
        attempt = self.attempt
        if attempt is None or attempt.phase is AttemptPhase.COMMITTING:
            return []
        return self._abandon(attempt, "the run is being stopped")

    def _add(self, waiter: SnapshotWaiter, now: float) -> list[Effect]:
        attempt = self.attempt
        if attempt is None:
            self.waiters.add(waiter, 0)
            return []
        place = "joins" if attempt.number == self.end_snapshot.attempt else snapshot_schedule.place(waiter, attempt)
        self.waiters.add(waiter, attempt.number if place == "joins" else 0)
        if place != "supersedes":
            return []
        self.schedule.search.refused = 0  # Aim at the next possible step.
        return self._give_up(attempt, "another is wanted now", now)

    # --- reports ------------------------------------------------------------------------------------------------------

    def on_report(self, event: sn.Prepared | sn.Marked | sn.Written | sn.PartFailed, now: float) -> list[Effect]:
        """Process a member's report about the attempt."""
        attempt, search = self.attempt, self.schedule.search
        sender = self._members.by_session(event.call)
        if attempt is None or attempt.phase is AttemptPhase.COMMITTING:
            return []
        if event.attempt != attempt.number or sender is None:
            return []
        attempt.moved = now
        match event:
            case sn.Prepared() if attempt.awaits(sender.member_id):
                attempt.servers[sender.member_id] = event.accepted
                search.learn((name, s) for name, s in event.steps_next if name in attempt.steps)
                return [] if None in attempt.servers.values() else self._on_all_prepared(attempt, now)
            case sn.Marked() if attempt.phase is AttemptPhase.MARKING:
                return self._on_marked(attempt, event, sender, now)
            case sn.Written():
                attempt.on_written(event, sender.member_id)
            case sn.PartFailed() if sender.member_id in attempt.servers or sender.member_id in attempt.uploads.workers:
                return self._fail(attempt, f"{sender.member_id}: {event.text}", now)
        return []

    def _on_marked(self, attempt: Attempt, event: sn.Marked, sender: Member, now: float) -> list[Effect]:
        """Process a worker's marks. If it no longer has its state from before the cut, a later cut is tried, if one is
        possible."""
        search, effects = self.schedule.search, list[Effect]()
        if later := attempt.on_marked(event, sender.identity):
            search.learn_states(later.items())
            if not all(self._is_last_cut(attempt, name) for name in later):
                search.count_refusal()
                return self._give_up(attempt, f"{sender.member_id} has passed the cut", now)
            attempt.uploads.do_without(sender.identity, later)
            steps = ", ".join(f"step {step} of {name!r}" for name, step in later.items())
            text = f"snapshot {attempt.directory} is without the state of {sender}, which has none from before {steps}"
            effects.append(LogEvent(text, "warning"))
        return effects if attempt.unanswered else effects + attempt.take_cut(self._members, search.known)

    def _is_last_cut(self, attempt: Attempt, name: str) -> bool:
        """True if a parameter set does not move beyond the cut before the snapshot is taken.

        The run ends there, or workers that wait for the snapshot make no push. A worker that takes part only from a
        later step on has no state from before that.
        """
        waiting = [waiter.next for waiter in self.waiters.workers]
        is_end = attempt.number == self.end_snapshot.attempt
        return is_end or snapshot_schedule.is_idle(attempt.parameters[name], waiting)

    def on_session(self, member: Member, epoch: int, now: float) -> list[Effect]:
        """Repeat commands to a member with a new session. Those on its previous session, and its reports, may be
        lost."""
        attempt = self.attempt
        if attempt is None and not self.is_enabled:
            return []
        if attempt is None:
            # Attempts of an earlier scheduler are over.
            self._number = max(self._number, epoch * _ATTEMPTS_PER_EPOCH)
            over = sn.End(self._number, False, "no snapshot is under way")
            return self._members.tell([member.member_id], over)
        if attempt.awaits(member.member_id):
            return attempt.prepare([member.member_id], self._members)
        if attempt.phase is AttemptPhase.MARKING and member.identity in attempt.unanswered:
            return attempt.mark([member.identity], self._members)
        takes_part = member.member_id in attempt.servers or member.identity in attempt.marks
        if takes_part and attempt.phase is not AttemptPhase.COMMITTING:
            return self._give_up(attempt, f"the session of {member} broke", now)
        return []

    def on_committed(self, event: sn.Committed, now: float) -> tuple[list[Effect], sn.CommitFound | None]:
        """Process a commit. Returns also the snapshot that the run must roll back to, if any.

        It must if the committed snapshot belongs to a history that was given up while the storage was stuck, and
        nothing is placed yet.
        """
        found = sn.CommitFound(event.commit, event.manifest)
        attempt = self.attempt if event.attempt == self._number else None
        if attempt is not None or self._registry.resume.is_of_this_course(found):
            return self._add_commit(found, attempt, now), None
        if any(p.record for p in self._registry.all):
            self.catalog.add(found, wanted=False)
            return [sn.Prune((event.commit,))], None
        return self._add_commit(found, attempt, now), found

    def on_commit_failed(self, event: sn.CommitFailed, now: float) -> list[Effect]:
        """Process a failed commit. The snapshot does not exist, or nobody knows whether it does."""
        self.catalog.fail(event)
        attempt = self.attempt
        return self._fail(attempt, event.text, now) if attempt and attempt.number == event.attempt else []

    def roll_back(self, now: float) -> list[Effect]:
        """Give up the attempt in progress, which a rollback has made meaningless."""
        attempt = self.attempt
        effects = self._give_up(attempt, "the run rolls back to a snapshot", now) if attempt else []
        self.schedule.rolled_back()
        self.end_snapshot.forget()
        return effects

    def _add_commit(self, found: sn.CommitFound, attempt: Attempt | None, now: float) -> list[Effect]:
        """Add a committed snapshot. attempt: the one in progress, if it took this snapshot."""
        commit = found.commit
        loss = self.catalog.loss(commit.steps)
        self.catalog.add(found)
        steps = ", ".join(f"{name!r} at step {step}" for name, step in commit.steps.items())
        size = f"{commit.bytes / 1e6:.1f} MB in {commit.seconds:.2f} s"
        effects: list[Effect] = [
            LogEvent(f"snapshot {commit.directory} ({commit.reason}): {steps}, {size}", kind="snapshot")
        ]
        effects += [LogEvent(loss, "warning")] if loss else []
        if attempt is not None:
            self._end(attempt, commit, now)
            effects += attempt.end(True, "", self._members)
            effects += self.waiters.answer_all(sn.Saved(commit), attempt.number)
        return effects + self.catalog.prune(self._settings.policy, {self._registry.base_in_use})

    # --- the attempt --------------------------------------------------------------------------------------------------

    def progress(self, epoch: int, now: float) -> list[Effect]:
        """Advance everything that is due by now."""
        if not self.is_enabled:
            return []
        effects = self.catalog.read_if_due(now)
        ready, attempt = self.ready, self.attempt
        self._datasets.used_ranges.forget_before(
            lambda worker: _lowest_bounds(attempt, ready, worker), self._members.is_live
        )
        effects += self._check(attempt, ready, now) if attempt is not None else []
        effects += self._commit(self.attempt, epoch, now) if self.attempt is not None else []
        if self.attempt is not None and self.attempt.phase >= AttemptPhase.CUTTING:
            self._alignment.release(HOLDER)
        if self.attempt is None and self.catalog.known:
            effects += self._start_due(ready, epoch, now)
        attempt = self.attempt
        text, written = (self.obstacle, (0, 0)) if attempt is None else (attempt.waiting_for, attempt.bytes)
        for waiter in self.waiters:
            news = Draining(text, 0, 0) if waiter.drains else sn.Saving(text, *written)
            effects += self._calls.tell(waiter.call, news, now, _NEWS_SECONDS)
        return effects

    def _start_due(self, ready: list[ParameterSet], epoch: int, now: float) -> list[Effect]:
        """Answer waiting callers, and start the snapshot that is due, if any."""
        effects = self._serve_waiters(ready)
        end = self.end_snapshot
        if self.obstacle or self.catalog.replaced or end.state is EndState.TAKEN:
            return effects
        alignment = self._alignment
        is_even = alignment.is_even is not False if alignment.applies else alignment.is_opened
        due = self.schedule.due(ready, self.waiters, end, self.catalog.saved_steps, now, is_even=is_even)
        if due is None:
            alignment.release(HOLDER)
        elif end.state is not EndState.WANTED:
            due = self.schedule.align(due, self.waiters, alignment)
        if due is not None:
            effects += self._start_attempt(due, ready, epoch, now)
        if end.state is EndState.WANTED and self.attempt is not None:
            end.attempt = self.attempt.number
        return effects

    def _serve_waiters(self, ready: list[ParameterSet]) -> list[Effect]:
        """Answer the callers that the newest snapshot serves, and refuse those that no snapshot can serve."""
        effects: list[Effect] = []
        newest, hopeless, is_back = self.catalog.newest, self._hopeless, self._is_back
        for waiter in self.waiters:
            if self.end_snapshot.commit is not None:
                effects += self.waiters.answer(waiter, sn.Saved(self.end_snapshot.commit))
            elif newest is not None and (is_back or snapshot_schedule.serves(newest, waiter, ready, self._datasets)):
                effects += self.waiters.answer(waiter, sn.Saved(newest.commit, True))
            elif hopeless is not None:
                effects += self.waiters.answer(waiter, hopeless)
        return effects

    def _start_attempt(self, due: DueSnapshot, ready: list[ParameterSet], epoch: int, now: float) -> list[Effect]:
        """Start an attempt at the due snapshot, unless it would come after the run's last snapshot."""
        if text := self.end_snapshot.check(due.steps):
            return self.waiters.answer_all(SnapshotFailedError(text))
        self._number = max(self._number + 1, epoch * _ATTEMPTS_PER_EPOCH)
        step = max((due.steps.get(p.name, self.schedule.search.version(p)) for p in ready), default=0)
        directory = directory_name(step, epoch, self._number % _ATTEMPTS_PER_EPOCH, self._settings.salt)
        uploads = WorkerStateUploads(
            dict.fromkeys(self.states.live_owners(ready), False), {p.name: number for number, p in enumerate(ready)}
        )
        self.attempt = Attempt(self._number, directory, due, {p.name: p for p in ready}, uploads, now)
        self.waiters.assign(self._number)
        return self.attempt.prepare(self.attempt.servers, self._members)

    def _on_all_prepared(self, attempt: Attempt, now: float) -> list[Effect]:
        """Continue after the last server's answer about the cut."""
        if not all(attempt.servers.values()):
            if not self.schedule.search.count_refusal():
                return self._fail(attempt, f"servers refused {REFUSALS_MAX} cuts", now)
            return self._abandon(attempt, "a slice has passed the cut")
        newest = self.catalog.newest
        has_same_steps = newest is not None and attempt.steps.items() <= newest.commit.steps.items()
        sets = attempt.parameters.values()
        may_be_same = has_same_steps and not attempt.marked
        if newest is not None and may_be_same and snapshot_schedule.is_as_saved(newest.manifest, sets, self._datasets):
            self._end(attempt, newest.commit, now)
            over = attempt.end(False, "nothing was trained since the last snapshot", self._members)
            return over + self.waiters.answer_all(sn.Saved(newest.commit, True), attempt.number)
        if attempt.due.reason == sn.AT_THE_END and (loss := self.catalog.loss(attempt.parameters)):
            return self._fail(attempt, loss, now)
        if attempt.unanswered:
            return attempt.mark(attempt.workers, self._members)
        return attempt.take_cut(self._members, self.schedule.search.known)

    def _check(self, attempt: Attempt, ready: list[ParameterSet], now: float) -> list[Effect]:
        """Give up an attempt that has become impossible."""
        if attempt.phase is AttemptPhase.COMMITTING:
            return []  # Everything is durable, whoever is present.
        if text := attempt.changed:
            return self._give_up(attempt, text, now)
        attempt.uploads.forget(self._members.is_live)
        if attempt.phase is AttemptPhase.MARKING and not attempt.unanswered:
            return attempt.take_cut(self._members, self.schedule.search.known)
        if attempt.due.ahead and not attempt.reached:
            if {p.name for p in ready} != attempt.parameters.keys():
                return self._abandon(attempt, "parameters were created since")
            if self.states.are_new(attempt):
                return self._abandon(attempt, "a worker registered state since")
            if attempt.is_uneven:
                return self._abandon(attempt, "parameters are not trained in step")
            if attempt.phase is not AttemptPhase.PREPARING:
                return []
        return self._check_silence(attempt, now - attempt.moved, now)

    def _check_silence(self, attempt: Attempt, seconds: float, now: float) -> list[Effect]:
        """Give up an attempt that made no progress for ``seconds``."""
        if self._settings.time_limits_suspended:
            return []
        search = self.schedule.search
        if seconds > _SILENCE_SECONDS:
            return self._fail(attempt, f"nothing was heard for {seconds:.0f} s, waiting {attempt.waiting_for}", now)
        if seconds <= self._settings.lease_seconds or attempt.phase is AttemptPhase.PREPARING:
            return []
        pushes_wait = bool(attempt.marks) and (not attempt.reached or attempt.is_held)
        if attempt.phase is AttemptPhase.MARKING or pushes_wait:
            end = self._give_up if search.count_held() else self._fail
            return end(attempt, f"waited too long {attempt.waiting_for}", now)
        if not attempt.reached and not search.exact:
            search.exact.update(attempt.unseen or attempt.parameters)
            return self._give_up(attempt, f"training is stalled, waiting {attempt.waiting_for}", now)
        return []

    def _commit(self, attempt: Attempt, epoch: int, now: float) -> list[Effect]:
        """Commit the attempt if all files are written, and no worker may yet report a range as used before the cut."""
        if attempt.phase is not AttemptPhase.CUTTING or not attempt.is_whole:
            return []
        # Workers that wait in a request have reported all ranges.
        told = {waiter.worker.member_id for waiter in self.waiters.workers if waiter.worker is not None}
        attempt.undecided = [worker for worker in self._datasets.undecided(attempt.bound) if worker not in told]
        attempt.whole_at = now if attempt.whole_at is None else attempt.whole_at
        if attempt.undecided and now - attempt.whole_at < self._settings.lease_seconds:
            return []
        if self.states.are_new(attempt):
            return self._abandon(attempt, "a worker registered state since")
        try:
            manifest = make_manifest(attempt, self._settings, self._members, self._datasets, epoch)
        except PsdistError as error:
            return self._fail(attempt, str(error), now)
        attempt.enter(AttemptPhase.COMMITTING)
        self.catalog.begin_commit(attempt.directory)
        return [sn.WriteCommit(attempt.number, self.catalog.highest + 1, manifest, now - attempt.began)]

    def _give_up(self, attempt: Attempt, reason: str, now: float) -> list[Effect]:
        """Give up the attempt. Another one follows immediately if it is wanted, unless there were too many."""
        may_retry = self.schedule.search.count_retry()
        return self._abandon(attempt, reason) if may_retry else self._fail(attempt, reason, now)

    def _fail(self, attempt: Attempt, text: str, now: float) -> list[Effect]:
        """Fail the attempt: refuse the callers that wait for it. Training, if any, continues."""
        self.failures = SnapshotFailures(self.failures.count + 1, text, now)
        self._end(attempt, None, now)
        continues = "; training continues" if self._members.workers else ""
        log = LogEvent(
            f"the snapshot of step {attempt.step} failed: {text}{continues}", "warning", kind="snapshot_failed"
        )
        error = SnapshotFailedError(f"the snapshot failed: {text}{continues}")
        refused = self.waiters.answer_all(error, attempt.number)
        return [*self._abandon(attempt, text), log, *refused]

    def _abandon(self, attempt: Attempt, reason: str) -> list[Effect]:
        """Drop the attempt. Its callers wait for the next one."""
        self.attempt = None
        self.waiters.assign(0)
        effects = attempt.end(False, reason, self._members)
        if attempt.phase is AttemptPhase.CUTTING:  # Files may have been written, and are not being committed.
            effects.append(self.catalog.remove_directory(attempt.directory))
        return effects

    def _end(self, attempt: Attempt, commit: CommitRecord | None, now: float) -> None:
        """Clear an attempt that ended for good. commit: the snapshot that contains it; None if it failed."""
        self.attempt = None
        self.saved_at = attempt.began if commit is not None else self.saved_at
        self.end_snapshot.on_attempt_ended(attempt.number, commit)
        self.schedule.attempt_ended(attempt, now)


def _lowest_bounds(attempt: Attempt | None, ready: Iterable[ParameterSet], worker: Identity) -> dict[str, int]:
    """Return the number of a worker's push that no later cut can be below, by parameter set.

    attempt: the one in progress, if any.
    """
    steps: dict[str, int] = {}
    for p in ready:
        cut = attempt if attempt is not None and p.name in attempt.parameters else None
        if p.is_stepped:
            steps[p.name] = p.version if cut is None else min(p.version, cut.steps[p.name])
        elif cut is not None and worker in cut.marks:
            steps[p.name] = (cut.marks[worker] or {}).get(p.name, 0)
    return steps
