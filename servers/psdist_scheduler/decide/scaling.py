"""Draining servers, and the wanted numbers of servers and workers. Pure.

A drained server is marked durably, and ``shard_placement`` moves everything away from it. This module holds the calls
that wait for that, and the numbers by which launchers start and stop servers and workers. A drain continues after its
caller is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from psdist.errors import InvalidArgumentError, LimitExceededError, ServerLostError
from psdist.types import Replica, Shard
from psdist.wire.limits import MEMBERS_MAX
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_state import ClusterSettings, Member, name_some
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.parameter_sets import Registry
from psdist_scheduler.decide.rendezvous import Rendezvous
from psdist_scheduler.decide.waiting_calls import WaitingCalls


@dataclass(slots=True)
class _Drain:
    """A call that waits until a server holds nothing."""

    server: Replica
    total: int


@dataclass(slots=True)
class Scaling:
    """Drains in progress, and the launchers that watch."""

    _settings: ClusterSettings
    _registry: Registry
    _members: Membership
    _rendezvous: Rendezvous
    _calls: WaitingCalls
    _drains: dict[int, _Drain] = field(default_factory=dict)
    #: News last sent to each watching call.
    _watchers: dict[int, ef.ScaleNews | None] = field(default_factory=dict)

    def drain(self, event: ev.Drain) -> list[ef.Effect]:
        """Start to move everything away from a server. Raises InvalidArgumentError."""
        member = self._members.get(event.server_id)
        if member is None or member.role != "server" or not member.live:
            there = name_some([server.member_id for server in self._members.servers]) or "none"
            raise InvalidArgumentError(f"no live server {event.server_id!r:.80}: these are live: {there}")
        held, others = len(self._held(member)), [server for server in self._members.staying if server != member]
        if held and not others and self._members.workers:
            raise InvalidArgumentError(
                f"{member} holds {held} shards and there is no other server to take them: start another one first",
                server_id=member.member_id,
            )
        # Servers that hold nothing are marked too, so that nothing is placed on a server about to be stopped.
        self._drains[event.call] = _Drain(member.replica, held)
        return self._mark([member])

    def scale(self, event: ev.Scale) -> list[ef.Effect]:
        """Set the wanted number of servers or workers. Raises InvalidArgumentError and LimitExceededError."""
        if bool(event.servers) == bool(event.workers):
            raise InvalidArgumentError(
                f"{event.servers} servers and {event.workers} workers: name one number, at least 1, and leave the other"
            )
        if event.workers:
            return self._scale_workers(event)
        least = self._settings.replicas
        if event.servers < least:
            raise InvalidArgumentError(
                f"{event.servers} servers are too few: each shard has {least} copies, each on a server of its own, so "
                f"{least} is the least"
            )
        if event.servers > MEMBERS_MAX:
            raise LimitExceededError(f"{event.servers} servers are more than the limit of {MEMBERS_MAX}")
        there = sorted(self._members.staying, key=_by_number)
        surplus = there[event.servers :]
        self._members.demand.want_servers(event.servers)
        missing = max(0, event.servers - len(there))
        drained = tuple(server.member_id for server in surplus)
        answer = ef.Answer(event.call, ef.Scaled(len(there), drained, missing, len(self._watchers)))
        return [
            ef.LogEvent(f"{event.servers} servers are wanted, {len(there)} are live", kind="scale"),
            *self._mark(surplus),
            answer,
        ]

    def _scale_workers(self, event: ev.Scale) -> list[ef.Effect]:
        """Only launchers know which workers are theirs, so they choose which to stop."""
        if event.workers > MEMBERS_MAX:
            raise LimitExceededError(f"{event.workers} workers are more than the limit of {MEMBERS_MAX}")
        there = len(self._members.workers)
        self._want_workers(event.workers)
        missing = max(0, event.workers - there)
        return [
            ef.LogEvent(f"{event.workers} workers are wanted, {there} are live", kind="scale"),
            ef.Answer(event.call, ef.Scaled(len(self._members.staying), (), missing, len(self._watchers), there)),
        ]

    def _want_workers(self, workers: int) -> None:
        """Reserve ranks: the scheduler learns of a rank that a launcher gave away only when its worker registers."""
        self._members.demand.want_workers(workers, max(self._members.next_rank, self._rendezvous.world_size))

    def watch(self, event: ev.WatchScale) -> list[ef.Effect]:
        """Add a launcher that watches the wanted numbers."""
        if not self._members.demand.workers_wanted:
            self._want_workers(min(event.workers_wanted, MEMBERS_MAX))
        self._watchers[event.call] = None
        return []

    def end_call(self, call: int) -> None:
        self._drains.pop(call, None)
        self._watchers.pop(call, None)

    def progress(self, now: float) -> list[ef.Effect]:
        """Return news for the calls that drain and watch."""
        effects: list[ef.Effect] = []
        for call, drain in list(self._drains.items()):
            effects += self._advance_drain(call, drain, now)
        draining = {server.member_id: self._held(server) for server in self._members.servers if server.draining}
        stop = tuple(server for server, held in draining.items() if not held)
        wanted, lost = self._members.demand, self._registry.lost_text
        news = ef.ScaleNews(
            wanted.servers_wanted, tuple(draining), stop, lost, wanted.workers_wanted, wanted.first_rank
        )
        for call, told in self._watchers.items():
            if told != news:
                self._watchers[call] = news
                effects.append(ef.Answer(call, news))
        return effects

    def waits(self) -> Iterator[ef.Wait]:
        """Yield the waits of drains. Their callers are notified by ``progress``."""
        for server in self._members.servers:
            if server.draining and (left := len(self._held(server))):
                yield f"drain {server}", [], self._text(server, left)

    def _mark(self, servers: list[Member]) -> list[ef.Effect]:
        fresh = [server for server in servers if not server.draining]
        for server in fresh:
            self._members.drain(server.member_id)
        return [
            ef.LogEvent(f"draining {server}: {len(self._held(server))} shards to move", kind="scale")
            for server in fresh
        ]

    def _advance_drain(self, call: int, drain: _Drain, now: float) -> list[ef.Effect]:
        server = self._members.get(drain.server.server_id)
        if server is None or not self._members.has(drain.server):
            del self._drains[call]
            if any(s.lost and s.primary == drain.server for entry in self._registry.entries for s in entry.shards):
                return [ef.Refuse(call, ServerLostError(f"{drain.server} was lost before all was moved away from it"))]
            return [ef.Answer(call, ef.Drained(drain.total))]
        left = len(self._held(server, worth=True))
        if not left or not (self._members.workers or self._members.staying):
            del self._drains[call]
            return [
                ef.Answer(call, ef.Drained(drain.total)),
                ef.LogEvent(f"{server} is drained and may be stopped", kind="scale"),
            ]
        return self._calls.tell(call, ef.Draining(self._text(server, left), left, max(left, drain.total)), now)

    def _text(self, server: Member, left: int) -> str:
        if not self._members.staying:
            return f"for another server to register, which can take {left} shards of {server}"
        return f"for {left} shards to be moved from {server} to other servers"

    def _held(self, server: Member, worth: bool = False) -> list[Shard]:
        """Return the shards that a server holds or gets a copy of.

        worth: True to omit values that nobody is left to upload.
        """
        return [
            shard
            for entry in self._registry.entries
            if not worth or entry.ready or self._members.workers
            for shard in entry.shards
            if not shard.lost and server.replica in shard.replicas
        ]


def _by_number(server: Member) -> tuple[int, str]:
    """Sort key that puts server-10 after server-9."""
    return len(server.member_id), server.member_id
