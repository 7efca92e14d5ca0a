"""Shutdown that would lose values: of the scheduler, and of servers whose shards nobody takes over. Pure.

If the policy wants a snapshot at the end, everything trained since the last one is saved first. Only heartbeats sent
after the request tell exactly what was trained. So they are awaited, unless no worker has been present since the last
snapshot began. A shutdown does not wait for a snapshot that fails.

A run is over when no worker has been present for the idle timeout, after some were. A lost worker may be restarted, so
the timeout is then at least the lease of workers. When the run is over, the scheduler must exit, and its servers before
it: they are notified once everything is saved, and awaited. A worker that registers before that withdraws this
shutdown. So does a snapshot that fails: nothing is lost, and the next attempt follows one timeout later.

Moving shards away is done by ``scaling``. A server is released as soon as nothing needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from psdist.errors import ClosedError, PsdistError, SnapshotFailedError
from psdist_scheduler.events.cluster_events import Answer, Broadcast, Done, Drain, Effect, Refuse, RunEnded, Stop
from psdist_scheduler.events.cluster_state import ClusterSettings
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement.registry import Registry
from psdist_scheduler.placement.scaling import Scaling
from psdist_scheduler.snapshots.snapshots import Snapshots

#: Longest wait for servers to exit after RunEnded.
SERVERS_END_SECONDS: Final = 10.0


@dataclass(slots=True)
class _Held:
    """A member that wants to exit."""

    event: Drain | Stop
    since: float
    #: True once it was decided whether a snapshot is needed.
    asked: bool = False
    #: Time at which servers were notified that the run is over (None: not yet), and the servers present then.
    told_at: float | None = None
    told: tuple[str, ...] = ()


@dataclass(slots=True)
class ExitRequests:
    """Members that want to exit and may not yet."""

    _settings: ClusterSettings
    _registry: Registry
    _members: Membership
    _snapshots: Snapshots
    _scaling: Scaling
    _held: dict[int, _Held] = field(default_factory=dict)
    #: Time since which no worker is present, or since a shutdown was withdrawn; None while a worker is present.
    _no_workers_since: float | None = None

    def hold(self, event: Drain | Stop, now: float) -> list[Effect]:
        """Hold a member that wants to exit. If others can take a server's shards, it is drained now instead.

        Raises WrongRunError and InvalidArgumentError.
        """
        if isinstance(event, Drain):
            self._members.check_run(event.run_id)
            others = [server for server in self._members.staying if server.member_id != event.server_id]
            if self._members.workers and others:
                return self._scaling.drain(event)
        self._held[event.call] = _Held(event, now)
        return []

    def end_call(self, call: int) -> None:
        self._held.pop(call, None)

    def request_snapshots(self, now: float) -> list[Effect]:
        """Request a snapshot if one is needed."""
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

    def release(self, now: float) -> list[Effect]:
        """Release callers that no longer have to wait."""
        effects: list[Effect] = []
        for call, held in list(self._held.items()):
            ends_servers = isinstance(held.event, Stop) and held.event.servers and held.told_at is None
            if ends_servers and self._members.workers:
                effects += self._withdraw(call, ClosedError(f"{self._members.workers[0]} is taking part again"))
                continue
            if not held.asked or call in self._snapshots.waiters:
                continue
            if ends_servers:
                if self._snapshots.readiness.has_unsaved:
                    self._no_workers_since = now
                    effects += self._withdraw(call, SnapshotFailedError("no snapshot contains the last training steps"))
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
        """Return True if no worker has been present for the idle timeout, after some were."""
        limit, since = self._settings.idle_timeout_seconds, self._no_workers_since
        if not limit or since is None or not self._members.ranks:
            return False
        if any(member.role == "worker" and member.state == "lost" for member in self._members.all):
            limit = max(limit, self._settings.worker_lease_seconds)
        return now - since >= limit

    def on_session(self, call: int) -> list[Effect]:
        """Notify a new session if servers are shutting down, since it missed the broadcast."""
        return [Answer(call, RunEnded())] if any(held.told_at is not None for held in self._held.values()) else []

    def _withdraw(self, call: int, error: PsdistError) -> list[Effect]:
        """Cancel a shutdown, because the run continues and servers were not notified."""
        self.end_call(call)
        self._snapshots.waiters.end_call(call)
        return [Refuse(call, error)]

    def _waits_for_servers(self, held: _Held, now: float) -> bool:
        """Return True if servers that were notified of the end have yet to exit.

        One whose session broke counts: it may not have received the news, and would return.
        """
        if held.told_at is None or now - held.told_at >= SERVERS_END_SECONDS:
            return False
        told = (self._members.get(server) for server in held.told)
        return bool(self._members.servers) or any(server is not None and server.state != "left" for server in told)

    def _is_known(self, since: float, now: float) -> bool:
        """Return True if it is known what was trained until ``since``."""
        if not self._snapshots.readiness.saves_at_end or now - since > self._settings.lease_seconds:
            return True
        if self._no_workers_since is not None and self._snapshots.saved_at >= self._no_workers_since:
            return True
        owners = {owner for entry in self._registry.entries for owner in entry.primaries}
        liveness = self._members.sessions.liveness
        return all(liveness[owner].seen > since for owner in owners if owner in liveness)
