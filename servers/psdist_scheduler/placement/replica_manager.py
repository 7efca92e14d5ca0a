"""Keeps every shard in the wanted number of copies on live servers, by applying ``replicas`` to the registry. Pure.

``lose`` reacts to lost servers, ``on_filled`` and ``on_unreachable`` to reports of primaries, and ``plan`` starts the
changes that are due. All of them only change the map. Primaries read from it which replicas to fill and which to drop.

``replicas`` decides which change is due, ``membership`` who is live, ``cluster`` epochs and durability.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from psdist.types import Replica, Shard
from psdist_scheduler.events import cluster_events as ev
from psdist_scheduler.events.cluster_state import ClusterSettings, group
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement import replicas
from psdist_scheduler.placement.registry import ParameterSet, Registry, name_shards

#: A server's place as a replica: parameter set, shard, and the server's incarnation.
_Place = tuple[str, int, Replica]


@dataclass(slots=True)
class ReplicaManager:
    """Assignment of shards to servers."""

    _settings: ClusterSettings
    _registry: Registry
    _members: Membership
    #: Places where a primary could not reach a replica, and the time until which that server is not tried there again.
    _unreachable: dict[_Place, float] = field(default_factory=dict)
    #: Backups that their primary cannot reach, with its term and its reason.
    _doubted: dict[_Place, tuple[int, str]] = field(default_factory=dict)
    #: Shards that changed. Servers must confirm the epoch that shows them before they change again.
    _fresh: set[tuple[str, int]] = field(default_factory=set)
    #: Epoch that showed each changed shard. All others were shown by this scheduler's first epoch.
    _shown: dict[tuple[str, int], int] = field(default_factory=dict)
    _first_epoch: int = 0
    #: Epoch of the map that each server confirmed.
    _confirmed: dict[str, int] = field(default_factory=dict)
    #: True if something may be due without a further change: after a restart, or after shards were ``_fresh``.
    _due: bool = True
    #: True if something is due as soon as servers confirm what was shown.
    _held_up: bool = False
    #: Draining servers that the last plan considered. One that waited for a snapshot is marked after the plan is made.
    _leaving: frozenset[Replica] = frozenset()

    def lose(self, epoch: int) -> list[ev.Effect]:
        """Continue without the servers that are gone: promote backups, or mark shards as lost.

        epoch: the epoch that will show it.
        """
        if not self._members.changed:
            return []
        self._unreachable = {place: t for place, t in self._unreachable.items() if self._members.has(place[2])}
        effects: list[ev.Effect] = []
        for p in self._placed():
            before = p.entry.shards
            after = tuple(replicas.after_loss(shard, self._members.has) for shard in before)
            if after == before:
                continue
            if self._needs_values(p, after):
                # If no server is left, shards stay unplaced until one registers.
                placed = self._placed_anew(p)
                if p.placed.committed or placed != before:
                    p.replace_shards(placed, epoch)
                    effects.append(
                        ev.LogEvent(
                            f"a server was lost before {p.name!r} was ready; its values are uploaded again",
                            kind="parameters",
                        )
                    )
            else:
                p.change(shards=after)
                effects += _promotions(p.name, before, after) + self._losses(p, before, after)
        return effects

    def on_filled(self, event: ev.ReplicaFilled) -> list[ev.Effect]:
        """Process a primary's report that a replica is complete. Reports of an earlier term or filling have no
        effect."""
        shard = self._reported(event)
        if shard is None or event.replica not in shard.filling:
            return []
        p = self._set(event.parameters, event.shard, replicas.filled(shard, event.replica))
        self._fresh.add((event.parameters, event.shard))
        if self._registry.missing_replicas(p) or self._settings.replicas == 1:
            return []
        return [ev.LogEvent(f"every shard of {p.name!r} has {self._settings.replicas} copies", kind="replication")]

    def on_unreachable(self, event: ev.ReplicaUnreachable, now: float) -> list[ev.Effect]:
        """Process a primary's report that it cannot reach a replica. Another server takes its place, or the same one
        later.

        A backup is not dropped immediately. If the primary is the unreachable one, the backup holds the only remaining
        copy. So a new epoch is made, and the backup is dropped once the primary has confirmed it.
        """
        shard = self._reported(event)
        place = (event.parameters, event.shard, event.replica)
        if shard is None or place in self._doubted:
            return []
        if event.replica in shard.filling:
            return self._drop(place, shard, event.reason, now)
        if event.replica in shard.backups:
            self._doubted[place] = (shard.term, event.reason)
            self._set(event.parameters, event.shard, shard)
            self._fresh.add(place[:2])
        return []

    def plan(self, epoch: int, now: float) -> list[ev.Effect]:
        """Start the changes of copies that are due.

        epoch: the epoch that will show them.
        """
        liveness = self._members.sessions.liveness
        confirmed = {server.member_id: liveness[server.member_id].epoch for server in self._members.servers}
        again = self._due or any(until <= now for until in self._unreachable.values())
        again = again or (self._held_up and confirmed != self._confirmed)
        leaving = frozenset(server.replica for server in self._members.servers if server.draining)
        again = again or leaving != self._leaving
        if not again and not self._members.changed and not self._registry.changed:
            return []
        self._confirmed, self._leaving = confirmed, leaving
        effects = self._drop_unreachable(now)
        placed = {p.name: p for p in self._placed()}
        plan = replicas.PlacementPlan(
            [p.placed for p in placed.values()],
            self._members.servers,
            self._settings.replicas,
            epoch,
            knows=self._knows,
            refused=lambda *place: self._unreachable.get(place, now) > now,
            tried=lambda *place: place in self._unreachable,
        )
        for name, after in plan.changes().items():
            before = placed[name].entry.shards
            placed[name].change(shards=after)
            effects += _fills(placed[name], before, after) + _promotions(name, before, after)
        self._held_up = plan.held_up or bool(self._doubted)
        return effects

    def published(self, epoch: int) -> None:
        """Note that ``epoch`` shows the changes, so that the next ones may follow."""
        self._first_epoch = self._first_epoch or epoch
        self._shown.update(dict.fromkeys(self._fresh, epoch))
        self._due, self._fresh = bool(self._fresh), set()

    def degraded(self) -> str:
        """Return a sentence about shards with fewer copies than wanted; empty if all have theirs."""
        wanted = self._settings.replicas
        short: dict[str, list[int]] = {}
        for p in self._placed():
            for server, numbers in self._registry.missing_replicas(p).items():
                short.setdefault(server, []).extend(numbers)
        if not short:
            return ""
        shards = sum(len(p.entry.shards) for p in self._placed())
        count = sum(len(numbers) for numbers in short.values())
        targets = ", ".join(sorted(server for server in short if server))
        what = f"being copied to {targets}" if targets else "waiting for a server that can hold the next"
        return f"{count} of {shards} shards have fewer than {wanted} copies: {what}"

    def _knows(self, name: str, number: int, replica: Replica) -> bool:
        """True if the server has confirmed a map that shows the shard as it is."""
        presence = self._members.sessions.liveness.get(replica.server_id)
        if presence is None or (name, number) in self._fresh or not self._members.has(replica):
            return False
        return presence.epoch >= self._shown.get((name, number), self._first_epoch) > 0

    def _drop(self, place: _Place, shard: Shard, reason: str, now: float) -> list[ev.Effect]:
        name, number, replica = place
        self._set(name, number, replicas.without(shard, replica))
        self._unreachable[place] = now + self._settings.lease_seconds
        what = f"{shard.primary} cannot reach {replica}, which held {name_shards([number])}"
        return [ev.LogEvent(f"{what} of {name!r}: {reason}", "warning", kind="replication")]

    def _drop_unreachable(self, now: float) -> list[ev.Effect]:
        """Drop unreachable backups whose primaries confirmed a later epoch, and are therefore reachable themselves."""
        effects: list[ev.Effect] = []
        for place, (term, reason) in list(self._doubted.items()):
            name, number, replica = place
            p = self._registry.get(name)
            placed = p is not None and p.record is not None and number < len(p.entry.shards)
            shard = p.entry.shards[number] if p is not None and placed else None
            if shard is None or shard.term != term or replica not in shard.backups:
                del self._doubted[place]
            elif self._knows(name, number, shard.primary):
                del self._doubted[place]
                effects += self._drop(place, shard, reason, now)
        return effects

    def _placed(self) -> Iterable[ParameterSet]:
        return [p for p in self._registry.all if p.record is not None]

    def _set(self, name: str, number: int, shard: Shard) -> ParameterSet:
        p = self._registry.get(name)
        assert p is not None
        shards = list(p.entry.shards)
        shards[number] = shard
        p.change(shards=tuple(shards))
        return p

    def _reported(self, event: ev.ReplicaFilled | ev.ReplicaUnreachable) -> Shard | None:
        """Return the shard of a report if its current primary sent it, about the replica's newest filling; otherwise
        None.

        A report may arrive late. If the replica was dropped and added again meanwhile, the report is about a copy that
        no longer counts.
        """
        server = self._members.by_session(event.call)
        p = self._registry.get(event.parameters)
        if server is None or p is None or p.record is None or not 0 <= event.shard < len(p.entry.shards):
            return None
        shard = p.entry.shards[event.shard]
        is_current = event.term == shard.term and event.fill == shard.fill_of(event.replica) and not shard.lost
        return shard if server.replica == shard.primary and is_current else None

    def _needs_values(self, p: ParameterSet, after: tuple[Shard, ...]) -> bool:
        """True if values were lost that nobody has trained yet. Their uploader still has them."""
        moved = any(new.lost or new.term != old.term for old, new in zip(p.entry.shards, after, strict=True))
        lost = any(new.lost for new in after)
        return not p.entry.ready and (lost if p.placed.committed else moved)

    def _placed_anew(self, p: ParameterSet) -> tuple[Shard, ...]:
        if not self._members.staying:
            return tuple(Shard(shard.primary, shard.term) for shard in p.entry.shards)
        shards: list[Shard] = []
        for shard in p.entry.shards:
            counts = [s.primary.server_id for s in shards]
            spare = min(self._members.staying, key=lambda server: (counts.count(server.member_id), server.member_id))
            shards.append(replicas.placed_anew(shard, self._members.has, spare.replica))
        return tuple(shards)

    def _losses(self, p: ParameterSet, before: tuple[Shard, ...], after: tuple[Shard, ...]) -> list[ev.Effect]:
        changes = enumerate(zip(before, after, strict=True))
        lost = group((new.primary.server_id, number) for number, (old, new) in changes if new.lost and not old.lost)
        effects: list[ev.Effect] = []
        for server, numbers in lost.items():
            member = self._members.get(server)
            held = f"{server} is gone and held {name_shards(numbers)} of {p.name!r} alone"
            if not self._members.workers:
                # At the orderly end of a run all servers leave. Each departure is logged, and nothing is lost.
                if member is None or member.state != "left":
                    effects.append(ev.LogEvent(f"{held}; no worker is left to miss it", kind="shard_loss"))
                continue
            text = f"{held} ({len(numbers)} of {len(after)} shards, at {p.version_text}): {self._registry.remedy}"
            effects.append(ev.Broadcast(ev.ShardsLost(p.name, tuple(numbers), server, p.version, text)))
            effects.append(ev.LogEvent(f"lost: {text}", "warning", kind="shard_loss"))
        return effects


def _promotions(name: str, before: tuple[Shard, ...], after: tuple[Shard, ...]) -> list[ev.Effect]:
    changes = enumerate(zip(before, after, strict=True))
    promoted = group(((old.primary, new.primary), number) for number, (old, new) in changes if new.term != old.term)
    return [
        ev.LogEvent(
            f"{new} is now the primary of {name_shards(numbers)} of {name!r}, which was {old}", kind="promotion"
        )
        for (old, new), numbers in promoted.items()
    ]


def _fills(p: ParameterSet, before: tuple[Shard, ...], after: tuple[Shard, ...]) -> list[ev.Effect]:
    """Log copies that start. Those that are part of a creation are not logged."""
    changes = enumerate(zip(before, after, strict=True)) if p.entry.ready else ()
    begun = group((r, number) for number, (old, new) in changes for r in new.filling if r not in old.filling)
    return [
        ev.LogEvent(
            f"{name_shards(n)} of {p.name!r} {'are' if n[1:] else 'is'} being copied to {replica}", kind="replication"
        )
        for replica, n in begun.items()
    ]
