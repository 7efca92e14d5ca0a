"""A run with two copies at a pure scheduler."""

from __future__ import annotations

from typing import Any

from psdist.types import Replica, Shard
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide.cluster_state import Member
from tests.support.scheduler_driver import Driver


class Run:
    """A driver with live members and parameters "mlp", created and (``ready``) filled."""

    def __init__(self, servers: int = 3, replicas: int = 2, workers: int = 1, ready: bool = True) -> None:
        self.d = Driver(workers_min=workers, replicas=replicas)
        self.sessions: dict[str, int] = {}
        self.servers = [self.server() for _ in range(servers)]
        joined = [self.d.join() for _ in range(workers)]
        self.workers = [member for member, _ in joined]
        self.beats = [session for _, session in joined]
        self.calls = [self.d.create(worker, slice_elements=400) for worker in self.workers]
        if ready:
            self.d.ask(ev.CommitParameters, self.workers[0])
            self.d.fill()
            assert self.d.map.parameters[0].ready

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.d.map.parameters[0].shards

    def server(self, **fields: Any) -> Member:
        member, session = self.d.join("server", **fields)
        self.sessions[member.member_id] = session
        return member

    def kill(self, server_id: str) -> None:
        self.d.on(ev.SessionClosed(self.sessions.pop(server_id), "its session broke"))

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.d.beat(*self.sessions.values(), *self.beats)
            self.d.tick(0.5)

    def drain(self, server_id: str) -> int:
        call = self.d.number()
        self.d.on(ev.Drain(call, "run", server_id))
        return call

    def scale(self, servers: int) -> int:
        call = self.d.number()
        self.d.on(ev.Scale(call, "run", servers))
        return call

    def filled(self, number: int) -> None:
        """The primary of a shard reports that the first of those being filled is complete."""
        shard = self.shards[number]
        session, target = self.sessions[shard.primary.server_id], shard.filling[0]
        self.d.on(ev.ReplicaFilled(session, "mlp", number, shard.term, target, shard.fill_of(target)))

    def unreachable(self, number: int, replica: Replica) -> None:
        shard = self.shards[number]
        session, fill = self.sessions[shard.primary.server_id], shard.fill_of(replica)
        self.d.on(ev.ReplicaUnreachable(session, "mlp", number, shard.term, replica, fill, "silent for 2 s"))
        self.d.hear()

    def load(self) -> dict[str, tuple[int, int]]:
        """Shards by server: as primary, and in all."""
        return {
            s.server_id: (
                sum(shard.primary.server_id == s.server_id for shard in self.shards),
                sum(s.server_id in [r.server_id for r in shard.replicas] for shard in self.shards),
            )
            for s in self.d.map.servers
        }
