"""Placement of shards in the wanted number of copies on live servers. Pure.

``ReplicaManager.lose`` reacts to lost servers, ``on_filled`` and ``on_unreachable`` to reports of primaries, and
``plan`` starts the changes that are due. All of them only change the map. Primaries read from it which replicas to fill
and which to drop.

``parameter_creation`` places new sets, ``members`` knows who is live, and ``cluster`` makes epochs durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from psdist.types import Replica, Shard, Slicing
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_state import ClusterSettings, Member, ParametersRecord, group
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.parameter_sets import ParameterSet, Registry, name_shards

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

    def lose(self, epoch: int) -> list[ef.Effect]:
        """Continue without the servers that are gone: promote backups, or mark shards as lost.

        epoch: the epoch that will show it.
        """
        if not self._members.changed:
            return []
        self._unreachable = {place: t for place, t in self._unreachable.items() if self._members.has(place[2])}
        effects: list[ef.Effect] = []
        for p in self._registry.placed:
            before = p.entry.shards
            after = tuple(after_loss(shard, self._members.has) for shard in before)
            if after == before:
                continue
            if self._needs_values(p, after):
                # If no server is left, shards stay unplaced until one registers.
                placed = self._placed_anew(p)
                if p.placed.committed or placed != before:
                    p.replace_shards(placed, epoch)
                    effects.append(
                        ef.LogEvent(
                            f"a server was lost before {p.name!r} was ready; its values are uploaded again",
                            kind="parameters",
                        )
                    )
            else:
                p.change(shards=after)
                effects += _promotions(p.name, before, after) + self._losses(p, before, after)
        return effects

    def on_filled(self, event: ev.ReplicaFilled) -> list[ef.Effect]:
        """Process a primary's report that a replica is complete. Reports of an earlier term or filling have no
        effect."""
        shard = self._reported(event)
        if shard is None or event.replica not in shard.filling:
            return []
        p = self._set(event.parameters, event.shard, filled(shard, event.replica))
        self._fresh.add((event.parameters, event.shard))
        if self._registry.missing_replicas(p) or self._settings.replicas == 1:
            return []
        return [ef.LogEvent(f"every shard of {p.name!r} has {self._settings.replicas} copies", kind="replication")]

    def on_unreachable(self, event: ev.ReplicaUnreachable, now: float) -> list[ef.Effect]:
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

    def plan(self, epoch: int, now: float) -> list[ef.Effect]:
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
        placed = {p.name: p for p in self._registry.placed}
        plan = PlacementPlan(
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
        for p in self._registry.placed:
            for server, numbers in self._registry.missing_replicas(p).items():
                short.setdefault(server, []).extend(numbers)
        if not short:
            return ""
        shards = sum(len(p.entry.shards) for p in self._registry.placed)
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

    def _drop(self, place: _Place, shard: Shard, reason: str, now: float) -> list[ef.Effect]:
        name, number, replica = place
        self._set(name, number, without(shard, replica))
        self._unreachable[place] = now + self._settings.lease_seconds
        what = f"{shard.primary} cannot reach {replica}, which held {name_shards([number])}"
        return [ef.LogEvent(f"{what} of {name!r}: {reason}", "warning", kind="replication")]

    def _drop_unreachable(self, now: float) -> list[ef.Effect]:
        """Drop unreachable backups whose primaries confirmed a later epoch, and are therefore reachable themselves."""
        effects: list[ef.Effect] = []
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
            shards.append(placed_anew(shard, self._members.has, spare.replica))
        return tuple(shards)

    def _losses(self, p: ParameterSet, before: tuple[Shard, ...], after: tuple[Shard, ...]) -> list[ef.Effect]:
        changes = enumerate(zip(before, after, strict=True))
        lost = group((new.primary.server_id, number) for number, (old, new) in changes if new.lost and not old.lost)
        effects: list[ef.Effect] = []
        for server, numbers in lost.items():
            member = self._members.get(server)
            held = f"{server} is gone and held {name_shards(numbers)} of {p.name!r} alone"
            if not self._members.workers:
                # At the orderly end of a run all servers leave. Each departure is logged, and nothing is lost.
                if member is None or member.state != "left":
                    effects.append(ef.LogEvent(f"{held}; no worker is left to miss it", kind="shard_loss"))
                continue
            text = f"{held} ({len(numbers)} of {len(after)} shards, at {p.version_text}): {self._registry.remedy}"
            effects.append(ef.Broadcast(ef.ShardsLost(p.name, tuple(numbers), server, p.version, text)))
            effects.append(ef.LogEvent(f"lost: {text}", "warning", kind="shard_loss"))
        return effects


def _promotions(name: str, before: tuple[Shard, ...], after: tuple[Shard, ...]) -> list[ef.Effect]:
    changes = enumerate(zip(before, after, strict=True))
    promoted = group(((old.primary, new.primary), number) for number, (old, new) in changes if new.term != old.term)
    return [
        ef.LogEvent(
            f"{new} is now the primary of {name_shards(numbers)} of {name!r}, which was {old}", kind="promotion"
        )
        for (old, new), numbers in promoted.items()
    ]


def _fills(p: ParameterSet, before: tuple[Shard, ...], after: tuple[Shard, ...]) -> list[ef.Effect]:
    """Log copies that start. Those that are part of a creation are not logged."""
    changes = enumerate(zip(before, after, strict=True)) if p.entry.ready else ()
    begun = group((r, number) for number, (old, new) in changes for r in new.filling if r not in old.filling)
    return [
        ef.LogEvent(
            f"{name_shards(n)} of {p.name!r} {'are' if n[1:] else 'is'} being copied to {replica}", kind="replication"
        )
        for replica, n in begun.items()
    ]


# --- transitions, and the plan of changes -----------------------------------------------------------------------------
#
# A shard changes when a server is lost (``after_loss``), when its primary reports that a replica is filled
# (``filled``) or does not answer (``without``), and when ``PlacementPlan`` finds an improvement:
#
# 1. A replica that is being filled on a draining server is dropped. A complete one there is dropped as soon as enough
#   others are complete.
# 2. A shard with too few copies gets another one, which is filled.
# 3. If all copies are complete, a shard may move: a further copy is filled. When it is complete, the copy whose
#   removal improves the balance most is dropped.
#
# A move is recorded only in the shard itself, so it continues after a restart. Moves end because each one lowers
# ``_imbalance``. Only a loss lowers the number of complete copies below what is wanted, and only complete copies are
# promoted. A copy is dropped only after the others have confirmed the map that lists them. So each of them was alive
# after they became sufficient. Otherwise a good copy could be dropped in favour of one whose loss is not noticed yet.

#: Number of copies that one primary fills at a time.
FILLS_PER_SOURCE = 2


#: Replacement of a shard: its parameter set, its number, and the new shard.
_Change = tuple[str, int, Shard]


# --- one shard --------------------------------------------------------------------------------------------------------


def after_loss(shard: Shard, live: Callable[[Replica], bool]) -> Shard:
    """Return the shard without its dead replicas. The first live backup is promoted; without one the shard is lost."""
    if shard.lost:
        return shard
    backups = tuple(replica for replica in shard.backups if live(replica))
    filling = tuple(replica for replica in shard.filling if live(replica))
    if live(shard.primary):
        return shard.with_copies(backups, filling)
    if not backups:
        return shard.with_copies((), (), lost=True)
    return shard.with_copies(backups[1:], filling, primary=backups[0], term=shard.term + 1)


def placed_anew(shard: Shard, live: Callable[[Replica], bool], spare: Replica) -> Shard:
    """Return the shard before it has values that count: alone on its primary, or on ``spare`` if the primary is
    gone."""
    return Shard(shard.primary, shard.term) if live(shard.primary) else Shard(spare, shard.term + 1)


def filled(shard: Shard, replica: Replica) -> Shard:
    """Return the shard after its primary reported ``replica`` as complete."""
    filling = tuple(other for other in shard.filling if other != replica)
    return shard.with_copies((*shard.backups, replica), filling)


def without(shard: Shard, replica: Replica) -> Shard:
    """Return the shard without one of its backups or of the replicas being filled."""
    backups = tuple(other for other in shard.backups if other != replica)
    filling = tuple(other for other in shard.filling if other != replica)
    return shard.with_copies(backups, filling)


def complete(shard: Shard) -> tuple[Replica, ...]:
    """Return the replicas that hold everything that was acknowledged."""
    return (shard.primary, *shard.backups)


def _dropped(shard: Shard, replica: Replica) -> Iterator[Shard]:
    """Yield the possible shards without one complete copy. A primary can be succeeded by any of its backups."""
    if replica != shard.primary:
        yield without(shard, replica)
        return
    for successor in shard.backups:
        others = tuple(other for other in shard.backups if other != successor)
        yield shard.with_copies(others, shard.filling, primary=successor, term=shard.term + 1)


# --- all shards -------------------------------------------------------------------------------------------------------


class PlacementPlan:
    """The changes that are due for the placed parameter sets on the live servers.

    wanted: copies of each shard.
    epoch: epoch of the map that will show the plan. It numbers the fillings that the plan starts.
    knows: returns True if a server has confirmed the map that shows a shard of a parameter set with its current copies.
        A changed shard is unknown to everybody until it is shown, so a promoted server was a backup in the epoch
        before.
    refused: returns True if a server cannot be used for a shard of a parameter set now.
    tried: returns True if a server failed earlier as a replica of that shard, so that any other is preferred.
    """

    def __init__(
        self,
        records: Sequence[ParametersRecord],
        servers: Sequence[Member],
        wanted: int,
        epoch: int,
        *,
        knows: Callable[[str, int, Replica], bool],
        refused: Callable[[str, int, Replica], bool],
        tried: Callable[[str, int, Replica], bool],
    ) -> None:
        self._now = {record.entry.spec.name: list(record.entry.shards) for record in records}
        self._sizes = {
            record.entry.spec.name: shard_elements(record.entry.slicing, len(record.entry.shards))
            for record in records
            if record.entry.shards
        }
        #: Parameter sets whose initial values are on the primaries. Others are not copied.
        self._installed = {record.entry.spec.name for record in records if record.committed}
        #: Parameter sets in use. The copying of others is not throttled.
        self._ready = {record.entry.spec.name for record in records if record.entry.ready}
        self._servers = {server.member_id: server for server in servers}
        self._usable = [server for server in servers if not server.draining]
        self._wanted, self._epoch = wanted, epoch
        self._knows, self._refused, self._tried = knows, refused, tried
        #: True if something is due as soon as a server confirms the map.
        self.held_up = False
        self._primary = dict.fromkeys(self._servers, 0)
        self._held = dict.fromkeys(self._servers, 0)
        self._fills = dict.fromkeys(self._servers, 0)
        for name, number, shard in self._shards():
            self._count(name, number, shard, 1)

    def changes(self) -> dict[str, tuple[Shard, ...]]:
        """Return the new shards of every parameter set with at least one change."""
        changed: dict[str, None] = {}
        again = True
        while again:
            again = False
            for name, number, _ in self._shards():
                while (better := self._better(name, number)) is not None:
                    self._set(name, number, better)
                    changed[name], again = None, True
        settled = all(self._settled(shard) for _, _, shard in self._shards())
        if settled and (move := self._move()):
            self._set(*move)
            changed[move[0]] = None
        return {name: tuple(self._now[name]) for name in changed}

    def _shards(self) -> Iterator[tuple[str, int, Shard]]:
        for name, shards in self._now.items():
            for number, shard in enumerate(shards):
                if not shard.lost:
                    yield name, number, shard

    def _count(self, name: str, number: int, shard: Shard, sign: int) -> None:
        elements = sign * self._sizes[name][number]
        for replica in shard.replicas:
            if replica.server_id in self._held:
                self._held[replica.server_id] += elements
        if shard.primary.server_id in self._primary:
            self._primary[shard.primary.server_id] += elements
            self._fills[shard.primary.server_id] += sign * len(shard.filling)

    def _set(self, name: str, number: int, shard: Shard) -> None:
        self._count(name, number, self._now[name][number], -1)
        self._now[name][number] = shard
        self._count(name, number, shard, 1)

    def _better(self, name: str, number: int) -> Shard | None:
        """Return the shard's next form if it must change now; otherwise None."""
        shard = self._now[name][number]
        return self._without_leaving(name, number, shard) or self._with_more(name, number, shard)

    def _settled(self, shard: Shard) -> bool:
        return not shard.filling and len(complete(shard)) == self._wanted

    def _stays(self, replica: Replica) -> bool:
        server = self._servers.get(replica.server_id)
        return server is not None and server.replica == replica and not server.draining

    def _without_leaving(self, name: str, number: int, shard: Shard) -> Shard | None:
        """Return the shard without a superfluous copy; None if there is none."""
        if given_up := [replica for replica in shard.filling if not self._stays(replica)]:
            return without(shard, given_up[0])
        staying = [replica for replica in complete(shard) if self._stays(replica)]
        leaving = [replica for replica in complete(shard) if not self._stays(replica)]
        if leaving and len(staying) >= max(1, min(self._wanted, len(self._usable))):
            successors = [after for after in _dropped(shard, leaving[0]) if self._stays(after.primary)]
            return self._best(name, number, shard, successors)
        if not leaving and len(staying) > self._wanted:
            options = [after for replica in complete(shard) for after in _dropped(shard, replica)]
            return self._best(name, number, shard, options)
        return None

    def _best(self, name: str, number: int, shard: Shard, options: Sequence[Shard]) -> Shard | None:
        """Return the best option; None until all replicas that it keeps have confirmed the map."""
        best = min(options, key=lambda after: self._imbalance(name, number, shard, after))
        if all(self._knows(name, number, replica) for replica in complete(best) if self._stays(replica)):
            return best
        self.held_up = True
        return None

    def _with_more(self, name: str, number: int, shard: Shard) -> Shard | None:
        """Return the shard with one more replica to fill; None if it has enough or must wait."""
        staying = [replica for replica in (*complete(shard), *shard.filling) if self._stays(replica)]
        if len(staying) >= self._wanted or name not in self._installed:
            return None
        if name in self._ready and self._fills.get(shard.primary.server_id, 0) >= FILLS_PER_SOURCE:
            return None
        holding = {replica.server_id for replica in shard.replicas}
        hosts = {self._servers[replica.server_id].host for replica in staying}
        targets = [
            server
            for server in self._usable
            if server.member_id not in holding and not self._refused(name, number, server.replica)
        ]
        if not targets:
            return None
        target = min(
            targets,
            key=lambda server: (
                self._tried(name, number, server.replica),
                server.host in hosts,
                self._held[server.member_id],
                server.member_id,
            ),
        )
        return shard.with_filling(target.replica, self._epoch)

    def _imbalance(self, name: str, number: int, before: Shard, after: Shard) -> tuple[int, int, int]:
        """Return how unbalanced the placement would be with ``after``: hosts shared by copies, then load, then
        memory."""
        self._count(name, number, before, -1)
        self._count(name, number, after, 1)
        load = sum(elements**2 for elements in self._primary.values())
        memory = sum(elements**2 for elements in self._held.values())
        self._count(name, number, after, -1)
        self._count(name, number, before, 1)
        hosts = [self._servers[r.server_id].host for r in complete(after) if r.server_id in self._servers]
        distinct = len({server.host for server in self._usable})
        return max(0, min(len(hosts), distinct) - len(set(hosts))), load, memory

    def _move(self) -> _Change | None:
        """Return the fill that starts the move with the best balance; None if no move is worthwhile."""
        for candidates in (self._crowded(), self._loaded(self._primary, 1), self._loaded(self._held, None)):
            gains = [(gain, change) for change in candidates if (gain := self._gain(change)) is not None]
            if gains:
                return min(gains, key=lambda pair: pair[0])[1]
        return None

    def _gain(self, change: _Change) -> tuple[int, int, int] | None:
        """Return the imbalance after the move that ``change`` starts; None if it is no better than now."""
        name, number, begun = change
        shard = self._now[name][number]
        whole = filled(shard, begun.filling[-1])
        options = [after for replica in complete(shard) for after in _dropped(whole, replica)]
        best = min(self._imbalance(name, number, shard, after) for after in options)
        return best if best < self._imbalance(name, number, shard, shard) else None

    def _crowded(self) -> Iterator[_Change]:
        """Yield moves of shards whose copies share hosts unnecessarily."""
        if len({server.host for server in self._usable}) > 1:
            for name, number, shard in self._shards():
                if self._imbalance(name, number, shard, shard)[0]:
                    for target in self._usable:
                        yield from self._begun(name, number, shard, target)

    def _loaded(self, load: Mapping[str, int], roles: int | None) -> Iterator[_Change]:
        """Yield moves from the fullest server to the emptiest, if they differ by more than the largest shard.

        roles: number of the first complete copies that may be taken from the fullest server; None for all.
        """
        fullest = max(load, key=lambda id_: load[id_], default="")
        emptiest = min((server.member_id for server in self._usable), key=lambda id_: load[id_], default="")
        worth = max((size for sizes in self._sizes.values() for size in sizes), default=0)
        if not emptiest or load[fullest] - load[emptiest] <= worth:
            return
        for name, number, shard in self._shards():
            if fullest not in [replica.server_id for replica in complete(shard)[:roles]]:
                continue
            holding = [replica.server_id for replica in shard.replicas]
            others = sorted(self._usable, key=lambda server: (self._held[server.member_id], server.member_id))
            # A backup on the emptiest server can take over once another server has been filled in its place.
            for target in others if emptiest in holding else [self._servers[emptiest]]:
                yield from self._begun(name, number, shard, target)

    def _begun(self, name: str, number: int, shard: Shard, target: Member) -> Iterator[_Change]:
        """Yield the shard with ``target`` being filled, if that is allowed."""
        unfit = target.member_id in [replica.server_id for replica in shard.replicas]
        unfit = unfit or name not in self._ready or self._tried(name, number, target.replica)
        if not unfit and not self._refused(name, number, target.replica):
            yield name, number, shard.with_filling(target.replica, self._epoch)


def shard_elements(slicing: Slicing, shards: int) -> list[int]:
    """Return the number of elements in each of ``shards`` shards (1 to ``slicing.count``)."""
    full, extra = divmod(slicing.count, shards)
    elements = [(full + (number < extra)) * slicing.slice_elements for number in range(shards)]
    elements[(slicing.count - 1) % shards] -= slicing.count * slicing.slice_elements - slicing.total
    return elements
