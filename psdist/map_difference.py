"""Difference between two cluster maps, from which a member with the first can build the second. Pure.

A map lists its servers by id and its workers by rank, so a difference need not say where a new one belongs. Parameter
sets keep their positions, and new ones come last.

Invariant: ``apply(before, difference(before, after)) == after``, for maps of one run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from psdist.errors import StaleEpochError
from psdist.types import ClusterMap, ParametersEntry, ServerEntry, WorkerEntry

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MapDifference:
    """Difference between the maps of epochs ``base`` and ``epoch``.

    servers_gone, workers_gone, parameters_gone: ids and names of removed entries.
    servers, workers, parameters: new or changed entries.
    paused, ranks_done: those of the new map.
    """

    base: int
    epoch: int
    servers_gone: tuple[str, ...] = ()
    servers: tuple[ServerEntry, ...] = ()
    workers_gone: tuple[str, ...] = ()
    workers: tuple[WorkerEntry, ...] = ()
    parameters_gone: tuple[str, ...] = ()
    parameters: tuple[ParametersEntry, ...] = ()
    paused: str = ""
    ranks_done: tuple[int, ...] = ()


def difference(before: ClusterMap, after: ClusterMap) -> MapDifference:
    """Return the difference that turns ``before`` into ``after``."""
    servers_gone, servers = _changes(_servers(before), _servers(after))
    workers_gone, workers = _changes(_workers(before), _workers(after))
    sets_before, sets_after = _parameters(before), _parameters(after)
    parameters_gone, parameters = _changes(sets_before, sets_after)
    if [*_merge(sets_before, parameters_gone, _parameters_of(parameters))] != [*sets_after]:  # The order changed.
        parameters_gone, parameters = tuple(sets_before), after.parameters
    return MapDifference(
        before.epoch,
        after.epoch,
        servers_gone,
        servers,
        workers_gone,
        workers,
        parameters_gone,
        parameters,
        after.paused,
        after.ranks_done,
    )


def apply(before: ClusterMap, change: MapDifference) -> ClusterMap:
    """Return the map of ``change.epoch``. Raises StaleEpochError if ``before`` is not the map of ``change.base``."""
    if before.epoch != change.base:
        raise StaleEpochError(
            f"a difference from cluster map {change.base} to {change.epoch} does not apply to map {before.epoch}: open "
            "a new session, which begins with a whole map",
            epoch=before.epoch,
        )
    servers = _merge(_servers(before), change.servers_gone, {one.server_id: one for one in change.servers})
    workers = _merge(_workers(before), change.workers_gone, {one.worker_id: one for one in change.workers})
    parameters = _merge(_parameters(before), change.parameters_gone, _parameters_of(change.parameters))
    return replace(
        before,
        epoch=change.epoch,
        servers=tuple(sorted(servers.values(), key=lambda server: server.server_id)),
        workers=tuple(sorted(workers.values(), key=lambda worker: worker.rank)),
        parameters=tuple(parameters.values()),
        paused=change.paused,
        ranks_done=change.ranks_done,
    )


def _servers(cluster: ClusterMap) -> dict[str, ServerEntry]:
    return {server.server_id: server for server in cluster.servers}


def _workers(cluster: ClusterMap) -> dict[str, WorkerEntry]:
    return {worker.worker_id: worker for worker in cluster.workers}


def _parameters(cluster: ClusterMap) -> dict[str, ParametersEntry]:
    return _parameters_of(cluster.parameters)


def _parameters_of(entries: Iterable[ParametersEntry]) -> dict[str, ParametersEntry]:
    return {entry.spec.name: entry for entry in entries}


def _changes(before: Mapping[str, T], after: Mapping[str, T]) -> tuple[tuple[str, ...], tuple[T, ...]]:
    """Return removed keys, and new or changed entries."""
    gone = tuple(key for key in before if key not in after)
    return gone, tuple(entry for key, entry in after.items() if before.get(key) != entry)


def _merge(before: Mapping[str, T], gone: Iterable[str], changed: Mapping[str, T]) -> dict[str, T]:
    """Return the remaining entries in place, followed by the new ones."""
    without = set(gone)
    return {key: entry for key, entry in before.items() if key not in without} | dict(changed)
