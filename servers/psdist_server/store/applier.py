"""Carries out the updates that the shard machines of a server ask for, here and at the replicas.

A slice without replicas is updated by one fused kernel, straight from the contributions, several slices at once. Where
a slice has replicas, a kernel combines the contributions into their mean first. The mean is sent to the replicas and
applied here at the same time. The update is complete when the kernel has ended and all required replicas have
acknowledged it. Replicas run the same kernel on the same mean, so all copies have the same bytes.

Kernels run in threads without the GIL, except for small slices, for which a thread costs more than the update.
Everything else runs on the event loop. While a snapshot is cut (``copy_on_write``), the kernel of an update first
copies what the snapshot needs of the slice, and updates that must not go on yet wait.

Invariants: at most one kernel works on a slice at a time. A quiescent slice can be copied, and its record then
describes exactly what is in its arrays. What was asked of a slice has no effect once the slice is dropped.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from psdist.consistency import BSP
from psdist.types import ParametersEntry
from psdist_server.core.events import Aggregate, Apply
from psdist_server.core.records import ReplicaUpdate, SliceRecord
from psdist_server.kernels.arrays import Array, Bad, DenseParameters, Gradient, Update
from psdist_server.kernels.optimizers import clip_factor
from psdist_server.kernels.pool import KernelPool
from psdist_server.store.rpc_call import Call

#: Slices of at most so many elements are updated on the event loop.
INLINE_ELEMENTS: Final = 1 << 15
#: Is added to the priority of what comes after everything else.
_LAST: Final = 1 << 48
#: Called with the work and the result of a kernel that did not fail.
Told = Callable[[Any, Any], None]


@dataclass(slots=True)
class PendingGradient:
    """A contribution that waits for its update."""

    index: int
    call: Call
    values: Gradient
    #: It lies in memory of the worker, and holds no slot of its stream.
    shared: bool


class Outcome(NamedTuple):
    """What a kernel tells: how long it took, contributions that were left out, and of a mean itself and its sum of
    squares."""

    seconds: float
    bad: Bad = ()
    mean: Array | None = None
    square: float = 0.0


class Aside(NamedTuple):
    """Where a slice is copied to: weights, then state, one after another. ``copied`` is called on the loop when it is,
    unless the slice was dropped."""

    memory: Array
    copied: Callable[[], None]


class CutGuard(Protocol):
    """What a snapshot that is being cut has to say about updates."""

    def blocks_update(self, index: int) -> bool:
        """Whether slice ``index`` may not be updated yet."""

    def copy_for_update(self, index: int) -> Aside | None:
        """Where an update of slice ``index``, which begins now, must copy the slice first; None where it need not."""


class _Job(NamedTuple):
    """What a kernel works on."""

    effect: Apply | Aggregate
    update: Update
    #: The update's parts are the contributions, not their mean.
    is_raw: bool = True
    #: Where the slice is copied to before it is updated.
    aside: Aside | None = None


@dataclass(slots=True)
class _Shipment:
    """An update that replicas must have."""

    effect: Apply
    update: Update
    square: float
    lsn: int = 0
    seconds: float = 0.0
    is_applied: bool = False
    is_replicated: bool = False


class Replicas(Protocol):
    """Who else holds the slices that this server is the primary of."""

    def needs_gradient(self, index: int) -> bool:
        """Whether anybody has slice ``index``, or is to have each of its updates."""

    def next_lsn(self, index: int) -> int | None:
        """Number of the next update of the slice's shard; None where it has no replicas at all."""

    def has_room(self) -> bool:
        """Whether another update may be kept until it is acknowledged."""

    def update(self, update: ReplicaUpdate[Gradient]) -> None:
        """Sends an update to them."""


class Owner(Protocol):
    """Who asked for the updates, and is told what came of them."""

    def used(self, effect: Apply | Aggregate, bad: Bad) -> None:
        """The contributions are no longer needed; those at positions ``bad`` were left out."""

    def done(self, effect: Apply | Aggregate, outcome: Outcome) -> None:
        """The effect is carried out, everywhere."""

    def fail(self, what: str, error: BaseException) -> None:
        """A kernel failed."""


class Applier:
    """Carries out the effects of one holding's machines."""

    def __init__(
        self,
        entry: ParametersEntry,
        dense: DenseParameters,
        pool: KernelPool[Any, Any],
        replicas: Replicas,
        owner: Owner,
    ) -> None:
        self._dense = dense
        self._pool = pool
        self._replicas = replicas
        self._owner = owner
        self._shard_count = max(1, len(entry.shards))
        self._max_grad_norm = entry.spec.optimizer.max_grad_norm
        asynchronous = not isinstance(entry.spec.consistency, BSP)
        self._inline = entry.slicing.slice_elements <= INLINE_ELEMENTS and not asynchronous
        self.parts: dict[int, PendingGradient] = {}
        #: The global norm by step, as far as needed.
        self.norms: dict[int, float] = {}
        #: What Aggregate made for Apply: the mean, and its sum of squares.
        self._means: dict[int, tuple[Array | None, float]] = {}
        self._shipments: dict[int, _Shipment] = {}
        #: Updates that wait for room among those that are kept for replicas.
        self._waiting: deque[_Shipment] = deque()
        #: The snapshot that is being cut, and updates by slice that wait for it, each with its sum of squares.
        self.guard: CutGuard | None = None
        self._kept_back: dict[int, tuple[_Job, float]] = {}
        self._kept_back_order: list[int] = []
        self._is_resuming = False
        #: Updates that are in the arrays, and that the machine was not told of yet.
        self._ahead: dict[int, Apply] = {}
        self._writing: set[int] = set()
        self._at_rest: dict[int, list[Callable[[], None]]] = {}
        #: Kernels under way by shard, and who waits for there to be none.
        self._running: Counter[int] = Counter()
        self._settled: dict[int, list[asyncio.Future[None]]] = {}
        self._dropped: set[int] = set()

    # --- effects ------------------------------------------------------------------------------------------------------

    def start(self, effect: Apply | Aggregate) -> None:
        """Begins to carry ``effect`` out."""
        index = effect.index
        values = [self.parts[token].values for token in effect.parts]
        if isinstance(effect, Aggregate):
            self.submit(index, self._combine, _Job(effect, Update(index, effect.step, values)), self._aggregated)
        elif index in self._means:
            mean, square = self._means.pop(index)
            factor = clip_factor(self.norms[effect.step], self._max_grad_norm)
            kept = [mean] if mean is not None else []
            self._deliver(_Job(effect, Update(index, effect.step, kept, effect.lr_scale, factor), False), square)
        else:
            self._start_apply(effect, values)

    def _start_apply(self, effect: Apply, values: list[Gradient]) -> None:
        factor = None
        if self._max_grad_norm and values:  # One push, scaled down by its own norm (SSP and ASP).
            factor = clip_factor(self.parts[effect.parts[0]].call.grad_norm, self._max_grad_norm)
        update = Update(effect.index, effect.step, values, effect.lr_scale, factor)
        if values and self._replicas.needs_gradient(effect.index):
            self.submit(effect.index, self._combine, _Job(effect, update), self._combined)
        else:
            self._deliver(_Job(effect, update), 0.0)

    def _deliver(self, job: _Job, square: float) -> None:
        effect = job.effect
        assert isinstance(effect, Apply)
        if self._must_wait(effect.index):
            self._keep_back(job, square)
            return
        if not self._replicas.needs_gradient(effect.index):
            self._write(job, self._applied)
            return
        shipment = _Shipment(effect, job.update, square)
        if self._waiting or not self._replicas.has_room():
            self._waiting.append(shipment)
        else:
            self._ship(shipment)

    def _write(self, job: _Job, told: Told) -> None:
        """Begins to update a slice, and to copy it aside before where that is needed."""
        index = job.effect.index
        self._writing.add(index)
        if self.guard is not None:
            job = job._replace(aside=self.guard.copy_for_update(index))
        self.submit(index, self._apply, job, told)

    def _ship(self, shipment: _Shipment) -> None:
        """Sends an update to the replicas and applies it meanwhile."""
        effect, index = shipment.effect, shipment.effect.index
        shipment.lsn = self._replicas.next_lsn(index) or 0
        self._shipments[index] = shipment
        self._writing.add(index)
        if shipment.lsn:
            self._replicas.update(_replica_update(shipment))
        else:  # The last replica went while the update waited.
            self.replicated(index, 0)
        self._write(_Job(effect, shipment.update, False), self._shipped)

    def replicated(self, index: int, lsn: int) -> None:
        """All that must have update ``lsn`` have it."""
        shipment = self._shipments.get(index)
        if shipment is not None and shipment.lsn == lsn:
            shipment.is_replicated = True
            self._end_if_done(shipment)

    def ship_waiting(self) -> None:
        """There may be room for updates that wait."""
        while self._waiting and self._replicas.has_room():
            shipment = self._waiting.popleft()
            if self._must_wait(shipment.effect.index):
                self._keep_back(_Job(shipment.effect, shipment.update, False), shipment.square)
            else:
                self._ship(shipment)

    def _keep_back(self, job: _Job, square: float) -> None:
        heapq.heappush(self._kept_back_order, job.effect.index)
        self._kept_back[job.effect.index] = job, square

    def resume(self, index: int = -1) -> None:
        """Updates that waited for the snapshot may go on: that of slice ``index``, and of others, the lowest first, as
        many as may."""
        self._resume_one(index)
        if self._is_resuming:  # Further out, where small slices are updated at once.
            return
        self._is_resuming, order = True, self._kept_back_order
        try:
            while order and (order[0] not in self._kept_back or self._resume_one(order[0])):
                heapq.heappop(order)
        finally:
            self._is_resuming = False

    def _resume_one(self, index: int) -> bool:
        if index not in self._kept_back or self._must_wait(index):
            return False
        self._deliver(*self._kept_back.pop(index))
        return True

    def _must_wait(self, index: int) -> bool:
        return self.guard is not None and self.guard.blocks_update(index)

    @property
    def kept_back(self) -> Collection[int]:
        """Slices of which an update waits for a snapshot."""
        return self._kept_back.keys()

    def copy(self, index: int, aside: Aside, last: bool = False) -> None:
        """Copies slice ``index``, which stands still, and which the guard lets nobody update meanwhile. last: after all
        updates."""
        self.submit(index, self._copy, aside, _copied, last)

    def _end_if_done(self, shipment: _Shipment) -> None:
        index = shipment.effect.index
        if shipment.is_applied and shipment.is_replicated and self._shipments.get(index) is shipment:
            del self._shipments[index]
            self._end(shipment.effect, Outcome(shipment.seconds))

    def _end(self, effect: Apply, outcome: Outcome) -> None:
        self._ahead.pop(effect.index, None)
        self._owner.done(effect, outcome)

    # --- kernels ------------------------------------------------------------------------------------------------------

    def submit(
        self, index: int, run: Callable[[Sequence[Any]], Sequence[Any]], work: Any, told: Told, last: bool = False
    ) -> None:
        """Runs a kernel on slice ``index``: in a thread, or here at once where the slices are small. last: after all
        others."""
        self._running[index % self._shard_count] += 1
        if not self._inline:
            self._pool.submit(index + last * _LAST, run, (index, work), partial(self._told_by_pool, told))
            return
        try:
            (result,) = run([(index, work)])
        except Exception as error:  # Whoever waits for the slice must hear of it, not only who pushed last.
            self._end_kernel(index, told, work, None, error)
        else:
            self._end_kernel(index, told, work, result, None)

    def _told_by_pool(self, told: Told, work: tuple[int, Any], result: Any, error: BaseException | None) -> None:
        self._end_kernel(work[0], told, work[1], result, error)

    def _end_kernel(self, index: int, told: Told, work: Any, result: Any, error: BaseException | None) -> None:
        shard = index % self._shard_count
        if index in self._dropped:
            pass
        elif error is not None:
            self._owner.fail(f"the update of slice {index}", error)
        else:
            told(work, result)
        self._running[shard] -= 1
        if not self._running[shard]:
            for waiting in self._settled.pop(shard, ()):
                if not waiting.done():
                    waiting.set_result(None)

    def _combine(self, works: Sequence[tuple[int, _Job]]) -> list[Outcome]:
        """Runs in a kernel thread, or on the loop."""
        outcomes = []
        for index, job in works:
            started = time.perf_counter()
            mean, square, bad = self._dense.combine(index, job.update.parts)
            outcomes.append(Outcome(time.perf_counter() - started, bad, mean, square))
        return outcomes

    def _apply(self, works: Sequence[tuple[int, _Job]]) -> list[Outcome]:
        """Runs in a kernel thread, or on the loop."""
        started = time.perf_counter()
        self._copy([(index, job.aside) for index, job in works if job.aside is not None])
        left_out = self._dense.apply([job.update for _, job in works])
        seconds = (time.perf_counter() - started) / len(works)
        return [Outcome(seconds, bad) for bad in left_out]

    def _copy(self, works: Sequence[tuple[int, Aside]]) -> list[None]:
        """Runs in a kernel thread, or on the loop."""
        for index, aside in works:
            start = 0
            for array in self._dense.export(index):
                aside.memory[start : start + array.size] = array
                start += array.size
        return [None] * len(works)

    def _aggregated(self, job: _Job, outcome: Outcome) -> None:
        self._means[job.effect.index] = (outcome.mean, outcome.square)
        self._owner.used(job.effect, outcome.bad)
        self._owner.done(job.effect, outcome)

    def _combined(self, job: _Job, outcome: Outcome) -> None:
        assert isinstance(job.effect, Apply)
        self._owner.used(job.effect, outcome.bad)
        kept = [outcome.mean] if outcome.mean is not None else []
        update = Update(job.effect.index, job.effect.step, kept, job.effect.lr_scale, job.update.factor)
        self._deliver(_Job(job.effect, update, False), 0.0)

    def _applied(self, job: _Job, outcome: Outcome) -> None:
        """An update that no replica has the slice for is in the arrays."""
        effect = job.effect
        assert isinstance(effect, Apply)
        if job.is_raw:
            self._owner.used(effect, outcome.bad)
        if (lsn := self._replicas.next_lsn(effect.index)) is not None:  # Those being filled count it all the same.
            self._replicas.update(_replica_update(_Shipment(effect, Update(effect.index, effect.step, ()), 0.0, lsn)))
        self._written(effect, job.aside)
        self._end(effect, outcome)

    def _shipped(self, job: _Job, outcome: Outcome) -> None:
        assert isinstance(job.effect, Apply)
        self._written(job.effect, job.aside)
        shipment = self._shipments[job.effect.index]
        shipment.is_applied, shipment.seconds = True, outcome.seconds
        self._end_if_done(shipment)

    # --- rest ---------------------------------------------------------------------------------------------------------

    def _written(self, effect: Apply, aside: Aside | None) -> None:
        self._writing.discard(effect.index)
        self._ahead[effect.index] = effect
        if aside is not None:
            aside.copied()
        for callback in self._at_rest.pop(effect.index, ()):
            callback()

    def is_quiesced(self, index: int, callback: Callable[[], None]) -> None:
        """Calls ``callback`` when no kernel writes slice ``index``: now, or as soon as the one that does has ended."""
        if index in self._writing:
            self._at_rest.setdefault(index, []).append(callback)
        else:
            callback()

    def record(self, index: int, known: SliceRecord) -> SliceRecord:
        """What is in the arrays of a slice at rest, of which the machine knows ``known``."""
        if (effect := self._ahead.get(index)) is not None:
            known.advance(effect.contributors, effect.sequence)
        return known

    def drop(self, indices: Collection[int]) -> None:
        """These slices are no longer updated here; what runs has no effect. Wait for ``settled`` before their memory
        is used for anything else, and then call ``dropped``."""
        gone = set(indices)
        self._dropped |= gone
        self._waiting = deque(shipment for shipment in self._waiting if shipment.effect.index not in gone)
        for index in indices:
            for table in (self._means, self._shipments, self._ahead, self._kept_back):
                table.pop(index, None)
            self._writing.discard(index)
            for callback in self._at_rest.pop(index, ()):
                callback()

    def dropped(self, indices: Collection[int]) -> None:
        """Nothing runs any more of what was dropped."""
        self._dropped.difference_update(indices)

    async def settled(self, shard: int) -> None:
        """Returns when no kernel runs for slices of ``shard``."""
        while self._running[shard]:
            waiting = asyncio.get_running_loop().create_future()
            self._settled.setdefault(shard, []).append(waiting)
            await waiting


def _copied(aside: Aside, _: None) -> None:
    aside.copied()


def _replica_update(shipment: _Shipment) -> ReplicaUpdate[Gradient]:
    effect, update = shipment.effect, shipment.update
    gradient = update.parts[0] if update.parts else None
    return ReplicaUpdate(
        lsn=shipment.lsn,
        index=effect.index,
        version=effect.step,
        contributors=effect.contributors,
        sequence=effect.sequence,
        gradient=gradient,
        lr_scale=effect.lr_scale,
        factor=update.factor if gradient is not None else None,
        square=shipment.square,
        size=gradient.nbytes if gradient is not None else 0,
    )
