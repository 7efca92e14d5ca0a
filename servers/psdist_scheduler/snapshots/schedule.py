"""The run's snapshots: when one is due, the attempt under way, and who waits for it. Pure.

There is one attempt at a time (``attempt``). It is refused when its cut has become impossible, because slices have
passed it, or because primaries or, with marked pushes, members changed. Then the next one asks for a later cut at once.
If a server or the storage fails, the attempt has failed, and the next one comes at the next interval or request.

A snapshot every so many steps is armed long before its step, and gives way to a request for one now. A worker that
waits in its request makes no push, so only a cut that is reached without one is possible.

Invariants: numbers of attempts grow, over restarts too (they begin with the epoch). The next record's number is one
above the highest ever seen. A scheduler that finds it taken saves no more. A waiting caller is answered by a snapshot
that has everything that the caller knows of.

Not here: files (``snapshot_io``), which snapshots exist (``catalog``), rolling back (``restore_point``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from psdist.errors import NoStorageError, PsdistError, SnapshotFailedError
from psdist.snapshots.format import directory_name
from psdist_scheduler.datasets.datasets import Datasets
from psdist_scheduler.events.cluster_events import Answer, Effect, LogEvent
from psdist_scheduler.events.records import ClusterSettings, Member
from psdist_scheduler.events.snapshot_events import (
    AT_THE_END,
    AttemptProgress,
    CommitFailed,
    CommitFound,
    Committed,
    End,
    History,
    Marked,
    PartFailed,
    Prepared,
    Prune,
    Pruned,
    RemoveDirectory,
    Save,
    Saved,
    SnapshotEvent,
    WriteCommit,
    Written,
)
from psdist_scheduler.events.worker_events import Caller
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement.parameters import ParameterSet
from psdist_scheduler.placement.registry import Registry
from psdist_scheduler.snapshots import retention, waiters
from psdist_scheduler.snapshots.attempt import Attempt, Failures, floor, is_stepped
from psdist_scheduler.snapshots.catalog import Catalog
from psdist_scheduler.snapshots.end_snapshot import EndSnapshot
from psdist_scheduler.snapshots.tries import HELD_MAX, REFUSALS_MAX, RETRIES_MAX, Tries
from psdist_scheduler.snapshots.waiters import SnapshotWaiter, SnapshotWaiters
from psdist_scheduler.snapshots.worker_states import WorkerStateRegistry

#: Attempts of one epoch; their numbers begin with it.
_ATTEMPTS_PER_EPOCH: Final = 1 << 20
#: An attempt of which nothing is heard for so long, in seconds, is given up: the storage stands still.
_SILENCE_SECONDS: Final = 120.0
_REASON_CHARACTERS: Final = 200


class SnapshotSchedule:
    """When snapshots of one run are taken, and who waits for them."""

    def __init__(
        self,
        settings: ClusterSettings,
        registry: Registry,
        members: Membership,
        datasets: Datasets,
        history: History | None,
        now: float,
    ) -> None:
        self._settings = settings
        self._policy = settings.policy
        self._registry = registry
        self._members = members
        self._datasets = datasets
        self.attempt: Attempt | None = None
        self.failures = Failures()
        #: Why nothing is saved any more; empty while it is.
        self.replaced = ""
        self.catalog = Catalog(registry.resume, history)
        self._waiters = SnapshotWaiters()
        self.end_snapshot = EndSnapshot()
        self.state_registry = WorkerStateRegistry(members)
        #: When the attempt was begun whose snapshot was the last to have everything.
        self.saved_at = float("-inf")
        self._tries = Tries()
        self._number = 0
        self._last = now
        #: The highest version when the last attempt ended, whose multiple of the interval is over.
        self._over = 0
        #: Something may lie in the storage that no record names.
        self._untidy = True

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Whether the run has a storage."""
        return bool(self._settings.storage)

    @property
    def doubt(self) -> str:
        """What must be known before it is known which snapshot is the newest, as a sentence that begins with "for";
        empty if nothing must."""
        return self.catalog.doubt if self.enabled else ""

    def waits(self) -> Iterator[tuple[str, list[int], str]]:
        """Key, calls and reason of each wait. The calls are told by ``progress``."""
        attempt = self.attempt
        if attempt is not None and (not attempt.ahead or attempt.reached):
            yield "snapshot", [], attempt.waiting_for
        elif self._waiters:
            yield "snapshot", [], self._obstacle(self._ready())

    def validate(self) -> None:
        """Asserts the invariants of the module's text."""
        assert all(saver.worker is None or self._is_live(saver.worker) for saver in self._waiters)
        self.catalog.validate()
        attempt = self.attempt
        if attempt is not None:
            assert attempt.phase == "committing" or not attempt.changed(self._members)
            assert attempt.number == self._number
            assert all(saver.attempt in (0, attempt.number) for saver in self._waiters)
            assert (None in attempt.servers.values()) <= (attempt.phase == "preparing")
            assert attempt.phase in ("preparing", "marking") or None not in attempt.lives.values()
            assert bool(attempt.missing) <= (attempt.phase != "committing")

    # --- requests -----------------------------------------------------------------------------------------------------

    def save(self, event: Save, now: float) -> list[Effect]:
        """Somebody wants a snapshot. Raises WrongRunError, FencedError, NoStorageError, SnapshotFailedError."""
        self._members.check_run(event.run_id)
        worker = None
        if event.worker_id:
            worker = self._members.check_caller(Caller(event.run_id, event.worker_id, event.incarnation))
        if not self.enabled:
            raise NoStorageError("this run has no storage: start it with --storage-path DIR or URL")
        if self._settings.unwritable:
            raise NoStorageError(self._settings.unwritable)
        if self.replaced:
            raise SnapshotFailedError(self.replaced)
        reason = (event.reason or "on demand")[:_REASON_CHARACTERS]
        if worker is not None and reason == AT_THE_END and not self._policy.at_end:
            raise SnapshotFailedError("this run takes no snapshot at its end")
        return self._add(SnapshotWaiter(event.call, worker, dict(event.next), reason), now)

    def save_before_the_end(self, call: int, server: str, now: float) -> list[Effect]:
        """A server wants to end whose values go with it: if anything was trained that no snapshot has, one is taken
        first, and one that is under way is finished."""
        if self.end_snapshot.commit is not None:
            return []
        attempt = self.attempt
        under_way = attempt is not None and server in attempt.servers and not (attempt.ahead and not attempt.reached)
        trained = self.saves_at_end and self._has_trained({p.name: self._tries.version(p) for p in self._ready()})
        if not under_way and not trained:
            return []
        return self._add(SnapshotWaiter(call, None, {}, AT_THE_END, drains=True), now)

    def save_for_the_end(self, steps: dict[str, int], now: float) -> list[Effect]:
        """All workers stand still, BSP parameters at ``steps``, and are about to leave: one is taken now,
        unless nothing was trained since the newest."""
        self.end_snapshot.forget()
        if not self.saves_at_end:
            return []
        newest, attempt = self.catalog.newest, self.attempt
        ready = self._ready()
        # Of parameters without steps servers may not have told the newest version yet.
        versions = {p.name: max(self._tries.version(p), steps.get(p.name, 0)) for p in ready}
        if newest is None or not all(is_stepped(p) for p in ready) or self._has_trained(versions):
            self.end_snapshot.want(steps)
        else:
            self.end_snapshot.be(newest.commit)
        if attempt is None or attempt.phase == "committing":
            return []
        return self._stop("the run is being stopped", now, retry=False)

    @property
    def may_leave(self) -> bool:
        """Whether workers that end together may leave."""
        return self.end_snapshot.is_safe(self.attempt)

    @property
    def saves_at_end(self) -> bool:
        """Whether there is something that could be saved when the run ends, and the policy wants that."""
        able = self.enabled and self.catalog.known and self._policy.at_end and not self.replaced
        return able and not self._lacking(self._ready()) and not self._registry.lost_text

    def is_waiting(self, call: int) -> bool:
        """Whether the call waits for a snapshot."""
        return call in self._waiters

    def _add(self, saver: SnapshotWaiter, now: float) -> list[Effect]:
        self._waiters.add(saver)
        if (attempt := self.attempt) is None:
            return []
        match "joins" if attempt.number == self.end_snapshot.attempt else waiters.place(saver, attempt):
            case "joins":
                saver.attempt = attempt.number
            case "supersedes":
                self._tries.refused = 0
                return self._stop("another is wanted now", now)
        return []

    def end(self, call: int) -> None:
        """The call does not wait any more."""
        self._waiters.end(call)

    # --- what members say ---------------------------------------------------------------------------------------------

    def heard(self, event: SnapshotEvent, now: float) -> list[Effect]:
        """A member's word about the attempt. What is said of an earlier one means nothing."""
        attempt = self.attempt
        sender = self._members.sessions.get(event.call, "")
        if attempt is None or not isinstance(event, Prepared | Marked | Written | PartFailed):
            return []
        if attempt.phase == "committing":
            return []
        if event.attempt != attempt.number or not sender:
            return []
        attempt.moved = now
        match event:
            case Prepared():
                return self._prepared(attempt, event, sender, now)
            case Marked():
                return self._marked(attempt, event, sender, now)
            case Written() if attempt.phase == "cutting":
                attempt.take_written(event, sender)
            case PartFailed() if sender in attempt.servers or sender in attempt.kept.workers:
                return self._fail(f"{sender}: {event.text}", now)
        return []

    def progressed(self, server: str, progress: AttemptProgress, now: float) -> None:
        """A server's heartbeat says how far it is."""
        attempt = self.attempt
        if attempt is not None and progress.attempt == attempt.number and server in attempt.servers:
            if attempt.progress.get(server) != progress:
                attempt.moved = now
            attempt.progress[server] = progress

    def session_opened(self, member: Member, epoch: int, now: float) -> list[Effect]:
        """A member's session begins. What it was told on the one before may be lost, and so may what it said."""
        attempt = self.attempt
        if attempt is not None:
            life = (member.member_id, member.incarnation)
            if attempt.phase == "preparing" and attempt.servers.get(member.member_id, False) is None:
                return attempt.prepare(member.member_id, self._members)
            if attempt.phase == "marking" and attempt.asks(life):
                return attempt.mark(member.member_id, self._members)
            if attempt.phase != "committing" and (member.member_id in attempt.servers or life in attempt.lives):
                return self._stop(f"the session of {member} broke", now)
            return []
        if not self.enabled:
            return []
        # What an earlier scheduler had begun is over.
        self._number = max(self._number, epoch * _ATTEMPTS_PER_EPOCH)
        over = End(self._number, False, "no snapshot is under way")
        return [Answer(self._members.session_of(member.member_id), over)]

    # --- what became of work on the storage ---------------------------------------------------------------------------

    def committed(self, event: Committed, now: float) -> list[Effect]:
        """A snapshot exists."""
        commit = event.commit
        loss = self.catalog.loss(commit.steps)
        self.catalog.add(CommitFound(commit, event.manifest))
        steps = ", ".join(f"{name!r} at step {step}" for name, step in commit.steps.items())
        size = f"{commit.bytes / 1e6:.1f} MB in {commit.seconds:.2f} s"
        effects: list[Effect] = [LogEvent(f"snapshot {commit.directory} ({commit.reason}): {steps}, {size}")]
        effects += [LogEvent(loss, "warning")] if loss else []
        attempt = self.attempt
        if attempt is not None and attempt.number == event.attempt:
            self.saved_at = attempt.began
            self.end_snapshot.ended(attempt.number, commit)
            effects += self._over_with(attempt, now)
            effects += attempt.end(True, "", self._members)
            for saver in self._waiters.of(attempt.number):
                effects += self._waiters.answer(saver, Saved(commit))
        return [*effects, *self._prune()]

    def is_late(self, event: Committed) -> bool:
        """Whether the attempt was given up while the storage was committing it."""
        return self.attempt is None or self.attempt.number != event.attempt

    def discard(self, event: Committed) -> list[Effect]:
        """A snapshot was committed that the run does not want any more."""
        self.catalog.add(CommitFound(event.commit, event.manifest), wanted=False)
        return [Prune((event.commit,))]

    def commit_failed(self, event: CommitFailed, now: float) -> list[Effect]:
        """It does not, or nobody knows."""
        self.catalog.fail(event.unsure)
        if event.replaced:
            self.replaced = f"{event.text}: this scheduler saves no more"
        if self.attempt is None or self.attempt.number != event.attempt:
            return []
        return self._fail(event.text, now, remove=False)

    def pruned(self, event: Pruned) -> list[Effect]:
        """Surplus snapshots are deleted."""
        self.catalog.remove(event.sequences)
        if not event.error:
            return []
        return [LogEvent(f"snapshots that are not kept any more could not be deleted: {event.error}", "warning")]

    def rolled_back(self, now: float) -> list[Effect]:
        """The run went back to a snapshot: what is under way means nothing, and no number that was heard does."""
        effects = self._stop("the run goes back to a snapshot", now) if self.attempt else []
        self._tries = Tries()
        self._over = 0
        self.end_snapshot.forget()
        return effects

    # --- progress -----------------------------------------------------------------------------------------------------

    def progress(self, epoch: int, now: float) -> list[Effect]:
        """Whatever is due by now."""
        if not self.enabled:
            return []
        effects = self.catalog.read_if_due(now)
        ready = self._ready()
        self._datasets.cut.settle(lambda life: floor(self.attempt, ready, life), self._members.is_live)
        if self.attempt is not None:
            effects += self._watch(self.attempt, now)
        attempt = self.attempt
        if attempt is not None and attempt.is_whole and not self._waits_for_data(attempt, now):
            effects += self._commit(attempt, epoch, now)
        if self.attempt is None and self.catalog.known:
            effects += self._start_due(epoch, now)
        attempt = self.attempt
        if attempt is None:
            return effects + self._waiters.tell(self._obstacle(self._ready()), 0, 0, now)
        return effects + self._waiters.tell(attempt.waiting_for, attempt.bytes_done, attempt.bytes_total, now)

    # --- inner: beginning ---------------------------------------------------------------------------------------------

    def _ready(self) -> list[ParameterSet]:
        return [p for p in self._registry.all if p.state == "ready" and p.entry.shards]

    def _obstacle(self, ready: list[ParameterSet]) -> str:
        """Why no attempt can begin now, as a sentence that begins with "for"; empty if one can."""
        return self._lacking(ready) or (self.doubt if self.catalog.committing else "")

    def _lacking(self, ready: list[ParameterSet]) -> str:
        """What there is not yet of that which a snapshot is made of; likewise."""
        if not self.catalog.known:
            return self.doubt
        if loading := [p.name for p in self._registry.all if p.state == "loading"]:
            return f"for {loading[0]!r} to be loaded from the snapshot before"
        return "" if ready else "for parameters to be ready"

    def _start_due(self, epoch: int, now: float) -> list[Effect]:
        ready = self._ready()
        effects = self._answer_what_is_there(ready)
        if self._obstacle(ready) or self.replaced or self.end_snapshot.commit is not None:
            return effects
        if self.end_snapshot.steps is not None:
            steps = self._soonest(ready)
            steps |= {name: max(step, self._tries.known.get(name, 0)) for name, step in self.end_snapshot.steps.items()}
            effects += self._begin(ready, steps, AT_THE_END, False, epoch, now)
            self.end_snapshot.attempt = self._number if self.attempt is not None else 0
            return effects
        policy, versions = self._policy, {p.name: self._tries.version(p) for p in ready}
        if self._waiters:
            reason = next(iter(self._waiters)).reason
            effects += self._begin(ready, self._soonest(ready), reason, False, epoch, now)
        elif policy.steps:
            effects += self._begin_by_steps(ready, versions, epoch, now)
        elif policy.seconds and now - self._last >= policy.seconds and self._has_trained(versions):
            effects += self._begin(ready, self._soonest(ready), policy.every, False, epoch, now)
        return effects

    def _begin_by_steps(
        self, ready: list[ParameterSet], versions: dict[str, int], epoch: int, now: float
    ) -> list[Effect]:
        interval, high, reason = self._policy.steps, max(versions.values()), self._policy.every
        if all(is_stepped(p) for p in ready) and high - min(versions.values()) <= 1:
            step = retention.next_multiple(max(high, self._over), interval)
            return self._begin(ready, dict.fromkeys(versions, step), reason, True, epoch, now)
        if high < retention.next_multiple(self._over, interval):
            return []
        return self._begin(ready, self._soonest(ready), reason, False, epoch, now)

    def _has_trained(self, versions: dict[str, int]) -> bool:
        return retention.trained(versions, self.catalog.newest.commit.steps if self.catalog.newest else {})

    def _soonest(self, ready: list[ParameterSet]) -> dict[str, int]:
        return self._tries.soonest(ready, [saver.next for saver in self._waiters.waiting])

    def _begin(
        self, ready: list[ParameterSet], steps: dict[str, int], reason: str, ahead: bool, epoch: int, now: float
    ) -> list[Effect]:
        if text := self.end_snapshot.passed(steps):
            self.end_snapshot.steps = None
            return self._waiters.refuse_all(SnapshotFailedError(text))
        self._number = max(self._number + 1, epoch * _ATTEMPTS_PER_EPOCH)
        step = max((steps.get(p.name, self._tries.version(p)) for p in ready), default=0)
        directory = directory_name(step, epoch, self._number % _ATTEMPTS_PER_EPOCH, self._settings.salt)
        self.attempt = attempt = Attempt(self._number, directory, reason, ahead, tuple(ready), steps, now, now)
        attempt.kept.answers = dict.fromkeys(self.state_registry.of(ready), False)
        self._waiters.assign(attempt.number)
        return [effect for server in attempt.servers for effect in attempt.prepare(server, self._members)]

    # --- inner: the attempt -------------------------------------------------------------------------------------------

    def _prepared(self, attempt: Attempt, event: Prepared, server: str, now: float) -> list[Effect]:
        if attempt.phase != "preparing" or attempt.servers.get(server, True) is not None:
            return []
        attempt.servers[server] = event.accepted
        known = self._tries.known
        for name, step in event.steps_next:
            if name in attempt.steps:
                known[name] = max(known.get(name, 0), step)
        answers = attempt.servers.values()
        if None in answers:
            return []
        if not all(answers):
            self._tries.refused += 1
            if self._tries.refused > REFUSALS_MAX:
                return self._fail(f"servers refused {REFUSALS_MAX} cuts", now)
            return self._stop("a slice has passed the cut", now, retry=False)
        if self._is_unchanged(attempt):
            return self._unchanged(attempt, now)
        if attempt.reason == AT_THE_END and (loss := self.catalog.loss(attempt.names)):
            return self._fail(loss, now)
        return self._cut(attempt) if attempt.is_agreed else attempt.mark_all(self._members)

    def _marked(self, attempt: Attempt, event: Marked, worker: str, now: float) -> list[Effect]:
        member = self._members.get(worker)
        if member is None or attempt.phase != "marking":
            return []
        if later := attempt.take_marked((worker, member.incarnation), event):
            self._tries.known |= later
            self._tries.refused += 1
            return self._stop(f"{worker} has gone on from the cut", now)
        return self._cut(attempt) if attempt.is_agreed else []

    def _cut(self, attempt: Attempt) -> list[Effect]:
        attempt.phase = "cutting"
        return attempt.cut(self._members, self._tries.known)

    def _watch(self, attempt: Attempt, now: float) -> list[Effect]:
        """Gives up what cannot be had any more. All that is committed is durable, whoever is there."""
        if attempt.phase == "committing":
            return []
        if text := attempt.changed(self._members):
            return self._stop(text, now)
        attempt.kept.forget(self._members.is_live)
        if attempt.phase == "marking" and attempt.is_agreed:
            return self._cut(attempt)
        still = now - attempt.moved
        if attempt.ahead and not attempt.reached:
            if {p.name for p in self._ready()} != set(attempt.names):
                return self._stop("parameters were created since", now, retry=False)
            if self.state_registry.are_new(attempt):
                return self._stop("a worker keeps something since", now, retry=False)
            if attempt.phase != "preparing":
                return []
        if still > _SILENCE_SECONDS:
            return self._fail(f"nothing was heard for {still:.0f} s, waiting {attempt.waiting_for}", now)
        if still <= self._settings.lease_seconds or attempt.phase == "preparing":
            return []
        if attempt.phase == "marking" or (attempt.lives and (not attempt.reached or attempt.is_held)):
            # Pushes wait for it.
            self._tries.held += 1
            end = self._stop if self._tries.held < HELD_MAX else self._fail
            return end(f"waited too long {attempt.waiting_for}", now)
        if attempt.phase == "cutting" and not attempt.reached and not self._tries.exact:
            self._tries.exact = True
            return self._stop(f"training stands still, waiting {attempt.waiting_for}", now)
        return []

    def _waits_for_data(self, attempt: Attempt, now: float) -> bool:
        """Whether a worker may yet say that it had used a range before the cut. Who waits in a request has told all."""
        if attempt.whole_at is None:
            attempt.whole_at = now
        told = {saver.worker.member_id for saver in self._waiters.waiting if saver.worker is not None}
        attempt.undecided = [w for w in self._datasets.undecided(attempt.numbers) if w not in told]
        return bool(attempt.undecided) and now - attempt.whole_at < self._settings.lease_seconds

    def _commit(self, attempt: Attempt, epoch: int, now: float) -> list[Effect]:
        configuration: dict[str, str | int] = {
            "workers": len(self._members.workers),
            "servers": len(self._members.servers),
            "replicas": self._settings.replicas,
            "policy": self._policy.text,
        }
        datasets = self._datasets.states(attempt.numbers)
        try:
            manifest = attempt.manifest(self._settings.run_id, epoch, configuration, datasets)
        except PsdistError as error:
            return self._fail(str(error), now)
        attempt.phase = "committing"
        self.catalog.begin(attempt.directory)
        return [WriteCommit(attempt.number, self.catalog.highest + 1, manifest, now - attempt.began)]

    # --- inner: ends --------------------------------------------------------------------------------------------------

    def _is_unchanged(self, attempt: Attempt) -> bool:
        """Whether the newest snapshot has all that the cut has, byte for byte."""
        newest = self.catalog.newest
        if newest is None or attempt.marked or not attempt.steps.items() <= newest.commit.steps.items():
            return False
        return waiters.is_as_saved(newest.manifest, attempt.parameters, self._datasets)

    def _unchanged(self, attempt: Attempt, now: float) -> list[Effect]:
        assert self.catalog.newest is not None
        self.saved_at = attempt.began
        self.end_snapshot.ended(attempt.number, self.catalog.newest.commit)
        effects = self._over_with(attempt, now)
        effects += attempt.end(False, "nothing was trained since the last snapshot", self._members)
        for saver in self._waiters.of(attempt.number):
            effects += self._waiters.answer(saver, Saved(self.catalog.newest.commit, True))
        return effects

    def _over_with(self, attempt: Attempt, now: float) -> list[Effect]:
        """The attempt has ended for good, one way or the other."""
        self.attempt = None
        self._last = now
        self._over = max(self._over, attempt.step, *(self._tries.version(p) for p in attempt.parameters if p.record))
        self._tries = Tries(known=self._tries.known)
        return []

    def _stop(self, reason: str, now: float, *, retry: bool = True) -> list[Effect]:
        """Gives the attempt up; another is begun at once if it is wanted. ``retry``: it counts as one more try."""
        attempt = self.attempt
        assert attempt is not None
        self._tries.retries += retry
        if self._tries.retries > RETRIES_MAX:
            return self._fail(reason, now)
        self.attempt = None
        self._waiters.assign(0)
        return [*attempt.end(False, reason, self._members), *self._remove(attempt)]

    def _fail(self, text: str, now: float, *, remove: bool = True) -> list[Effect]:
        """The attempt has failed: that is told, and training goes on."""
        attempt = self.attempt
        assert attempt is not None
        self.failures = Failures(self.failures.count + 1, text, now)
        self.end_snapshot.ended(attempt.number, None)
        effects = self._over_with(attempt, now)
        effects += attempt.end(False, text, self._members)
        effects += self._remove(attempt) if remove else []
        effects.append(LogEvent(f"the snapshot of step {attempt.step} failed: {text}; training goes on", "warning"))
        error = SnapshotFailedError(f"the snapshot failed, and training goes on: {text}")
        for saver in self._waiters.of(attempt.number):
            effects += self._waiters.refuse(saver, error)
        return effects

    def _remove(self, attempt: Attempt) -> list[Effect]:
        """What may have been written is removed; but not what the storage may be committing."""
        if attempt.phase != "cutting":
            return []
        self._untidy = True
        return [RemoveDirectory(attempt.directory)]

    def _prune(self) -> list[Effect]:
        surplus = retention.surplus(self.catalog.commits, self._policy, {self._registry.base_in_use})
        untidy, self._untidy = self._untidy, False
        if not surplus and not untidy:
            return []
        return [Prune(surplus, untidy)]

    # --- inner: those who wait ----------------------------------------------------------------------------------------

    def _answer_what_is_there(self, ready: list[ParameterSet]) -> list[Effect]:
        """Answers those whom the newest snapshot serves, and those whom none can."""
        effects: list[Effect] = []
        for saver in self._waiters:
            newest = self.catalog.newest
            if self.end_snapshot.commit is not None:
                effects += self._waiters.answer(saver, Saved(self.end_snapshot.commit))
            elif newest is not None and (self._is_back(ready) or waiters.serves(newest, saver, ready, self._datasets)):
                effects += self._waiters.answer(saver, Saved(newest.commit, True))
            elif (error := self._hopeless(ready)) is not None:
                effects += self._waiters.refuse(saver, error)
        return effects

    def _is_back(self, ready: list[ParameterSet]) -> bool:
        """Whether the run went back to the newest snapshot, and nothing is there yet that could be trained."""
        gathering = not any(p.record for p in self._registry.all)
        return not ready and gathering and self._registry.resume.base.restore is not None

    def _hopeless(self, ready: list[ParameterSet]) -> SnapshotFailedError | None:
        if self.replaced:
            return SnapshotFailedError(self.replaced)
        if lost := self._registry.lost_text:
            return SnapshotFailedError(f"there is nothing whole to save: {lost}")
        if not ready and not any(p.state == "loading" for p in self._registry.all):
            return SnapshotFailedError("there are no parameters to save yet: create them first")
        return None

    def _is_live(self, worker: Member) -> bool:
        return self._members.is_live(worker.member_id, worker.incarnation)
