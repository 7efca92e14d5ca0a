"""Carries out the updates that a server's shard machines ask for, here and at the replicas.

A slice is updated by one fused kernel, straight from the contributions, several slices at a time. If a slice has
replicas, the kernel also writes out the applied gradient, into memory reserved in advance. This is sent to the replicas
when the kernel has ended, and the update is complete when all required ones have acknowledged it. Replicas run the same
kernel on it, so all copies have the same bytes.

While a snapshot is being cut (``snapshot_cut``), an update's kernel first copies the slice if the snapshot needs it,
and updates that must not proceed yet wait.

Invariants: At most one kernel works on a slice at a time. A pending update has no effect once its slice is dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from psdist.monitoring.spans import SpanKind
from psdist.types import ParametersEntry
from psdist_server.core.replication import Replicated, ReplicaUpdate, RoomFreed
from psdist_server.core.shard import Aggregate, Apply
from psdist_server.kernels.arrays import Applied, Array, Bad, DenseParameters, Gradient, Update
from psdist_server.kernels.optimizers import clip_factor
from psdist_server.kernels.pool import KernelLauncher
from psdist_server.store.gradients import PendingGradients
from psdist_server.store.replicator import Replicator
from psdist_server.store.shard_router import SliceContents
from psdist_server.store.snapshot_cut import CopyTarget, UpdateGate
from psdist_server.store.statistics import SliceSpans


class Outcome(NamedTuple):
    """Result of a kernel: its duration, the contributions left out, when it ended (``perf_counter``), and for a mean
    the array and its sum of squares."""

    seconds: float
    bad: Bad = ()
    ended: float = 0.0
    mean: Array | None = None
    square: float = 0.0


class _Job(NamedTuple):
    """Work item of a kernel.

    is_raw: the update's parts are the contributions, not their mean.
    square: sum of squares of that mean (clipping).
    is_shipped: replicas need the update with its gradient.
    submitted: when it stopped to wait for contributions, while a trace is recorded; 0 otherwise.
    target: memory that the slice is copied to before it is updated.
    """

    effect: Apply | Aggregate
    update: Update
    is_raw: bool = True
    square: float = 0.0
    is_shipped: bool = False
    submitted: float = 0.0
    target: CopyTarget | None = None


class _Shipment(NamedTuple):
    """An update that is in the arrays here, and that replicas must acknowledge. sent: while a trace is recorded."""

    effect: Apply
    lsn: int
    outcome: Outcome
    sent: float


@dataclass(frozen=True, slots=True)
class Aggregated:
    """Effect: the mean of ``Aggregate`` is computed."""

    effect: Aggregate
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Updated:
    """Effect: an update is complete, here and at the replicas."""

    effect: Apply
    outcome: Outcome


class Applier:
    """Carries out ``Apply`` and ``Aggregate`` effects.

    run: carries out the effects ``Aggregated``, ``Updated`` and ``RoomFreed``.
    """

    def __init__(
        self,
        entry: ParametersEntry,
        dense: DenseParameters,
        kernels: KernelLauncher,
        gradients: PendingGradients,
        replicator: Replicator,
        contents: SliceContents,
        run: Callable[[Iterable[object]], None],
        spans: SliceSpans,
    ) -> None:
        self._name = entry.spec.name
        self._spans = spans
        self._dense = dense
        self._kernels = kernels
        self._gradients = gradients
        self._replicator = replicator
        self._contents = contents
        self._run = run
        self._max_grad_norm = entry.spec.optimizer.max_grad_norm
        #: BSP: clipping factor of the newest step, by step.
        self._clip_factors: dict[int, float | None] = {}
        #: Results of Aggregate for Apply: the mean, its sum of squares, and the update without it.
        self._means: dict[int, tuple[Array | None, float, Update]] = {}
        self._shipments: dict[int, _Shipment] = {}
        #: Updates that wait for room in the log of replicated updates.
        self._waiting: deque[_Job] = deque()
        #: Updates that wait for a snapshot.
        self.gate = UpdateGate[_Job](self._deliver)

    def start(self, effect: Apply | Aggregate) -> None:
        """Start carrying out ``effect``."""
        index = effect.index
        update = self._gradients.update(index, effect.step, effect.parts, self._assigned(effect))
        submitted = 0.0
        if self._spans.recorder is not None:
            pending = [self._gradients.by_token[token] for token in effect.parts if index not in self._means]
            arrived = [(one.call.identity.worker_id, one.arrived) for one in pending]
            submitted = self._spans.end_queue(self._name, index, effect.step, arrived)
        if isinstance(effect, Aggregate):
            job = _Job(effect, update, submitted=submitted)
            self._kernels.submit(index, self._combine, job, self._combined)
        elif index in self._means:
            mean, square, update = self._means.pop(index)
            kept, factor = [mean] if mean is not None else [], self._clip_factors[effect.step]
            update = replace(update, parts=kept, factor=factor).scaled(effect.lr_scale)
            self._deliver(_Job(effect, update, False, square, submitted=submitted))
        else:
            if self._max_grad_norm and effect.parts:  # One push, scaled down by its own norm (SSP and ASP).
                norm = self._gradients.by_token[effect.parts[0]].call.gradient.norm
                factor = clip_factor(norm, self._max_grad_norm)
                update = replace(update, factor=factor)
            if effect.lr_scale != 1.0:
                update = update.scaled(effect.lr_scale)
            self._deliver(_Job(effect, update, submitted=submitted))

    def _assigned(self, effect: Apply | Aggregate) -> Array | None:
        """Return the weights that the slice is set to before its update, or None. No kernel is writing the slice."""
        writes = self._gradients.by_token[effect.writer].writes if effect.writer else None
        return None if writes is None else writes.onto(self._dense.export_weights(effect.index))

    def norm_known(self, step: int, norm: float) -> None:
        """BSP: set the global norm of ``step``, by which the aggregated slices are clipped."""
        self._clip_factors = {step: clip_factor(norm, self._max_grad_norm)}

    def _deliver(self, job: _Job, *, is_next: bool = False) -> None:
        """Start updating a slice, unless the update must wait. is_next: replicas may be sent one more update, and it is
        this one."""
        index, update, copies = job.effect.index, job.update, self.gate.copies
        if copies is not None and self.gate.blocks(index):
            self.gate.defer(index, job)
            return
        if self._replicator.needs_gradient(index):
            if not is_next and (self._waiting or not self._replicator.has_room()):
                self._waiting.append(job)
                return
            mean = self._replicator.memory.reserve(index) if update.parts else None
            job = job._replace(update=replace(update, mean=mean), is_shipped=True)
        self._contents.write_started(index)
        if copies is not None and (target := copies.copy_for_update(index)) is not None:
            job = job._replace(update=replace(job.update, copy=target.memory), target=target)
        self._kernels.submit(index, self._dense.carry_out, job, self._applied)

    def replicated(self, replicated: Replicated) -> None:
        """Complete an update that all required replicas have."""
        shipment = self._shipments.get(replicated.index)
        if shipment is not None and shipment.lsn == replicated.lsn:
            del self._shipments[replicated.index]
            self._spans.end_replication(self._name, replicated.index, shipment.effect.step, shipment.sent)
            self._run([Updated(shipment.effect, shipment.outcome)])

    def ship_waiting(self, _: RoomFreed) -> None:
        """Start waiting updates while there is room."""
        while self._waiting and self._replicator.has_room():
            self._deliver(self._waiting.popleft(), is_next=True)

    def _combine(self, works: Sequence[tuple[int, _Job]]) -> list[Outcome]:
        """Compute means. Runs in a kernel thread, or on the loop."""
        outcomes = []
        for index, job in works:
            started = time.perf_counter()
            update = job.update
            mean, square, bad = self._dense.combine(index, update.parts, update.is_encoded, update.weights)
            ended = time.perf_counter()
            outcomes.append(Outcome(ended - started, bad, ended, mean, square))
        return outcomes

    def _combined(self, job: _Job, outcome: Outcome) -> None:
        effect = job.effect
        assert isinstance(effect, Aggregate)
        self._end_kernel(SpanKind.COMBINE, job, outcome)
        self._gradients.used(effect.index, effect.parts, outcome.bad)
        rest = replace(job.update, parts=(), is_encoded=False, weights=())
        self._means[effect.index] = (outcome.mean, outcome.square, rest)
        self._run([Aggregated(effect, outcome)])

    def _applied(self, job: _Job, applied: Applied) -> None:
        """Handle an update that is in the arrays here."""
        effect, outcome = job.effect, Outcome(*applied)
        assert isinstance(effect, Apply)
        index = effect.index
        if self._spans.recorder is not None:
            self._end_kernel(SpanKind.APPLY, job, outcome)
        if job.is_raw:
            self._gradients.used(index, effect.parts, outcome.bad)
        effects: list[object] = []
        # Sent before the slice counts as quiescent, so that the update precedes any copy of it. Replicas that are being
        # filled count it, too.
        if (lsn := self._replicator.take_lsn(index)) is not None:
            effects += self._replicator.update(_replica_update(job, lsn))
        if job.is_shipped and lsn is not None:
            self._shipments[index] = _Shipment(effect, lsn, outcome, self._spans.now())
        else:
            effects.append(Updated(effect, outcome))
        if job.is_shipped and lsn is None:  # The last replica left meanwhile.
            self._replicator.memory.cancel([index])
        self._contents.write_ended(effect)
        if job.target is not None:
            job.target.copied()
        if self._waiting:
            effects.append(RoomFreed())  # This update may have left room without an acknowledgement to come.
        self._run(effects)

    def _end_kernel(self, kind: SpanKind, job: _Job, outcome: Outcome) -> None:
        effect, (seconds, ended) = job.effect, (outcome.seconds, outcome.ended)
        self._spans.end_kernel(kind, self._name, effect.index, effect.step, job.submitted, seconds, ended)

    def drop(self, indices: Collection[int]) -> None:
        """Stop updating these slices here; running kernels have no effect. See ``KernelLauncher.discard``."""
        self._gradients.discard_slices(indices)
        self._kernels.discard(indices)
        self._replicator.memory.cancel(indices)
        self._waiting = deque(job for job in self._waiting if job.effect.index not in indices)
        for index in indices:
            self._means.pop(index, None)
            self._shipments.pop(index, None)
            self.gate.discard(index)
        self._contents.drop(indices)


def _replica_update(job: _Job, lsn: int) -> ReplicaUpdate[Gradient]:
    effect, gradient, assigned = job.effect, job.update.mean, job.update.assigned
    assert isinstance(effect, Apply)
    return ReplicaUpdate(
        lsn=lsn,
        index=effect.index,
        version=effect.step,
        contributors=effect.contributors,
        sequence=effect.sequence,
        gradient=gradient,
        lr_scale=job.update.lr_scale,
        settings=job.update.settings,
        square=job.square,
        assigned=assigned,
        size=sum(array.nbytes for array in (gradient, assigned) if array is not None),
        absent=job.update.absent if gradient is not None else (),
    )
