"""The scheduler's machine: all machines of a run as one, and the epoch over them. Pure.

``on(event, now)`` changes the state and returns the effects. A refused request changes nothing. Every change of the
map's content, or of state that a restart needs, makes a new epoch: one ``Persist``, then the news of losses, then one
``Publish``, then the answers. So nobody learns of anything that is not durable, and the map of an answer is not older
than the answer. Changes of data sets alone are made durable without an epoch, because the map does not show them.
Events that arrive together share an epoch (``on_all``).

Invariants: The epoch grows with every change and never otherwise. Effects do not depend on the order of any set.

The decisions themselves are in the other modules of this folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from psdist.errors import FencedError, InvalidArgumentError, PsdistError, RunLostError, copy_error
from psdist.types import ClusterMap, ServerEntry, WorkerEntry
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide import snapshot_events as sn
from psdist_scheduler.decide.alignment import Alignment
from psdist_scheduler.decide.cluster_events import Call, Event, RunCall, WorkerCall
from psdist_scheduler.decide.cluster_state import ClusterSettings, Member, StoredState
from psdist_scheduler.decide.effects import Broadcast, Effect, Persist, Publish, Refuse, Wait
from psdist_scheduler.decide.formations import GroupFormations
from psdist_scheduler.decide.joins import Joins
from psdist_scheduler.decide.leased_datasets import Datasets, SameBatchWarnings
from psdist_scheduler.decide.losses import MemberLosses
from psdist_scheduler.decide.member_admission import Lineage, MemberAdmission, lost
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.parameter_creation import Commits, Creation
from psdist_scheduler.decide.parameter_sets import Registry
from psdist_scheduler.decide.rollback import Rollback
from psdist_scheduler.decide.run_end import CoordinatedShutdown, ExitRequests, RunStart
from psdist_scheduler.decide.scaling import Rendezvous, Scaling
from psdist_scheduler.decide.shard_placement import ReplicaManager
from psdist_scheduler.decide.snapshot_catalog import Resume
from psdist_scheduler.decide.snapshots import Snapshots
from psdist_scheduler.decide.stack_dumps import StackDumps
from psdist_scheduler.decide.trace_recording import Traces
from psdist_scheduler.decide.waits import Barriers, Deadlocks, WaitingCalls

#: Events that no waiting call depends on. There are thousands of heartbeats, so the planners are not asked after each.
_PASSING: Final = (
    ev.Heartbeat | ev.Heard | ev.ServerChecked | ev.EqualContributions | ev.FormGroup | ev.TraceRequested
    | ev.SpansReported | ev.ClockReported | ev.StacksRequested | ev.StacksReported
)  # fmt: skip
#: Failed workers are restarted sooner than this by their agent, and new ones arrive.
_VACANT_SECONDS: Final = 30.0
#: Number of bits for commands to workers and proposals to servers per epoch. Their numbers begin with the epoch.
_COMMANDS_BITS: Final = 20
_NO_RECORD: Final = (
    "No snapshot has the training progress either. Start afresh under another --run-id; a scheduler with --store, and "
    "--storage-path for snapshots, survives this"
)


class Cluster:
    """One run.

    stored: state that an earlier scheduler stored, if there was one.
    history: content of the run's storage; None if it was not read.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        stored: StoredState | None,
        now: float,
        history: sn.History | None = None,
    ) -> None:
        self.settings = settings
        self.epoch = stored.epoch if stored is not None else 0
        if history is not None:
            # A run that resumes from a snapshot has higher epochs than the run that took it.
            self.epoch = max(self.epoch, *(commit.epoch for commit in history.commits), 0)
        self._calls = WaitingCalls()
        self._make_machines(stored, history, now)
        self.lineage = Lineage(settings.salt, stored)
        self._same_batches = SameBatchWarnings(self.members, self.registry)
        self._formations = GroupFormations(self.members, is_restored=stored is not None)
        self._traces = Traces(self.members)
        self._stack_dumps = StackDumps(self.members)
        #: True once members and callers were notified that the run cannot continue.
        self._has_ended = False

    def _make_machines(self, stored: StoredState | None, history: sn.History | None, now: float) -> None:
        """Create the machines of the run."""
        settings, epoch, begins = self.settings, self.epoch, stored is None
        stored = stored or StoredState(settings.run_id, 0)
        # Grace periods for missing members start again.
        resume = Resume(stored.base, now if stored.base.generation else None)
        if history is not None:
            resume.read(history.base)
            if begins and history.newest is not None:
                resume.go_to(history.newest, 0, epoch + 1, None)
        if stored.run_lost:
            resume.fail(RunLostError(stored.run_lost))
        numbers = (epoch + 1) << _COMMANDS_BITS
        self.members = members = Membership(settings, stored.members, now, resume.incarnations, stored.servers_wanted)
        self.demand = members.demand
        self.admission = MemberAdmission(settings, members)
        self.registry = registry = Registry(settings, stored.parameters, epoch + 1, resume)
        self.alignment = Alignment(members, registry, numbers)
        self.joins = Joins(registry, members, self.alignment, numbers)
        self.creation = Creation(settings, registry, resume, members, self.joins, Commits(registry, members))
        self.replica_manager = ReplicaManager(settings, registry, members)
        self.datasets = datasets = Datasets(stored.datasets, resume)
        self.snapshots = snapshots = Snapshots(
            settings, registry, members, datasets, self.alignment, self._calls, history, now, stored.ends
        )
        self.rollback = Rollback(registry, self.joins, members, datasets, snapshots)
        vacant = max(settings.worker_lease_seconds, _VACANT_SECONDS)
        self.rendezvous = Rendezvous(stored.nodes, settings.join_grace_seconds, vacant, now)
        self.scaling = Scaling(settings, registry, members, self.rendezvous, self._calls)
        self.barriers = Barriers(members, stored.barriers)
        self.losses = MemberLosses(settings, members, registry, snapshots, now)
        self.run_start = RunStart(settings, members, registry, now)
        self.exit_requests = ExitRequests(settings, registry, members, snapshots, self.scaling)
        shutdown_numbers = epoch << _COMMANDS_BITS
        self.coordinated_shutdown = CoordinatedShutdown(members, registry, snapshots, self.alignment, shutdown_numbers)
        self.deadlocks = Deadlocks(members, registry, self.barriers)

    @property
    def failed(self) -> PsdistError | None:
        """Why the run cannot continue; None while it can."""
        return self.registry.resume.failed

    @property
    def map(self) -> ClusterMap:
        return ClusterMap(
            run_id=self.settings.run_id,
            epoch=self.epoch,
            servers=tuple(ServerEntry(m.member_id, m.incarnation, m.address) for m in self.members.servers),
            workers=tuple(WorkerEntry(m.member_id, m.incarnation, m.rank, m.address) for m in self.members.workers),
            parameters=self.registry.entries,
            paused=self.paused,
            scheduler_id=self.lineage.scheduler_id,
            ranks_done=self.demand.ranks_done,
        )

    @property
    def paused(self) -> str:
        """Why no step begins: an elastic run has fewer nodes than its minimum. Empty while steps may begin.

        Workers that are done count as present.
        """
        return self.rendezvous.shortage(self.demand.ranks_in_service) if self.registry.has_begun else ""

    @property
    def waits(self) -> list[str]:
        """One sentence per wait in progress, the oldest first."""
        return self._calls.texts

    @property
    def is_ready(self) -> bool:
        """True while the run has its required members and nothing is lost."""
        return not (self.registry.lost_text or self.paused or self.demand.shortage(begun=bool(self.registry.entries)))

    @property
    def phase(self) -> str:
        """One sentence about the state of the run, with the reason if it is stalled."""
        if lost := self.rollback.text:
            return lost
        if wait := self.losses.deferred.wait:
            return f"held up, waiting {wait}"
        training = [
            f"{p.name!r} at {p.version_text}" for p in self.registry.all if p.state == "ready" and p.entry.members
        ]
        if self.paused:
            return f"paused, waiting {self.paused}"
        if training:
            shortage = self.demand.shortage(begun=True)
            degraded = self.replica_manager.degraded()
            fewer = f"with fewer than wanted, waiting {shortage}" if shortage else ""
            also = [self.losses.silence_text, degraded, fewer]
            return "; ".join([f"training {', '.join(training)}", *(text for text in also if text)])
        if shortage := self.demand.shortage():
            everyone_left = not self.members.workers and self.members.ranks
            return "all workers are gone" if everyone_left else f"waiting {shortage}"
        if self.waits:
            return f"waiting {self.waits[0]}"
        return "idle: no worker takes part in any parameters"

    def start(self, now: float) -> list[Effect]:
        """Return the first effects: the first epoch of this scheduler, durable and published."""
        again = ef.LogEvent("a new process of the scheduler continues the run from its store")
        return self._commit([] if self.lineage.is_first else [again], now, changed=True)

    def on(self, event: Event, now: float) -> list[Effect]:
        """Process one event. Raises nothing: a refused request becomes a Refuse."""
        return self.on_all((event,), now)

    def on_all(self, events: Iterable[Event], now: float) -> list[Effect]:
        """Process events that arrived together, in their order, as one epoch. Raises nothing.

        If there are several, none may depend on the consequences of another, as registrations of workers do not.
        """
        effects: list[Effect] = []
        accepted = False
        for event in events:
            try:
                effects += self._handle(event, now)
            except PsdistError as error:
                effects += [Refuse(event.call, error)] if isinstance(event, Call) else []
                continue
            # Nor does a waiting call depend on the end of a refused one: repeated wrong requests must cost little.
            is_refused = isinstance(event, ev.CallEnded) and event.refused
            accepted = accepted or not (is_refused or isinstance(event, _PASSING))
        if self.failed is not None:
            return self._end_run(self.failed, effects, now)
        return self._commit(effects, now) if accepted else effects

    def _end_run(self, error: PsdistError, before: list[Effect], now: float, changed: bool = False) -> list[Effect]:
        """End a run that cannot continue: notify all members and callers, and take no further action.

        before: effects of the events that led to this.
        changed: True if there is a new epoch in any case.
        """
        effects = before + self.scaling.progress(now)
        if self._has_ended:
            return effects
        self._has_ended = True
        self._calls.drop_answered(effects)
        sessions, calls = [*self.members.sessions.by_call], self._calls.all
        for call in calls:
            self._end(call)
        # Only an operator knows whether a lost record comes back. The next scheduler examines the snapshots again.
        lost = error.message if isinstance(error, RunLostError) else ""
        changes = self._take_changes()
        changed = changed or self._makes_epoch(changes)
        self.epoch += changed
        changes = replace(changes, epoch=self.epoch, run_lost=lost)
        log = ef.LogEvent(f"the run ends: {error}", "warning", kind="shutdown")
        refused = [Refuse(call, copy_error(error)) for call in (*calls, *sessions)]
        published = [Publish(self.map)] if changed else []
        return [changes, log, *published, *effects, *refused]

    def validate(self) -> None:
        self.members.validate()
        self.registry.validate(self.members)
        self.joins.validate()
        self.alignment.validate()
        self.creation.commits.validate()
        self.rendezvous.validate()
        self.datasets.validate()
        self.snapshots.validate()
        self.losses.validate()
        self.barriers.validate()
        self._formations.validate()
        assert self._take_changes() == Persist(self.epoch), "a change is not durable"

    # --- events -------------------------------------------------------------------------------------------------------

    def _handle(self, event: Event, now: float) -> list[Effect]:
        if self.failed is not None and not isinstance(event, ev.CallEnded | ev.WatchScale):
            raise copy_error(self.failed)
        if isinstance(event, RunCall):
            self.members.check_run(event.run_id)
        if isinstance(event, WorkerCall):
            return self._serve(event, self.members.check_caller(event.caller), now)
        match event:
            case ev.Heartbeat():
                return self._heartbeat(event, now)
            case ev.Heard(heard):
                self.members.on_activity(heard, now)
                return []
            case ev.Tick():
                effects, calls = self.deadlocks.progress()
                for call in calls:
                    self._end(call)
                return effects + self.losses.tick(now) + self._traces.tick(now) + self._stack_dumps.tick(now)
            case ev.Register():
                return self._register(event, now)
            case ev.SessionOpened():
                self._check_lineage(event)
                return self._open_session(event, now)
            case ev.SessionClosed():
                return self.losses.close_session(event, now)
            case ev.Probed():
                return self.losses.on_probed(event, now)
            case ev.Leave():
                return self.losses.leave(event, now)
            case ev.JoinAnswered():
                return self.joins.on_answer(event)
            case ev.ValuesAnswered():
                return self.creation.commits.on_answer(event)
            case ev.ReplicaFilled():
                return self.replica_manager.on_filled(event)
            case ev.ReplicaUnreachable():
                return self.replica_manager.on_unreachable(event, now)
            case ev.GiveUp():
                return self.run_start.give_up(event)
            case ev.Drain() | ev.Stop():
                return self.exit_requests.hold(event, now)
            case ev.StopReported():
                return self.coordinated_shutdown.on_report(event)
            case ev.ServerChecked():
                return self.losses.on_checked(event, now)
            case ev.CallChecked():
                self.deadlocks.on_checked(event)
                return []
            case ev.EqualContributions():
                return self._same_batches.on_report(event)
            case ev.AlignReported():
                return self.alignment.on_report(event, now)
            case ev.Scale():
                return self.scaling.scale(event)
            case ev.WatchScale():
                return self.scaling.watch(event)
            case ev.GetPosition():
                return self.datasets.get_position(event)
            case ev.CallEnded():
                self._end(event.call)
                return self._traces.end_call(event.call)
            case ev.TraceRequested() | ev.StacksRequested() | ev.EnterRendezvous() | sn.Save():
                return self._wait(event, now)
            case ev.StacksReported():
                return self._stack_dumps.on_stacks(event, now)
            case ev.SpansReported():
                return self._traces.on_spans(event, now)
            case ev.ClockReported():
                return self._traces.on_clock(event)
        return self._snapshot(event, now)

    def _register(self, event: ev.Register, now: float) -> list[Effect]:
        losses = self.losses
        losses.on_register(event, now)
        member, effects = self.admission.register(event, self.registry.lost_owners, now)
        return effects + losses.replace_at_address(member, now)

    def _open_session(self, event: ev.SessionOpened, now: float) -> list[Effect]:
        """Open a member's session. All machines that send commands repeat theirs on it."""
        member, effects = self.members.open_session(event, now)
        if member.role == "server":
            effects += self.joins.on_session(member.member_id)
        else:
            self.coordinated_shutdown.on_session(member)
            self.alignment.on_session(member)
        effects += self.snapshots.on_session(member, self.epoch, now)
        return effects + self.exit_requests.on_session(event.call)

    def _check_lineage(self, event: ev.SessionOpened) -> None:
        """Raise RunLostError if a member comes from a part of the run that is not on record.

        The run ends with it, unless it resumed from a snapshot, or is training: then a member of its past has come too
        late. Raises InvalidArgumentError for a map that this very process would have published later: nothing is lost,
        and the member is wrong.
        """
        lineage, resume = self.lineage, self.registry.resume
        why = lineage.missing(event, self.epoch)
        if not why:
            return
        if event.scheduler_id == lineage.scheduler_id:
            raise InvalidArgumentError(f"{why}: say the epoch of the newest map that it has received")
        is_older = lineage.knows(event.scheduler_id)
        if not is_older and resume.base.restore is not None and not resume.base.generation:
            directory = resume.base.restore.directory
            remedy = f"The run resumes from snapshot {directory}, and what was trained after it is lost: start again"
            raise lost(why, remedy, snapshot=directory)
        # Members that this scheduler knows are back, or it began with an empty store, so the unknown member is late.
        is_known = lineage.is_first or bool(self.members.sessions.by_call)
        if not is_older and is_known and self.registry.has_begun:
            raise lost(why, "The run was started again without it")
        error = lost(why, "Give the scheduler the newest store of this run (--store)" if is_older else _NO_RECORD)
        resume.fail(error)
        raise copy_error(error)

    def _snapshot(self, event: Event, now: float) -> list[Effect]:
        snapshots, rollback = self.snapshots, self.rollback
        match event:
            case sn.StatesAnnounced():
                return snapshots.states.on_announced(event)
            case sn.StateWritten():
                return snapshots.states.on_written(event, snapshots.attempt, now)
            case sn.Prepared() | sn.Marked() | sn.Written() | sn.PartFailed():
                return snapshots.on_report(event, now)
            case sn.Committed():
                effects, newer = snapshots.on_committed(event, now)
                if newer is None:
                    return effects
                why = "the storage has committed a newer snapshot after all"
                return effects + rollback.roll_back(newer, self.epoch + 1, now, why)
            case sn.CommitFailed():
                return snapshots.on_commit_failed(event, now)
            case sn.Pruned():
                return snapshots.catalog.on_pruned(event)
            case sn.Loaded():
                return self.creation.on_loaded(event)
            case sn.LoadFailed():
                return rollback.on_load_failed(event)
            case sn.HistoryRead():
                return rollback.on_history_read(event, self.epoch + 1, now)
        raise AssertionError(f"{event} is handled nowhere")

    def _wait(
        self, event: ev.TraceRequested | ev.StacksRequested | ev.EnterRendezvous | sn.Save, now: float
    ) -> list[Effect]:
        """Process a call that may have to wait."""
        match event:
            case ev.TraceRequested():
                effects = self._traces.start(event, now)
            case ev.StacksRequested():
                effects = self._stack_dumps.start(event, now)
            case ev.EnterRendezvous():
                effects = self.rendezvous.enter(event, now)
            case sn.Save():
                effects = self.snapshots.save(event, now)
        caller = event.caller if isinstance(event, sn.Save) else None
        self._calls.add(event.call, caller.member_id if caller else "")
        return effects

    def _serve(self, event: WorkerCall, worker: Member, now: float) -> list[Effect]:
        """Process a worker's call. Some calls may have to wait."""
        match event:
            case ev.CommitParameters():
                return self.creation.commit(event, worker)
            case ev.OpenDataset():
                return self.datasets.open(event)
            case ev.LeaseRange():
                return self.datasets.lease(event, worker)
            case ev.EndRanges():
                return self.datasets.end(event, worker)
            case ev.SetPosition():
                return self.datasets.set_position(event, worker)
            case ev.FormGroup():
                return self._formations.form(event, worker, now)
            case sn.StateOffered():
                return self.snapshots.states.on_offered(event, worker, self.snapshots.attempt, now)
            case sn.GetState():
                return self.snapshots.states.get(event, worker, self.registry.resume.found)
        self._calls.check(worker)
        match event:
            case ev.Create():
                effects = self.creation.create(event, worker)
                self.snapshots.end_snapshot.forget()
            case ev.Describe():
                effects = self.creation.describe(event, worker)
            case ev.EnterBarrier():
                effects = self.barriers.enter(event, worker)
            case _:
                raise AssertionError(f"{event} is handled nowhere")
        self._calls.add(event.call, worker.member_id)
        if not isinstance(event, ev.Describe):
            self.deadlocks.on_activity(worker, event.activity, event.call)
        return effects

    def _heartbeat(self, event: ev.Heartbeat, now: float) -> list[Effect]:
        member = self.members.by_session(event.call)
        if member is None:
            return []
        self.members.sessions.on_heartbeat(event, member.member_id, now)
        effects = self.losses.on_heartbeat(event, member, now)
        if member.role == "worker":
            self.deadlocks.on_activity(member, event.activity)
            return effects
        for name, version in event.versions:
            if (p := self.registry.get(name)) is not None:
                p.on_version(member.member_id, event.epoch, version)
        if event.progress is not None and (attempt := self.snapshots.attempt) is not None:
            attempt.on_progress(member.member_id, event.progress, now)
        return effects

    def _end(self, call: int) -> None:
        """Remove a call that is over from every machine."""
        for end_call in (
            self._calls.end_call, self.registry.end_call, self.creation.commits.end_call, self.barriers.end_call,
            self.rendezvous.end_call, self.scaling.end_call, self.snapshots.waiters.end_call,
            self.exit_requests.end_call, self.deadlocks.end_call, self._stack_dumps.end_call,
        ):  # fmt: skip
            end_call(call)

    # --- what follows -------------------------------------------------------------------------------------------------

    def _commit(self, effects: list[Effect], now: float, changed: bool = False) -> list[Effect]:
        """Let each planner act once, and return the effects in the order that the module docstring promises.

        Each planner comes after those whose decisions it uses:

        1. Losses, promotions and rollbacks: all others then see only live members. The run may end here.
        2. Creation and joins among those members. Then replicas, so that sets just placed get their backups in the same
           epoch.
        3. Shutdown: it requests snapshots. Then snapshots, then the exits that waited for one.
        4. Alignment: it sends commands on behalf of joins, shutdown and snapshots.
        5. Scaling, barriers, rendezvous and data sets, which nothing else depends on.
        """
        epoch = self.epoch + 1
        effects += self.losses.progress(now)
        effects += self.rollback.roll_back_if_lost(epoch, now)
        if self.failed is None:
            effects += self._end_calls_of_the_gone() + self.replica_manager.lose(epoch)
            self.rollback.end_if_lost()
            effects += self.run_start.progress(now)
        if self.failed is not None:
            return self._end_run(self.failed, effects, now, changed)
        effects += self.creation.progress(epoch, now) + self.replica_manager.plan(epoch, now)
        effects += self.exit_requests.request_snapshots(now) + self.coordinated_shutdown.progress(now)
        # A scheduler that starts belongs to its own epoch now: numbers derived from it must exceed all that its
        # predecessor used.
        effects += self.snapshots.progress(self.epoch + changed, now) + self.exit_requests.release(now)
        effects += self.alignment.progress(now)
        effects += self.scaling.progress(now) + self.barriers.progress()
        if self.rendezvous.world_size:
            live = [worker.rank for worker in self.members.workers]
            done = [worker.rank for worker in self.demand.workers_done]
            self.rendezvous.update_presence(self.members.ranks, live, done, now)
        effects += self.rendezvous.progress(now, max(self.members.next_rank, self.demand.ranks_used))
        if changed or self.members.changed:
            effects += self.datasets.lose(self.members.is_live)
        changes = self._take_changes()
        changed = changed or self._makes_epoch(changes)
        is_empty = not changed and changes == Persist(self.epoch)
        self.epoch += changed
        self.replica_manager.published(self.epoch)
        first = [] if is_empty else [replace(changes, epoch=self.epoch)]
        news = [effect for effect in effects if isinstance(effect, Broadcast)]
        rest: list[Effect] = [effect for effect in effects if not isinstance(effect, Broadcast)]
        published = [Publish(self.map)] if changed else []
        self._calls.drop_answered(rest)
        return [*first, *news, *published, *rest, *self._calls.report(self._all_waits(now), now)]

    def _all_waits(self, now: float) -> Iterator[Wait]:
        yield from self.creation.waits(now)
        yield from self.joins.waits()
        yield from self.barriers.waits()
        yield from self.rendezvous.waits(now)
        yield from self.scaling.waits()
        yield from self.losses.waits()
        yield from self.snapshots.waits()
        yield from self.coordinated_shutdown.waits()
        yield from self.alignment.waits()

    def _makes_epoch(self, changes: Persist) -> bool:
        """Return True if something changed that the map shows, or that a restart needs. Data sets, barriers and the
        steps of the end make no epoch."""
        return replace(changes, datasets=(), barriers=(), ends=None) != Persist(self.epoch)

    def _take_changes(self) -> Persist:
        """Return everything that changed since the previous call."""
        forgotten, parameters = self.registry.take_changes()
        return Persist(
            epoch=self.epoch,
            members=self.members.take_changes(),
            parameters=parameters,
            nodes=self.rendezvous.take_changes(),
            datasets=self.datasets.take_changes(),
            servers_wanted=self.demand.take_change(),
            forgotten=forgotten,
            base=self.registry.resume.take_change(),
            barriers=self.barriers.take_changes(),
            schedulers=self.lineage.take_change(),
            ends=self.snapshots.end_snapshot.take_change(),
        )

    def _end_calls_of_the_gone(self) -> list[Effect]:
        effects: list[Effect] = []
        gone = {i: m for i in self.members.changed if (m := self.members.get(i)) is not None and not m.live}
        for call, member_id in self._calls.of_members(gone):
            member = gone[member_id]
            text = f"{member} was fenced: it {member.state_text}; register again"
            effects.append(Refuse(call, FencedError(text, member_id=member_id)))
            self._end(call)
        return effects
