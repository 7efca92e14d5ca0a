"""The replication machines: the primary's and a backup's view of one shard's copies. Pure.

The primary numbers its updates (lsn) and sends them to each replica over one stream. A replica accepts them in that
order and acknowledges them. A replica that misses an update which the primary no longer has must be copied: ``begin``,
then every slice as soon as it is quiescent, then ``end``. Updates arrive in between; an update of a slice that has not
been sent yet is only counted. A slice that the replica holds from an earlier term stays until its new copy arrives, so
that the replica can still be promoted.

Two numbers prove that a replica can resume without a copy. (term, lsn) identifies one state of the shard: lsn advances
with every update, even without a replica to send it to. Each filling has a number, assigned by the map
(``Shard.fills``): statements of a replica, a primary or a late report about an earlier filling are ignored.

Invariants: An update counts as replicated once each required replica (``backups`` of the map, and those already filled)
has acknowledged it. A replica that is being copied acknowledges nothing before it is filled. A replica accepts only
lsn + 1, acknowledges repeats again, and refuses everything that is not from its map's primary and term. The primary
stores updates until no replica needs them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Literal, TypeVar

from psdist.errors import InvalidArgumentError, StaleCopyError, StaleEpochError, StaleTermError
from psdist.hyperparameters import Settings
from psdist.types import Replica, Shard
from psdist_server.core.lags import Ranges
from psdist_server.core.shard import Producer, SliceRecord

G = TypeVar("G")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplicaUpdate(Generic[G]):
    """An update of one slice, as sent to replicas.

    lsn: number of the shard's update under one term, from 1.
    version: of the slice before the update.
    contributors, sequence: entries for the duplicate table; ``sequence`` is None in BSP.
    gradient: the gradient to apply; None if nobody contributed.
    settings: hyperparameters that differ from the specification's.
    square: the slice's sum of squares (clipping).
    assigned: weights that the slice is set to before the update; None if it keeps its own.
    size: bytes of the gradient and of these weights.
    absent: elements that the update skips.
    """

    lsn: int
    index: int
    version: int
    contributors: tuple[Producer, ...] = ()
    sequence: int | None = None
    gradient: G | None = None
    lr_scale: float = 1.0
    square: float = 0.0
    assigned: G | None = None
    size: int = 0
    settings: Settings = ()
    absent: Ranges = ()


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica's report on its copy of a shard: updates up to ``lsn`` under ``term``, from filling ``fill``."""

    term: int
    lsn: int
    complete: bool
    fill: int = 0


# --- effects of the primary's machine ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendBegin:
    """Start a copy to ``replica``; then send it slice by slice (``next_copy``, ``copied``).

    fill: number that the map gives to this filling of the replica.
    copy: number of this copy, which the replica repeats when it is complete.
    """

    replica: Replica
    lsn: int
    fill: int
    copy: int


@dataclass(frozen=True, slots=True)
class SendUpdate(Generic[T]):
    """Send ``update`` to ``replica``, with its gradient if ``whole``."""

    replica: Replica
    update: ReplicaUpdate[T]
    whole: bool


@dataclass(frozen=True, slots=True)
class Replicated:
    """All required replicas have update ``lsn`` of slice ``index``."""

    index: int
    lsn: int


ReplicationEffect = SendBegin | SendUpdate[G] | Replicated

# --- effects of a primary on its store --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoomFreed:
    """Updates may continue that wait until fewer unacknowledged ones are stored."""


@dataclass(frozen=True, slots=True)
class ShardFenced:
    """A replica knows a newer primary of shard ``number``."""

    number: int


class PeerState(Enum):
    """A primary's knowledge of a replica's copy."""

    UNKNOWN = "no stream has been opened yet"
    COPYING = "the shard is being copied"
    CAUGHT_UP = "it has the state that this primary started with, and receives every update"


@dataclass(slots=True)
class Peer:
    """One replica, as its primary sees it. Its state changes in ``resume``, ``begin_copy`` and ``complete_copy``."""

    replica: Replica
    #: The map lists it as a backup.
    in_sync: bool
    #: Number of its filling in the map.
    fill: int = 0
    #: Number of the newest copy started to it.
    copy: int = 0
    state: PeerState = PeerState.UNKNOWN
    #: It answered, under this primary, that its copy is complete.
    filled: bool = False
    #: A stream is open, and the state of the replica's copy is known.
    is_open: bool = False
    #: Slices that the current copy has not sent yet.
    missing: set[int] = field(default_factory=set)
    #: Highest lsn that it acknowledged.
    acked: int = 0
    #: Highest lsn that workers may have been answered for without its acknowledgement, before it was filled.
    required_acks: int = 0
    #: Time since which an answer of it is missing.
    waiting_since: float | None = None
    #: Why it cannot hold the shard, or cannot use its copy.
    refusal: str = ""
    #: Number of comparisons of its bytes.
    digests: int = 0

    @property
    def is_copying(self) -> bool:
        """True if the shard is being copied to the replica."""
        return self.state is PeerState.COPYING

    @property
    def required(self) -> bool:
        """True if updates wait for the replica's acknowledgement."""
        return self.in_sync or self.filled

    @property
    def complete(self) -> bool:
        """True if the replica has every update that a worker was ever answered for, so that it may be promoted. A
        complete copy is not enough: updates sent behind the copy may still be in flight."""
        return self.filled and not self.is_copying and self.acked >= self.required_acks

    def has(self, index: int) -> bool:
        """True if the replica has slice ``index``, and so needs the gradients of the slice's updates."""
        return index not in self.missing if self.is_copying else self.required

    def resume(self, lsn: int) -> None:
        """The replica has all updates up to ``lsn``; the later ones are sent to it."""
        self.state, self.missing, self.acked = PeerState.CAUGHT_UP, set(), lsn

    def begin_copy(self, number: int, slices: Iterable[int], lsn: int) -> None:
        """Start copy ``number``: all slices, as they are after update ``lsn`` or later."""
        self.state, self.copy, self.missing, self.acked = PeerState.COPYING, number, set(slices), lsn

    def complete_copy(self, lsn: int) -> None:
        """Record the replica's answer that its copy is complete, while the newest update is ``lsn``."""
        self.state, self.filled, self.required_acks = PeerState.CAUGHT_UP, True, lsn


class PrimaryReplication(Generic[G]):
    """The primary's side of shard ``number`` under ``term``.

    base: term and lsn of this server's copy when it was promoted; replicas that hold the same state need no copy.
    """

    def __init__(self, number: int, term: int, slices: Iterable[int], base: tuple[int, int] = (0, 0)) -> None:
        self.number = number
        self.term = term
        self.slices = tuple(slices)
        self.base = base
        #: Number of the newest change. One without a replica to send it to has a number, too: the new state could be
        #: mistaken for the previous one, and a replica that held that one and returns would never receive the change.
        self.lsn = base[1]
        self.peers: dict[Replica, Peer] = {}
        #: A replica knows a newer primary: answer nothing before a newer map.
        self.fenced = False
        #: Bytes of the stored gradients.
        self.log_bytes = 0
        self._copies = 0
        self._log: dict[int, ReplicaUpdate[G]] = {}
        self._unreplicated: dict[int, int] = {}

    @property
    def is_caught_up(self) -> bool:
        """True if all required replicas have the state that this primary started with. No answer may expose that state
        earlier: the previous primary may have died with updates that only this server received."""
        return all(peer.state is PeerState.CAUGHT_UP for peer in self.peers.values() if peer.required)

    @property
    def behind(self) -> list[Replica]:
        """Required replicas that have not acknowledged all updates."""
        return [peer.replica for peer in self.peers.values() if peer.required and peer.waiting_since is not None]

    def lag(self, replica: Replica) -> tuple[int, int]:
        """Return the updates, and their bytes, that ``replica`` has not acknowledged."""
        acked = self.peers[replica].acked
        behind = [update.size for update in self._log.values() if update.lsn > acked]
        return len(behind), sum(behind)

    def needs_gradient(self, index: int) -> bool:
        """True if an update of slice ``index`` is sent with its gradient to any replica."""
        return any(peer.has(index) for peer in self.peers.values())

    def adopt_map(self, shard: Shard, now: float) -> list[ReplicationEffect[G]]:
        """Adopt the replicas that a new map names."""
        self.fenced = False
        wanted = dict.fromkeys(shard.backups, True) | dict.fromkeys(shard.filling, False)
        for gone in [replica for replica in self.peers if replica not in wanted]:
            del self.peers[gone]
        for replica, in_sync in wanted.items():
            known = self.peers.get(replica)
            fill = shard.fill_of(replica)
            # A changed number, or a backup that is being filled again: it was off the list in between.
            if known is None or known.fill != fill or (known.in_sync and not in_sync):
                known = self.peers[replica] = Peer(replica, in_sync, fill, waiting_since=now)
            known.in_sync = in_sync
        return self._take_replicated()

    def opened(self, replica: Replica, held: ReplicaState | None, now: float) -> list[ReplicationEffect[G]]:
        """Handle a newly opened stream to ``replica``. held: the replica's report on its copy, if it has one."""
        peer = self.peers[replica]
        peer.is_open, peer.waiting_since, peer.refusal = True, None, ""
        lsn = self._resumable(peer, held) if peer.required and not peer.is_copying else None
        if lsn is None:
            return self.start_copy(replica)
        peer.resume(lsn)
        again = [SendUpdate(replica, update, True) for update in self._log.values() if update.lsn > lsn]
        peer.waiting_since = now if again else None
        return [*again, *self._take_replicated()]

    def _resumable(self, peer: Peer, held: ReplicaState | None) -> int | None:
        """Return the lsn after which updates are sent again to a replica that holds ``held``, or None if it must be
        copied.

        No copy is needed if the replica's copy is from the filling in the map, its (term, lsn) is a state of this
        primary, and every later update is still in the log.
        """
        if held is None or not held.complete or held.fill != peer.fill:
            return None
        if held.term == self.term:
            known = self.lsn - len(self._log) <= held.lsn <= self.lsn
        else:
            known = (held.term, held.lsn) == self.base and self.lsn - len(self._log) == held.lsn
        return held.lsn if known else None

    def start_copy(self, replica: Replica) -> list[ReplicationEffect[G]]:
        """Start a (new) copy of the shard to ``replica``."""
        peer, self._copies = self.peers[replica], self._copies + 1
        peer.begin_copy(self._copies, self.slices, self.lsn)
        return [SendBegin(replica, self.lsn, peer.fill, peer.copy), *self._take_replicated()]

    def closed(self, replica: Replica, now: float) -> None:
        """Handle a broken stream to ``replica``."""
        peer = self.peers.get(replica)
        if peer is not None:
            peer.is_open = False
            if peer.is_copying:
                peer.missing = set(self.slices)
            if peer.waiting_since is None:
                peer.waiting_since = now
            self._trim()

    def next_copy(self, replica: Replica) -> int | None:
        """Return the next slice to copy to ``replica``, or None if all were copied."""
        peer = self.peers.get(replica)
        return min(peer.missing, default=None) if peer is not None and peer.is_copying and peer.is_open else None

    def copied(self, replica: Replica, index: int) -> None:
        """Record that slice ``index``, in its current state, has been sent to ``replica``."""
        self.peers[replica].missing.discard(index)

    def replaced(self, index: int) -> list[ReplicationEffect[G]]:
        """Slice ``index`` was replaced without an update: send it to every replica again."""
        if not self.peers:
            self.lsn += 1
        effects: list[ReplicationEffect[G]] = []
        for replica, peer in self.peers.items():
            if not peer.is_open:  # Copied on its next stream, whatever lsn it holds.
                peer.begin_copy(peer.copy, self.slices, self.lsn)
            elif peer.is_copying and peer.missing:
                peer.missing.add(index)
            else:
                effects += self.start_copy(replica)
        return effects

    def ended(self, replica: Replica, now: float) -> None:
        """``replica`` was sent every slice and the end of the copy: wait for its answer that it is filled."""
        self.peers[replica].waiting_since = now

    def filled(self, replica: Replica, copy: int, now: float) -> list[ReplicationEffect[G]]:
        """Handle ``replica``'s answer that copy number ``copy`` is complete. Counts only for the newest copy."""
        peer = self.peers.get(replica)
        if peer is None or not peer.is_copying or peer.missing or peer.copy != copy:
            return []
        peer.complete_copy(self.lsn)
        peer.waiting_since = now if peer.acked < self.lsn else None
        return self._take_replicated()

    def update(self, update: ReplicaUpdate[G], now: float) -> list[ReplicationEffect[G]]:
        """Number an update (its ``lsn`` must be ``self.lsn + 1``) and send it to all replicas."""
        assert update.lsn == self.lsn + 1, (update.lsn, self.lsn)
        self.lsn = update.lsn
        self._log[update.lsn] = update
        self.log_bytes += update.size
        self._unreplicated[update.lsn] = update.index
        effects: list[ReplicationEffect[G]] = []
        for peer in self.peers.values():
            if peer.is_open and not peer.refusal:
                effects.append(SendUpdate(peer.replica, update, peer.has(update.index)))
                peer.waiting_since = now if peer.waiting_since is None else peer.waiting_since
        return [*effects, *self._take_replicated()]

    def acknowledged(self, replica: Replica, lsn: int, now: float) -> list[ReplicationEffect[G]]:
        """Record that ``replica`` has all updates up to ``lsn``."""
        peer = self.peers.get(replica)
        if peer is None or not peer.is_open or lsn > self.lsn:
            return []
        peer.acked = max(peer.acked, lsn)
        peer.waiting_since = now if peer.acked < self.lsn else None
        return self._take_replicated()

    def _take_replicated(self) -> list[ReplicationEffect[G]]:
        """Return the newly replicated updates, in order, and trim the log."""
        required = [0 if peer.is_copying else peer.acked for peer in self.peers.values() if peer.required]
        reached = min(required, default=self.lsn)
        ready = [Replicated(index, lsn) for lsn, index in self._unreplicated.items() if lsn <= reached]
        for effect in ready:
            del self._unreplicated[effect.lsn]
        self._trim()
        return list(ready)

    def _trim(self) -> None:
        """Discard the updates that no replica needs."""
        needed = [peer.acked for peer in self.peers.values() if peer.is_open or (peer.required and not peer.is_copying)]
        reached = min(needed, default=self.lsn)
        for lsn in [lsn for lsn in self._log if lsn <= reached]:
            self.log_bytes -= self._log.pop(lsn).size

    def refused_copy(self, replica: Replica, reason: str) -> bool:
        """``replica`` cannot hold the shard, or refused an update that does not fit its copy: stop sending to it.
        Returns False if it no longer has a role in the shard."""
        if (peer := self.peers.get(replica)) is not None:
            peer.refusal = reason
        return peer is not None

    def compared(self, replica: Replica) -> None:
        """Count a digest sent to ``replica``, which reports a mismatch if its bytes differ."""
        self.peers[replica].digests += 1

    def unreachable(self, now: float, limit: float) -> list[Replica]:
        """Return the replicas whose answer has been missing for longer than ``limit`` seconds, or that cannot hold the
        shard."""
        return [
            peer.replica
            for peer in self.peers.values()
            if peer.refusal or (peer.waiting_since is not None and now - peer.waiting_since > limit)
        ]

    def refused(self, term: int) -> None:
        """A replica refused ``term`` because it knows a newer primary."""
        if term == self.term:
            self.fenced = True

    def validate(self) -> None:
        """Assert the invariants."""
        assert list(self._log) == list(range(self.lsn - len(self._log) + 1, self.lsn + 1)), (self._log, self.lsn)
        assert self.log_bytes == sum(update.size for update in self._log.values()), self.log_bytes
        assert all(peer.acked <= self.lsn for peer in self.peers.values()), self.peers
        assert all(peer.is_copying or not peer.missing for peer in self.peers.values()), self.peers


# --- the replica's side -----------------------------------------------------------------------------------------------

#: Treatment of an update: apply it; only acknowledge it, since the slice has yet to arrive (skip) or the update was
#: accepted before (repeat); or ignore it, because the copy is stale.
Verdict = Literal["apply", "skip", "repeat", "ignore"]


class BackupReplication:
    """A replica's side of shard ``number``, from the time when the map names it as a backup or as being filled."""

    def __init__(self, number: int, slices: Iterable[int], shard: Shard) -> None:
        self.number = number
        self.slices = tuple(slices)
        #: The server whose updates are accepted, by the map.
        self.primary = shard.primary
        #: Term and lsn of the held copy.
        self.term = 0
        self.lsn = 0
        self.records: dict[int, SliceRecord] = {}
        #: Number of the filling that the copy is from, and of the copy on its stream.
        self.fill = 0
        self.copy = 0
        #: An update did not fit: the copy lacks something, so it can be neither promoted nor resumed.
        self.is_stale = False
        #: Slices that the current copy has not delivered yet.
        self.awaited: set[int] = set()
        self._copying = False
        self._acked = 0
        self._applied: set[int] = set()

    @property
    def complete(self) -> bool:
        """True if every slice is present and none is known to be stale, so that this server can be promoted."""
        return len(self.records) == len(self.slices) and not self.is_stale

    @property
    def base(self) -> tuple[int, int]:
        """Term and lsn from which this server continues once it is promoted. A partial copy has term 0: no other server
        holds exactly that state."""
        return (0 if self._copying else self.term), self.lsn

    @property
    def held(self) -> ReplicaState:
        """Report on this copy, for a primary that resumes its stream. An interrupted copy must be restarted."""
        return ReplicaState(self.term, self.lsn, self.complete and not self._copying, self.fill)

    def adopt_map(self, shard: Shard) -> None:
        """Adopt the primary that a new map names."""
        self.primary = shard.primary

    def start_copy(self, term: int, lsn: int, fill: int = 0, copy: int = 0) -> None:
        """Start receiving copy number ``copy``, for filling ``fill``. Held slices stay until they are replaced."""
        self.term, self.lsn, self._acked = term, lsn, lsn
        self.fill, self.copy = fill, copy
        self.awaited, self._copying = set(self.slices), True
        self._applied.clear()

    def state(self, index: int, record: SliceRecord) -> None:
        """Record that all arrays of slice ``index`` have arrived, with ``record``."""
        if not self._copying or index not in self.slices:
            raise InvalidArgumentError(f"slice {index} of shard {self.number} was sent without begin")
        self.awaited.discard(index)
        self.records[index] = record

    def end(self) -> None:
        """Finish the copy. Raises InvalidArgumentError if a slice is missing."""
        if missing := self.awaited or self.slices[len(self.records) :]:
            raise InvalidArgumentError(f"the copy of shard {self.number} ends without slices {sorted(missing)[:4]}")
        self._copying = self.is_stale = False

    def update(self, term: int, update: ReplicaUpdate[G]) -> Verdict:
        """Record an update and its entries in the duplicate table.

        Raises InvalidArgumentError if updates before it are missing: the stream must be reopened. Raises
        StaleCopyError, once, if it does not fit the copy: the copy must be filled again.
        """
        if self.is_stale and not self._copying:
            return "ignore"
        if term == self.term and update.lsn <= self.lsn:
            return "repeat"
        if update.lsn != self.lsn + 1 or self.term == 0 or (term != self.term and self._copying):
            raise InvalidArgumentError(
                f"update {update.lsn} of shard {self.number} comes after {self.lsn}: open the stream again"
            )
        is_here = update.index not in self.awaited
        if is_here and (version := self.records[update.index].version) != update.version:
            self.is_stale = True
            raise StaleCopyError(
                f"update of version {update.version} of slice {update.index} of shard {self.number}, whose copy here "
                f"is at version {version}: the copy must be filled again",
                slice=update.index,
            )
        if term != self.term:  # The new primary has the same state and continues from it.
            self.term, self._acked = term, self.lsn
            self._applied.clear()
        self.lsn = update.lsn
        if not is_here:
            return "skip"
        self.records[update.index].advance(update.contributors, update.sequence)
        return "apply"

    def applied(self, term: int, lsn: int) -> int:
        """Record that an accepted update is in the arrays. Returns the highest lsn that may be acknowledged."""
        if term == self.term and lsn > self._acked:
            self._applied.add(lsn)
            while self._acked + 1 in self._applied:
                self._acked += 1
                self._applied.remove(self._acked)
        return self._acked

    def retain(self, producers: Collection[Producer]) -> None:
        """Drop all other producers, whose pushes can no longer be repeated."""
        for record in self.records.values():
            record.retain(producers)


def stale_term(number: int, sender: Replica, term: int, primary: Replica, known: int) -> StaleTermError:
    """Return the error for a server that acts as a shard's primary without being it."""
    return StaleTermError(
        f"shard {number} has {primary} (incarnation {primary.incarnation}) as primary in term {known}, not "
        f"{sender} (incarnation {sender.incarnation}) in term {term}",
        shard=number,
        term=known,
    )


def not_primary(number: int) -> StaleEpochError:
    """Return the error for a request that assumes that this server is the primary of a shard."""
    return StaleEpochError(
        f"this server is no longer the primary of shard {number}: fetch the map, update the route and resend"
    )
