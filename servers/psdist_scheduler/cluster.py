"""The scheduler's machine: membership, parameters, barriers and rendezvous as one, and the epoch over them. Pure.

``on(event, now)`` changes the state and returns the effects. A refused request changes nothing. Every change of what
the map shows, or of what a restart must know, makes a new epoch: one ``Persist``, then the news of losses, then one
``Publish``, then the answers, so that nobody learns of anything that is not durable and an answer's map is not older
than the answer.

Invariants: the epoch grows with every change and never otherwise; effects do not depend on the order of any set; what
waits is told its reason when that changes, and every ``REPEAT_SECONDS``.
"""

from __future__ import annotations

from dataclasses import dataclass

from psdist.errors import FencedError, LimitExceededError, PsdistError, ServerLostError
from psdist.types import ClusterMap, ServerEntry, WorkerEntry
from psdist.wire.limits import REPORT_WAIT_SECONDS
from psdist_scheduler.events import (
    Announce,
    Answer,
    Attach,
    CallEnded,
    Caller,
    Close,
    Commit,
    Create,
    Describe,
    Done,
    Effect,
    EnterBarrier,
    EnterRendezvous,
    Event,
    Heartbeat,
    JoinAnswered,
    Leave,
    MemberLost,
    Note,
    Persist,
    Publish,
    Refuse,
    Register,
    Registered,
    SessionClosed,
    SessionOpened,
    Tick,
    Upload,
    Waiting,
)
from psdist_scheduler.membership import Membership
from psdist_scheduler.records import ClusterSettings, Stored
from psdist_scheduler.registry import Registry
from psdist_scheduler.rendezvous import Barriers, Rendezvous

#: A call that waits hears its reason again after so long, so that its peer can tell a wait from a dead connection.
REPEAT_SECONDS = 2.0
#: Calls of one member that may wait at a time.
WAITS_PER_MEMBER_MAX = 64
_TICKS_PER_LEASE = 8


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
    """One run. ``stored`` is what a store kept of an earlier scheduler's life, if there was one."""

    def __init__(self, settings: ClusterSettings, stored: Stored | None, now: float) -> None:
        stored = stored or Stored(settings.run_id, 0)
        self.settings = settings
        self.epoch = stored.epoch
        self.members = Membership(settings, stored.members, now)
        self.registry = Registry(stored.parameters, stored.epoch + 1, settings.join_grace_seconds, now)
        self._barriers = Barriers()
        self._rendezvous = Rendezvous(stored.nodes, settings.join_grace_seconds, now)
        self._ticked = now
        self._told: dict[int, _Told] = {}
        self._waits: dict[str, _Wait] = {}
        self._waiters: dict[int, str] = {}

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def tick_seconds(self) -> float:
        """How often Tick is expected."""
        return self.settings.lease_seconds / _TICKS_PER_LEASE

    @property
    def map(self) -> ClusterMap:
        """The cluster map."""
        return ClusterMap(
            run_id=self.settings.run_id,
            epoch=self.epoch,
            servers=tuple(ServerEntry(m.member_id, m.incarnation, m.address) for m in self.members.servers),
            workers=tuple(WorkerEntry(m.member_id, m.incarnation, m.rank) for m in self.members.workers),
            parameters=self.registry.entries,
        )

    @property
    def waits(self) -> list[str]:
        """One sentence per wait in progress, the oldest first."""
        ordered = sorted(self._waits.values(), key=lambda wait: wait.since)
        return [wait.text for wait in ordered]

    @property
    def phase(self) -> str:
        """One sentence about where the run stands, with the reason if it does not go on."""
        lost = [text for p in self.registry.all if (text := self.registry.lost(p, self.members))]
        if lost:
            return f"lost: {'; '.join(lost)}; restart the run"
        training = [
            f"{p.name!r} at version {p.version}" for p in self.registry.all if p.state == "ready" and p.entry.members
        ]
        if training:
            return f"training {', '.join(training)}"
        if shortage := self.members.shortage():
            everyone_left = not self.members.workers and self.members.workers_known
            return "all workers are gone" if everyone_left else f"waiting {shortage}"
        if self._waits:
            return f"waiting {next(iter(self._waits.values())).text}"
        return "idle: no worker takes part in any parameters"

    # --- the machine --------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Effect]:
        """The first effects: this life's first epoch, durable and published."""
        return self._commit([], now, changed=True)

    def on(self, event: Event, now: float) -> list[Effect]:
        """Takes one event. Raises nothing: a refused request becomes a Refuse."""
        try:
            effects = self._handle(event, now)
        except PsdistError as error:
            return [Refuse(event.call, error)] if not isinstance(event, Tick) else []
        # Signs of life come by the thousand and let nothing go on.
        if isinstance(event, Heartbeat):
            return effects
        return self._commit(effects, now)

    def validate(self) -> None:
        """Asserts the invariants of all parts."""
        self.members.validate()
        self.registry.validate(self.members)
        self._rendezvous.validate()
        assert not self.members.changed and not self.registry.changed and not self._rendezvous.changed
        assert self._told.keys() <= self._waiters.keys(), "a call was told to wait that does not wait"

    # --- inner --------------------------------------------------------------------------------------------------------

    def _handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Heartbeat():
                return self._heartbeat(event, now)
            case Tick():
                return self._tick(now)
            case Register():
                return self._register(event, now)
            case SessionOpened():
                return self._open_session(event, now)
            case SessionClosed():
                return self._close_session(event)
            case Leave():
                return self._leave(event)
            case JoinAnswered():
                return self._join_answered(event)
            case Commit():
                worker = self.members.check_caller(event.caller)
                return self.registry.commit(event.call, worker, event.parameters, now)
            case CallEnded():
                self._forget(event.call)
                return []
            case _:
                return self._wait(event, now)

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
                effects = self.registry.create(event, worker, self.members, now)
            case Describe():
                effects = self.registry.describe(event, worker, self.members, now)
            case EnterBarrier():
                effects = self._barriers.enter(event.call, worker, event.name)
        self._waiters[event.call] = worker.member_id
        return effects

    def _register(self, event: Register, now: float) -> list[Effect]:
        if event.role == "server" and event.member_id in self.registry.owners():
            self._check_returning(event.member_id)
        member = self.members.register(event, self.registry.owners(), now)
        world_size = max(self.members.workers_min, member.rank + 1) if member.role == "worker" else 0
        life = f", incarnation {member.incarnation}" if member.incarnation > 1 else ""
        where = f" at {member.address}" if member.address else f" on {member.host or 'an unknown host'}"
        registered = Registered(member, world_size, self.settings.lease_seconds)
        return [Note(f"{member} registered{where}{life}"), Answer(event.call, registered)]

    def _check_returning(self, server_id: str) -> None:
        """A server that held shards cannot come back without them under the id that the map names as their owner."""
        member = self.members.get(server_id)
        if member is not None and not member.live:
            raise ServerLostError(
                f"{server_id} held shards in an earlier life, and they are gone with it: restart the run, or start "
                "this server under another id",
                member_id=server_id,
            )

    def _open_session(self, event: SessionOpened, now: float) -> list[Effect]:
        caller = Caller("", event.member_id, event.incarnation)
        member, replaced = self.members.open_session(event.call, caller, now)
        effects: list[Effect] = [Close(replaced)] if replaced else []
        effects.append(Attach(event.call))
        if member.role == "server":
            effects += self.registry.server_session(member.member_id, self.members)
        return effects

    def _close_session(self, event: SessionClosed) -> list[Effect]:
        member_id = self.members.sessions.get(event.call)
        return self._lose([(member_id, event.reason)]) if member_id else []

    def _heartbeat(self, event: Heartbeat, now: float) -> list[Effect]:
        member = self.members.heartbeat(event, now)
        if member is not None and member.role == "server":
            self.registry.versions(member.member_id, event.versions)
        return []

    def _join_answered(self, event: JoinAnswered) -> list[Effect]:
        server = self.members.sessions.get(event.call)
        if server is None:
            return []
        return self.registry.join_answered(server, event.proposal_id, event.accepted, event.version_max, self.members)

    def _leave(self, event: Leave) -> list[Effect]:
        member = self.members.check_caller(event.caller, role=None)
        lost = self._held_by([member.member_id])
        gone, session = self.members.end(member.member_id, "left", event.reason or "done")
        effects: list[Effect] = [Note(f"{gone} left: {gone.reason}"), *lost, Answer(event.call, Done())]
        return [*effects, Close(session)] if session else effects

    def _lose(self, gone: list[tuple[str, str]]) -> list[Effect]:
        """Members are lost, each for its reason."""
        notes: list[Effect] = []
        news: list[Effect] = []
        held = self._held_by([member_id for member_id, _ in gone])
        for member_id, reason in gone:
            member, session = self.members.end(member_id, "lost", reason)
            notes.append(Note(f"{member} is lost: {reason}", "warning"))
            news.append(Announce(MemberLost(member_id, member.role, reason)))
            if session:
                news.append(Close(session))
        return [*notes, *held, *news]

    def _held_by(self, ids: list[str]) -> list[Effect]:
        """What is lost with servers that are about to go. Where no worker is left, nobody misses it."""
        names = {i: [e.spec.name for e in self.registry.entries if i in e.primaries] for i in ids}
        missed = bool(self.members.workers)
        return [
            Note(f"lost: {id_} held shards of {', '.join(map(repr, held))}; restart the run", "warning")
            if missed
            else Note(f"{id_} takes its shards of {', '.join(map(repr, held))} with it; no worker is left")
            for id_, held in names.items()
            if held
        ]

    def _tick(self, now: float) -> list[Effect]:
        late = now - self._ticked - self.tick_seconds
        self._ticked = now
        if late > self.tick_seconds:
            self.members.extend(now, late)
        return self._lose(self.members.expired(now))

    def _forget(self, call: int) -> None:
        self._waiters.pop(call, None)
        self._told.pop(call, None)
        self.registry.end(call)
        self._barriers.end(call)
        self._rendezvous.end(call)

    def _commit(self, effects: list[Effect], now: float, changed: bool = False) -> list[Effect]:
        """Lets everything go on that can, and puts what became of it in the order that the module's text promises."""
        effects += self._end_calls_of_the_gone()
        effects += self.registry.progress(self.members, now)
        effects += self._barriers.progress(self.members) + self._rendezvous.progress(now)
        changed = changed or bool(self.members.changed or self.registry.changed or self._rendezvous.changed)
        first = [self._take_changes()] if changed else []
        news = [effect for effect in effects if isinstance(effect, Announce)]
        rest: list[Effect] = [effect for effect in effects if not isinstance(effect, Announce)]
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

    def _take_changes(self) -> Effect:
        self.epoch += 1
        persist = Persist(
            epoch=self.epoch,
            members=tuple(m for id_ in self.members.changed if (m := self.members.get(id_)) is not None),
            parameters=tuple(self.registry.record(name) for name in self.registry.changed),
            nodes=tuple(self._rendezvous.changed),
        )
        self.members.changed.clear()
        self.registry.changed.clear()
        self._rendezvous.changed.clear()
        return persist

    def _settle(self, effects: list[Effect]) -> None:
        """Calls that were answered for good do not wait any more."""
        for effect in effects:
            if isinstance(effect, Refuse) or (isinstance(effect, Answer) and not isinstance(effect.value, Upload)):
                self._waiters.pop(effect.call, None)
                self._told.pop(effect.call, None)

    def _report(self, now: float) -> list[Effect]:
        """Tells the calls that wait why, and notes what has waited for long."""
        effects: list[Effect] = []
        waits: dict[str, _Wait] = {}
        sources = (
            self.registry.waits(self.members, now),
            self._barriers.waits(self.members),
            self._rendezvous.waits(now),
        )
        for key, calls, text in (wait for source in sources for wait in source):
            wait = waits[key] = self._waits.get(key) or _Wait(now, text)
            wait.text = text
            if now - wait.since >= REPORT_WAIT_SECONDS and wait.reported != text:
                wait.reported = text
                effects.append(Note(f"{key}: waiting {text}, {now - wait.since:.0f} s so far", "wait"))
            for call in calls:
                told = self._told.get(call)
                if told is None or told.text != text or now - told.at >= REPEAT_SECONDS:
                    self._told[call] = _Told(text, now)
                    effects.append(Answer(call, Waiting(text)))
        self._waits = waits
        return effects
