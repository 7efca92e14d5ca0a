"""The roles that a new map gives to one server and takes from it, shard by shard, and the machine of a new one. Pure.

A server is the primary of a shard, or has a copy of it (as a backup, or while it is filled), or neither.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from psdist.consistency import BSP, SSP, Consistency
from psdist.types import ParametersEntry, ParametersMember, Replica, Shard
from psdist_server.core.async_shard import AsyncShard
from psdist_server.core.bsp_shard import BspShard
from psdist_server.core.records import Records


@dataclass(slots=True)
class RoleChanges:
    """What changes, as shard numbers, in the order in which it must be done."""

    #: Was primary, is not any more.
    demoted: list[int] = field(default_factory=list)
    #: Had a copy, and is to discard it.
    discarded: list[int] = field(default_factory=list)
    #: Gets a copy.
    added: list[int] = field(default_factory=list)
    #: Has a copy, and is the primary now.
    promoted: list[int] = field(default_factory=list)
    #: Is the primary of a shard that no server had before.
    created: list[int] = field(default_factory=list)

    @property
    def ended(self) -> list[int]:
        """Shards in which something may still be under way that must end first."""
        return [*self.demoted, *self.discarded, *self.promoted]


def is_primary(shard: Shard, me: Replica) -> bool:
    """Whether this incarnation of this server serves the shard."""
    return shard.primary == me and not shard.lost


def changes(entry: ParametersEntry, me: Replica, terms: Mapping[int, int], copies: Collection[int]) -> RoleChanges:
    """What ``entry`` changes for a server that is primary of the shards in ``terms``, under these terms, and holds
    copies of the shards in ``copies``."""
    found = RoleChanges()
    for number, shard in enumerate(entry.shards):
        stays = is_primary(shard, me) and terms.get(number) == shard.term
        if number in terms and not stays:
            found.demoted.append(number)
        if is_primary(shard, me):
            if number in copies:
                found.promoted.append(number)
            elif not stays:
                found.created.append(number)
        elif shard.primary != me and (me in shard.backups or me in shard.filling):
            if number not in copies:
                found.added.append(number)
        elif number in copies:
            found.discarded.append(number)
    return found


def make_shard(
    indices: Iterable[int],
    members: Iterable[ParametersMember],
    consistency: Consistency,
    clipping: bool,
    reference_workers: int = 0,
    records: Records | None = None,
    departed: tuple[ParametersMember, ...] = (),
) -> BspShard | AsyncShard:
    """The machine for one shard of parameters with this consistency.

    clipping, reference_workers: BSP only: a step is aggregated first and applied when its global norm is known; what
        ``BSP.resize_lr`` compares with. departed: SSP and ASP: workers that were lost and may continue their pushes.
    records: what is known of each slice, where the shard was another's before; else all slices are new.
    """
    if isinstance(consistency, BSP):
        return BspShard(indices, members, consistency, clipping, reference_workers, records)
    staleness = consistency.staleness if isinstance(consistency, SSP) else None
    return AsyncShard(indices, members, staleness, consistency.staleness_lr == "inverse", records, departed)
