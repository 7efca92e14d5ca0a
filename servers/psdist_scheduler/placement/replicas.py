"""Transitions of a shard's holders, and the plan of changes that are due. Pure.

A shard changes when a server is lost (``after_loss``), when its primary reports that a replica is filled (``filled``)
or does not answer (``without``), and when ``PlacementPlan`` finds an improvement:

1. A replica that is being filled on a draining server is dropped. A complete one there is dropped as soon as enough
  others are complete.
2. A shard with too few copies gets another one, which is filled.
3. If all copies are complete, a shard may move: a further copy is filled. When it is complete, the copy whose removal
  improves the balance most is dropped.

A move is recorded only in the shard itself, so it continues after a restart. Moves end because each one lowers
``_imbalance``. Only a loss lowers the number of complete copies below what is wanted, and only complete copies are
promoted. A copy is dropped only after the others have confirmed the map that lists them. So each of them was alive
after they became sufficient. Otherwise a good copy could be dropped in favour of one whose loss is not noticed yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from psdist.types import Replica, Shard
from psdist_scheduler.events.cluster_state import Member, ParametersRecord
from psdist_scheduler.placement.placement import shard_elements

#: Number of copies that one primary fills at a time.
FILLS_PER_SOURCE = 2


@dataclass(frozen=True, slots=True)
class ShardChange:
    """Replacement of shard ``number`` of a parameter set by ``shard``."""

    parameters: str
    number: int
    shard: Shard


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
            self._set(move.parameters, move.number, move.shard)
            changed[move.parameters] = None
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

    def _move(self) -> ShardChange | None:
        """Return the fill that starts the move with the best balance; None if no move is worthwhile."""
        for candidates in (self._crowded(), self._loaded(self._primary, 1), self._loaded(self._held, None)):
            gains = [(gain, change) for change in candidates if (gain := self._gain(change)) is not None]
            if gains:
                return min(gains, key=lambda pair: pair[0])[1]
        return None

    def _gain(self, change: ShardChange) -> tuple[int, int, int] | None:
        """Return the imbalance after the move that ``change`` starts; None if it is no better than now."""
        name, number, shard = change.parameters, change.number, self._now[change.parameters][change.number]
        whole = filled(shard, change.shard.filling[-1])
        options = [after for replica in complete(shard) for after in _dropped(whole, replica)]
        best = min(self._imbalance(name, number, shard, after) for after in options)
        return best if best < self._imbalance(name, number, shard, shard) else None

    def _crowded(self) -> Iterator[ShardChange]:
        """Yield moves of shards whose copies share hosts unnecessarily."""
        if len({server.host for server in self._usable}) > 1:
            for name, number, shard in self._shards():
                if self._imbalance(name, number, shard, shard)[0]:
                    for target in self._usable:
                        yield from self._begun(name, number, shard, target)

    def _loaded(self, load: Mapping[str, int], roles: int | None) -> Iterator[ShardChange]:
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

    def _begun(self, name: str, number: int, shard: Shard, target: Member) -> Iterator[ShardChange]:
        """Yield the shard with ``target`` being filled, if that is allowed."""
        unfit = target.member_id in [replica.server_id for replica in shard.replicas]
        unfit = unfit or name not in self._ready or self._tried(name, number, target.replica)
        if not unfit and not self._refused(name, number, target.replica):
            yield ShardChange(name, number, shard.with_filling(target.replica, self._epoch))
