"""Servers that a worker cannot reach while both reach the scheduler: whom to ask, and whom to expel. Pure.

A worker that cannot reach a server holds up all others, in BSP at the next step and in SSP at the bound. No lease
expires, since the worker and the server both send heartbeats. So workers report such servers, and the scheduler asks
other workers to call the same server. Each answer is the result of a call made for this purpose. Together they tell a
broken path from a server that nobody reaches.

After ``worker_lease_seconds`` without an interruption:

* The worker is expelled if another worker reached the server within the last ``EVIDENCE_SECONDS``, the server has not
  heard from it since its last report, and others wait for it. It keeps its session, and rejoins the training when it
  reaches the servers.
* The server is lost instead if most workers cannot reach it, no last copy of a shard is lost with it, and another
  server is left.

Otherwise nobody is expelled: not the last worker, nor one that nobody waits for (ASP). Members are expelled one at a
time, because the next one is judged by those that remain.

``members.sessions`` handles members that are silent towards the scheduler, ``placement.replica_manager`` replicas that
a primary cannot reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from psdist.consistency import ASP
from psdist.types import ParametersEntry, Replica
from psdist_scheduler.decide.cluster_events import UnreachableServer
from psdist_scheduler.decide.cluster_state import ClusterSettings, Identity, Member
from psdist_scheduler.decide.deferred_losses import DeferredLosses, Losses
from psdist_scheduler.decide.effects import Answer, CheckServer, Effect, LogEvent
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.parameter_sets import Registry

#: Number of heartbeats after which a report is outdated. Workers of a large run send their heartbeats less often.
FRESH_HEARTBEATS = 3
#: Pause in seconds between two requests to other workers, and the number of workers asked at a time.
ASK_SECONDS = 2.0
_ASKED_AT_A_TIME = 3
#: Seconds for which an answer is evidence.
EVIDENCE_SECONDS = 6.0
#: Younger doubts are not logged: connections break and are made again.
_LOG_SECONDS = 3.0


@dataclass(slots=True)
class Doubt:
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
    """Reports of one run's workers, and the resulting decisions."""

    _settings: ClusterSettings
    _members: Membership
    _registry: Registry
    _deferred: DeferredLosses
    #: Reports by worker identity and server.
    _doubts: dict[tuple[Identity, Replica], Doubt] = field(default_factory=dict)
    #: Time at which a worker last reached a server because it was asked to, by server and worker id.
    _reached: dict[Replica, dict[str, float]] = field(default_factory=dict)
    _asked: float = float("-inf")

    # --- what workers say ---------------------------------------------------------------------------------------------

    def on_report(self, worker: Member, reports: Sequence[UnreachableServer], now: float) -> list[Effect]:
        """Replace a worker's list of servers that it cannot reach."""
        known = {report.server: report for report in reports if self._members.has(report.server)}
        effects: list[Effect] = []
        for key in [key for key in self._doubts if key[0][0] == worker.member_id]:
            if key[0] != worker.identity or key[1] not in known:
                effects += self._forget(key)
        for server, report in known.items():
            doubt = self._doubts.setdefault((worker.identity, server), Doubt(now, now, report.reason))
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

    # --- what follows -------------------------------------------------------------------------------------------------

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
        overdue: dict[Replica, list[tuple[Identity, Doubt]]] = {}
        for (worker, server), doubt in self._doubts.items():
            is_fresh = now - doubt.reported <= self._fresh_seconds and doubt.heard <= doubt.reported
            if now - doubt.since > limit and is_fresh and self._entries_of(server):
                overdue.setdefault(server, []).append((worker, doubt))
        for server, doubts in overdue.items():
            if 2 * len(doubts) > len(self._members.workers) and self._can_go(server, now):
                names = ", ".join(worker_id for (worker_id, _), _ in doubts)
                return [(server.server_id, f"{names} cannot reach it for {limit:g} s (--worker-timeout)")]
        return self._blamed_worker(overdue, now)

    def _blamed_worker(self, overdue: dict[Replica, list[tuple[Identity, Doubt]]], now: float) -> Losses:
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

    def waits(self) -> Iterator[tuple[str, list[int], str]]:
        """Yield the servers that workers wait to reach."""
        for worker, server in self._doubts:
            others = ", ".join(sorted(self._reached.get(server, {})))
            who = f"{others} can" if others else "no other worker has reached it yet"
            yield f"{worker[0]} to {server}", [], f"for {worker[0]} to reach {server}, which it cannot; {who}"

    def validate(self) -> None:
        assert self._reached.keys() <= {server for _, server in self._doubts}, "answers about a server nobody doubts"

    # --- parts --------------------------------------------------------------------------------------------------------

    @property
    def _fresh_seconds(self) -> float:
        heartbeat = self._settings.heartbeat_of("worker", len(self._members.workers))
        return max(self._settings.lease_seconds, FRESH_HEARTBEATS * heartbeat)

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
        sessions = [session for worker in others if (session := self._members.sessions.call_of(worker.member_id))]
        return [Answer(session, CheckServer(server)) for session in sessions[:_ASKED_AT_A_TIME]]

    def _witnesses(self, server: Replica, worker_id: str, now: float) -> list[str]:
        """Return other live workers that recently reached the server."""
        live = {worker.member_id for worker in self._members.workers} - {worker_id}
        answers = self._reached.get(server, {}).items()
        return sorted(other for other, when in answers if other in live and now - when <= EVIDENCE_SECONDS)

    def _entries_of(self, server: Replica) -> list[ParametersEntry]:
        """Return the parameter sets that the server is a primary of."""
        entries = [p.entry for p in self._registry.all if p.record is not None]
        return [entry for entry in entries if any(shard.primary == server for shard in entry.shards)]

    def _is_waited_for(self, worker: Identity, server: Replica) -> bool:
        """Return True if others wait for the pushes of this worker to this server."""
        return any(
            not isinstance(entry.spec.consistency, ASP)
            and any((member.worker_id, member.incarnation) == worker for member in entry.members)
            for entry in self._entries_of(server)
        )

    def _can_go(self, server: Replica, now: float) -> bool:
        """True if nothing is lost with the server, and another one is left. A silent server may be gone itself, so its
        copies do not count."""
        member, sessions = self._members.get(server.server_id), self._members.sessions
        silent = frozenset(s.member_id for s in self._members.servers if sessions.is_silent(s.member_id, now))
        if member is None or len(self._members.servers) <= 1:
            return False
        return not self._deferred.has_last_copy(member, silent)
