"""Routes calls about slices to the machines of their shards, as events, and tracks the content of the slices.

Invariants: A call for a slice that is not served here is refused without changing anything; its sender routes it again.
A call that waits for a slice fails when the slice's shard moves to another server.

Weights are sent to workers, or read in place. A sent read happens between two updates of its slice, so none is torn. If
a slice cannot change until a worker pushes it again, that worker's answer need not be a copy. This is so in BSP without
backup workers, as long as the worker is a member; a fenced worker is sent nothing more before the others continue
without it. A worker that holds an earlier version is sent the differences from it, if they are known
(``kernels.published``).

A worker on this host reads the weights of its last calls in place until its next calls. So the weights of moved slices
stay until every such worker has made a call by the map of the move, or a newer one; after that it reads none of them
(``psdist.client.transport.shm``). They stay for at least a minute, for workers whose stream broke.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Protocol

from psdist.consistency import BSP, Consistency
from psdist.errors import InvalidArgumentError, PsdistError
from psdist.off_loop import off_loop
from psdist.types import Identity, ParametersEntry, ParametersMember
from psdist.v1 import server_pb2
from psdist.wire import frames
from psdist_server.core.async_shard import AsyncShard
from psdist_server.core.bsp_shard import BspShard
from psdist_server.core.replication import ShardFenced, not_primary
from psdist_server.core.shard import (
    Apply,
    Cancelled,
    Effect,
    Event,
    JoinProposed,
    JoinWithdrawn,
    PullRequested,
    SlicePushed,
    SliceRecord,
)
from psdist_server.kernels.arrays import DenseParameters, Gradient, WrittenSlice
from psdist_server.store.gradients import PendingGradient, PendingGradients
from psdist_server.store.rpc_call import Call, CallTable, SliceAnswer
from psdist_server.store.statistics import Counters, SliceSpans


class ShardRouter:
    """The machines of the shards that this server is the primary of. Passes events to them.

    run: carries out the machines' effects.
    spans: spans of the server's slices, for traces.
    """

    def __init__(
        self,
        entry: ParametersEntry,
        calls: CallTable,
        gradients: PendingGradients,
        counters: Counters,
        run: Callable[[Iterable[Effect]], None],
        spans: SliceSpans,
    ) -> None:
        self._spans = spans
        self.machines: dict[int, BspShard | AsyncShard] = {}
        #: Shards that are yet to be loaded from a snapshot.
        self.unloaded: set[int] = set()
        self.calls = calls
        self._gradients = gradients
        self._counters = counters
        self.run = run
        self._name = entry.spec.name
        self._slice_count = entry.slicing.count
        self._shard_count = max(1, len(entry.shards))
        #: Epoch of the newest map, and the shards that it assigns to this server.
        self.epoch = 0
        self._assigned: Collection[int] = ()
        #: Shards whose newer primary is known to a replica.
        self._fenced: set[int] = set()
        self._indices: tuple[int, ...] | None = ()

    def assign(self, epoch: int, assigned: Collection[int]) -> None:
        """Adopt a new map, by which this server is the primary of the ``assigned`` shards."""
        self.epoch, self._assigned = epoch, assigned

    def add(self, number: int, machine: BspShard | AsyncShard, *, is_loaded: bool = True) -> None:
        """Start serving a shard. is_loaded: False if its slices are to be loaded from a snapshot."""
        self.machines[number] = machine
        self._indices = None
        if not is_loaded:
            self.unloaded.add(number)

    def loaded(self, number: int) -> None:
        """Record that all slices of a shard are loaded from the snapshot."""
        self.unloaded.discard(number)

    def remove(self, number: int) -> None:
        """Stop serving a shard: fail the calls that wait for it."""
        del self.machines[number]
        self._indices = None
        self.unloaded.discard(number)
        self.calls.fail_slices(self.slices_of(number), not_primary(number))

    def fence_shard(self, fenced: ShardFenced) -> None:
        """Refuse a shard's slices until the next map is adopted, because a replica knows a newer primary."""
        self._fenced.add(fenced.number)
        self.calls.fail_slices(self.slices_of(fenced.number), not_primary(fenced.number))

    def unfence(self) -> None:
        """Serve fenced shards again; the map has confirmed the primaries."""
        self._fenced.clear()

    @property
    def indices(self) -> tuple[int, ...]:
        """The slices served here, ascending."""
        if self._indices is None:
            self._indices = tuple(sorted(index for machine in self.machines.values() for index in machine.slices))
        return self._indices

    def slices_of(self, number: int) -> range:
        """Return the slices of a shard."""
        return range(number, self._slice_count, self._shard_count)

    def shard_of(self, index: int) -> int:
        """Return the number of a slice's shard."""
        return index % self._shard_count

    def get(self, index: int) -> BspShard | AsyncShard | None:
        """Return the machine of a slice's shard, or None if it is not served here."""
        return self.machines.get(index % self._shard_count)

    def machine_of(self, index: int) -> BspShard | AsyncShard:
        """Return the machine of the shard of a slice that is served here."""
        return self.machines[index % self._shard_count]

    def version(self, index: int) -> int:
        """Return the version of a slice that is served here."""
        return self.machine_of(index).slices[index].version

    def check_slice(self, index: int, epoch: int) -> None:
        """Raise InvalidArgumentError if slice ``index`` does not exist or is another server's in map ``epoch``, and
        StaleEpochError if it is no longer served here."""
        number = index % self._shard_count
        if number in self.machines and index < self._slice_count and number not in self._fenced:
            return
        if index >= self._slice_count or (epoch == self.epoch and number not in self._assigned):
            raise InvalidArgumentError(
                f"slice {index} of {self._name!r} is not on this server (of {self._slice_count} slices); "
                "route by the cluster map"
            )
        raise not_primary(number)

    def dispatch(self, index: int, event: Event) -> None:
        """Pass an event about a slice served here to its machine, and carry out the effects."""
        self.run(self.machines[index % self._shard_count].on(event))

    def dispatch_all(self, event: Event) -> None:
        """Pass an event to all machines, and carry out the effects."""
        for machine in self.machines.values():
            self.run(machine.on(event))

    def push(
        self,
        call: Call,
        index: int,
        base_version: int,
        payload: memoryview,
        written: server_pb2.Written | None = None,
    ) -> None:
        """Route one contribution.

        written: values that the script wrote to weights of the slice.

        Raises InvalidArgumentError and its subclasses, StaleEpochError if the slice is not served here, and
        StaleEstimateError; nothing has changed then.
        """
        self.check_slice(index, call.identity.epoch)
        writes = None if written is None else self._gradients.receive_writes(call, index, written)
        values, counts = self._gradients.receive(call, index, payload)
        self._counters.workers[call.identity.worker_id].push_bytes += len(payload)
        self.push_unchecked(call, index, base_version, values, is_shared=False, writes=writes, counts=counts)

    def push_unchecked(
        self,
        call: Call,
        index: int,
        base_version: int,
        values: Gradient,
        *,
        is_shared: bool,
        writes: WrittenSlice | None = None,
        counts: bool = True,
    ) -> None:
        """Route one contribution whose ``values`` the kernel checks, to a slice that ``check_slice`` accepts. Their
        number is the slice's; their content is arbitrary.

        is_shared: they are in memory of the worker.
        writes: values that the script wrote to weights of the slice.
        counts: False if the contribution is made, but not added, although the push does not abstain.
        """
        worker_id, incarnation = call.identity.worker_id, call.identity.incarnation
        gradient = PendingGradient(index, call, values, is_shared, writes=writes)
        if self._spans.recorder is not None:
            gradient.arrived = self._spans.clock()
        self._counters.workers[worker_id].pushes += 1
        machine = self.machines[index % self._shard_count]
        member = machine.members.get(worker_id)
        if member is not None and member.incarnation == incarnation:  # Otherwise the machine refuses it.
            gradient.member = member
        token = self.calls.ask(call, index)
        error_of_repeat = self._gradients.add(token, gradient)
        pushed, abstain = call.gradient, call.abstain or not counts
        event = SlicePushed(
            token, index, worker_id, incarnation, call.step, base_version, abstain, call.wants_weights, call.mark,
            pushed.written, pushed.follows_writes, pushed.attempt, pushed.withdraws,
        )  # fmt: skip
        self.run(machine.on(event))
        if error_of_repeat is not None:
            call.fail(error_of_repeat)

    def pull(self, call: Call, index: int, min_version: int) -> None:
        """Request one slice at ``min_version`` or later. Raises the errors of ``check_slice``."""
        self.check_slice(index, call.identity.epoch)
        token = self.calls.ask(call, index)
        self._counters.workers[call.identity.worker_id].pulls += 1
        self.dispatch(index, PullRequested(token, index, call.identity.worker_id, min_version))

    def cancel(self, call: Call) -> None:
        """Stop answering a call that ended."""
        for token, index in list(call.outstanding.items()):
            self.calls.pop(token)
            if self.get(index) is not None:
                self.dispatch(index, Cancelled(token, index))
        call.outstanding.clear()

    def propose(self, member: ParametersMember) -> bool:
        """Return True if ``member`` may join at its first step. If so, wait for its contributions from now on."""
        if not all(machine.admits(member) for machine in self.machines.values()):
            return False
        self.dispatch_all(JoinProposed(member))
        return True

    def withdraw(self, worker_id: str) -> None:
        """Withdraw a proposal."""
        self.dispatch_all(JoinWithdrawn(worker_id))

    @property
    def proposed(self) -> list[str]:
        """Workers whose proposal was accepted and that are not members yet."""
        return sorted({worker_id for machine in self.machines.values() for worker_id in machine.proposals})

    @property
    def step_next(self) -> int:
        """Lowest step or clock at which a worker may join, as far as this server is concerned."""
        return max((machine.step_next for machine in self.machines.values()), default=0)


class SliceContents:
    """Contents of a store's slices: which of them kernels are writing, and the record that describes each one's arrays.

    The applier reports each write. The replicator copies a slice when it is quiescent: its content is complete and no
    kernel is writing it. An update can be in the arrays before the shard's machine counts it, namely until the replicas
    have acknowledged it. The record of such a slice is ahead of the machine's by that update.

    Invariant: the record of a quiescent slice describes exactly the content of its arrays.
    """

    def __init__(self, dense: DenseParameters, router: ShardRouter) -> None:
        self._dense = dense
        self._router = router
        self._writing: set[int] = set()
        #: Updates that are in the arrays and not yet counted by the machine.
        self._ahead: dict[int, Apply] = {}
        self._callbacks: dict[int, list[Callable[[], None]]] = {}

    def write_started(self, index: int) -> None:
        """Record that a kernel is about to write slice ``index``."""
        self._writing.add(index)

    def write_ended(self, effect: Apply) -> None:
        """Record that an update is in the arrays, so that its slice is quiescent."""
        self._writing.discard(effect.index)
        self._ahead[effect.index] = effect
        if self._callbacks:
            self.notify(effect.index)

    def update_counted(self, index: int) -> None:
        """Record that the machine is about to count the update in the arrays of slice ``index``."""
        self._ahead.pop(index, None)

    def when_quiescent(self, index: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` as soon as slice ``index`` is quiescent: now, or after the current write."""
        is_missing = index in self._dense.held and index not in self._dense.installed
        if is_missing or index in self._writing:
            self._callbacks.setdefault(index, []).append(callback)
        else:
            callback()

    def notify(self, index: int) -> None:
        """Run the callbacks of slice ``index``, which has become quiescent or was dropped."""
        for callback in self._callbacks.pop(index, ()):
            callback()

    def record(self, index: int) -> SliceRecord:
        """Return the record of a quiescent slice that is served here."""
        record = self._router.machine_of(index).record(index)
        if (effect := self._ahead.get(index)) is not None:
            record.advance(effect.contributors, effect.sequence)
        return record

    def drop(self, indices: Collection[int]) -> None:
        """Forget the writes of slices that are no longer updated here."""
        for index in indices:
            self._ahead.pop(index, None)
            self._writing.discard(index)
            self.notify(index)


# --- reads ------------------------------------------------------------------------------------------------------------


#: Encoded answers cached for the other workers of the step.
ENCODED_MAX: Final = 4
RECLAIM_SECONDS: Final = 60.0


class Weights(NamedTuple):
    """Payload of a slice. differences: the parts of the payload; None if it is the weights."""

    version: int
    payload: bytes | memoryview
    differences: server_pb2.Differences | None = None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Requested form of a slice. held: the version to which differences may be sent, or None."""

    index: int
    dtype: str
    held: int | None


def _wanted(index: int, call: Call) -> _Wanted:
    return _Wanted(index, call.wanted.dtype, call.wanted.held.get(index))


class SliceReads:
    """Reads slices of one parameter set, immediately or after the current update."""

    def __init__(
        self, router: ShardRouter, dense: DenseParameters, counters: Counters, consistency: Consistency
    ) -> None:
        self._router = router
        #: True if an update waits for the pushes of all members.
        self._waits_for_all = isinstance(consistency, BSP) and not consistency.backup_workers
        self._dense = dense
        self._counters = counters
        #: By slice: reads that wait for the end of an update.
        self.waiting: dict[int, list[tuple[asyncio.Future[Weights], _Wanted]]] = {}
        self._encoded: dict[tuple[SliceAnswer, int, _Wanted], bytes] = {}
        self._copies: dict[tuple[int, _Wanted], Weights] = {}

    async def read(self, index: int, call: Call) -> Weights:
        """Read a slice for the answer to a call. The payload is valid until the next await. Raises StaleEpochError if
        the slice is no longer served here."""
        return await self._read(_wanted(index, call))

    async def _read(self, wanted: _Wanted) -> Weights:
        machine = self._router.get(wanted.index)
        if machine is None:
            raise not_primary(self._router.shard_of(wanted.index))
        state = machine.slices[wanted.index]
        if not state.is_written:
            return self._now(wanted, state.version)
        future: asyncio.Future[Weights] = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(wanted.index, []).append((future, wanted))
        return await future

    def _now(self, wanted: _Wanted, version: int) -> Weights:
        """Read a slice that is not being written."""
        published = self._dense.published
        if published is not None and wanted.held is not None:
            found = published.differences(wanted.index, wanted.held, version)
            if found is not None:
                return Weights(version, b"".join(found), server_pb2.Differences(bytes=map(len, found)))
        return Weights(version, self._dense.read(wanted.index, wanted.dtype))

    async def encode(self, answer: SliceAnswer, call: Call) -> bytes:
        """Return the PushPullResponse with the slice's weights. The last few are cached, since in BSP all workers get
        the same."""
        wanted = _wanted(answer.index, call)
        weights = await self._read(wanted)
        self._counters.workers[call.identity.worker_id].pull_bytes += len(weights.payload)
        key = (answer, weights.version, wanted)
        if key not in self._encoded:
            header = server_pb2.PushPullResponse(
                slice=answer.index,
                version=weights.version,
                ignored=answer.ignored,
                staleness=answer.staleness,
                differences=weights.differences,
            )
            self._encoded[key] = frames.pack(header, weights.payload)
            if len(self._encoded) > ENCODED_MAX:
                del self._encoded[next(iter(self._encoded))]
        return self._encoded[key]

    async def lasting(self, answer: SliceAnswer, call: Call) -> Weights:
        """Read a slice for the answer to a call of a member, or of a worker that reads. The payload is valid until that
        worker pushes the slice again, or is fenced. Raises StaleEpochError if the slice is no longer served here."""
        return self.in_place(answer, call) or await self._copy(_wanted(answer.index, call))

    def in_place(self, answer: SliceAnswer, call: Call) -> Weights | None:
        """Return as ``lasting``, without a copy; None if the slice may change too early, or is encoded."""
        wanted = _wanted(answer.index, call)
        if wanted.dtype == "float32" and self._stands_still(answer, call):
            return self._now(wanted, answer.version)
        return None

    def _stands_still(self, answer: SliceAnswer, call: Call) -> bool:
        """Return True if the next update of the slice waits for another push of the call's worker."""
        machine = self._router.get(answer.index)
        if not self._waits_for_all or not call.is_push or answer.ignored or machine is None:
            return False
        state = machine.slices[answer.index]
        return not state.is_written and state.version == answer.version

    async def _copy(self, wanted: _Wanted) -> Weights:
        """Read a slice into a payload that never changes. The last few are cached, as in ``encode``."""
        weights = await self._read(wanted)
        key = (weights.version, wanted)
        if key not in self._copies:
            self._copies[key] = weights._replace(payload=bytes(weights.payload))
            if len(self._copies) > ENCODED_MAX:
                del self._copies[next(iter(self._copies))]
        return self._copies[key]

    def updated(self, index: int, version: int) -> None:
        """Serve the reads that wait for slice ``index``, which is at ``version``. Its next update has not started."""
        for future, wanted in self.waiting.pop(index, ()):
            if not future.done():
                weights = self._now(wanted, version)
                future.set_result(weights._replace(payload=bytes(weights.payload)))

    def fail(self, indices: Iterable[int], error: PsdistError) -> None:
        """Fail the reads of these slices, which are no longer served here."""
        for index in indices:
            for future, _ in self.waiting.pop(index, ()):
                if not future.done():
                    future.set_exception(error)


class Reader(Protocol):
    """A worker that can read the weights in place, or is sent them from there.

    admitted: the identity of its last call.
    """

    @property
    def admitted(self) -> Identity: ...

    def fenced(self) -> None:
        """Stop sending to the worker, which is fenced."""


class InPlaceReaders:
    """The workers that read the weights of one parameter store in place, or are sent them from there."""

    def __init__(self, dense: DenseParameters) -> None:
        self._readers: list[Reader] = []
        self._dense = dense
        #: Epoch of the map that last moved a slice to another server.
        self._released: dict[int, int] = {}
        self._reclaiming: asyncio.Future[None] | None = None

    def add(self, reader: Reader) -> None:
        """Add a worker."""
        self._readers.append(reader)

    def remove(self, reader: Reader) -> None:
        """Remove a worker, which reads nothing in place any more."""
        self._readers.remove(reader)

    def fence(self, live: Mapping[str, int]) -> None:
        """Stop the readers whose incarnation is not ``live`` in a new map, before any slice is updated by it."""
        for reader in list(self._readers):
            if live.get(reader.admitted.worker_id) != reader.admitted.incarnation:
                reader.fenced()

    async def release(self, indices: Sequence[int], epoch: int) -> None:
        """Release slices that were moved by the map of ``epoch``: their state now, and their weights when nothing reads
        them any more."""
        await off_loop(len(indices) * self._dense.slicing.slice_elements, partial(self._dense.release, indices))
        self._released.update(dict.fromkeys(indices, epoch))
        self._reclaim_later(indices, epoch)

    def _reclaim_later(self, indices: Sequence[int], epoch: int) -> None:
        asyncio.get_running_loop().call_later(RECLAIM_SECONDS, self._reclaim, indices, epoch)

    def _reclaim(self, indices: Sequence[int], epoch: int) -> None:
        if any(reader.admitted.epoch < epoch for reader in self._readers):
            self._reclaim_later(indices, epoch)
        else:
            unread = [index for index in indices if self._released.get(index) == epoch]
            elements = len(unread) * self._dense.slicing.slice_elements
            self._reclaiming = asyncio.ensure_future(off_loop(elements, partial(self._dense.reclaim, unread)))
