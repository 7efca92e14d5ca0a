"""Losses of members: collects the evidence, and ends those that are lost. Pure.

``docs/internals/losses.md`` explains which evidence exists, what each proves, and why some losses are deferred.

* A member that is silent towards the scheduler, or whose session ended, is suspected, and lost only by ``is_lost``.
* A worker that cannot reach a server, while both reach the scheduler, is judged by ``UnreachableServers``.
* A loss that rolls the run back waits while nobody knows which snapshot is the newest (``DeferredLosses``).

``members`` holds leases and sessions, and ends a member. Losses of shards are handled by ``shard_placement``, of data
by ``leased_datasets``, and of the run by ``rollback``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from psdist.consistency import ASP
from psdist.errors import DuplicateMemberError
from psdist.types import ParametersEntry, Replica, Shard
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_events import Register, UnreachableServer
from psdist_scheduler.decide.cluster_state import ClusterSettings, Identity, Member, ProbeResult
from psdist_scheduler.decide.effects import Answer, CheckServer, Effect, LogEvent, Wait
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.parameter_sets import Registry
from psdist_scheduler.decide.shard_placement import after_loss
from psdist_scheduler.decide.snapshots import Snapshots

#: Leases after which a member is expelled that others hear, and the scheduler does not, if there are other copies: it
#: misses new maps, and others may have to wait for it.
HEARD_LEASES: Final = 3
#: Leases for which a server with the last copy of a shard is awaited.
LAST_COPY_LEASES: Final = 30
#: Number of workers that are asked at a time whether they reach a server.
_ASKED_AT_A_TIME: Final = 3
#: Heartbeats after which a report of an unreachable server is outdated. Workers of a large run send fewer.
FRESH_HEARTBEATS: Final = 3
#: Pause in seconds between two requests to other workers about a server that one cannot reach.
ASK_SECONDS: Final = 2.0
#: Seconds for which an answer is evidence.
EVIDENCE_SECONDS: Final = 6.0
#: Younger reports are not logged: connections break and are made again.
_LOG_SECONDS: Final = 3.0
#: Longest time in seconds that a loss is deferred. Servers that register wait longer for an address to become free.
PATIENCE_SECONDS: Final = 30.0

#: Ids of members, and the reason for the loss of each.
Losses = list[tuple[str, str]]


# --- the rule for a silent member -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence on a member whose lease has expired or whose session ended.

    overdue: seconds since its lease expired; negative before.
    lease: its length in seconds.
    others: True if somebody else has recently reached the scheduler. If not, the scheduler suspects itself.
    probe: result of a connection to its port during this silence.
    ended: True if its own side ended the session while the connection worked, as a dying process does.
    heard: True if others have heard from it since.
    last_copy: True if a shard has no other complete copy on a server that is not silent itself.
    asked_for: seconds during which another process has requested its id.
    answers: True for a worker with an open session: its process answers the pings of the connection.
    """

    overdue: float
    lease: float
    others: bool = True
    probe: ProbeResult = ""
    ended: bool = False
    heard: bool = False
    last_copy: bool = False
    asked_for: float = 0.0
    answers: bool = False

    @property
    def leases(self) -> float:
        """Number of leases for which the member may be silent."""
        if self.answers:
            return float("inf")
        if self.last_copy:
            return float("inf") if self.heard else LAST_COPY_LEASES
        return HEARD_LEASES if self.heard else 1


def is_lost(e: Evidence) -> bool:
    """Return True if the member is to be expelled now."""
    if e.probe == "refused" and (e.others or e.ended):
        return True
    if e.asked_for >= e.lease and e.overdue > 0:
        return True
    return e.others and e.overdue > (e.leases - 1) * e.lease


def excuse(e: Evidence) -> str:
    """Return why a member whose lease has expired is not expelled yet."""
    if not e.others:
        return "nobody else reached the scheduler meanwhile, which may be cut off itself"
    if e.answers:
        return "its process answers pings, so it is busy, perhaps in one long call of C code; the run waits for it"
    until = f"it is expelled after {e.leases * e.lease:g} s" if e.leases != float("inf") else "the run waits for it"
    if e.heard:
        return f"others hear from it; {until}"
    kernel = ", and its host accepts connections" if e.probe == "accepted" else ""
    return f"it may have the last copy of a shard{kernel}; {until}"


# --- losses that wait -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class DeferredLosses:
    """Servers that are gone and still count as members, because their loss rolls the run back.

    Invariant: A loss is deferred only while it is in doubt which snapshot is the newest.
    """

    _registry: Registry
    _members: Membership
    _snapshots: Snapshots
    #: Incarnation and reason of each deferred loss, by member id.
    _deferred: dict[str, tuple[Member, str]] = field(default_factory=dict)
    #: Time of the first deferral since the newest snapshot was last known.
    _since: float | None = None

    @property
    def wait(self) -> str:
        """Reason for the wait, as text that begins with "for"; empty if nothing is deferred."""
        if not self._deferred:
            return ""
        who = "; ".join(
            f"{member}, which had the only copy of shards, is gone ({why})" for member, why in self._deferred.values()
        )
        return f"{self._snapshots.doubt}, to roll back to the newest: {who}"

    def validate(self) -> None:
        assert all(self._is_gone(member) for member, _ in self._deferred.values()), "a present server is deferred"
        assert not self._deferred or self._snapshots.doubt, "a loss is deferred for nothing"

    def check(self, event: Register, now: float) -> None:
        """Raise DuplicateMemberError if a server would replace one whose loss must wait. Registering it would end that
        one."""
        if event.role != "server" or not self._must_wait(now):
            return
        for member in self._members.servers:
            same = event.member_id == member.member_id or (event.address and event.address == member.address)
            if same and self.has_last_copy(member):
                raise DuplicateMemberError(
                    f"this takes the place of {member} at {member.address}, which had the only copy of shards. Its "
                    f"loss waits {self._snapshots.doubt}: try again",
                    member_id=member.member_id,
                )

    def defer(self, gone: Losses, now: float) -> tuple[Losses, list[Effect]]:
        """Defer the losses that must wait. Returns those that count now."""
        counts: Losses = []
        effects: list[Effect] = []
        for member_id, reason in gone:
            member = self._members.get(member_id)
            if member_id in self._deferred:
                continue
            if member is None or not self._must_wait(now) or not self.has_last_copy(member):
                counts.append((member_id, reason))
                continue
            self._since = now if self._since is None else self._since
            self._deferred[member_id] = member, reason
            level: Literal["info", "warning"] = "warning" if self._members.workers else "info"
            effects.append(LogEvent(f"{member} is gone: {reason}; waiting {self.wait}", level))
            if session := self._members.sessions.call_of(member_id):
                self._members.sessions.detach(session, now)
                effects.append(ef.Close(session))
        return counts, effects

    def due(self, now: float) -> Losses:
        """Return the deferred losses that count now. Those of servers that are back are forgotten."""
        self._deferred = {id_: loss for id_, loss in self._deferred.items() if self._is_gone(loss[0])}
        if not self._snapshots.doubt:
            self._since = None
        if not self._deferred or self._must_wait(now):
            return []
        due = [(member_id, reason) for member_id, (_, reason) in self._deferred.items()]
        self._deferred.clear()
        return due

    def _is_gone(self, member: Member) -> bool:
        return self._members.is_live(*member.identity) and not self._members.sessions.call_of(member.member_id)

    def _must_wait(self, now: float) -> bool:
        patient = self._since is None or now - self._since < PATIENCE_SECONDS
        return bool(self._snapshots.doubt) and patient

    def has_last_copy(self, member: Member, but: frozenset[str] = frozenset()) -> bool:
        """Return True for a server with values that nobody else has, apart from the servers ``but``."""

        def is_left(replica: Replica) -> bool:
            there = self._members.has(replica) and replica.server_id != member.member_id
            return there and replica.server_id not in but

        def is_holder(shard: Shard) -> bool:
            return member.replica in (shard.primary, *shard.backups)

        if member.role != "server":
            return False
        shards = (shard for entry in self._registry.entries if entry.ready for shard in entry.shards)
        return any(is_holder(shard) and after_loss(shard, is_left).lost and not shard.lost for shard in shards)


# --- broken paths between members -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Doubt:
    """A worker's report that it cannot reach a server.

    reported: time of its last report.
    heard: time at which the server last heard from the worker.
    """

    since: float
    reported: float
    reason: str
    heard: float = float("-inf")
    is_logged: bool = False


@dataclass(slots=True)
class UnreachableServers:
    """Servers that a worker cannot reach while both reach the scheduler: whom to ask, and whom to expel.

    After ``worker_lease_seconds`` without an interruption:

    * The server is lost if most workers cannot reach it, no last copy of a shard is lost with it, and another server
      is left.
    * Otherwise the worker is expelled if another worker reached the server within the last ``EVIDENCE_SECONDS``, the
      server has not heard from it since its last report, and others wait for it. It keeps its session.

    Otherwise nobody is expelled: not the last worker, nor one that nobody waits for (ASP). Members are expelled one at
    a time, because the next one is judged by those that remain.
    """

    _settings: ClusterSettings
    _members: Membership
    _registry: Registry
    _deferred: DeferredLosses
    #: Reports by worker identity and server.
    _doubts: dict[tuple[Identity, Replica], _Doubt] = field(default_factory=dict)
    #: Time at which a worker last reached a server because it was asked to, by server and worker id.
    _reached: dict[Replica, dict[str, float]] = field(default_factory=dict)
    _asked: float = float("-inf")

    def on_report(self, worker: Member, reports: Sequence[UnreachableServer], now: float) -> list[Effect]:
        """Replace a worker's list of servers that it cannot reach."""
        known = {report.server: report for report in reports if self._members.has(report.server)}
        effects: list[Effect] = []
        for key in [key for key in self._doubts if key[0][0] == worker.member_id]:
            if key[0] != worker.identity or key[1] not in known:
                effects += self._forget(key)
        for server, report in known.items():
            doubt = self._doubts.setdefault((worker.identity, server), _Doubt(now, now, report.reason))
            doubt.since = min(doubt.since, now - report.seconds)
            doubt.reported, doubt.reason = now, report.reason
            self._reached.get(server, {}).pop(worker.member_id, None)
        return effects

    def on_checked(self, worker: Member, server: Replica, *, reached: bool, now: float) -> None:
        """Record a worker's answer whether it reached a server."""
        if any(server == doubted for _, doubted in self._doubts):
            answers = self._reached.setdefault(server, {})
            answers.pop(worker.member_id, None)
            if reached:
                answers[worker.member_id] = now

    def on_heard(self, server: Replica, worker: Identity, when: float) -> None:
        """Record that a server has heard from a worker: a report from before says nothing any more. A worker that is
        busy may not be able to withdraw it."""
        if (doubt := self._doubts.get((worker, server))) is not None:
            doubt.heard = max(doubt.heard, when)

    def progress(self, now: float) -> list[Effect]:
        """Forget reports of members that are gone, log the others, and ask other workers."""
        effects: list[Effect] = []
        for key in [key for key in self._doubts if not self._are_live(key)]:
            effects += self._forget(key)
        for (worker, server), doubt in self._doubts.items():
            if not doubt.is_logged and now - doubt.since >= _LOG_SECONDS:
                doubt.is_logged = True
                effects.append(LogEvent(f"{worker[0]} cannot reach {server}: {doubt.reason}", "warning"))
        if self._doubts and now - self._asked >= ASK_SECONDS:
            self._asked = now
            for server in dict.fromkeys(server for _, server in self._doubts):
                effects += self._ask(server)
        return effects

    def expelled(self, now: float) -> Losses:
        """Return the member to expel now, with the reason; empty for nobody."""
        limit = self._settings.worker_lease_seconds
        heartbeat = self._settings.heartbeat_of("worker", len(self._members.workers))
        fresh_seconds = max(self._settings.lease_seconds, FRESH_HEARTBEATS * heartbeat)
        overdue: dict[Replica, list[tuple[Identity, _Doubt]]] = {}
        for (worker, server), doubt in self._doubts.items():
            is_fresh = now - doubt.reported <= fresh_seconds and doubt.heard <= doubt.reported
            if now - doubt.since > limit and is_fresh and self._entries_of(server):
                overdue.setdefault(server, []).append((worker, doubt))
        for server, doubts in overdue.items():
            if 2 * len(doubts) > len(self._members.workers) and self._can_go(server, now):
                names = ", ".join(worker_id for (worker_id, _), _ in doubts)
                return [(server.server_id, f"{names} cannot reach it for {limit:g} s (--worker-timeout)")]
        return self._blamed_worker(overdue, now)

    def _blamed_worker(self, overdue: dict[Replica, list[tuple[Identity, _Doubt]]], now: float) -> Losses:
        blamed: dict[str, list[str]] = {}
        for server, doubts in overdue.items():
            for worker, doubt in doubts:
                others = self._witnesses(server, worker[0], now)
                if others and self._is_waited_for(worker, server):
                    seconds = now - doubt.since
                    blamed.setdefault(worker[0], []).append(
                        f"it cannot reach {server} for {seconds:.0f} s (--worker-timeout is "
                        f"{self._settings.worker_lease_seconds:g} s), and {', '.join(others)} can: {doubt.reason}"
                    )
        if not blamed:
            return []
        rank = {worker.member_id: worker.rank for worker in self._members.workers}
        worst = max(blamed, key=lambda worker_id: (len(blamed[worker_id]), rank[worker_id]))
        return [(worst, "; ".join(blamed[worst]))]

    def sentences(self, member_id: str, now: float) -> list[str]:
        """Return a worker's waits for servers, for ``psdist status``. Each text begins with "for"."""
        return [
            f"for {server} to be reachable from here ({now - doubt.since:.0f} s): {doubt.reason}"
            for (worker, server), doubt in self._doubts.items()
            if worker[0] == member_id
        ]

    def waits(self) -> Iterator[Wait]:
        """Yield the servers that workers wait to reach."""
        for worker, server in self._doubts:
            others = ", ".join(sorted(self._reached.get(server, {})))
            who = f"{others} can" if others else "no other worker has reached it yet"
            yield f"{worker[0]} to {server}", [], f"for {worker[0]} to reach {server}, which it cannot; {who}"

    def validate(self) -> None:
        assert self._reached.keys() <= {server for _, server in self._doubts}, "answers about a server nobody doubts"

    def _are_live(self, key: tuple[Identity, Replica]) -> bool:
        return self._members.is_live(*key[0]) and self._members.has(key[1])

    def _forget(self, key: tuple[Identity, Replica]) -> list[Effect]:
        worker, server = key
        doubt = self._doubts.pop(key)
        if not any(server == doubted for _, doubted in self._doubts):
            self._reached.pop(server, None)
        is_back = doubt.is_logged and self._are_live(key)
        return [LogEvent(f"{worker[0]} reaches {server} again")] if is_back else []

    def _ask(self, server: Replica) -> list[Effect]:
        """Ask workers that do not doubt the server, starting with those that last reached it."""
        doubting = {worker_id for (worker_id, _), doubted in self._doubts if doubted == server}
        answers = self._reached.get(server, {})
        others = [worker for worker in self._members.workers if worker.member_id not in doubting]
        others.sort(key=lambda worker: -answers.get(worker.member_id, float("-inf")))
        return _ask_first(others, server, self._members)

    def _witnesses(self, server: Replica, worker_id: str, now: float) -> list[str]:
        """Return other live workers that recently reached the server."""
        live = {worker.member_id for worker in self._members.workers} - {worker_id}
        answers = self._reached.get(server, {}).items()
        return sorted(other for other, when in answers if other in live and now - when <= EVIDENCE_SECONDS)

    def _entries_of(self, server: Replica) -> list[ParametersEntry]:
        """Return the parameter sets that the server is a primary of."""
        return [entry for entry in self._registry.entries if any(shard.primary == server for shard in entry.shards)]

    def _is_waited_for(self, worker: Identity, server: Replica) -> bool:
        """Return True if others wait for the pushes of this worker to this server."""
        return any(
            not isinstance(entry.spec.consistency, ASP) and any(member.identity == worker for member in entry.members)
            for entry in self._entries_of(server)
        )

    def _can_go(self, server: Replica, now: float) -> bool:
        """True if nothing is lost with the server, and another one is left. A silent server may be gone itself, so its
        copies do not count."""
        member = self._members.get(server.server_id)
        if member is None or len(self._members.servers) <= 1:
            return False
        return not self._deferred.has_last_copy(member, _silent_servers(self._members, now))


def _ask_first(workers: Sequence[Member], server: Replica, members: Membership) -> list[Effect]:
    """Ask the first of these workers that have a session whether they reach a server."""
    return members.tell((worker.member_id for worker in workers), CheckServer(server))[:_ASKED_AT_A_TIME]


def _silent_servers(members: Membership, now: float) -> frozenset[str]:
    return frozenset(s.member_id for s in members.servers if members.sessions.is_silent(s.member_id, now))


# --- all losses -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Findings:
    """Findings during one silence of one member.

    probe: result of the last connection to its port.
    probing: True while another connection is tried.
    heard: time at which a worker last reached it on request.
    asked: time at which workers were last asked.
    wanted_since, wanted_until: times at which another process first and last requested its id.
    is_logged: True once the log says why it is not expelled.
    """

    probe: ProbeResult = ""
    probing: bool = False
    heard: float = float("-inf")
    asked: float = float("-inf")
    wanted_since: float = float("inf")
    wanted_until: float = float("-inf")
    is_logged: bool = False


class MemberLosses:
    """Decides which members of one run are lost, and when their losses count.

    Invariant: Findings about a silence are forgotten when the member is heard again, or is another incarnation.
    """

    def __init__(
        self, settings: ClusterSettings, members: Membership, registry: Registry, snapshots: Snapshots, now: float
    ) -> None:
        self._settings = settings
        self._members = members
        self.deferred = DeferredLosses(registry, members, snapshots)
        self.unreachable = UnreachableServers(settings, members, registry, self.deferred)
        self._ticked = now
        self._findings: dict[Identity, Findings] = {}
        #: Why members with an expired lease were not expelled at the last tick, and how long they had been silent.
        self._excuses: dict[str, tuple[str, float]] = {}

    # --- evidence -----------------------------------------------------------------------------------------------------

    def on_register(self, event: Register, now: float) -> None:
        """Record a registration that requests a member's place, as evidence that this member is gone.

        Raises DuplicateMemberError if the loss of that member must wait.
        """
        member = self._members.get(event.member_id) or next(
            (worker for worker in self._members.workers if event.role == "worker" and worker.rank == event.rank), None
        )
        if member is not None and member.live and member.role == event.role:
            findings = self._findings_on(member)
            findings.wanted_since, findings.wanted_until = min(findings.wanted_since, now), now
        self.deferred.check(event, now)

    def on_heartbeat(self, event: ev.Heartbeat, member: Member, now: float) -> list[Effect]:
        """Take a worker's list of servers that it cannot reach, or a server's of workers that it has heard."""
        if member.role == "worker":
            return self.unreachable.on_report(member, event.unreachable, now)
        for worker_id, incarnation, age in event.heard:
            self._members.on_activity([(worker_id, incarnation)], now - age)
            self.unreachable.on_heard(member.replica, (worker_id, incarnation), now - age)
        return []

    def on_checked(self, event: ev.ServerChecked, now: float) -> list[Effect]:
        """Record a worker's answer whether it reached a server."""
        if (worker := self._members.by_session(event.call)) is not None:
            server = event.server
            self.unreachable.on_checked(worker, server, reached=event.reached, now=now)
            findings = self._findings.get((server.server_id, server.incarnation))
            if event.reached and findings is not None:
                findings.heard = now
        return []

    def on_probed(self, event: ev.Probed, now: float) -> list[Effect]:
        """Process the result of a probe of a server's port."""
        findings = self._findings.get((event.member_id, event.incarnation))
        if findings is None or not self._members.is_live(event.member_id, event.incarnation):
            return []
        findings.probing, findings.probe = False, event.result
        is_suspect = event.member_id in self._members.sessions.suspects(now)
        lost = self._if_lost(event.member_id, now) if is_suspect else []
        if not lost and event.result == "refused":
            findings.probe = ""  # It proves nothing now. Try again when it can.
        return self._lose(lost, now)

    def close_session(self, event: ev.SessionClosed, now: float) -> list[Effect]:
        """Judge a member whose session ended."""
        sessions = self._members.sessions
        member = self._members.by_session(event.call)
        if member is None:
            return []
        # This process may have been suspended until members hung up.
        was_suspended = now - self._ticked >= self._settings.lease_seconds / 2
        steady = sessions.was_steady(member.member_id, now) and not was_suspended
        if steady and member.role == "worker":
            return self._lose([(member.member_id, event.reason)], now)
        sessions.detach(event.call, now, by_member=steady)
        if member.role == "server":
            return self._probe(member)
        return [LogEvent(f"the session of {member} ended after a silence; waiting for it to return")]

    # --- judgement ----------------------------------------------------------------------------------------------------

    def replace_at_address(self, member: Member, now: float) -> list[Effect]:
        """Replace the server registered at this address (a restart, or a retried registration).

        An address belongs to one process. Otherwise shards could be placed on the old incarnation, and their calls
        would reach the new one. The address of a worker replaces nobody: nothing is placed on workers.
        """
        if member.role == "worker":
            return []
        before = [m.member_id for m in self._members.servers if m.address == member.address and m is not member]
        return self._lose([(member_id, f"{member} registered at its address") for member_id in before], now)

    def leave(self, event: ev.Leave, now: float) -> list[Effect]:
        """Remove a member that leaves in an orderly way. Raises FencedError."""
        done, reason = Answer(event.call, ef.Done()), event.reason or "done"
        if self._members.leave_late(event.caller, reason):
            return [done]
        member = self._members.check_caller(event.caller, role=None)
        counts, effects = self.deferred.defer([(member.member_id, reason)], now)
        return [*effects, *(self._members.leave(member.member_id, reason, now) if counts else ()), done]

    def tick(self, now: float) -> list[Effect]:
        """Judge the suspects, ask for further evidence on silent members, and judge broken paths."""
        sessions = self._members.sessions
        late = now - self._ticked - self._settings.tick_seconds
        if late > self._settings.tick_seconds:
            sessions.extend(now, late)
        self._ticked = now
        suspects, silent = sessions.suspects(now), _silent_servers(self._members, now)
        servers = [s for s in self._members.servers if s.member_id in suspects or s.member_id in silent]
        kept = {server.identity for server in servers}
        kept |= {member.identity for id_ in suspects if (member := self._members.get(id_)) is not None}
        self._findings = {identity: f for identity, f in self._findings.items() if identity in kept}
        losses: Losses = []
        effects: list[Effect] = []
        self._excuses = {}
        for member_id in suspects:
            losses += (lost := self._if_lost(member_id, now))
            effects += [] if lost else self._excuse(member_id, now)
        for server in servers:
            effects += self._ask(server, now)
            effects += self._probe(server) if server.member_id in suspects else []
        effects += self._lose(losses, now)
        effects += self.unreachable.progress(now)
        return effects + self._lose(self.unreachable.expelled(now), now)

    def progress(self, now: float) -> list[Effect]:
        """Apply deferred losses that count now."""
        return self._end(self.deferred.due(now), now)

    # --- reports ------------------------------------------------------------------------------------------------------

    def waits(self) -> Iterator[Wait]:
        """Yield the losses that wait, the servers that workers wait to reach, and the silent members."""
        if wait := self.deferred.wait:
            yield "lost shards", [], wait
        yield from self.unreachable.waits()
        for member_id, (text, _) in self._excuses.items():
            yield f"silent {member_id}", [], f"for {member_id} to be heard again: {text}"

    @property
    def silence_text(self) -> str:
        """The silent members that are awaited, for the run's phase; empty for none."""
        silent = self._excuses.items()
        return "; ".join(
            f"{member_id} has been silent for {seconds:.1f} s: {text}" for member_id, (text, seconds) in silent
        )

    def validate(self) -> None:
        self.deferred.validate()
        self.unreachable.validate()

    # --- parts --------------------------------------------------------------------------------------------------------

    def _lose(self, gone: Losses, now: float) -> list[Effect]:
        """Lose members, each for its reason: now, or once it is known to which snapshot the run rolls back."""
        counts, effects = self.deferred.defer(gone, now)
        return effects + self._end(counts, now)

    def _end(self, gone: Losses, now: float) -> list[Effect]:
        return [effect for member_id, reason in gone for effect in self._members.lose(member_id, reason, now)]

    def _findings_on(self, member: Member) -> Findings:
        return self._findings.setdefault(member.identity, Findings())

    def _probe(self, server: Member) -> list[Effect]:
        """Start a probe of a server's port, unless one is in progress."""
        findings = self._findings_on(server)
        if findings.probing:
            return []
        findings.probing = True
        return [ef.Probe(server.member_id, server.incarnation, server.address)]

    def _ask(self, server: Member, now: float) -> list[Effect]:
        """Ask workers about a silent server, so that their answers are available when its lease expires."""
        findings, liveness = self._findings_on(server), self._members.sessions.liveness
        if now - findings.asked < self._settings.lease_seconds / 2:
            return []
        findings.asked = now
        workers = sorted(self._members.workers, key=lambda worker: -liveness[worker.member_id].seen)
        return _ask_first(workers, server.replica, self._members)

    def _if_lost(self, member_id: str, now: float) -> Losses:
        evidence = self._evidence(member_id, now)
        if not is_lost(evidence):
            return []
        port = ", and its port refuses connections" if evidence.probe == "refused" else ""
        return [(member_id, f"{self._members.sessions.liveness[member_id].silence(now)}{port}")]

    def _excuse(self, member_id: str, now: float) -> list[Effect]:
        evidence, member = self._evidence(member_id, now), self._members.get(member_id)
        if evidence.overdue <= 0 or member is None:
            return []
        liveness = self._members.sessions.liveness[member_id]
        self._excuses[member_id] = excuse(evidence), now - liveness.seen
        findings = self._findings_on(member)
        if findings.is_logged:
            return []
        findings.is_logged = True
        return [LogEvent(f"{member} is not expelled yet ({liveness.silence(now)}): {excuse(evidence)}", "warning")]

    def _evidence(self, member_id: str, now: float) -> Evidence:
        sessions, member = self._members.sessions, self._members.get(member_id)
        assert member is not None
        liveness = sessions.liveness[member_id]
        findings = self._findings.get(member.identity) or Findings()
        # A member that never had a session takes part in nothing yet.
        takes_part = sessions.was_open(member_id) or liveness.restored
        return Evidence(
            overdue=now - liveness.deadline,
            lease=self._settings.lease_seconds,
            others=not takes_part or sessions.somebody_beside(member_id, now),
            probe=findings.probe,
            ended=liveness.ended_by_member,
            heard=now - findings.heard <= self._settings.lease_seconds,
            last_copy=takes_part and self.deferred.has_last_copy(member, _silent_servers(self._members, now)),
            asked_for=findings.wanted_until - findings.wanted_since,
            answers=member.role == "worker" and bool(liveness.session),
        )
