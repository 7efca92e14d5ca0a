"""Keeps every shard in as many copies as wanted, on servers that live: applies ``replicas`` to the registry. Pure.

``lose`` follows the loss of servers, ``filled`` and ``unreachable`` what primaries say, and ``plan`` puts in hand what
is due. All of it changes the map and nothing else: primaries see there what to fill, and what to forget.

Not here: which change is due (``replicas``), who is live (``membership``), epochs and durability (``cluster``).
"""

from __future__ import annotations

from collections.abc import Iterable

from psdist.types import Replica, Shard
from psdist_scheduler import replicas
from psdist_scheduler.events import Announce, Effect, Note, ReplicaFilled, ReplicaUnreachable, ShardsLost
from psdist_scheduler.membership import Membership
from psdist_scheduler.parameters import Parameters
from psdist_scheduler.records import ClusterSettings
from psdist_scheduler.registry import REMEDY, Registry, name_shards

#: A server's place as a replica: parameters, shard, and the server's life.
_Place = tuple[str, int, Replica]


class Keeper:
    """Who holds which shard, from now on."""

    def __init__(self, settings: ClusterSettings, registry: Registry, members: Membership) -> None:
        self._settings = settings
        self._registry = registry
        self._members = members
        #: Where a primary could not reach a replica, and until when that server is not tried again in this place.
        self._unreachable: dict[_Place, float] = {}
        #: Shards with a copy that became complete since the last epoch.
        self._fresh: set[tuple[str, int]] = set()
        #: Whether something may be due though nothing changes: after a restart, or after what was ``fresh``.
        self._due = True

    def lose(self, epoch: int) -> list[Effect]:
        """Shards go on without the servers that are gone, or are lost with them. ``epoch`` is the one that shows it."""
        if not self._members.changed:
            return []
        self._unreachable = {place: t for place, t in self._unreachable.items() if self._live(place[2])}
        effects: list[Effect] = []
        for p in self._placed():
            before = p.entry.shards
            after = tuple(replicas.after_loss(shard, self._live) for shard in before)
            if after == before:
                continue
            if self._needs_values(p, after) and self._members.staying:
                self._registry.place_anew(p.name, self._placed_anew(p), epoch)
                effects.append(Note(f"a server is gone before {p.name!r} was ready: its values are uploaded again"))
            else:
                self._registry.set_shards(p.name, after)
                effects += _promotions(p.name, before, after) + self._losses(p, before, after)
        return effects

    def filled(self, event: ReplicaFilled) -> list[Effect]:
        """A primary says that a replica is complete. What it says of an earlier term means nothing any more."""
        shard = self._reported(event)
        if shard is None or event.replica not in shard.filling:
            return []
        p = self._set(event.parameters, event.shard, replicas.filled(shard, event.replica))
        self._fresh.add((event.parameters, event.shard))
        if self._registry.shorthanded(p) or self._settings.replicas == 1:
            return []
        return [Note(f"every shard of {p.name!r} has {self._settings.replicas} copies")]

    def unreachable(self, event: ReplicaUnreachable, now: float) -> list[Effect]:
        """A primary cannot reach a replica: another takes its place, or the same one later if there is no other."""
        shard = self._reported(event)
        if shard is None or event.replica not in (*shard.backups, *shard.filling):
            return []
        self._set(event.parameters, event.shard, replicas.without(shard, event.replica))
        until = now + self._settings.lease_seconds
        self._unreachable[event.parameters, event.shard, event.replica] = until
        what = f"{shard.primary} cannot reach {event.replica}, which held {name_shards([event.shard])}"
        return [Note(f"{what} of {event.parameters!r}: {event.reason}", "warning")]

    def plan(self, now: float) -> list[Effect]:
        """Puts in hand what is due by now."""
        again = self._due or any(until <= now for until in self._unreachable.values())
        if not again and not self._members.changed and not self._registry.changed:
            return []
        placed = {p.name: p for p in self._placed()}
        due = replicas.Plan(
            [p.entry for p in placed.values()],
            [
                replicas.Holder(Replica(server.member_id, server.incarnation), server.host, server.draining)
                for server in self._members.servers
            ],
            self._settings.replicas,
            installed=lambda name: placed[name].placed.committed,
            ready=lambda name: placed[name].entry.ready,
            fresh=lambda name, number: (name, number) in self._fresh,
            refused=lambda *place: self._unreachable.get(place, now) > now,
            tried=lambda *place: place in self._unreachable,
        ).changes()
        effects: list[Effect] = []
        for name, after in due.items():
            before = placed[name].entry.shards
            self._registry.set_shards(name, after)
            effects += _fills(placed[name], before, after) + _promotions(name, before, after)
        return effects

    def published(self) -> None:
        """What changed is shown in an epoch, so that more can become of it."""
        self._due, self._fresh = bool(self._fresh), set()

    def degraded(self) -> str:
        """A sentence about shards with fewer copies than wanted; empty if all have theirs."""
        wanted = self._settings.replicas
        short: dict[str, list[int]] = {}
        for p in self._placed():
            for server, numbers in self._registry.shorthanded(p).items():
                short.setdefault(server, []).extend(numbers)
        if not short:
            return ""
        shards = sum(len(p.entry.shards) for p in self._placed())
        count = sum(len(numbers) for numbers in short.values())
        targets = ", ".join(sorted(server for server in short if server))
        what = f"being copied to {targets}" if targets else "waiting for a server that can hold the next"
        return f"{count} of {shards} shards have fewer than {wanted} copies: {what}"

    # --- inner --------------------------------------------------------------------------------------------------------

    def _live(self, replica: Replica) -> bool:
        return self._members.is_live(replica.server_id, replica.incarnation)

    def _placed(self) -> Iterable[Parameters]:
        return [p for p in self._registry.all if p.record is not None]

    def _set(self, name: str, number: int, shard: Shard) -> Parameters:
        p = self._registry.get(name)
        assert p is not None
        shards = list(p.entry.shards)
        shards[number] = shard
        self._registry.set_shards(name, tuple(shards))
        return p

    def _reported(self, event: ReplicaFilled | ReplicaUnreachable) -> Shard | None:
        """The shard that a report is about, if it comes from its primary of this term."""
        server = self._members.get(self._members.sessions.get(event.call, ""))
        p = self._registry.get(event.parameters)
        if server is None or p is None or p.record is None or not 0 <= event.shard < len(p.entry.shards):
            return None
        shard = p.entry.shards[event.shard]
        sender = Replica(server.member_id, server.incarnation)
        return shard if sender == shard.primary and event.term == shard.term and not shard.lost else None

    def _needs_values(self, p: Parameters, after: tuple[Shard, ...]) -> bool:
        """Whether values are gone that nobody has trained yet, so that their uploader still has them."""
        moved = any(new.lost or new.term != old.term for old, new in zip(p.entry.shards, after, strict=True))
        lost = any(new.lost for new in after)
        return not p.entry.ready and (lost if p.placed.committed else moved)

    def _placed_anew(self, p: Parameters) -> tuple[Shard, ...]:
        shards: list[Shard] = []
        for shard in p.entry.shards:
            counts = [s.primary.server_id for s in shards]
            spare = min(self._members.staying, key=lambda server: (counts.count(server.member_id), server.member_id))
            shards.append(replicas.placed_anew(shard, self._live, Replica(spare.member_id, spare.incarnation)))
        return tuple(shards)

    def _losses(self, p: Parameters, before: tuple[Shard, ...], after: tuple[Shard, ...]) -> list[Effect]:
        lost: dict[str, list[int]] = {}
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            if new.lost and not old.lost:
                lost.setdefault(new.primary.server_id, []).append(number)
        effects: list[Effect] = []
        for server, numbers in lost.items():
            held = f"{server} is gone and held {name_shards(numbers)} of {p.name!r} alone"
            if not self._members.workers:
                effects.append(Note(f"{held}; no worker is left to miss it"))
                continue
            text = f"{held} ({len(numbers)} of {len(after)} shards, at version {p.version}): {REMEDY}"
            effects.append(Announce(ShardsLost(p.name, tuple(numbers), server, p.version, text)))
            effects.append(Note(f"lost: {text}", "warning"))
        return effects


def _promotions(name: str, before: tuple[Shard, ...], after: tuple[Shard, ...]) -> list[Effect]:
    promoted: dict[tuple[Replica, Replica], list[int]] = {}
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        if new.term != old.term:
            promoted.setdefault((old.primary, new.primary), []).append(number)
    return [
        Note(f"{new} is now the primary of {name_shards(numbers)} of {name!r}, which was {old}")
        for (old, new), numbers in promoted.items()
    ]


def _fills(p: Parameters, before: tuple[Shard, ...], after: tuple[Shard, ...]) -> list[Effect]:
    """Notes on copies that begin. Those that belong to a creation are no news."""
    begun: dict[Replica, list[int]] = {}
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        for replica in new.filling if p.entry.ready else ():
            if replica not in old.filling:
                begun.setdefault(replica, []).append(number)
    return [
        Note(
            f"{name_shards(numbers)} of {p.name!r} is being copied to {replica}"
            if not numbers[1:]
            else f"{name_shards(numbers)} of {p.name!r} are being copied to {replica}"
        )
        for replica, numbers in begun.items()
    ]
