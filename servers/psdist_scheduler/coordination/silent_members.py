"""Members that are silent towards the scheduler: gathers the evidence on them, and names those that are lost. Pure.

If a server is silent for longer than its interval of heartbeats, workers are asked whether they reach it, so that their
answers are available when its lease expires. Once its lease has expired, or its session has ended, each tick also
probes its port.

Invariant: Findings about a silence are forgotten when the member is heard again, or is another incarnation.

``members.sessions`` knows who is silent, ``members.suspicion`` has the rule, ``member_losses`` handles a loss.
``unreachable_servers`` handles broken paths between members.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from psdist.types import Replica
from psdist_scheduler.coordination.deferred_losses import DeferredLosses, Losses
from psdist_scheduler.events.cluster_events import Answer, Effect, LogEvent, Probe, Probed, Register, Wait
from psdist_scheduler.events.cluster_state import ClusterSettings, Identity, Member, ProbeResult
from psdist_scheduler.events.worker_events import CheckServer
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.members.suspicion import Evidence, excuse, is_lost

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
