"""Routes: the server of each slice, by one cluster map and the news since. Pure.

Invariants: The plan of one call covers exactly the requested slices, each once, ascending within a route, with at most
one route per server. A shard without a live primary has no route. Its slices wait for a newer map, because only the
scheduler chooses the next server. A shard that the scheduler has declared lost is an error.

Not here: connections (``worker_session``), unanswered slices (``push_sequence``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from psdist.errors import ServerLostError, UnknownParametersError
from psdist.types import ClusterMap, ParametersEntry, Replica, ServerEntry


@dataclass(frozen=True, slots=True)
class ServerNews:
    """News since the newest map.

    gone: reason for each server that is gone, although the map still lists it.
    lost: for each parameter set with a lost shard, a message with the loss and the remedy.
    """

    gone: Mapping[Replica, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Route:
    """Slices of a parameter set, ascending, and their primary in the map of ``epoch``.

    generation: generation of the set in that map.
    """

    server_id: str
    incarnation: int
    address: str
    epoch: int
    slices: tuple[int, ...]
    generation: int = 0

    @cached_property
    def peer(self) -> str:
        """Name of the server for messages."""
        return f"{self.server_id} ({self.address})"

    @cached_property
    def server(self) -> Replica:
        """Server and incarnation."""
        return Replica(self.server_id, self.incarnation)


@dataclass(frozen=True, slots=True)
class RoutingPlan:
    """Destinations of slices.

    routes: one for each server that is the primary of some of them.
    orphans: slices without a live primary, ascending.
    reason: cause of the orphans' wait: "for a new primary of shard 3 of 'mlp' in place of server-1 (lost: ...)".
    """

    routes: tuple[Route, ...]
    orphans: tuple[int, ...] = ()
    reason: str = ""


def find_entry(cluster: ClusterMap, parameters: str) -> ParametersEntry:
    """Return the entry of a parameter set. Raises UnknownParametersError."""
    entry = cluster.entry(parameters)
    if entry is None:
        raise UnknownParametersError(f"the cluster map of epoch {cluster.epoch} has no parameters {parameters!r}")
    return entry


def why_gone(cluster: ClusterMap, news: ServerNews, server: Replica) -> str:
    """Return the reason why this incarnation of a server has ended, as far as known; empty if it has not."""
    if reason := news.gone.get(server, ""):
        return reason
    entry = cluster.server(server.server_id)
    return "" if entry is not None and entry.incarnation == server.incarnation else "it left the cluster map"


def plan(
    cluster: ClusterMap, parameters: str, wanted: Sequence[int] | None = None, news: ServerNews = ServerNews()
) -> RoutingPlan:
    """Return the routes of the slices of ``wanted`` (ascending; None means all).

    Raises UnknownParametersError, and ServerLostError if one of their shards is lost.
    """
    entry = find_entry(cluster, parameters)
    if parameters in news.lost:
        raise ServerLostError(news.lost[parameters], parameters=parameters)
    servers = [_live_primary(cluster, news, entry, number) for number in range(len(entry.shards))]
    by_server: dict[str, list[int]] = {}
    orphans = []
    for index in range(entry.slicing.count) if wanted is None else wanted:
        server = servers[index % len(servers)]
        if server is None:
            orphans.append(index)
        else:
            by_server.setdefault(server.server_id, []).append(index)
    generation = entry.generation
    live = {server.server_id: server for server in servers if server is not None}
    routes = tuple(
        Route(server_id, live[server_id].incarnation, live[server_id].address, cluster.epoch, tuple(slices), generation)
        for server_id, slices in by_server.items()
    )
    return RoutingPlan(routes, tuple(orphans), _reason(cluster, news, entry, orphans) if orphans else "")


def _live_primary(cluster: ClusterMap, news: ServerNews, entry: ParametersEntry, number: int) -> ServerEntry | None:
    shard = entry.shards[number]
    if shard.lost:
        raise ServerLostError(
            f"shard {number} of {entry.spec.name!r} is lost: {shard.primary}, which held it, is gone, and there was no "
            "copy. Restart the run; with --replicas 2 the loss of a server loses nothing",
            server=shard.primary,
        )
    return None if why_gone(cluster, news, shard.primary) else cluster.server(shard.primary.server_id)


def _reason(cluster: ClusterMap, news: ServerNews, entry: ParametersEntry, orphans: list[int]) -> str:
    numbers = sorted({index % len(entry.shards) for index in orphans})
    owners = list(dict.fromkeys(entry.shards[number].primary for number in numbers))
    shards = f"shard{'s' if numbers[1:] else ''} {', '.join(map(str, numbers))}"
    gone = ", ".join(f"{owner} (lost: {why_gone(cluster, news, owner)})" for owner in owners)
    return f"for a new primary of {shards} of {entry.spec.name!r} in place of {gone}"
