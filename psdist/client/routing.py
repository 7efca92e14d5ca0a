"""Routes: which server gets which slices, read from one cluster map.

Pure: frozen values in and out. Not here: connections (``connection``), what is still to be sent (``session``).

Invariants: the routes of one call cover exactly the slices asked for, each once, ascending within a route, and at
most one route goes to a server. A shard whose server is gone is an error, never a gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psdist.errors import ServerLostError, UnknownParametersError
from psdist.types import ClusterMap, ParametersEntry, ServerEntry


@dataclass(frozen=True, slots=True)
class Route:
    """Slices of one parameters, ascending, and the server that is their primary in the map of ``epoch``."""

    server_id: str
    incarnation: int
    address: str
    epoch: int
    slices: tuple[int, ...]

    @property
    def peer(self) -> str:
        """The server's name for messages."""
        return f"{self.server_id} ({self.address})"


def find_entry(cluster: ClusterMap, parameters: str) -> ParametersEntry:
    """The entry of these parameters. Raises UnknownParametersError."""
    entry = cluster.entry(parameters)
    if entry is None:
        raise UnknownParametersError(f"the cluster map of epoch {cluster.epoch} has no parameters {parameters!r}")
    return entry


def holders_of(cluster: ClusterMap, entry: ParametersEntry) -> dict[str, int]:
    """Incarnation of each live server that holds a shard of the parameters."""
    servers = ((server_id, cluster.server(server_id)) for server_id in dict.fromkeys(entry.primaries))
    return {server_id: server.incarnation for server_id, server in servers if server is not None}


def plan(
    cluster: ClusterMap, parameters: str, holders: Mapping[str, int], wanted: Sequence[int] | None = None
) -> tuple[Route, ...]:
    """Routes to the slices of ``wanted`` (ascending; None means all).

    holders: the incarnation in which each server got its shards. A server that came back in another has nothing any
        more; one that is not named is taken as the map shows it.

    Raises UnknownParametersError, and ServerLostError where a shard's server is gone.
    """
    entry = find_entry(cluster, parameters)
    by_server: dict[str, list[int]] = {}
    primaries = entry.primaries
    for index in range(entry.slicing.count) if wanted is None else wanted:
        by_server.setdefault(primaries[index % len(primaries)], []).append(index)
    routes = []
    for server_id, slices in by_server.items():
        server = cluster.server(server_id)
        if server is None or server.incarnation != holders.get(server_id, server.incarnation):
            raise lost(server_id, parameters, "it is not in the cluster map any more")
        routes.append(_route(cluster, server, slices))
    return tuple(routes)


def _route(cluster: ClusterMap, server: ServerEntry, slices: list[int]) -> Route:
    return Route(server.server_id, server.incarnation, server.address, cluster.epoch, tuple(slices))


def lost(server_id: str, parameters: str, reason: str) -> ServerLostError:
    """The error for a server that is gone with the slices it held."""
    return ServerLostError(
        f"{server_id}, which held a part of {parameters!r}, is lost: {reason}. Restart the run", server=server_id
    )
