"""Ends with which values would be lost: of the scheduler, and of servers whose shards nobody takes over. Pure.

A snapshot of what was trained since the last one comes first, if the policy wants one at the end. Only heartbeats after
the request say exactly what was trained. So they are waited for, unless no worker was there since the last snapshot
began. An end does not wait for a snapshot that fails.

A run is over when no worker has been there for the idle timeout, after some were. A worker that was lost may be started
again, so the timeout is then at least the lease of workers. When the run is over, the scheduler is to end, and its
servers before it: they are told when what was trained is saved, and waited for. A worker that registers before they are
told withdraws this end. So does a snapshot that fails: nothing is lost, and the next try is one timeout later.

Not here: moving shards away (``scaling``). A server is released as soon as nothing needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from psdist.errors import ClosedError, PsdistError, SnapshotFailedError
from psdist_scheduler.events.cluster_events import Answer, Broadcast, Done, Drain, Effect, Refuse, RunEnded, Stop
from psdist_scheduler.events.records import ClusterSettings
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement.registry import Registry
from psdist_scheduler.placement.scaling import Scaling
from psdist_scheduler.snapshots.snapshots import Snapshots

#: Longest wait for servers to exit after RunEnded.
SERVERS_END_SECONDS: Final = 10.0


@dataclass(slots=True)
class _Held:
    """Somebody who wants to end."""

    event: Drain | Stop
    since: float
    #: Whether it was decided if a snapshot is needed.
    asked: bool = False
    #: When servers were told that the run is over; None if they were not. Which servers there were then.
    told_at: float | None = None
    told: tuple[str, ...] = ()


@dataclass(slots=True)
class GracefulShutdown:
    """The members that want to end and may not yet."""

    _settings: ClusterSettings
    _registry: Registry
    _members: Membership
    _snapshots: Snapshots
    _scaling: Scaling
    _held: dict[int, _Held] = field(default_factory=dict)
    #: Since when no worker is there, or since an end was withdrawn; None while a worker is there.
    _no_workers_since: float | None = None

    def hold(self, event: Drain | Stop, now: float) -> list[Effect]:
        """Somebody wants to end. Where others take what a server has, it is drained at once. Raises WrongRunError,
        InvalidArgumentError."""
        if isinstance(event, Drain):
            self._members.check_run(event.run_id)
            others = [server for server in self._members.staying if server.member_id != event.server_id]
            if self._members.workers and others:
                return self._scaling.drain(event)
        self._held[event.call] = _Held(event, now)
        return []

    def end(self, call: int) -> None:
        self._held.pop(call, None)

    def ask(self, now: float) -> list[Effect]:
        """Has a snapshot taken where one is needed."""
        if self._members.workers:
            self._no_workers_since = None
        elif self._no_workers_since is None:
            self._no_workers_since = now
        effects: list[Effect] = []
        for call, held in self._held.items():
            if not held.asked and self._is_known(held.since, now):
                held.asked = True
                server = held.event.server_id if isinstance(held.event, Drain) else ""
                effects += self._snapshots.save_before_the_end(call, server, now)
        return effects

    def go_on(self, now: float) -> list[Effect]:
        """Releases callers that no longer have to wait."""
        effects: list[Effect] = []
        for call, held in list(self._held.items()):
            ends_servers = isinstance(held.event, Stop) and held.event.servers and held.told_at is None
            if ends_servers and self._members.workers:
                effects += self._withdraw(call, ClosedError(f"{self._members.workers[0]} takes part again"))
                continue
            if not held.asked or call in self._snapshots.waiters:
                continue
            if ends_servers:
                if self._snapshots.has_unsaved:
                    self._no_workers_since = now
                    effects += self._withdraw(call, SnapshotFailedError("no snapshot has what was trained last"))
                    continue
                held.told_at, held.told = now, tuple(server.member_id for server in self._members.servers)
                effects.append(Broadcast(RunEnded()))
            if self._waits_for_servers(held, now):
                continue
            del self._held[call]
            try:
                event = held.event
                effects += self._scaling.drain(event) if isinstance(event, Drain) else [Answer(call, Done())]
            except PsdistError as error:
                effects.append(Refuse(call, error))
        return effects

    def is_over(self, now: float) -> bool:
        """Whether no worker has been there for the idle timeout, after some were."""
        limit, since = self._settings.idle_timeout_seconds, self._no_workers_since
        if not limit or since is None or not self._members.ranks:
            return False
        if any(member.role == "worker" and member.state == "lost" for member in self._members.all):
            limit = max(limit, self._settings.worker_lease_seconds)
        return now - since >= limit

    def on_session(self, call: int) -> list[Effect]:
        """A session opens. While servers are to end, it is told so, as the broadcast was before it."""
        return [Answer(call, RunEnded())] if any(held.told_at is not None for held in self._held.values()) else []

    def _withdraw(self, call: int, error: PsdistError) -> list[Effect]:
        """The run goes on: the scheduler does not end, and servers were not told that they should."""
        self.end(call)
        self._snapshots.waiters.end(call)
        return [Refuse(call, error)]

    def _waits_for_servers(self, held: _Held, now: float) -> bool:
        """Whether servers that were told that the run is over are still to end. One whose session broke counts: it may
        not have heard, and then it comes back."""
        if held.told_at is None or now - held.told_at >= SERVERS_END_SECONDS:
            return False
        told = (self._members.get(server) for server in held.told)
        return bool(self._members.servers) or any(server is not None and server.state != "left" for server in told)

    def _is_known(self, since: float, now: float) -> bool:
        """Whether it is known what was trained until ``since``."""
        if not self._snapshots.saves_at_end or now - since > self._settings.lease_seconds:
            return True
        if self._no_workers_since is not None and self._snapshots.runner.saved_at >= self._no_workers_since:
            return True
        owners = {owner for entry in self._registry.entries for owner in entry.primaries}
        liveness = self._members.sessions.liveness
        return all(liveness[owner].seen > since for owner in owners if owner in liveness)
