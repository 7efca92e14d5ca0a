"""Copies that are being filled, and the servers that can be struck meanwhile without losing a shard. Pure.

A shard survives as long as one complete copy does. So a test may strike a server only if each shard has a complete copy
on another server that was not struck before. The loss of the last copy would be the test's fault.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from psdist.types import ParametersEntry, Replica

#: Role of a struck server: it receives the copy, or sends it.
Role = Literal["target", "source"]


@dataclass(frozen=True, slots=True)
class Fill:
    """A copy that is being filled. number: of ``Shard.fills``; a later filling of the same copy has a different one."""

    parameters: str
    shard: int
    number: int
    source: Replica
    target: Replica


@dataclass(frozen=True, slots=True)
class Chance:
    """A server that takes part in ``fill`` and can be struck."""

    server: Replica
    role: Role
    fill: Fill


def fills_of(entries: Iterable[ParametersEntry]) -> list[Fill]:
    """Return all fillings in a cluster map."""
    return [
        Fill(entry.spec.name, number, shard.fill_of(target), shard.primary, target)
        for entry in entries
        for number, shard in enumerate(entry.shards)
        for target in shard.filling
    ]


def is_expendable(entries: Iterable[ParametersEntry], server: Replica, gone: Collection[Replica]) -> bool:
    """Return True if every shard has a complete copy on a server other than ``server`` and those that are ``gone``."""
    return all(
        any(copy != server and copy not in gone for copy in (shard.primary, *shard.backups))
        for entry in entries
        for shard in entry.shards
    )


def chances(entries: Collection[ParametersEntry], gone: Collection[Replica]) -> list[Chance]:
    """Return every strike that hits a filling and loses no shard. gone: servers that were struck before."""
    both = [
        chance
        for fill in fills_of(entries)
        for chance in (Chance(fill.target, "target", fill), Chance(fill.source, "source", fill))
    ]
    servers = {chance.server for chance in both} - set(gone)
    expendable = {server for server in servers if is_expendable(entries, server, gone)}
    return [chance for chance in both if chance.server in expendable]
