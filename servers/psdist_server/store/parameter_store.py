"""A parameter set on one server: its parts, their connections, and the server's roles in its shards.

Calls become events, and the machines' effects are carried out (``shard_router``, ``applier``). A new map changes this
server's roles (``core.role_changes``), and ``update`` carries the changes out. The primary of a shard has its machine
and sends its updates to the replicas. A server with another role holds a copy for the primary (``backup_shards``),
which becomes a machine when it is promoted. Everything here runs on the event loop except the kernels.

Invariants: Calls that wait for a shard are refused, because it went to another server, before anything else changes.
The memory of a shard is not reused before its last kernel has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import structlog

from psdist.consistency import BSP
from psdist.errors import (
    InternalError,
    InvalidArgumentError,
    LimitExceededError,
    PsdistError,
    StaleEpochError,
    UnknownParametersError,
)
from psdist.off_loop import off_loop
from psdist.types import ITEM_BYTES, ParametersEntry, Replica
from psdist.v1 import server_pb2
from psdist_server.core import role_changes
from psdist_server.core.lags import Lags
from psdist_server.core.replication import BackupReplication, Replicated, RoomFreed, ShardFenced, not_primary
from psdist_server.core.role_changes import RoleChanges, make_shard
from psdist_server.core.shard import (
    Aggregate,
    Apply,
    Forget,
    MembersChanged,
    NormKnown,
    RefuseSlice,
    Reply,
    SliceAggregated,
    SliceApplied,
    SliceLoaded,
)
from psdist_server.kernels.arrays import Array, DenseParameters, all_finite, gradient_of
from psdist_server.kernels.pool import KernelLauncher, KernelPool
from psdist_server.store.applier import Aggregated, Applier, Updated
from psdist_server.store.backup_shards import BackupShards
from psdist_server.store.gradients import Aggregation, NormBoard, PendingGradients
from psdist_server.store.replicator import Replicator
from psdist_server.store.rpc_call import Call, CallTable, SliceAnswer
from psdist_server.store.shard_router import InPlaceReaders, ShardRouter, SliceContents, SliceReads
from psdist_server.store.snapshot_cut import CutController
from psdist_server.store.statistics import Counters, SliceSpans
from psdist_server.store.stream_to_replica import ReplicaNetwork

#: Memory for more elements than this is allocated in a thread, because the kernel clears it.
_LARGE_ELEMENTS: Final = 1 << 20

logger = structlog.get_logger("psdist.server")


class Trampoline:
    """A queue of effects, which bounds the depth of calls: carries them out one after the other, in order. Effects that
    this causes are carried out after those in the queue, so no handler is called while another one runs.

    handlers: a function for each class of effects. It may be filled later.
    """

    def __init__(self) -> None:
        self.handlers: dict[type[Any], Callable[[Any], None]] = {}
        self._effects: deque[object] = deque()
        self._is_running = False

    def run(self, effects: Iterable[object]) -> None:
        """Carry out ``effects``: before this returns, unless a handler calls it."""
        self._effects.extend(effects)
        if self._is_running:
            return
        self._is_running = True
        try:
            while self._effects:
                effect = self._effects.popleft()
                self.handlers[type(effect)](effect)
        finally:
            self._is_running = False


class ParameterStore:
    """The shards of ``entry`` that ``me`` is the primary of, or holds copies of. Empty before the first ``update``.

    dense: the arrays, in host or device memory.
    network: access to the other servers.
    on_aggregated: called with (store, step) when the gradients of all slices served here are aggregated. Only sets that
        clip by the global norm aggregate before they update.
    prepare_sums: called when the first push starts that is encoded or has a weight.
    spans: spans of the server's slices, for traces.
    """

    def __init__(
        self,
        entry: ParametersEntry,
        dense: DenseParameters,
        me: Replica,
        pool: KernelPool,
        network: ReplicaNetwork,
        on_aggregated: Callable[[ParameterStore, int], None],
        prepare_sums: Callable[[], None] = lambda: None,
        spans: SliceSpans | None = None,
    ) -> None:
        spans = spans or SliceSpans(time.perf_counter)
        self.entry = entry
        self.me = me
        self.counters = Counters()
        self.dense = dense
        self.kernels = kernels = KernelLauncher(entry, pool, self.fail)
        self.gradients = PendingGradients(entry.spec, entry.slicing, self.counters, prepare_sums)
        self.norms = NormBoard()
        #: The slices served here once all of them were found installed.
        self._installed_indices: tuple[int, ...] | None = None
        self._effects = Trampoline()
        run = self._effects.run
        self.router = ShardRouter(entry, CallTable(), self.gradients, self.counters, run, spans)
        self.contents = SliceContents(dense, self.router)
        self.replicator = Replicator(entry, network, dense, self.norms, self.contents, self.fail_permanently, run)
        self.applier = Applier(entry, dense, kernels, self.gradients, self.replicator, self.contents, run, spans)
        self.aggregation = Aggregation(self.norms, self.router.version, partial(on_aggregated, self))
        self.reads = SliceReads(self.router, dense, self.counters, entry.spec.consistency)
        self.readers = InPlaceReaders(dense)
        self.cuts = CutController(self.router, dense, kernels, self.applier.gate)
        self.backups = BackupShards(entry.spec, dense, kernels, self.norms, self.counters, self.fail_permanently)
        self._effects.handlers = {
            Apply: self.applier.start,
            Aggregate: self.applier.start,
            Aggregated: self._aggregated,
            Updated: self._updated,
            Reply: self._reply,
            RefuseSlice: self._refuse,
            Forget: self.gradients.forget,
            Replicated: self.applier.replicated,
            RoomFreed: self.applier.ship_waiting,
            ShardFenced: self.router.fence_shard,
        }

    def check_installed(self) -> None:
        """Raise UnknownParametersError while initial values are missing, and the error that permanently stopped updates
        here."""
        self.router.calls.raise_if_failed()
        indices = self.router.indices
        if self.entry.ready and self._installed_indices is indices:
            return
        installed, served = self.installed_slices, len(indices)
        if installed < served or not self.entry.ready:
            raise UnknownParametersError(
                f"{self.entry.spec.name!r} is not ready: {installed} of {served} slices here have their "
                "initial values; wait for CreateParameters to say STATE_READY"
            )
        self._installed_indices = indices

    @property
    def installed_slices(self) -> int:
        """Number of slices served here that have their initial values."""
        return len(self.dense.installed.intersection(self.router.indices))

    def install(self, index: int, payload: memoryview, epoch: int) -> None:
        """Set the initial weights of a slice.

        Raises InvalidArgumentError if the parameter set is ready, if the number of values is not the slice's, or if
        they are not finite: the weights could never become finite again. Raises StaleEpochError if the sender's map is
        too old to tell that the set is ready: another upload, or an earlier one of this sender, was complete.
        """
        self.router.calls.raise_if_failed()
        self.router.check_slice(index, epoch)
        expected = self.dense.slicing.size(index) * ITEM_BYTES["float32"]
        if self.entry.ready:
            text = f"{self.entry.spec.name!r} is ready: its initial values cannot be set again"
            raise StaleEpochError(text) if epoch < self.router.epoch else InvalidArgumentError(text)
        if len(payload) != expected:
            raise InvalidArgumentError(f"slice {index} has {expected} bytes in float32, not {len(payload)}")
        values = gradient_of(payload, "float32")
        if not all_finite(values, self.entry.spec.dtype):
            start, stop = self.dense.slicing.bounds(index)
            raise InvalidArgumentError(
                f"the initial values of {self.entry.spec.name!r} hold NaN or Inf in elements {start} to {stop - 1} "
                f"(slice {index}): install finite ones"
            )
        self.dense.install(index, values)
        self._installed(index)

    async def load(self, index: int, arrays: Sequence[Array], version: int, lags: Lags = ()) -> None:
        """Set a slice served here from a snapshot. arrays: float32[n] each, weights first; only these are used if the
        map says so. lags: of the slice."""
        weights_only = self.entry.restore is not None and self.entry.restore.weights_only

        def write() -> None:
            if weights_only:
                self.dense.install(index, arrays[0], version)
                return
            self.dense.lags.set(index, lags)
            for number, array in enumerate(arrays):
                self.dense.install_state(index, number, array, version)

        await self.kernels.write(index, sum(array.size for array in arrays), write)
        if self.router.get(index) is not None:  # Otherwise the shard moved to another server meanwhile.
            self.router.dispatch(index, SliceLoaded(index, version))
            self._installed(index)

    def _installed(self, index: int) -> None:
        self.replicator.installed(index)
        self.contents.notify(index)

    def fence(self, live: Mapping[str, int]) -> None:
        """End the calls of workers that a new map does not name; ``live`` has the incarnations that it names. Call this
        before ``update``: the end of a membership also unblocks what its worker waits for, which would let it read past
        the staleness bound."""
        self.readers.fence(live)
        self.gradients.estimates.fence(live)
        self.router.calls.fence(live)

    async def update(self, entry: ParametersEntry, epoch: int) -> None:
        """Adopt a new map, that of ``epoch``, with the new ``entry`` of this parameter set."""
        before, self.entry = self.entry, entry
        terms = {number: machine.term for number, machine in self.replicator.machines.items()}
        changes = role_changes.changes(entry, self.me, terms, self.backups.machines)
        shards = enumerate(entry.shards)
        self.router.assign(epoch, [number for number, shard in shards if role_changes.is_primary(shard, self.me)])
        self.cuts.check_changes(changes, entry.members != before.members)
        copies = self._leave_roles(changes, epoch)
        if (entry.members, entry.departed) != (before.members, before.departed):
            self.router.dispatch_all(MembersChanged(entry.members, entry.departed))
            self.backups.retain(entry.producers)
        for number in changes.ended:
            await self.kernels.settled(number)
        await self._release([*changes.demoted, *changes.discarded], epoch)
        await self._make_room([*changes.added, *changes.created, *changes.promoted])
        self._take_roles(changes, copies, epoch)
        self.norms.wake()

    def _leave_roles(self, changes: RoleChanges, epoch: int) -> dict[int, BackupReplication]:
        """Stop serving and copying the shards that other servers serve or copy. Returns the copies taken out."""
        for number in changes.demoted:
            self._demote(number)
            logger.info("stopped serving a shard", parameters=self.entry.spec.name, shard=number, epoch=epoch)
        copies = {number: self.backups.remove(number) for number in (*changes.discarded, *changes.promoted)}
        for number in changes.discarded:
            self.backups.discard(copies[number].slices)
        if changes.demoted:
            self._serve_steps()
        return copies

    def _take_roles(self, changes: RoleChanges, copies: Mapping[int, BackupReplication], epoch: int) -> None:
        """Start copying the added shards and serving the created and promoted ones."""
        entry = self.entry
        self.backups.adopt_map(entry.shards)
        for number in changes.added:
            self.backups.add(number, self.router.slices_of(number), entry.shards[number])
        for number in (*changes.created, *changes.promoted):
            self._become_primary(number, copies.get(number), epoch)
        self.router.unfence()
        self.replicator.adopt_map(entry)
        if changes.promoted:
            # All members that a step waited for may have left with this map.
            self.router.dispatch_all(MembersChanged(entry.members, entry.departed))
        if changes.promoted or changes.created:
            self._serve_steps()

    def _demote(self, number: int) -> None:
        """Stop serving a shard."""
        indices = self.router.slices_of(number)
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
        """Allocate memory for shards, in a thread so that heartbeats continue. Requests routed by this map wait until
        it is adopted as a whole."""
        shards = [self.router.slices_of(number) for number in numbers]

        def make_room() -> None:
            for indices in shards:
                with suppress(LimitExceededError):  # Raised again when the shard is to be held.
                    self.dense.weights.make_room(indices)

        elements = sum(map(len, shards)) * self.dense.slicing.slice_elements
        await off_loop(elements, make_room, waits=elements >= _LARGE_ELEMENTS)

    def _become_primary(self, number: int, copy: BackupReplication | None, epoch: int) -> None:
        """Start serving a shard: a new one, or one that this server has a copy of."""
        entry, indices = self.entry, self.router.slices_of(number)
        spec, shard = entry.spec, entry.shards[number]
        try:
            self.dense.hold(indices)
        except LimitExceededError as error:  # Of a new shard: a promoted one is already held.
            self.fail_permanently(error)
        records, base = None, (0, 0)
        # Before the parameter set is ready, an incomplete copy may be promoted: all values are uploaded again.
        if copy is not None and (copy.complete or entry.ready):
            records, base = copy.records, copy.base
            if not copy.complete:
                self.fail_permanently(
                    InternalError(f"shard {number} of {spec.name!r} was promoted before its copy was complete")
                )
                records = {}
            logger.info("promoted", parameters=spec.name, shard=number, term=shard.term, lsn=copy.lsn, epoch=epoch)
        clipping = spec.optimizer.max_grad_norm > 0 and isinstance(spec.consistency, BSP)
        machine = make_shard(
            indices, entry.members, spec.consistency, clipping, entry.reference_workers, records, entry.departed
        )
        self.router.add(number, machine, is_loaded=entry.restore is None or entry.ready)
        self.replicator.add(number, shard.term, indices, base)

    def _serve_steps(self) -> None:
        """Aggregate the slices now served here. A step may have become complete by the change, or incomplete."""
        self.aggregation.serve(self.router.indices)
        for index in self.router.indices:
            state = self.router.machine_of(index).slices[index]
            if state.aggregated:
                self.aggregation.aggregated(state.version, index)

    async def close(self) -> None:
        """Release everything: the parameter set was removed or restarts, or the server ends. Waiting calls are routed
        again."""
        for number in list(self.router.machines):
            self._demote(number)
        for number in list(self.backups.machines):
            self.backups.discard(self.backups.remove(number).slices)
        await self.replicator.close()
        await self.kernels.all_settled()
        self.norms.wake()
        await off_loop(self.entry.total, self.dense.close)

    def _aggregated(self, aggregated: Aggregated) -> None:
        effect, outcome = aggregated.effect, aggregated.outcome
        self.counters.apply_seconds += outcome.seconds
        self.router.dispatch(effect.index, SliceAggregated(effect.index))
        self.norms.record(effect.step, effect.index, outcome.square)
        self.aggregation.aggregated(effect.step, effect.index)

    def _updated(self, updated: Updated) -> None:
        index = updated.effect.index
        self.counters.apply_seconds += updated.outcome.seconds
        self.counters.applied_slices += 1
        machine = self.router.machine_of(index)
        self.contents.update_counted(index)
        effects = machine.on(SliceApplied(index))
        # Before these effects start the slice's next update, it can be read, compared and copied.
        if index in self.reads.waiting:
            self.reads.updated(index, machine.slices[index].version)
        self.replicator.applied(index)
        self.cuts.updated_at = asyncio.get_running_loop().time()
        if self.cuts.current is not None:
            effects += self.cuts.applied(index)
        self.router.run(effects)

    def _reply(self, effect: Reply) -> None:
        """Answer a slice of a call, once the replicas have the state that this exposes."""
        if self.replicator.hold(effect) or (call := self.router.calls.pop(effect.token)) is None:
            return
        if call.is_push and (effect.ignored or effect.staleness):
            self.counters.answered(call.identity.worker_id, effect.ignored, effect.late, effect.staleness)
        call.answer(effect.token, SliceAnswer(effect.index, effect.version, effect.ignored, effect.staleness))

    def _refuse(self, effect: RefuseSlice) -> None:
        self.gradients.refused(effect.token)
        if (call := self.router.calls.pop(effect.token)) is not None:
            self.counters.workers[call.identity.worker_id].rejected += 1
            call.fail(effect.error)

    def norm_known(self, step: int, norm: float) -> None:
        """Apply the aggregated slices of ``step``, whose global norm is known."""
        self.applier.norm_known(step, norm)
        self.router.dispatch_all(NormKnown(step))

    def fail(self, what: str, error: BaseException) -> None:
        """Handle a defect: log the traceback, and fail all present and future calls."""
        logger.error("failed", parameters=self.entry.spec.name, what=what, exc_info=error)
        self.router.calls.fail_permanently(InternalError(f"{what} of {self.entry.spec.name!r} failed: {error!r}"))

    def fail_permanently(self, error: PsdistError) -> None:
        """Stop the parameter set here: fail all present and future calls with ``error``."""
        logger.error("stopped", parameters=self.entry.spec.name, reason=str(error))
        self.router.calls.fail_permanently(error)

    def waiting_for(self, call: Call) -> str:
        """Return why the call's oldest slice is unanswered."""
        for token, index in call.outstanding.items():
            if (machine := self.router.get(index)) is not None:
                return machine.waiting_for(token, index) or self._own_wait(index)
        return ""

    def _own_wait(self, index: int) -> str:
        machine = self.replicator.machines.get(self.router.shard_of(index))
        replicas = ", ".join(sorted(map(str, machine.behind))) if machine is not None else ""
        if index in self.applier.gate.deferred:
            return "for a snapshot to be written: this server has no memory for more copies"
        return f"for {replicas} to acknowledge the update" if replicas else "for this server to apply the update"

    def statistics(self) -> server_pb2.ParametersStatistics:
        """Return counters and waits as a message."""
        slices = [state.version for machine in self.router.machines.values() for state in machine.slices.values()]
        workers = self.counters.workers
        return server_pb2.ParametersStatistics(
            parameters=self.entry.spec.name,
            version_min=min(slices, default=0),
            version_max=max(slices, default=0),
            applied_slices=self.counters.applied_slices,
            apply_seconds=self.counters.apply_seconds,
            bytes_held=self.counters.bytes_held,
            estimate_bytes=self.gradients.estimates.bytes,
            waiting_for=sorted({call.waiting_for for call in self.router.calls if call.waiting_for}),
            replicas=self.replicator.statistics(),
            primary_of=sorted(self.router.machines),
            backup_of=sorted(self.backups.machines),
            workers=[workers[worker_id] for worker_id in sorted(workers)],
        )
