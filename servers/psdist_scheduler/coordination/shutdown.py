"""Ends with which values would be lost: of the scheduler, and of servers whose shards nobody takes over. Pure.

A snapshot of what was trained since the last one comes first, if the policy wants one at the end. Only heartbeats after
the request say exactly what was trained. So they are waited for, unless no worker was there since the last snapshot
began. An end does not wait for a snapshot that fails.

A run is over when no worker has been there for the idle timeout, after some were. Then the scheduler is to end, and its
servers before it: they are told when what was trained is saved, and waited for.

Not here: moving shards away (``scaling``). A server is released as soon as nothing needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from psdist.errors import PsdistError
from psdist_scheduler.events.cluster_events import Answer, Broadcast, Done, Drain, Effect, Refuse, RunEnded, Stop
from psdist_scheduler.events.records import ClusterSettings
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement.registry import Registry
from psdist_scheduler.placement.scaling import Scaling
from psdist_scheduler.snapshots.snapshots import Snapshots

#: Servers that do not end when the run is over keep the scheduler no longer.
SERVERS_END_SECONDS: Final = 10.0


@dataclass(slots=True)
class _Held:
    """Somebody who wants to end."""

    event: Drain | Stop
    since: float
    #: Whether it was decided if a snapshot is needed.
    asked: bool = False
    #: When servers were told that the run is over; None if they were not.
    told_at: float | None = None


@dataclass(slots=True)
class GracefulShutdown:
    """The members that want to end and may not yet."""

    _settings: ClusterSettings
    _registry: Registry
    _members: Membership
    _snapshots: Snapshots
    _scaling: Scaling
    _held: dict[int, _Held] = field(default_factory=dict)
    #: Since when no worker is there; None while one is.
    _deserted: float | None = None

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
            self._deserted = None
        elif self._deserted is None:
            self._deserted = now
        effects: list[Effect] = []
        for call, held in self._held.items():
            if not held.asked and self._is_known(held.since, now):
                held.asked = True
                server = held.event.server_id if isinstance(held.event, Drain) else ""
                effects += self._snapshots.save_before_the_end(call, server, now)
        return effects

    def go_on(self, now: float) -> list[Effect]:
        """Lets those end that nothing keeps."""
        effects: list[Effect] = []
        for call, held in list(self._held.items()):
            if not held.asked or call in self._snapshots.waiters:
                continue
            if isinstance(held.event, Stop) and held.event.servers and held.told_at is None:
                held.told_at = now
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
        limit, deserted = self._settings.idle_timeout_seconds, self._deserted
        return bool(limit and self._members.ranks and deserted is not None and now - deserted >= limit)

    def _waits_for_servers(self, held: _Held, now: float) -> bool:
        """Whether servers that were told that the run is over are still to end."""
        return held.told_at is not None and bool(self._members.servers) and now - held.told_at < SERVERS_END_SECONDS

    def _is_known(self, since: float, now: float) -> bool:
        """Whether it is known what was trained until ``since``."""
        if not self._snapshots.saves_at_end or now - since > self._settings.lease_seconds:
            return True
        if self._deserted is not None and self._snapshots.runner.saved_at >= self._deserted:
            return True
        owners = {owner for entry in self._registry.entries for owner in entry.primaries}
        liveness = self._members.sessions.liveness
        return all(liveness[owner].seen > since for owner in owners if owner in liveness)
