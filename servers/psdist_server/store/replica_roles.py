"""The roles of this server in the shards of one parameter set, as each new map names them: primary, backup, or neither.

A server that is the primary of a shard has its machine and sends its updates to the replicas. A server with another
role holds a copy for the primary (``backup_shards``), which becomes a machine when it is promoted.

Invariants: calls that wait for a shard are told that it went to another server before anything else changes. Memory of
a shard is used for nothing else before its last kernel has ended.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from psdist.consistency import BSP
from psdist.errors import InternalError, LimitExceededError
from psdist.off_loop import off_loop
from psdist.types import ParametersEntry, Replica
from psdist_server.core import role_changes
from psdist_server.core.events import MembersChanged
from psdist_server.core.replication import BackupReplication
from psdist_server.core.role_changes import make_shard
from psdist_server.kernels.arrays import DenseParameters
from psdist_server.kernels.pool import KernelLauncher
from psdist_server.store.applier import Applier
from psdist_server.store.backup_shards import BackupShards
from psdist_server.store.cut_controller import CutController
from psdist_server.store.global_norm import Aggregation
from psdist_server.store.replicator import Replicator
from psdist_server.store.shard_router import ShardRouter
from psdist_server.store.slice_reads import InPlaceReaders, SliceReads
from psdist_server.store.stream_to_replica import not_primary

if TYPE_CHECKING:
    from psdist_server.store.parameter_store import ParameterStore

#: Memory for more elements is cleared in a thread.
_LARGE_ELEMENTS: Final = 1 << 20

_log = structlog.get_logger("psdist.server")


@dataclass(slots=True)
class ReplicaRoles:
    """Takes and leaves the roles of ``me``. unloaded: shards that are to be loaded from a snapshot and are not yet."""

    me: Replica
    store: ParameterStore
    router: ShardRouter
    replicator: Replicator
    backups: BackupShards
    applier: Applier
    kernels: KernelLauncher
    dense: DenseParameters
    reads: SliceReads
    readers: InPlaceReaders
    aggregation: Aggregation
    cuts: CutController
    unloaded: set[int] = field(default_factory=set)

    async def follow(self, before: ParametersEntry, entry: ParametersEntry, epoch: int) -> None:
        """Takes and leaves the roles by which the map of ``epoch``, which has ``entry``, differs from that with
        ``before``."""
        terms = {number: machine.term for number, machine in self.replicator.machines.items()}
        changes = role_changes.changes(entry, self.me, terms, self.backups.machines)
        shards = enumerate(entry.shards)
        self.router.follow(epoch, [number for number, shard in shards if role_changes.is_primary(shard, self.me)])
        self.cuts.follow(changes, entry.members != before.members)
        for number in changes.demoted:
            self._demote(number)
            _log.info("a shard is served elsewhere", parameters=entry.spec.name, shard=number, epoch=epoch)
        copies = {number: self.backups.remove(number) for number in (*changes.discarded, *changes.promoted)}
        for number in changes.discarded:
            self.backups.discard(copies[number].slices)
        if changes.demoted:
            self._serve_steps()
        if (entry.members, entry.departed) != (before.members, before.departed):
            self.router.dispatch_all(MembersChanged(entry.members, entry.departed))
            self.backups.retain(entry.producers)
        for number in changes.ended:
            await self.kernels.settled(number)
        await self._release([*changes.demoted, *changes.discarded], epoch)
        await self._make_room([*changes.added, *changes.created, *changes.promoted])
        self.backups.follow(entry.shards)
        for number in changes.added:
            self.backups.add(number, self.router.slices_of(number), entry.shards[number])
        for number in (*changes.created, *changes.promoted):
            self._become_primary(number, copies.get(number), entry, epoch)
        self.router.unfence()
        self.replicator.follow(entry)
        if changes.promoted:
            # All members that a step waited for may have left with this map.
            self.router.dispatch_all(MembersChanged(entry.members, entry.departed))
        if changes.promoted or changes.created:
            self._serve_steps()

    async def close(self) -> None:
        """Leaves all roles; returns when no kernel runs any more."""
        for number in list(self.router.machines):
            self._demote(number)
        for number in list(self.backups.machines):
            self.backups.discard(self.backups.remove(number).slices)
        await self.replicator.close()
        await self.kernels.all_settled()

    def loaded(self, number: int) -> None:
        """All slices of a shard are loaded from the snapshot."""
        self.unloaded.discard(number)

    def _demote(self, number: int) -> None:
        """Another server is the primary of a shard, or none is."""
        indices = self.router.slices_of(number)
        self.unloaded.discard(number)
        self.router.remove(number)
        self.replicator.remove(number)
        self.reads.fail(indices, not_primary(number))
        self.applier.drop(indices)

    async def _release(self, numbers: Collection[int], epoch: int) -> None:
        indices = [index for number in numbers for index in self.router.slices_of(number)]
        if indices:
            self.kernels.readmit(indices)
            await self.readers.release(indices, epoch)

    async def _make_room(self, numbers: Collection[int]) -> None:
        """Memory for shards, which is cleared in a thread: heartbeats go on meanwhile. Requests that were routed by
        this map wait until all of it is followed."""
        shards = [self.router.slices_of(number) for number in numbers]

        def make_room() -> None:
            for indices in shards:
                with suppress(LimitExceededError):  # Raised again where the shard is to be held.
                    self.dense.weights.make_room(indices)

        elements = sum(map(len, shards)) * self.dense.slicing.slice_elements
        await off_loop(elements, make_room, waits=elements >= _LARGE_ELEMENTS)

    def _become_primary(self, number: int, copy: BackupReplication | None, entry: ParametersEntry, epoch: int) -> None:
        """Serves a shard from now on: a new one, or one that this server has a copy of."""
        spec, indices, shard = entry.spec, self.router.slices_of(number), entry.shards[number]
        try:
            self.dense.hold(indices)
        except LimitExceededError as error:  # Of a new shard: what is promoted is held already.
            self.store.fail_permanently(error)
        records, base = None, (0, 0)
        # Before the parameter set is ready a copy that was being filled may be promoted: all values are uploaded again.
        if copy is not None and (copy.complete or entry.ready):
            records, base = copy.records, copy.base
            if not copy.complete:
                self.store.fail_permanently(
                    InternalError(f"shard {number} of {spec.name!r} was promoted before its copy was complete")
                )
                records = {}
            _log.info("promoted", parameters=spec.name, shard=number, term=shard.term, lsn=copy.lsn, epoch=epoch)
        clipping = spec.optimizer.max_grad_norm > 0 and isinstance(spec.consistency, BSP)
        machine = make_shard(
            indices, entry.members, spec.consistency, clipping, entry.reference_workers, records, entry.departed
        )
        self.router.add(number, machine)
        self.replicator.add(number, shard.term, indices, base)
        if entry.restore is not None and not entry.ready:
            self.unloaded.add(number)

    def _serve_steps(self) -> None:
        """Other slices are served here than before: a step may be complete now, or not any more."""
        self.aggregation.serve(self.router.indices)
        for index in self.router.indices:
            state = self.router.of(index).slices[index]
            if state.aggregated:
                self.aggregation.aggregated(state.version, index)
