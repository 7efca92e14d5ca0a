"""The primary's side of replication: keeps the other servers' copies of a store's shards up to date.

There is one stream (``Replicate``) to each server that holds copies. The machines (``core.replication``) decide its
content, and which updates are sent again after a break.

Invariants: Messages leave in the order of the machines' effects. Memory for replicas is bounded: above KEPT_BYTES_MAX
further updates wait (``has_room``), and slices are copied one at a time.

The stream itself is in ``stream_to_replica``, the replica's side in ``backup_shards``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import structlog

from psdist.errors import LimitExceededError, PsdistError, ReplicaMismatchError, StaleCopyError
from psdist.types import ParametersEntry, Replica
from psdist.v1 import server_pb2 as pb
from psdist.wire import status
from psdist.wire.limits import KEPT_BYTES_MAX
from psdist_server.core.replication import (
    PrimaryReplication,
    ReplicaState,
    Replicated,
    ReplicationEffect,
    ReplicaUpdate,
    RoomFreed,
    SendBegin,
    SendUpdate,
    ShardFenced,
)
from psdist_server.core.shard import Reply
from psdist_server.kernels.arrays import DenseParameters, Gradient
from psdist_server.store.gradients import NormBoard
from psdist_server.store.replica_carriers import UpdateMemory
from psdist_server.store.shard_router import SliceContents
from psdist_server.store.stream_to_replica import (
    Machine,
    ReplicaNetwork,
    StreamToReplica,
    now,
    state_message,
    update_messages,
)

logger = structlog.get_logger("psdist.server")

#: Interval between comparisons of a slice's bytes, in updates of its shard.
DIGEST_EVERY: Final = 64


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A primary's report to the scheduler: ``replica`` is filled, or does not answer.

    fill: number of the filling, as in ``Shard.fills``.
    """

    kind: Literal["filled", "unreachable"]
    parameters: str
    shard: int
    term: int
    replica: Replica
    reason: str = ""
    fill: int = 0


class Replicator:
    """The primary's side of the shards of one parameter store.

    fail: called with the error after which nothing here can be trusted.
    run: carries out effects on the store: ``Replicated``, ``RoomFreed``, ``ShardFenced``, and answers that were held.
    """

    def __init__(
        self,
        entry: ParametersEntry,
        network: ReplicaNetwork,
        dense: DenseParameters,
        norms: NormBoard,
        contents: SliceContents,
        fail: Callable[[PsdistError], None],
        run: Callable[[Iterable[object]], None],
    ) -> None:
        self.name = entry.spec.name
        self.machines: dict[int, Machine] = {}
        self.network = network
        self.contents = contents
        self._dense = dense
        self._norms = norms
        self._fail = fail
        self._run = run
        self._shard_count = max(1, len(entry.shards))
        #: Streams to the servers that hold copies.
        self.streams: dict[Replica, StreamToReplica] = {}
        self._updates: Counter[int] = Counter()
        self.memory = UpdateMemory(entry.slicing, shared="shm" in network.carriers)
        #: By shard: answers that wait until all replicas have the state that this server started with.
        self._held: dict[int, list[Reply]] = {}

    def add(self, number: int, term: int, slices: Iterable[int], base: tuple[int, int] = (0, 0)) -> None:
        """Start replicating a shard; ``adopt_map`` comes next."""
        self.machines[number] = PrimaryReplication(number, term, slices, base)

    def remove(self, number: int) -> None:
        """Stop replicating a shard: fail the waiting confirmations."""
        self.machines.pop(number, None)
        self._held.pop(number, None)
        for stream in self.streams.values():
            stream.refuse(number)

    def adopt_map(self, entry: ParametersEntry) -> None:
        """Adopt a new map: open and close streams, and copy shards to new replicas."""
        for stream in self.streams.values():  # Before a copy by this map, which the replica may not have yet.
            stream.send(self.network.hello(self.name))
        for number, machine in sorted(self.machines.items()):
            before, was_fenced = dict(machine.peers), machine.fenced
            self._run(self._carry_out(machine, machine.adopt_map(entry.shards[number], now())))
            for replica, peer in machine.peers.items():
                is_new = before.get(replica) is not peer
                if replica not in self.streams:
                    self.streams[replica] = StreamToReplica(self, replica)
                elif was_fenced or (is_new and peer.in_sync):
                    self.streams[replica].restart()
                elif is_new:
                    self.streams[replica].add(machine)
        wanted = {replica for machine in self.machines.values() for replica in machine.peers}
        for replica in [replica for replica in self.streams if replica not in wanted]:
            self.streams.pop(replica).close()
        if not self.streams:
            self.memory.close()
        self.ship_waiting()

    async def close(self) -> None:
        """End all streams."""
        streams, self.streams = list(self.streams.values()), {}
        for stream in streams:
            stream.close()
        await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)
        self.memory.close()

    def installed(self, index: int) -> None:
        """Send slice ``index``, which has new initial values, to the replicas again."""
        if (machine := self._machine(index)) is not None:
            self._run(self._carry_out(machine, machine.replaced(index)))

    def ship_waiting(self) -> None:
        """Continue with updates that wait for room, if there is some."""
        self._run([RoomFreed()])

    def _machine(self, index: int) -> Machine | None:
        return self.machines.get(index % self._shard_count)

    def needs_gradient(self, index: int) -> bool:
        """Return True if an update of slice ``index`` is sent with its gradient to any replica."""
        machine = self.machines.get(index % self._shard_count)
        return machine is not None and bool(machine.peers) and machine.needs_gradient(index)

    def take_lsn(self, index: int) -> int | None:
        """Number an update of the slice that is in the arrays. Returns None if its shard has no replica to send it to;
        otherwise ``update`` comes next."""
        machine = self.machines.get(index % self._shard_count)
        if machine is None:
            return None
        if machine.peers:
            return machine.lsn + 1
        machine.lsn += 1
        return None

    def has_room(self) -> bool:
        """Return True if another update may be stored until it is acknowledged."""
        kept = sum(machine.log_bytes for machine in self.machines.values())
        return kept + self.memory.reserved_bytes < KEPT_BYTES_MAX

    def update(self, update: ReplicaUpdate[Gradient]) -> list[object]:
        """Send an update, which has the number of ``take_lsn``, to the replicas. Returns the effects on the store."""
        machine = self._machine(update.index)
        assert machine is not None
        self.memory.cancel([update.index])
        return self._carry_out(machine, machine.update(update, now()))

    def hold(self, answer: Reply) -> bool:
        """Hold an answer if workers may not see the state that this server started with as the primary of the slice's
        shard. It is run again once they may; never if another primary takes over first. Returns True if it is held."""
        machine = self.machines.get(answer.index % self._shard_count)
        if machine is None or not machine.peers or machine.is_caught_up:
            return False
        self._held.setdefault(machine.number, []).append(answer)
        return True

    def applied(self, index: int) -> None:
        """Handle the end of an update, before the slice's next one starts. Every DIGEST_EVERY-th time the replicas
        compare their bytes."""
        machine = self.machines.get(index % self._shard_count)
        if machine is None or not machine.peers:
            return
        self._updates[machine.number] += 1
        if self._updates[machine.number] % DIGEST_EVERY == 0:
            for replica, peer in machine.peers.items():
                if peer.is_open and index not in peer.missing:
                    self._compare(machine, self.streams[replica], index)

    def _compare(self, machine: Machine, stream: StreamToReplica, index: int) -> None:
        version = self.contents.record(index).version
        digest = pb.ReplicateRequest.Digest(slice=index, version=version, digest=self._dense.digest(index))
        stream.send(pb.ReplicateRequest(shard=machine.number, term=machine.term, digest=digest))
        machine.compared(stream.replica)

    def _carry_out(self, machine: Machine, effects: Sequence[ReplicationEffect[Gradient]]) -> list[object]:
        """Send the messages of a machine in order. Returns the effects on the store."""
        found: list[object] = []
        for effect in effects:
            match effect:
                case SendUpdate(replica, update, whole):
                    for message, payload in update_messages(machine, update, whole):
                        self.streams[replica].send(message, payload)
                case SendBegin(replica, lsn, fill, copy):
                    begin = pb.ReplicateRequest.Begin(lsn=lsn, fill=fill, copy=copy)
                    stream = self.streams[replica]
                    stream.send(pb.ReplicateRequest(shard=machine.number, term=machine.term, begin=begin))
                    stream.copy(machine)
                case Replicated():
                    found.append(effect)
        if machine.is_caught_up:
            found += self._held.pop(machine.number, ())
        return found

    def opened(self, stream: StreamToReplica, machine: Machine, held: ReplicaState | None) -> None:
        """Handle a newly opened ``stream``, whose replica has ``held`` of the shard."""
        self._run(self._carry_out(machine, machine.opened(stream.replica, held, now())))

    def copy_slice(self, stream: StreamToReplica, machine: Machine, index: int) -> None:
        """Send a quiescent slice."""
        record, arrays = self.contents.record(index), self._dense.export(index)
        square = self._norms.known(record.version - 1).get(index, 0.0)
        lags = self._dense.lags.rows([index])
        for number, array in enumerate(arrays):
            state = state_message(record, square, index, number, len(arrays), lags)
            stream.send(pb.ReplicateRequest(shard=machine.number, term=machine.term, state=state), array.copy())
        machine.copied(stream.replica, index)
        self._compare(machine, stream, index)

    def lose(self, gradients: Sequence[Gradient]) -> None:
        """Give up gradients that a replica may still read. If too many are lost in this way, another arena replaces
        this one, and all replicas receive it on new streams."""
        if self.memory.lose(gradients):
            self.memory.renew()
            for stream in self.streams.values():
                stream.restart()

    def answered(self, stream: StreamToReplica, response: pb.ReplicateResponse) -> None:
        """Handle an answer of a replica."""
        match response.WhichOneof("kind"):
            case "ack":
                if (machine := self._current(response.ack.shard, response.ack.term)) is not None:
                    peer = machine.peers.get(stream.replica)
                    waited = peer is not None and not peer.complete
                    self._run(self._carry_out(machine, machine.acknowledged(stream.replica, response.ack.lsn, now())))
                    self.ship_waiting()
                    if waited and peer is not None and peer.complete:
                        self.network.report()
            case "filled":
                if (machine := self._current(response.filled.shard, response.filled.term)) is not None:
                    self._run(self._carry_out(machine, machine.filled(stream.replica, response.filled.copy, now())))
                    self.ship_waiting()
                    self.network.report()
            case "refused":
                self._refused(stream, response.refused)

    def _refused(self, stream: StreamToReplica, refused: pb.ReplicateResponse.Refused) -> None:
        machine = self._current(refused.shard, refused.term)
        if machine is None:
            return
        error = status.from_detail(refused.error)
        if isinstance(error, ReplicaMismatchError):
            self._fail(error)
            return
        if isinstance(error, LimitExceededError | StaleCopyError):
            if isinstance(error, StaleCopyError):
                logger.warning("a copy is stale", parameters=self.name, peer=str(stream.replica), reason=str(error))
            if machine.refused_copy(stream.replica, str(error)):
                self.network.report()
            return
        # No warning: after the loss of a server terms differ for a moment, and this is how the shard gets over it.
        logger.info("refused by a replica", parameters=self.name, peer=str(stream.replica), reason=str(error))
        if int(error.details.get("term", machine.term)) < machine.term:
            stream.restart()  # Only its map is older. On a new stream it waits for the newer one.
            return
        machine.refused(refused.term)
        for other in self.streams.values():
            other.refuse(machine.number)
        self._run([ShardFenced(machine.number)])

    def _current(self, number: int, term: int) -> Machine | None:
        machine = self.machines.get(number)
        return machine if machine is not None and machine.term == term else None

    def needs_confirm(self, indices: Iterable[int]) -> bool:
        """Return True if backups must confirm this primary before these slices are read."""
        return any(
            machine is not None and any(peer.required for peer in machine.peers.values())
            for machine in map(self._machine, indices)
        )

    async def confirm(self, indices: Iterable[int]) -> None:
        """Wait until the backups have confirmed that this server is still the primary of these slices' shards. Raises
        StaleEpochError if it is not."""
        by_replica: dict[Replica, list[Machine]] = {}
        for number in sorted({index % self._shard_count for index in indices}):
            machine = self.machines.get(number)
            for replica, peer in machine.peers.items() if machine is not None else ():
                if machine is not None and peer.required:
                    by_replica.setdefault(replica, []).append(machine)
        streams = [(self.streams[replica], machines) for replica, machines in by_replica.items()]
        await asyncio.gather(*(stream.confirm(machines) for stream, machines in streams))

    def reports(self, entry: ParametersEntry) -> list[ReplicaReport]:
        """Return the current facts about replicas that are not in the map yet."""
        found: list[ReplicaReport] = []
        for number, machine in sorted(self.machines.items()):
            shard = entry.shards[number]
            for replica, peer in machine.peers.items():
                if peer.complete and replica in shard.filling:
                    found.append(ReplicaReport("filled", self.name, number, machine.term, replica, fill=peer.fill))
            for replica in self._unreachable(machine):
                peer = machine.peers[replica]
                reason = peer.refusal or self.streams[replica].reason or "it does not answer"
                found.append(ReplicaReport("unreachable", self.name, number, machine.term, replica, reason, peer.fill))
        return found

    def statistics(self) -> list[pb.ReplicaStatistics]:
        """Return how far each replica is behind."""
        found = []
        for number, machine in sorted(self.machines.items()):
            unreachable = self._unreachable(machine)
            for replica, peer in machine.peers.items():
                updates, size = machine.lag(replica)
                state = "filling" if peer.is_copying or not peer.required else "in sync"
                stream = self.streams.get(replica)
                found.append(
                    pb.ReplicaStatistics(
                        shard=number,
                        server_id=replica.server_id,
                        state="unreachable" if replica in unreachable else state,
                        lag_updates=updates,
                        lag_bytes=size,
                        slices_filled=len(machine.slices) - len(peer.missing)
                        if peer.is_copying or peer.required
                        else 0,
                        slices=len(machine.slices),
                        digests=peer.digests,
                        carrier=stream.carrier_text if stream is not None else "",
                    )
                )
        return found

    def _unreachable(self, machine: Machine) -> list[Replica]:
        return machine.unreachable(now(), self.network.lease_seconds) if machine.peers else []
