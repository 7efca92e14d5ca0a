"""A parameter set on one server: feeds the shard machines and carries out their effects.

Everything here runs on the event loop except the kernels (``applier``). A slice's weights are copied out only while no
kernel writes them. An answer waits until the replicas have the updates that it is about.

The map decides of which shards the server is the primary, and of which it holds copies (``update``). A call for a shard
that has moved fails with StaleEpochError, and its sender routes it anew.

Contributions in messages (``push``) are checked for NaN and Inf when they arrive. Contributions in shared memory
(``push_shared``) are checked when their kernel reads them, because they could change in between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import structlog

from psdist.consistency import BSP
from psdist.errors import (
    InternalError,
    InvalidArgumentError,
    LimitExceededError,
    PsdistError,
    UnknownParametersError,
)
from psdist.types import ITEM_BYTES, ParametersEntry, ParametersMember, Replica
from psdist.v1 import server_pb2
from psdist.wire import frames
from psdist_server.core import role_changes
from psdist_server.core.async_shard import AsyncShard
from psdist_server.core.bsp_shard import BspShard
from psdist_server.core.events import (
    Aggregate,
    Apply,
    Cancelled,
    Effect,
    Event,
    Forget,
    JoinProposed,
    JoinWithdrawn,
    MembersChanged,
    NormKnown,
    PullRequested,
    RefuseSlice,
    Reply,
    SliceAggregated,
    SliceApplied,
    SlicePushed,
)
from psdist_server.core.records import SliceRecord
from psdist_server.core.replication import BackupReplication
from psdist_server.core.shards import make_shard
from psdist_server.kernels.arrays import Array, Bad, DenseParameters, Gradient, gradient_of
from psdist_server.kernels.pool import KernelPool
from psdist_server.store.applier import Applier, Outcome, PendingGradient
from psdist_server.store.backup_shards import BackupShards
from psdist_server.store.cut_controller import CutController
from psdist_server.store.global_norm import Aggregation, NormBoard
from psdist_server.store.push_validation import Contributions
from psdist_server.store.replica_stream import not_primary
from psdist_server.store.replicator import ReplicaNetwork, Replicator
from psdist_server.store.rpc_call import Call, SliceAnswer, fenced
from psdist_server.store.shm_readers import ShmReaders
from psdist_server.store.statistics import Counters

_log = structlog.get_logger("psdist.server")

#: So many encoded answers are kept for the other workers of the step.
ENCODED_MAX: Final = 4


class ParameterStore:
    """The shards of ``entry`` that ``me`` is the primary of, or holds copies of. Empty before the first ``update``.

    network: how other servers are reached.
    on_aggregated: called with (holding, step) when all slices served here are aggregated (clipping).
    """

    def __init__(
        self,
        entry: ParametersEntry,
        me: Replica,
        pool: KernelPool[Any, Any],
        network: ReplicaNetwork,
        on_aggregated: Callable[[ParameterStore, int], None],
    ) -> None:
        self.entry = entry
        self.me = me
        self.epoch = 0
        self.slicing = entry.slicing  # The same for the parameters' life, as is the number of shards.
        self._shard_count = max(1, len(entry.shards))
        self.dense = DenseParameters(entry)
        self.counters = Counters()
        self.norms = NormBoard()
        self.aggregation = Aggregation(self.norms, lambda index: self._shard(index).slices[index].version)
        self._on_aggregated = on_aggregated
        self.is_asynchronous = not isinstance(entry.spec.consistency, BSP)
        self._clipping = entry.spec.optimizer.max_grad_norm > 0
        needs_norm = self._clipping and self.is_asynchronous
        self.contributions = Contributions(entry.spec, self.slicing, self.counters, needs_norm)
        #: The machines of the shards that this server is the primary of.
        self.shards: dict[int, BspShard | AsyncShard] = {}
        #: Their slices, ascending.
        self.indices: tuple[int, ...] = ()
        self.replicator = Replicator(entry, me, network, self)
        self._applier = Applier(entry, self.dense, pool, self.replicator, self)
        self.copies = BackupShards(entry.spec, self.dense, self._applier, self.norms, self.counters, self.stop)
        self._calls: dict[int, Call] = {}
        self._encoded: dict[tuple[SliceAnswer, int, str], bytes] = {}
        self._effects: deque[Effect] = deque()
        self._carrying_out = False
        #: Something went wrong that makes slices stand for good, so nobody is to wait for them.
        self._defect: PsdistError | None = None
        self._fenced: set[int] = set()
        #: Answers that wait for the replicas of a shard that was taken over.
        self._withheld: dict[int, list[Reply]] = {}
        self._readers: dict[int, list[tuple[asyncio.Future[tuple[int, bytes]], str]]] = {}
        self.readers = ShmReaders(self.dense)
        self._uninstalled: dict[int, list[Callable[[], None]]] = {}
        #: Shards that are to be loaded from a snapshot and are not yet.
        self.unloaded: set[int] = set()
        #: The snapshot that is being cut.
        self.cuts = CutController(self.shards, self._shard, self._applier, self._carry_out)
        #: Done when the update kernel is compiled.
        self.ready = pool.prepare(self.dense.compile)

    # --- what the service asks --------------------------------------------------------------------------------------

    def _check_defect(self) -> None:
        """Raises the error that made slices stand, if there was one."""
        if self._defect is not None:
            raise type(self._defect)(self._defect.message, **self._defect.details)

    def check_installed(self) -> None:
        """Raises UnknownParametersError while initial values are missing, and the error that made slices stand."""
        self._check_defect()
        if (missing := len(set(self.indices) - self.dense.installed)) or not self.entry.ready:
            raise UnknownParametersError(
                f"{self.entry.spec.name!r} is not ready: {len(self.indices) - missing} of {len(self.indices)} "
                "slices here have their initial values; wait for CreateParameters to say STATE_READY"
            )

    def check_slice(self, index: int, epoch: int) -> None:
        """Raises InvalidArgumentError where slice ``index`` does not exist or is another server's in map ``epoch``;
        StaleEpochError where it is not served here any more."""
        number = index % self._shard_count
        if number in self.shards and index < self.slicing.count and number not in self._fenced:
            return
        if index >= self.slicing.count or (
            epoch == self.epoch and not role_changes.is_primary(self.entry.shards[number], self.me)
        ):
            raise InvalidArgumentError(
                f"slice {index} of {self.entry.spec.name!r} is not on this server (of {self.slicing.count} slices); "
                "route by the cluster map"
            )
        raise not_primary(number)

    def install(self, index: int, payload: memoryview, epoch: int) -> None:
        """Sets the initial weights of a slice. Raises InvalidArgumentError once the parameters are ready."""
        self._check_defect()
        self.check_slice(index, epoch)
        expected = self.slicing.size(index) * ITEM_BYTES["float32"]
        if self.entry.ready:
            raise InvalidArgumentError(f"{self.entry.spec.name!r} is ready: its initial values cannot be set again")
        if len(payload) != expected:
            raise InvalidArgumentError(f"slice {index} has {expected} bytes in float32, not {len(payload)}")
        self.dense.install(index, gradient_of(payload, "float32"))
        self._installed(index)

    def load(self, index: int, arrays: Sequence[Array], version: int) -> None:
        """Sets a slice served here from a snapshot: float32[n] each, weights first; these alone if the map says so."""
        if self.entry.restore is not None and self.entry.restore.weights_only:
            self.dense.install(index, arrays[0], version)
        else:
            for number, array in enumerate(arrays):
                self.dense.install_state(index, number, array, version)
        self._shard(index).slices[index].version = version
        self._installed(index)

    def _installed(self, index: int) -> None:
        self.replicator.installed(index)
        for callback in self._uninstalled.pop(index, ()):
            callback()

    def push(self, call: Call, index: int, base_version: int, payload: memoryview) -> None:
        """Takes one contribution. Raises InvalidArgumentError and its kinds; then nothing was changed."""
        counters = self.counters.of(call.identity.worker_id)
        self.check_slice(index, call.identity.epoch)
        values = self.contributions.gradient(call, index, payload)
        abstain = call.abstain or not self.contributions.is_finite(call, index, values)
        self.counters.bytes_held += values.nbytes
        counters.push_bytes += len(payload)
        self._take(call, index, base_version, PendingGradient(index, call, values, shared=False), abstain)

    def push_shared(self, call: Call, index: int, base_version: int, values: Gradient) -> None:
        """Takes one contribution that lies in shared memory: ``values`` are read when the slice is updated, and may
        hold anything. Raises InvalidArgumentError where the slice is not here; then nothing was changed."""
        self.check_slice(index, call.identity.epoch)
        self._take(call, index, base_version, PendingGradient(index, call, values, shared=True), call.abstain)

    def _take(self, call: Call, index: int, base_version: int, part: PendingGradient, abstain: bool) -> None:
        token = call.ask(index)
        self.counters.of(call.identity.worker_id).pushes += 1
        self._calls[token] = call
        self._applier.parts[token] = part
        event = SlicePushed(
            token,
            index,
            call.identity.worker_id,
            call.identity.incarnation,
            call.step,
            base_version,
            abstain,
            call.wants_weights,
            call.mark,
        )
        self._dispatch(index, event)

    def pull(self, call: Call, index: int, min_version: int) -> None:
        """Asks for one slice at ``min_version`` or later."""
        self.check_slice(index, call.identity.epoch)
        token = call.ask(index)
        self._calls[token] = call
        self.counters.of(call.identity.worker_id).pulls += 1
        self._dispatch(index, PullRequested(token, index, call.identity.worker_id, min_version))

    def cancel(self, call: Call) -> None:
        """The call ended: nobody is to be answered any more."""
        for token, index in list(call.outstanding.items()):
            self._calls.pop(token, None)
            if index % self._shard_count in self.shards:
                self._dispatch(index, Cancelled(token, index))
        call.outstanding.clear()

    async def read(self, index: int, dtype: str) -> tuple[int, bytes | memoryview]:
        """Version and payload of a slice, never torn. The payload is valid until the next await. Raises
        StaleEpochError where the slice went elsewhere."""
        if index % self._shard_count not in self.shards:
            raise not_primary(index % self._shard_count)
        state = self._shard(index).slices[index]
        if not state.busy or self._is_frozen(index):
            return state.version, self.dense.read(index, dtype)
        future: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._readers.setdefault(index, []).append((future, dtype))
        return await future

    async def close(self) -> None:
        """The parameters are gone or begin anew, or the server ends. Who waits for something here is sent elsewhere."""
        for number in list(self.shards):
            self._demote(number)
        for number in list(self.copies.machines):
            self.copies.discard(self.copies.remove(number).slices)
        await self.replicator.close()
        for number in range(self._shard_count):
            await self._applier.settled(number)
        self.norms.wake()
        self.dense.close()

    async def encode(self, answer: SliceAnswer, call: Call) -> bytes:
        """The PushPullResponse with the slice's weights; the last few are kept, as in BSP all workers get the same."""
        version, payload = await self.read(answer.index, call.pull_dtype)
        self.counters.of(call.identity.worker_id).pull_bytes += len(payload)
        key = (answer, version, call.pull_dtype)
        if key not in self._encoded:
            header = server_pb2.PushPullResponse(
                slice=answer.index, version=version, ignored=answer.ignored, staleness=answer.staleness
            )
            self._encoded[key] = frames.pack(header, payload)
            if len(self._encoded) > ENCODED_MAX:
                del self._encoded[next(iter(self._encoded))]
        return self._encoded[key]

    def _is_frozen(self, index: int) -> bool:
        """Busy, but nothing is being written: an aggregated gradient waits for the norm."""
        return getattr(self._shard(index).slices[index], "aggregated", False) is True

    def waiting_for(self, call: Call) -> str:
        """Why the call's oldest slice is not answered yet."""
        for token, index in call.outstanding.items():
            shard = self.shards.get(index % self._shard_count)
            if shard is not None:
                return shard.waiting_for(token, index) or self._own_wait(index)
        return ""

    def _own_wait(self, index: int) -> str:
        replicas = self.replicator.behind(index)
        if index in self._applier.kept_back:
            return "for a snapshot to be written, for which this server can copy no more"
        return f"for {replicas} to acknowledge the update" if replicas else "for this server to apply the update"

    def fence(self, live: dict[str, int]) -> None:
        """Ends the calls of workers that are no longer ``live`` (incarnation by worker id)."""
        for call in {id(call): call for call in self._calls.values()}.values():
            if live.get(call.identity.worker_id) != call.identity.incarnation:
                call.fail(fenced(call.identity))

    # --- membership ---------------------------------------------------------------------------------------------------

    async def update(self, entry: ParametersEntry, epoch: int) -> None:
        """A new map's entry for the same parameters: takes over, and gives up, what the map says."""
        before, self.entry, self.epoch = self.entry, entry, epoch
        terms = {n: machine.term for n, machine in self.replicator.machines.items()}
        changes = role_changes.changes(entry, self.me, terms, self.copies.machines)
        self.cuts.follow(changes, entry.members != before.members)
        for number in changes.demoted:
            self._demote(number)
        copies = {number: self.copies.remove(number) for number in (*changes.discarded, *changes.promoted)}
        for number in changes.discarded:
            self.copies.discard(copies[number].slices)
        self._recount(bool(changes.demoted))
        if (entry.members, entry.departed) != (before.members, before.departed):
            self._dispatch_all(MembersChanged(entry.members, entry.departed))
            self.copies.retain(entry.producers)
        for number in changes.ended:
            await self._applier.settled(number)
        self._release([*changes.demoted, *changes.discarded])
        self.copies.no_room.clear()
        for number in changes.added:
            self._add_copy(number)
        for number in (*changes.created, *changes.promoted):
            self._become_primary(number, copies.get(number))
        for number, machine in self.copies.machines.items():
            machine.follow(entry.shards[number])
        self._fenced.clear()
        self.replicator.follow(entry)
        if changes.promoted:
            # All whom a step waited for may have left just now.
            self._dispatch_all(MembersChanged(entry.members, entry.departed))
        self._recount(bool(changes.promoted or changes.created))
        self.norms.wake()

    def _slices_of(self, number: int) -> range:
        return range(number, self.slicing.count, self._shard_count)

    def _demote(self, number: int) -> None:
        """Another is the primary of a shard, or nobody."""
        del self.shards[number]
        self.unloaded.discard(number)
        self._withheld.pop(number, None)
        self.replicator.remove(number)
        self._fail_calls(number)
        indices = self._slices_of(number)
        for token in [token for token, part in self._applier.parts.items() if part.index in indices]:
            self._drop(token)
        for index in indices:
            for future, _ in self._readers.pop(index, ()):
                if not future.done():
                    future.set_exception(not_primary(number))
            for callback in self._uninstalled.pop(index, ()):
                callback()
        self._applier.drop(indices)
        _log.info("a shard is served elsewhere", parameters=self.entry.spec.name, shard=number, epoch=self.epoch)

    def _fail_calls(self, number: int) -> None:
        """Ends the calls that wait for slices of a shard that is not served here any more."""
        for call in {id(call): call for call in self._calls.values()}.values():
            if any(index % self._shard_count == number for index in call.outstanding.values()):
                call.fail(not_primary(number))

    def _release(self, numbers: Collection[int]) -> None:
        indices = [index for number in numbers for index in self._slices_of(number)]
        if indices:
            self._applier.dropped(indices)
            self.readers.release(indices, self.epoch)

    def _add_copy(self, number: int) -> None:
        indices = self._slices_of(number)
        try:
            self.dense.hold(indices)
        except LimitExceededError as error:
            self.copies.no_room[number] = error
            return
        self.copies.machines[number] = BackupReplication(number, indices, self.entry.shards[number])

    def _become_primary(self, number: int, copy: BackupReplication | None) -> None:
        """Serves a shard from now on: a new one, or one that this server has a copy of."""
        spec, indices, shard = self.entry.spec, self._slices_of(number), self.entry.shards[number]
        try:
            self.dense.hold(indices)
        except LimitExceededError as error:  # Of a new shard: what is promoted is held already.
            self.stop(error)
        records, base = None, (0, 0)
        # Before it is ready, one that was being filled may take the place of one that is gone: all is uploaded again.
        if copy is not None and (copy.complete or self.entry.ready):
            records, base = copy.records, copy.base
            if not copy.complete:
                self.stop(InternalError(f"shard {number} of {spec.name!r} was promoted before its copy was complete"))
                records = {}
            _log.info("promoted", parameters=spec.name, shard=number, term=shard.term, lsn=copy.lsn, epoch=self.epoch)
        clipping = self._clipping and not self.is_asynchronous
        self.shards[number] = make_shard(
            indices, self.entry.members, spec.consistency, clipping, self.entry.reference_workers, records,
            self.entry.departed,
        )  # fmt: skip
        self.replicator.add(number, shard.term, indices, base)
        if self.entry.restore is not None and not self.entry.ready:
            self.unloaded.add(number)

    def propose(self, member: ParametersMember) -> bool:
        """May ``member`` join at its first step? Then its contributions are waited for from now on."""
        if not all(shard.admits(member) for shard in self.shards.values()):
            return False
        self._dispatch_all(JoinProposed(member))
        return True

    @property
    def step_next(self) -> int:
        """The step or clock that a worker may join at, as far as this server goes."""
        return max((shard.step_next for shard in self.shards.values()), default=0)

    @property
    def proposed(self) -> list[str]:
        """Workers that were let in and are no members yet."""
        return sorted({worker_id for shard in self.shards.values() for worker_id in shard.proposals})

    def withdraw(self, worker_id: str) -> None:
        """Forgets a proposal."""
        self._dispatch_all(JoinWithdrawn(worker_id))

    def norm_known(self, step: int, norm: float) -> None:
        """The global norm of ``step``: what was aggregated is applied."""
        self._applier.norms = {step: norm}
        self._dispatch_all(NormKnown(step))

    def _aggregated(self, step: int, index: int) -> None:
        if self.aggregation.note(step, index):
            self.norms.wake()
            self._on_aggregated(self, step)

    def _recount(self, changed: bool) -> None:
        """Perhaps other slices are served here: a step may be complete now, or not any more."""
        if not changed:
            return
        self.indices = tuple(sorted(index for shard in self.shards.values() for index in shard.slices))
        self.aggregation.serve(self.indices)
        for index in self.indices if self._clipping and not self.is_asynchronous else ():
            if self._is_frozen(index):
                self._aggregated(self._shard(index).slices[index].version, index)

    # --- machines and effects -----------------------------------------------------------------------------------------

    def _shard(self, index: int) -> BspShard | AsyncShard:
        return self.shards[index % self._shard_count]

    def _dispatch(self, index: int, event: Event) -> None:
        self._carry_out(self._shard(index).on(event))

    def _dispatch_all(self, event: Event) -> None:
        for shard in self.shards.values():
            self._carry_out(shard.on(event))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        """Carries effects out in order; those that follow from them are queued, so that no chain of them is too
        deep."""
        self._effects.extend(effects)
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while self._effects:
                self._carry_out_one(self._effects.popleft())
        finally:
            self._carrying_out = False

    def _carry_out_one(self, effect: Effect) -> None:
        match effect:
            case Reply():
                self._reply(effect)
            case Apply() | Aggregate():
                self._applier.start(effect)
            case Forget(token):
                self._drop(token)
            case RefuseSlice(token, error):
                self._drop(token)
                call = self._calls.pop(token)
                self.counters.of(call.identity.worker_id).rejected += 1
                call.fail(error)

    def _reply(self, effect: Reply) -> None:
        number = effect.index % self._shard_count
        if not self.replicator.is_caught_up(number):
            self._withheld.setdefault(number, []).append(effect)
            return
        call = self._calls.pop(effect.token, None)
        if call is None:
            return
        if call.is_push:
            counters = self.counters.of(call.identity.worker_id)
            counters.answered(effect.ignored, effect.late, effect.staleness)
        call.answer(effect.token, SliceAnswer(effect.index, effect.version, effect.ignored, effect.staleness))

    def _drop(self, token: int) -> None:
        part = self._applier.parts.pop(token, None)
        if part is not None and not part.shared:
            self.counters.bytes_held -= part.values.nbytes
            part.call.slots.release()

    # --- what the applier tells ---------------------------------------------------------------------------------------

    def used(self, effect: Apply | Aggregate, bad: Bad) -> None:
        """See Owner."""
        for place in bad:
            self.contributions.left_out(self._applier.parts[effect.parts[place]].call, effect.index)
        for token in effect.parts:
            self._drop(token)

    def done(self, effect: Apply | Aggregate, outcome: Outcome) -> None:
        """See Owner."""
        self.counters.apply_seconds += outcome.seconds
        if isinstance(effect, Aggregate):
            self._dispatch(effect.index, SliceAggregated(effect.index))
            self.norms.record(effect.step, effect.index, outcome.square)
            self._aggregated(effect.step, effect.index)
            return
        self.counters.applied_slices += 1
        effects = self._shard(effect.index).on(SliceApplied(effect.index))
        self._serve_readers(effect.index)  # Before the next update of the slice may begin.
        self.replicator.applied(effect.index)
        self._carry_out([*effects, *self.cuts.applied(effect.index)])

    def fail(self, what: str, error: BaseException) -> None:
        """A defect: everybody who waits for something here is told, or will ask, and the log has the traceback."""
        _log.error("failed", parameters=self.entry.spec.name, what=what, exc_info=error)
        self._stop(InternalError(f"{what} of {self.entry.spec.name!r} failed: {error!r}"))

    def stop(self, error: PsdistError) -> None:
        """Nothing of the parameters can be trusted here any more: everybody is told why."""
        _log.error("stopped", parameters=self.entry.spec.name, reason=str(error))
        self._stop(error)

    def _stop(self, error: PsdistError) -> None:
        self._defect = error
        for call in {id(call): call for call in self._calls.values()}.values():
            call.fail(error)

    # --- what the replicator asks and tells ---------------------------------------------------------------------------

    def is_quiesced(self, index: int, callback: Callable[[], None]) -> None:
        """See Source."""
        if index in self.dense.installed or index not in self.dense.held:
            self._applier.is_quiesced(index, callback)
        else:
            self._uninstalled.setdefault(index, []).append(callback)

    def export(self, index: int) -> tuple[SliceRecord, list[Array]]:
        """See Source."""
        return self._applier.record(index, self._shard(index).record(index)), self.dense.export(index)

    def digest(self, index: int) -> bytes:
        """See Source."""
        return self.dense.digest(index)

    def square(self, index: int, step: int) -> float:
        """See Source."""
        return self.norms.known(step).get(index, 0.0)

    def replicated(self, index: int, lsn: int) -> None:
        """See Source."""
        self._applier.replicated(index, lsn)

    def level(self, number: int) -> None:
        """See Source."""
        for effect in self._withheld.pop(number, ()):
            self._reply(effect)

    def has_room_again(self) -> None:
        """See Source."""
        self._applier.ship_waiting()

    def fenced(self, number: int) -> None:
        """See Source."""
        self._fenced.add(number)
        self._fail_calls(number)

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _serve_readers(self, index: int) -> None:
        version = self._shard(index).slices[index].version
        for future, dtype in self._readers.pop(index, ()):
            if not future.done():
                future.set_result((version, bytes(self.dense.read(index, dtype))))

    def statistics(self) -> server_pb2.ParametersStatistics:
        """Counters and waits as a message."""
        calls = {id(call): call for call in self._calls.values()}.values()
        waits = sorted({call.waiting_for for call in calls if call.waiting_for})
        versions = [shard.version_min for shard in self.shards.values()]
        return self.counters.to_proto(
            self.entry.spec.name,
            min(versions, default=0),
            max((shard.version_max for shard in self.shards.values()), default=0),
            waits,
            replicas=self.replicator.statistics(),
            primary_of=sorted(self.shards),
            backup_of=sorted(self.copies.machines),
        )
