"""Changes that a new map makes to one server's roles, shard by shard, and the machine for a new primary. Pure.

A server is a shard's primary, or holds a copy of it (as a backup, or while being filled), or has no role in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from psdist.consistency import BSP, SSP, Consistency
from psdist.types import ParametersEntry, ParametersMember, Replica, Shard
from psdist_server.core.async_shard import AsyncShard
from psdist_server.core.bsp_shard import BspShard
from psdist_server.core.shard import Records


@dataclass(slots=True)
class RoleChanges:
    """Role changes as shard numbers, in the order in which they must be carried out."""

    #: No longer primary.
    demoted: list[int] = field(default_factory=list)
    #: Held a copy, which must be discarded.
    discarded: list[int] = field(default_factory=list)
    #: Must hold a copy from now on.
    added: list[int] = field(default_factory=list)
    #: Held a copy, and is now the primary.
    promoted: list[int] = field(default_factory=list)
    #: Primary of a shard that no server held before.
    created: list[int] = field(default_factory=list)

    @property
    def ended(self) -> list[int]:
        """Shards that may still have work in progress that must finish first."""
        return [*self.demoted, *self.discarded, *self.promoted]


def is_primary(shard: Shard, me: Replica) -> bool:
    """True if this incarnation of this server serves the shard."""
    return shard.primary == me and not shard.lost


def changes(entry: ParametersEntry, me: Replica, terms: Mapping[int, int], copies: Collection[int]) -> RoleChanges:
    """Compare this server's current roles with those that ``entry`` assigns to it.

    terms: current term of each shard that it is the primary of.
    copies: shards that it holds a copy of.
    """
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
    """Create the machine for one shard of parameters with this consistency.

    clipping: BSP only: True to aggregate a step first, and to apply it when its global norm is known.
    reference_workers: BSP only: number of workers that ``BSP.resize_lr`` compares with.
    records: state of each slice taken over from another server; None if all slices are new.
    departed: SSP and ASP: lost workers that may continue their pushes.
    """
    if isinstance(consistency, BSP):
        return BspShard(indices, members, consistency, clipping, reference_workers, records)
    staleness = consistency.staleness if isinstance(consistency, SSP) else None
    return AsyncShard(indices, members, staleness, consistency.staleness_lr == "inverse", records, departed)
