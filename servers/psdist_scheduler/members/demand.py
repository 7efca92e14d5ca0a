"""How many members the run needs, and whom it still waits for. Pure.

Not here: who is there (``membership``), who starts and stops servers (``scaling``).
"""

from __future__ import annotations

from psdist_scheduler.events.records import ClusterSettings
from psdist_scheduler.members.membership import Membership

#: The reason that workers give that leave when their work is done.
_DONE = ("closed", "done")


class Demand:
    """The members that one run needs. servers_wanted: servers that it shall have; 0 if none was set."""

    def __init__(self, settings: ClusterSettings, members: Membership, servers_wanted: int) -> None:
        self._settings = settings
        self._members = members
        self.servers_wanted = servers_wanted
        self.changed = False

    @property
    def workers_min(self) -> int:
        """Workers that the run needs: those of the settings, or the largest world that a live worker names."""
        world = max((worker.world_size for worker in self._members.workers), default=0)
        return max(self._settings.workers_min, world)

    @property
    def servers_min(self) -> int:
        """Servers that the run needs: those of the settings, without those that were drained, or fewer if fewer are
        wanted by now, and one for each copy of a shard."""
        least = self._settings.servers_min - sum(member.draining for member in self._members.all)
        return max(min(least, self.servers_wanted or least), self._settings.replicas)

    @property
    def workers_in_service(self) -> int:
        """Workers that live, and those that left when their work was done."""
        workers = (member for member in self._members.all if member.role == "worker")
        return sum(worker.live or (worker.state == "left" and worker.reason in _DONE) for worker in workers)

    def shortage(self, begun: bool = False, servers: int | None = None, workers: int | None = None) -> str:
        """What is missing before anything can begin, as a sentence that begins with "for"; empty if nothing is. Once a
        run has begun, workers that left when they were done are not missed. ``servers``, ``workers``: so few are
        enough."""
        there = self.workers_in_service if begun else len(self._members.workers)
        servers = self.servers_min if servers is None else servers
        workers = self.workers_min if workers is None else workers
        counts = (("server", servers, len(self._members.staying)), ("worker", workers, there))
        for role, wanted, there in counts:
            if there < wanted:
                return f"for {f'{wanted - there} of {wanted} {role}s' if wanted > 1 else f'a {role}'} to register"
        return ""

    def want_servers(self, servers: int) -> None:
        """The run shall have so many servers."""
        self.servers_wanted, self.changed = servers, True

    def take_change(self) -> int | None:
        """The wanted number of servers, if it changed since this was called last."""
        changed, self.changed = self.changed, False
        return self.servers_wanted if changed else None
