"""The roles that a new map gives to one server and takes from it, shard by shard. Pure.

A server is the primary of a shard, or has a copy of it (as a backup, or while it is filled), or neither.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from psdist.types import ParametersEntry, Replica, Shard


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


def has_copy(shard: Shard, me: Replica) -> bool:
    """Whether it holds a copy for another."""
    return shard.primary != me and (me in shard.backups or me in shard.filling)


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
        elif has_copy(shard, me):
            if number not in copies:
                found.added.append(number)
        elif number in copies:
            found.discarded.append(number)
    return found
