"""Losses of members: collects the evidence, and ends those that are lost. Pure.

A member whose lease expired, or whose session ended, is suspected, and lost only on evidence (``silent_members``). A
worker whose session ended while its messages arrived regularly is lost immediately: its kernel ended the session. A
loss that must wait for the storage is deferred (``deferred_losses``). Missing members are awaited, or end the run
(``start``).

``membership`` ends a member. Losses of shards are handled by ``replica_manager``, of data by ``datasets``, and of the
run by ``rollback``. They need the members, so this cannot be part of ``membership``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from psdist.types import Replica
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_events import Probed, Register, ServerChecked
from psdist_scheduler.decide.cluster_state import ClusterSettings, Identity, Member, ProbeResult
from psdist_scheduler.decide.deferred_losses import DeferredLosses, Losses
from psdist_scheduler.decide.effects import Answer, CheckServer, Effect, LogEvent, Probe, Wait
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.run_end import RunStart
from psdist_scheduler.decide.unreachable_servers import UnreachableServers


@dataclass(slots=True)
class MemberLosses:
    """Decides which members of one run are lost, and when their losses count."""

    _settings: ClusterSettings
    _members: Membership
    deferred: DeferredLosses
    unreachable: UnreachableServers
    silent: SilentMembers
    start: RunStart
    _ticked: float

    def on_register(self, event: ev.Register, now: float) -> None:
        """Take a registration as evidence on the member whose place it requests. Raises DuplicateMemberError."""
        self.silent.on_wanted(event, now)
        self.deferred.check(event, now)

    def replace_at_address(self, member: Member, now: float) -> list[ef.Effect]:
        """Replace the server registered at this address (a restart, or a retried registration).

        An address belongs to one process. Otherwise shards could be placed on the old incarnation, and their calls
        would reach the new one. The address of a worker replaces nobody: nothing is placed on workers.
        """
        if member.role == "worker":
            return []
        before = [m.member_id for m in self._members.servers if m.address == member.address and m is not member]
        return self._lose([(member_id, f"{member} registered at its address") for member_id in before], now)

    def close_session(self, event: ev.SessionClosed, now: float) -> list[ef.Effect]:
        """Judge a member whose session ended."""
        member_id = self._members.sessions.member_of(event.call)
        member = self._members.get(member_id or "")
        if member is None:
            return []
        steady = self._members.sessions.was_steady(member.member_id, now) and not self._was_suspended(now)
        if steady and member.role == "worker":
            return self._lose([(member.member_id, event.reason)], now)
        self._members.sessions.detach(event.call, now, by_member=steady)
        if member.role == "server":
            return self.silent.probe(member)
        return [ef.LogEvent(f"the session of {member} ended after a silence; waiting for it to return")]

    def on_probed(self, event: ev.Probed, now: float) -> list[ef.Effect]:
        """Process the result of a probe of a server's port."""
        return self._lose(self.silent.on_probed(event, now), now)

    def on_checked(self, event: ServerChecked, now: float) -> list[ef.Effect]:
        """Process a worker's answer whether it reached a server."""
        if (worker := self._members.by_session(event.call)) is not None:
            self.unreachable.on_checked(worker, event.server, reached=event.reached, now=now)
            if event.reached:
                self.silent.on_reached(event.server, now)
        return []

    def leave(self, event: ev.Leave, now: float) -> list[ef.Effect]:
        """Remove a member that leaves in an orderly way. Raises FencedError."""
        done, reason = ef.Answer(event.call, ef.Done()), event.reason or "done"
        if self._members.leave_late(event.caller, reason):
            return [done]
        member = self._members.check_caller(event.caller, role=None)
        counts, effects = self.deferred.defer([(member.member_id, reason)], now)
        return [*effects, *(self._members.leave(member.member_id, reason, now) if counts else ()), done]

    def tick(self, now: float) -> list[ef.Effect]:
        """Judge the suspects, and probe again them and broken paths between members."""
        late = now - self._ticked - self._settings.tick_seconds
        if late > self._settings.tick_seconds:
            self._members.sessions.extend(now, late)
        self._ticked = now
        lost, effects = self.silent.tick(now)
        effects += self._lose(lost, now)
        effects += self.unreachable.progress(now)
        return effects + self._lose(self.unreachable.expelled(now), now)

    def progress(self, now: float) -> list[ef.Effect]:
        """Apply deferred losses that count now."""
        return self._end(self.deferred.due(now), now)

    def _was_suspended(self, now: float) -> bool:
        """Return True if this process may have been suspended until members hung up."""
        return now - self._ticked >= self._settings.lease_seconds / 2

    def _lose(self, gone: Losses, now: float) -> list[ef.Effect]:
        """Lose members, each for its reason: now, or once it is known to which snapshot the run rolls back."""
        counts, effects = self.deferred.defer(gone, now)
        return effects + self._end(counts, now)

    def _end(self, gone: Losses, now: float) -> list[ef.Effect]:
        return [effect for member_id, reason in gone for effect in self._members.lose(member_id, reason, now)]


# --- suspicion --------------------------------------------------------------------------------------------------------
#
# Suspicion: the evidence on a silent member, and the rule that decides whether it is lost.
#
# Silence alone proves little: the member may be slow, the network between it and the scheduler may be down, or the
# scheduler itself may be cut off. So the rule asks three questions before it expels anybody:
#
# 1. Has somebody else reached the scheduler meanwhile? If not, the scheduler suspects itself and waits. When its
#   network is back, everybody has ``RETURN_LEASES`` to return.
# 2. Have others heard from the member? Then it is alive and only cut off from the scheduler.
# 3. What is the cost of a mistake? If every shard of the member has another complete copy, one lease is enough. If
#   its loss would take the last copy of a shard, the scheduler waits much longer, because a member that returns
#   brings everything with it.
#
# A process that is gone needs no patience: its kernel ends its session, and refuses connections to its port. Nor does
# a member whose id is requested by another process: whoever starts members has replaced it.
#
# A silent worker with an open session is alive. Threads that need no interpreter answer the pings of its connection;
# if the process is stopped or cut off, missing answers break the session. So a worker may hold its interpreter in one
# call of C code for any time.
#
# ``sessions`` knows who is silent; ``member_losses`` collects the evidence.

#: Leases after which a member is expelled that others hear, and the scheduler does not, if there are other copies: it
#: misses new maps, and others may have to wait for it.
HEARD_LEASES: Final = 3
#: Leases for which a server with the last copy of a shard is awaited.
LAST_COPY_LEASES: Final = 30


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence on a member whose lease has expired or whose session ended.

    overdue: seconds since its lease expired; negative before.
    lease: its length in seconds.
    others: True if somebody else has recently reached the scheduler.
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


def is_lost(e: Evidence) -> bool:
    """Return True if the member is to be expelled now."""
    if e.probe == "refused" and (e.others or e.ended):
        return True
    if e.asked_for >= e.lease and e.overdue > 0:
        return True
    return e.others and e.overdue > (_leases(e) - 1) * e.lease


def excuse(e: Evidence) -> str:
    """Return why a member whose lease has expired is not expelled yet."""
    if not e.others:
        return "nobody else reached the scheduler meanwhile, which may be cut off itself"
    if e.answers:
        return "its process answers pings, so it is busy, perhaps in one long call of C code; the run waits for it"
    leases = _leases(e)
    until = f"it is expelled after {leases * e.lease:g} s" if leases != float("inf") else "the run waits for it"
    if e.heard:
        return f"others hear from it; {until}"
    kernel = ", and its host accepts connections" if e.probe == "accepted" else ""
    return f"it may have the last copy of a shard{kernel}; {until}"


def _leases(e: Evidence) -> float:
    """Return the number of leases for which the member may be silent."""
    if e.answers:
        return float("inf")
    if e.last_copy:
        return float("inf") if e.heard else LAST_COPY_LEASES
    return HEARD_LEASES if e.heard else 1


# --- silent members ---------------------------------------------------------------------------------------------------
#
# Members that are silent towards the scheduler: gathers the evidence on them, and names those that are lost.
#
# If a server is silent for longer than its interval of heartbeats, workers are asked whether they reach it, so that
# their answers are available when its lease expires. Once its lease has expired, or its session has ended, each tick
# also probes its port.
#
# Invariant: Findings about a silence are forgotten when the member is heard again, or is another incarnation.
#
# ``members.sessions`` knows who is silent, ``members.suspicion`` has the rule, ``member_losses`` handles a loss.
# ``unreachable_servers`` handles broken paths between members.


#: Number of workers that are asked about a silent server at a time.
_ASKED_AT_A_TIME = 3


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


@dataclass(slots=True)
class SilentMembers:
    """The silent members of one run."""

    _settings: ClusterSettings
    _members: Membership
    _deferred: DeferredLosses
    _findings: dict[Identity, Findings] = field(default_factory=dict)
    #: Why members with an expired lease were not expelled at the last tick, and how long they had been silent.
    _excuses: dict[str, tuple[str, float]] = field(default_factory=dict)

    def on_probed(self, event: Probed, now: float) -> Losses:
        """Process the result of a probe. Returns the server if it is lost."""
        findings = self._findings.get((event.member_id, event.incarnation))
        if findings is None or not self._members.is_live(event.member_id, event.incarnation):
            return []
        findings.probing, findings.probe = False, event.result
        is_suspect = event.member_id in self._members.sessions.suspects(now)
        lost = self._if_lost(event.member_id, now) if is_suspect else []
        if not lost and event.result == "refused":
            findings.probe = ""  # It proves nothing now. Try again when it can.
        return lost

    def on_reached(self, server: Replica, now: float) -> None:
        """Record that a worker that was asked has reached this server."""
        if (findings := self._findings.get((server.server_id, server.incarnation))) is not None:
            findings.heard = now

    def on_wanted(self, event: Register, now: float) -> None:
        """Record a registration that requests a member's place, as evidence that this member is gone."""
        member = self._members.get(event.member_id) or next(
            (worker for worker in self._members.workers if event.role == "worker" and worker.rank == event.rank), None
        )
        if member is None or not member.live or member.role != event.role:
            return
        findings = self._findings.setdefault(member.identity, Findings())
        findings.wanted_since, findings.wanted_until = min(findings.wanted_since, now), now

    def probe(self, member: Member) -> list[Effect]:
        """Start a probe of a server's port, unless one is in progress."""
        findings = self._findings.setdefault(member.identity, Findings())
        if findings.probing:
            return []
        findings.probing = True
        return [Probe(member.member_id, member.incarnation, member.address)]

    def tick(self, now: float) -> tuple[Losses, list[Effect]]:
        """Judge the suspects. Returns the lost members, and requests for further evidence."""
        sessions = self._members.sessions
        suspects = sessions.suspects(now)
        silent = [s for s in self._members.servers if s.member_id in suspects or sessions.is_silent(s.member_id, now)]
        kept = {member.identity for member in silent}
        kept |= {member.identity for id_ in suspects if (member := self._members.get(id_)) is not None}
        self._findings = {identity: f for identity, f in self._findings.items() if identity in kept}
        losses: Losses = []
        effects: list[Effect] = []
        self._excuses = {}
        for member_id in suspects:
            losses += (lost := self._if_lost(member_id, now))
            effects += [] if lost else self._excuse(member_id, now)
        for server in silent:
            effects += self._ask(server, now)
            effects += self.probe(server) if server.member_id in suspects else []
        return losses, effects

    def waits(self) -> Iterator[Wait]:
        """Yield the silent members that are awaited."""
        for member_id, (text, _) in self._excuses.items():
            yield f"silent {member_id}", [], f"for {member_id} to be heard again: {text}"

    @property
    def sentence(self) -> str:
        """The silent members that are awaited, for the run's phase; empty for none."""
        silent = self._excuses.items()
        return "; ".join(
            f"{member_id} has been silent for {seconds:.1f} s: {text}" for member_id, (text, seconds) in silent
        )

    def _ask(self, server: Member, now: float) -> list[Effect]:
        findings = self._findings.setdefault(server.identity, Findings())
        if now - findings.asked < self._settings.lease_seconds / 2:
            return []
        findings.asked = now
        sessions = self._members.sessions
        others = [w for w in self._members.workers if sessions.call_of(w.member_id)]
        others.sort(key=lambda worker: -sessions.liveness[worker.member_id].seen)
        question = CheckServer(server.replica)
        return [Answer(sessions.call_of(worker.member_id), question) for worker in others[:_ASKED_AT_A_TIME]]

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
        self._excuses[member_id] = excuse(evidence), now - self._members.sessions.liveness[member_id].seen
        findings = self._findings.setdefault(member.identity, Findings())
        if findings.is_logged:
            return []
        findings.is_logged = True
        why = self._members.sessions.liveness[member_id].silence(now)
        return [LogEvent(f"{member} is not expelled yet ({why}): {excuse(evidence)}", "warning")]

    def _evidence(self, member_id: str, now: float) -> Evidence:
        sessions, member = self._members.sessions, self._members.get(member_id)
        assert member is not None
        liveness = sessions.liveness[member_id]
        findings = self._findings.get(member.identity) or Findings()
        # A member that never had a session takes part in nothing yet.
        takes_part = sessions.was_open(member_id) or liveness.restored
        silent = frozenset(s.member_id for s in self._members.servers if sessions.is_silent(s.member_id, now))
        return Evidence(
            overdue=now - liveness.deadline,
            lease=self._settings.lease_seconds,
            others=not takes_part or sessions.somebody_beside(member_id, now),
            probe=findings.probe,
            ended=liveness.ended_by_member,
            heard=now - findings.heard <= self._settings.lease_seconds,
            last_copy=takes_part and self._deferred.has_last_copy(member, silent),
            asked_for=findings.wanted_until - findings.wanted_since,
            answers=member.role == "worker" and bool(liveness.session),
        )
