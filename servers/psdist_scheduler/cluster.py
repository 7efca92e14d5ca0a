"""The scheduler's machine: membership, parameter sets, barriers and rendezvous as one, and the epoch over them. Pure.

``on(event, now)`` changes the state and returns the effects. A refused request changes nothing. Every change of what
the map shows, or of what a restart must know, makes a new epoch: one ``Persist``, then the news of losses, then one
``Publish``, then the answers. So nobody learns of anything that is not durable, and the map of an answer is not older
than the answer. Changes of data sets alone are made durable without an epoch, because the map does not show them.

Invariants: the epoch grows with every change and never otherwise. Effects do not depend on the order of any set. A
waiting call is sent its reason when the reason changes, and every ``REPEAT_SECONDS``.
"""

from __future__ import annotations

from dataclasses import dataclass

from psdist.errors import FencedError, LimitExceededError, PsdistError
from psdist.types import ClusterMap, ServerEntry, WorkerEntry
from psdist.wire.limits import REPORT_WAIT_SECONDS
from psdist_scheduler.coordination.deferred_losses import DeferredLosses
from psdist_scheduler.coordination.mutual_waits import MutualWaits
from psdist_scheduler.coordination.rollback import Rollback
from psdist_scheduler.coordination.shutdown import GracefulShutdown
from psdist_scheduler.coordination.stops import Stops
from psdist_scheduler.datasets.datasets import Datasets
from psdist_scheduler.events.cluster_events import (
    Answer,
    Attach,
    Broadcast,
    CallEnded,
    Close,
    CommitParameters,
    Create,
    Describe,
    Done,
    Drain,
    Draining,
    Effect,
    EnterBarrier,
    EnterRendezvous,
    Event,
    Heartbeat,
    JoinAnswered,
    Leave,
    LogEvent,
    MemberLost,
    Persist,
    Publish,
    Refuse,
    Register,
    Registered,
    ReplicaFilled,
    ReplicaUnreachable,
    Scale,
    ScaleNews,
    SessionClosed,
    SessionOpened,
    Stop,
    Tick,
    Upload,
    Waiting,
    WatchScale,
)
from psdist_scheduler.events.data_events import DataEvent, EndRanges, GetPosition, LeaseRange, OpenDataset, SetPosition
from psdist_scheduler.events.records import ClusterSettings, Member, StoredState
from psdist_scheduler.events.snapshot_events import (
    CommitFailed,
    Committed,
    GetState,
    HandedIn,
    HandIn,
    History,
    HistoryRead,
    Keeps,
    Loaded,
    LoadFailed,
    Marked,
    PartFailed,
    Prepared,
    Pruned,
    Save,
    Saving,
    Written,
)
from psdist_scheduler.events.worker_events import Caller, Heard, StopReported
from psdist_scheduler.members.admission import Admission
from psdist_scheduler.members.barriers import Barriers
from psdist_scheduler.members.demand import Demand
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.members.rendezvous import Rendezvous
from psdist_scheduler.placement.registry import Registry
from psdist_scheduler.placement.replica_manager import ReplicaManager
from psdist_scheduler.placement.restore_point import Resume
from psdist_scheduler.placement.scaling import Scaling
from psdist_scheduler.snapshots.snapshots import Snapshots

#: A call that waits hears its reason again after so long, so that its peer can tell a wait from a dead connection.
REPEAT_SECONDS = 2.0
#: Calls of one member that may wait at a time.
WAITS_PER_MEMBER_MAX = 64
_TICKS_PER_LEASE = 8
#: Commands to workers of one epoch; their numbers begin with it.
_COMMANDS_BITS = 20


@dataclass(slots=True)
class _Told:
    """What a waiting call was told last."""

    text: str
    at: float


@dataclass(slots=True)
class _Wait:
    """Something that somebody waits for."""

    since: float
    text: str
    reported: str = ""


class Cluster:
    """One run. ``stored`` is what the store kept of an earlier scheduler, if there was one; ``history`` what the
    run's storage holds, None where it was not read."""

    def __init__(
        self, settings: ClusterSettings, stored: StoredState | None, now: float, history: History | None = None
    ) -> None:
        begun, stored = stored is not None, stored or StoredState(settings.run_id, 0)
        self.settings = settings
        # A run that goes on from a snapshot has higher epochs than whoever took it.
        self.epoch = max(stored.epoch, *(commit.epoch for commit in history.commits), 0) if history else stored.epoch
        resume = Resume(stored.base, None)
        resume.since = now if stored.base.generation else None  # Whoever was missed before has its time anew.
        if history is not None:
            resume.read(history.base)
            if not begun and history.newest is not None:
                resume.go_to(history.newest, 0, self.epoch + 1, None)
        incarnations_given = resume.incarnations if history is not None else 0
        self.members = Membership(settings, stored.members, now, incarnations_given)
        self.demand = Demand(settings, self.members, stored.servers_wanted)
        self._admission = Admission(settings, self.members)
        self.registry = Registry(settings, stored.parameters, self.epoch + 1, now, self.demand, resume)
        self._replica_manager = ReplicaManager(settings, self.registry, self.members)
        self._scaling = Scaling(settings, self.registry, self.members, self.demand)
        self.datasets = Datasets(stored.datasets, resume)
        self.snapshots = Snapshots(settings, self.registry, self.members, self.datasets, history, now)
        self._deferred = DeferredLosses(self.registry, self.members, self.snapshots)
        self._going_back = Rollback(self.registry, self.members, self.datasets, self.snapshots)
        self._leaving = GracefulShutdown(settings, self.registry, self.members, self.snapshots, self._scaling)
        self._stops = Stops(self.members, self.registry, self.snapshots, self.epoch << _COMMANDS_BITS)
        self._barriers = Barriers(self.members, self.demand, stored.barriers)
        self._mutual_waits = MutualWaits(self.members, self.registry, self._barriers)
        self._rendezvous = Rendezvous(stored.nodes, settings.join_grace_seconds, now)
        self._ticked = now
        #: Until then a session may end because this process itself was silent.
        self._forgiving_until = now
        self._told: dict[int, _Told] = {}
        self._waits: dict[str, _Wait] = {}
        self._waiters: dict[int, str] = {}

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def tick_seconds(self) -> float:
        """How often Tick is expected."""
        return self.settings.lease_seconds / _TICKS_PER_LEASE

    @property
    def _stall_seconds(self) -> float:
        """A tick that is later than this says that this process stood still."""
        return self.settings.lease_seconds / 2

    @property
    def map(self) -> ClusterMap:
        """The cluster map."""
        return ClusterMap(
            run_id=self.settings.run_id,
            epoch=self.epoch,
            servers=tuple(ServerEntry(m.member_id, m.incarnation, m.address) for m in self.members.servers),
            workers=tuple(WorkerEntry(m.member_id, m.incarnation, m.rank) for m in self.members.workers),
            parameters=self.registry.entries,
            paused=self.paused,
        )

    @property
    def paused(self) -> str:
        """Why no step begins: an elastic run that has begun has fewer workers than its minimum. Those that are done
        count as there. Empty while steps may begin."""
        least = self._rendezvous.workers_min
        missing = least - self.demand.workers_in_service
        if missing <= 0 or not any(entry.ready for entry in self.registry.entries):
            return ""
        return f"for {missing} of {least} workers to come back, which the run needs to go on"

    @property
    def waits(self) -> list[str]:
        """One sentence per wait in progress, the oldest first."""
        ordered = sorted(self._waits.values(), key=lambda wait: wait.since)
        return [wait.text for wait in ordered]

    @property
    def phase(self) -> str:
        """One sentence about where the run stands, with the reason if it does not go on."""
        if lost := self.registry.lost_text:
            return lost
        if wait := self._deferred.wait:
            return f"held up, waiting {wait}"
        training = [
            f"{p.name!r} at version {p.version}" for p in self.registry.all if p.state == "ready" and p.entry.members
        ]
        if self.paused:
            return f"paused, waiting {self.paused}"
        if training:
            shortage = self.demand.shortage(begun=True)
            also = [self._replica_manager.degraded(), f"with fewer than wanted, waiting {shortage}" if shortage else ""]
            return "; ".join([f"training {', '.join(training)}", *(text for text in also if text)])
        if shortage := self.demand.shortage():
            everyone_left = not self.members.workers and self.members.ranks
            return "all workers are gone" if everyone_left else f"waiting {shortage}"
        if self._waits:
            return f"waiting {next(iter(self._waits.values())).text}"
        return "idle: no worker takes part in any parameters"

    # --- the machine --------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Effect]:
        """The first effects: the first epoch of this scheduler, durable and published."""
        return self._commit([], now, changed=True)

    def on(self, event: Event, now: float) -> list[Effect]:
        """Takes one event. Raises nothing: a refused request becomes a Refuse."""
        try:
            effects = self._handle(event, now)
        except PsdistError as error:
            return [Refuse(call, error)] if (call := getattr(event, "call", 0)) else []
        # Heartbeats come by the thousand, and no waiting call depends on them.
        if isinstance(event, Heartbeat | Heard):
            return effects
        return self._commit(effects, now)

    def validate(self) -> None:
        """Asserts the invariants of all parts."""
        self.members.validate()
        self.registry.validate(self.members)
        self._rendezvous.validate()
        self.datasets.validate()
        self.snapshots.validate()
        self._deferred.validate()
        self._barriers.validate()
        assert not self._has_changed() and not self.datasets.changed and not self._barriers.changed
        assert self._told.keys() <= self._waiters.keys(), "a call was told to wait that does not wait"

    # --- inner --------------------------------------------------------------------------------------------------------

    def _handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Heartbeat():
                return self._heartbeat(event, now)
            case Heard(heard):
                self.members.on_activity(heard, now)
                return []
            case Tick():
                return self._tick(now)
            case Register():
                return self._register(event, now)
            case SessionOpened():
                return self._open_session(event, now)
            case SessionClosed():
                return self._close_session(event, now)
            case Leave():
                return self._leave(event, now)
            case JoinAnswered():
                return self._join_answered(event)
            case ReplicaFilled():
                return self._replica_manager.filled(event)
            case ReplicaUnreachable():
                return self._replica_manager.unreachable(event, now)
            case Drain():
                return self._drain(event, now)
            case Stop():
                return self._leaving.hold(event, now)
            case StopReported():
                return self._stops.heard(event)
            case Scale():
                return self._scaling.scale(event)
            case WatchScale():
                return self._scaling.watch(event)
            case CommitParameters():
                worker = self.members.check_caller(event.caller)
                return self.registry.commit(event, worker, now)
            case OpenDataset() | LeaseRange() | EndRanges() | GetPosition() | SetPosition():
                return self._data(event)
            case Save():
                effects = self.snapshots.save(event, now)
                self._waiters[event.call] = event.worker_id
                return effects
            case Loaded():
                return self.registry.loaded(event, self.members.sessions.get(event.call, ""), now)
            case LoadFailed():
                return self._going_back.load_failed(event)
            case Keeps() | HandIn() | HandedIn():
                return self.snapshots.runner.states.on(event, self.snapshots.runner.attempt, now)
            case GetState():
                return self.snapshots.runner.states.get(event, self.registry.resume.found)
            case Prepared() | Marked() | Written() | PartFailed():
                return self.snapshots.runner.on(event, now)
            case Committed():
                effects, newer = self.snapshots.on_committed(event, now)
                return effects if newer is None else effects + self._going_back.to_newer(newer, self.epoch + 1, now)
            case CommitFailed():
                return self.snapshots.on_commit_failed(event, now)
            case Pruned():
                return self.snapshots.catalog.on_pruned(event)
            case HistoryRead():
                return self._going_back.history_read(event, self.epoch + 1, now)
            case CallEnded():
                self._forget(event.call)
                return []
            case _:
                return self._wait(event, now)

    def _drain(self, event: Drain, now: float) -> list[Effect]:
        """Where what a server has goes with it, because nobody takes it, a snapshot comes first."""
        self.members.check_run(event.run_id)
        others = [server for server in self.members.staying if server.member_id != event.server_id]
        if self.members.workers and others:
            return self._scaling.drain(event)
        return self._leaving.hold(event, now)

    def _wait(self, event: Create | Describe | EnterBarrier | EnterRendezvous, now: float) -> list[Effect]:
        """A call that may have to wait."""
        if isinstance(event, EnterRendezvous):
            self.members.check_run(event.run_id)
            effects = self._rendezvous.enter(event, now)
            self._waiters[event.call] = ""
            return effects
        worker = self.members.check_caller(event.caller)
        if list(self._waiters.values()).count(worker.member_id) >= WAITS_PER_MEMBER_MAX:
            raise LimitExceededError(f"{worker} waits in {WAITS_PER_MEMBER_MAX} calls already, which is the limit")
        match event:
            case Create():
                effects = self.registry.create(event, worker, now)
                self.snapshots.end_snapshot.forget()
            case Describe():
                effects = self.registry.describe(event, worker, now)
            case EnterBarrier():
                effects = self._barriers.enter(event, worker)
        self._waiters[event.call] = worker.member_id
        if not isinstance(event, Describe):
            self._mutual_waits.heard(worker, event.activity, event.call)
        return effects

    def _data(self, event: DataEvent) -> list[Effect]:
        """Whatever is about data sets."""
        if isinstance(event, GetPosition):
            self.members.check_run(event.run_id)
            return self.datasets.get_position(event)
        worker = self.members.check_caller(event.caller)
        match event:
            case OpenDataset():
                return self.datasets.open(event)
            case LeaseRange():
                return self.datasets.lease(event, worker)
            case EndRanges():
                return self.datasets.end(event, worker)
            case SetPosition():
                return self.datasets.set_position(event, worker)

    def _register(self, event: Register, now: float) -> list[Effect]:
        self._deferred.check(event, now)
        member = self._admission.accept(event, self.registry.lost_owners)
        self.members.add(member, now)
        world_size = max(self.demand.workers_min, member.rank + 1) if member.role == "worker" else 0
        life = f", incarnation {member.incarnation}" if member.incarnation > 1 else ""
        where = f" at {member.address}" if member.address else f" on {member.host or 'an unknown host'}"
        settings = self.settings
        registered = Registered(member, world_size, settings.lease_of(member.role), settings.heartbeat_seconds)
        return [
            LogEvent(f"{member} registered{where}{life}"),
            *self._replace_at_address(member, now),
            Answer(event.call, registered),
        ]

    def _replace_at_address(self, member: Member, now: float) -> list[Effect]:
        """An address has one process: a server that is another's successor there, or the same, whose first answer was
        lost, ends the incarnation before it. Else shards could be placed on that one, and their calls reach this
        one."""
        before = [m.member_id for m in self.members.servers if m.address == member.address and m is not member]
        return self._lose([(member_id, f"{member} registered at its address") for member_id in before], now)

    def _open_session(self, event: SessionOpened, now: float) -> list[Effect]:
        member = self.members.check_caller(Caller("", event.member_id, event.incarnation), role=None)
        replaced = self.members.sessions.open(event.call, member.member_id, now)
        effects: list[Effect] = [Close(replaced)] if replaced else []
        effects.append(Attach(event.call))
        if member.role == "server":
            effects += self.registry.server_session(member.member_id, self.members)
        else:
            self._stops.session_opened(member)
        return effects + self.snapshots.runner.session_opened(member, self.epoch, now)

    def _close_session(self, event: SessionClosed, now: float) -> list[Effect]:
        member_id = self.members.sessions.get(event.call)
        if not member_id:
            return []
        # Members hang up on a scheduler that stands still. They are alive, and will be back.
        if now < self._forgiving_until or now - self._ticked > self.tick_seconds + self._stall_seconds:
            self.members.sessions.detach(event.call, now)
            return [
                LogEvent(f"the session of {member_id} ended while the scheduler stood still: waiting for its return")
            ]
        return self._lose([(member_id, event.reason)], now)

    def _heartbeat(self, event: Heartbeat, now: float) -> list[Effect]:
        member = self.members.by_session(event.call)
        if member is None:
            return []
        self.members.sessions.on_heartbeat(event, member.member_id, now)
        if member.role == "worker":
            self._mutual_waits.heard(member, event.activity)
        else:
            self.members.on_activity(event.heard, now)
            self.registry.versions(member.member_id, event.epoch, event.versions)
            if event.progress is not None and self.snapshots.runner.attempt is not None:
                self.snapshots.runner.attempt.on_progress(member.member_id, event.progress, now)
        return []

    def _join_answered(self, event: JoinAnswered) -> list[Effect]:
        server = self.members.sessions.get(event.call)
        if server is None:
            return []
        return self.registry.join_answered(server, event.proposal_id, event.accepted, event.version_max, self.members)

    def _leave(self, event: Leave, now: float) -> list[Effect]:
        if self.members.leave_late(event.caller, event.reason or "done"):
            return [Answer(event.call, Done())]
        member = self.members.check_caller(event.caller, role=None)
        counts, effects = self._deferred.defer([(member.member_id, event.reason or "done")], now)
        if not counts:
            return [*effects, Answer(event.call, Done())]
        gone, session = self.members.end(member.member_id, "left", event.reason or "done")
        effects = [LogEvent(f"{gone} left: {gone.reason}"), Answer(event.call, Done())]
        return [*effects, Close(session)] if session else effects

    def _lose(self, gone: list[tuple[str, str]], now: float) -> list[Effect]:
        """Members are lost, each for its reason: now, or when it is known to which snapshot the run goes back then."""
        counts, effects = self._deferred.defer(gone, now)
        return effects + self._end_lives(counts)

    def _end_lives(self, gone: list[tuple[str, str]]) -> list[Effect]:
        notes: list[Effect] = []
        news: list[Effect] = []
        for member_id, reason in gone:
            member, session = self.members.end(member_id, "lost", reason)
            notes.append(LogEvent(f"{member} is lost: {reason}", "warning"))
            news.append(Broadcast(MemberLost(member_id, member.role, reason)))
            if session:
                news.append(Close(session))
        return [*notes, *news]

    def _tick(self, now: float) -> list[Effect]:
        late = now - self._ticked - self.tick_seconds
        self._ticked = now
        if late > self.tick_seconds:
            self.members.sessions.extend(now, late)
        if late > self._stall_seconds:
            self._forgiving_until = now + self.settings.lease_seconds
        effects, calls = self._mutual_waits.progress()
        for call in calls:
            self._forget(call)
        return effects + self._lose(self.members.sessions.expired(now), now)

    def _forget(self, call: int) -> None:
        self._waiters.pop(call, None)
        self._told.pop(call, None)
        self.registry.end(call)
        self._barriers.end(call)
        self._rendezvous.end(call)
        self._scaling.end(call)
        self.snapshots.waiters.end(call)
        self._leaving.end(call)
        self._mutual_waits.end(call)

    def _commit(self, effects: list[Effect], now: float, changed: bool = False) -> list[Effect]:
        """Lets everything go on that can, and puts what became of it in the order that the module's text promises."""
        effects += self._end_lives(self._deferred.due(now))
        effects += self._going_back.if_lost(self.epoch + 1, now)
        effects += self._end_calls_of_the_gone()
        effects += self._replica_manager.lose(self.epoch + 1) + self._replica_manager.plan(now)
        effects += self.registry.progress(self.members, self.epoch + 1, now)
        # What was placed just now gets its backups in the same epoch.
        effects += self._replica_manager.plan(now) + self._leaving.ask(now) + self._stops.progress(now)
        # A scheduler that begins is in its own epoch at once: what it numbers by it must be above all that the one
        # before said.
        effects += self.snapshots.progress(self.epoch + changed, now) + self._stops.progress(now)
        effects += self._leaving.go_on() + self._scaling.progress(now)
        effects += self._barriers.progress() + self._rendezvous.progress(now, max(self.members.ranks, default=-1) + 1)
        if changed or self.members.changed:
            effects += self.datasets.lose(self.members.is_live)
        changed = changed or self._has_changed()
        self.epoch += changed
        self._replica_manager.published(self.epoch)
        first = [self._take_changes()] if changed or self.datasets.changed or self._barriers.changed else []
        news = [effect for effect in effects if isinstance(effect, Broadcast)]
        rest: list[Effect] = [effect for effect in effects if not isinstance(effect, Broadcast)]
        published = [Publish(self.map)] if changed else []
        self._settle(rest)
        return [*first, *news, *published, *rest, *self._report(now)]

    def _end_calls_of_the_gone(self) -> list[Effect]:
        effects: list[Effect] = []
        gone = {i: m for i in self.members.changed if (m := self.members.get(i)) is not None and not m.live}
        for call, member_id in list(self._waiters.items() if gone else ()):
            if member := gone.get(member_id):
                text = f"{member} does not count any more, it {member.state_text}: register again"
                effects.append(Refuse(call, FencedError(text, member_id=member_id)))
                self._forget(call)
        return effects

    def _has_changed(self) -> bool:
        members = self.members
        registry = self.registry
        parameters = bool(registry.changed or registry.forgotten or registry.resume.changed)
        return bool(members.changed or self.demand.changed or parameters or self._rendezvous.changed)

    def _take_changes(self) -> Effect:
        persist = Persist(
            epoch=self.epoch,
            members=self.members.take_changes(),
            parameters=tuple(self.registry.record(name) for name in self.registry.changed),
            nodes=tuple(self._rendezvous.changed),
            datasets=tuple(self.datasets.record(name) for name in self.datasets.changed),
            servers_wanted=self.demand.take_change(),
            forgotten=tuple(self.registry.forgotten),
            base=self.registry.resume.base if self.registry.resume.changed else None,
            barriers=tuple(self._barriers.changed),
        )
        self.registry.changed.clear()
        self.registry.forgotten.clear()
        self.registry.resume.changed = False
        self._rendezvous.changed.clear()
        self.datasets.changed.clear()
        self._barriers.changed.clear()
        return persist

    def _settle(self, effects: list[Effect]) -> None:
        """Calls that were answered for good do not wait any more."""
        for effect in effects:
            if isinstance(effect, Refuse) or (
                isinstance(effect, Answer) and not isinstance(effect.value, Upload | Draining | ScaleNews | Saving)
            ):
                self._waiters.pop(effect.call, None)
                self._told.pop(effect.call, None)

    def _report(self, now: float) -> list[Effect]:
        """Tells the calls that wait why, and notes what has waited for long."""
        effects: list[Effect] = []
        waits: dict[str, _Wait] = {}
        sources = (
            self.registry.waits(self.members, now),
            self._barriers.waits(),
            self._rendezvous.waits(now),
            self._scaling.waits(),
            self._deferred.waits(),
            self.snapshots.waits(),
            self._stops.waits(),
        )
        for key, calls, text in (wait for source in sources for wait in source):
            wait = waits[key] = self._waits.get(key) or _Wait(now, text)
            wait.text = text
            if now - wait.since >= REPORT_WAIT_SECONDS and wait.reported != text:
                wait.reported = text
                effects.append(LogEvent(f"{key}: waiting {text}, {now - wait.since:.0f} s so far", "wait"))
            for call in calls:
                told = self._told.get(call)
                if told is None or told.text != text or now - told.at >= REPEAT_SECONDS:
                    self._told[call] = _Told(text, now)
                    effects.append(Answer(call, Waiting(text)))
        self._waits = waits
        return effects
