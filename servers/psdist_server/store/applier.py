"""Carries out the updates that a server's shard machines ask for, here and at the replicas.

A slice is updated by one fused kernel, straight from the contributions, several slices at a time. If a slice has
replicas, the kernel also writes out the applied gradient, into memory reserved in advance. This is sent to the replicas
when the kernel has ended, and the update is complete when all required ones have acknowledged it. Replicas run the same
kernel on it, so all copies have the same bytes.

While a snapshot is being cut (``copy_on_write``), an update's kernel first copies the slice if the snapshot needs it,
and updates that must not proceed yet wait.

Invariants: At most one kernel works on a slice at a time. A pending update has no effect once its slice is dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from psdist.tracing.spans import SpanKind
from psdist.types import ParametersEntry
from psdist_server.core.events import Aggregate, Apply
from psdist_server.core.replication import ReplicaUpdate
from psdist_server.kernels.arrays import Applied, Array, Bad, DenseParameters, Gradient, Update
from psdist_server.kernels.optimizers import clip_factor
from psdist_server.kernels.pool import KernelLauncher
from psdist_server.store.copy_on_write import CopyTarget, UpdateGate
from psdist_server.store.pending_gradients import PendingGradients
from psdist_server.store.replicator import Replicator
from psdist_server.store.slice_contents import SliceContents
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


@dataclass(slots=True)
class _Shipment:
    """An update that is in the arrays here, and that replicas must acknowledge."""

    effect: Apply
    lsn: int
    outcome: Outcome
    sent: float = 0.0
    is_replicated: bool = False
    may_end: bool = False


class Applier:
    """Carries out ``Apply`` and ``Aggregate`` effects.

    done: called with each effect that is complete, here and at the replicas, and its outcome.
    """

    def __init__(
        self,
        entry: ParametersEntry,
        dense: DenseParameters,
        kernels: KernelLauncher,
        gradients: PendingGradients,
        replicator: Replicator,
        contents: SliceContents,
        done: Callable[[Apply | Aggregate, Outcome], None],
        spans: SliceSpans,
    ) -> None:
        self._name = entry.spec.name
        self._spans = spans
        self._dense = dense
        self._kernels = kernels
        self._gradients = gradients
        self._replicator = replicator
        self._contents = contents
        self._done = done
        self._max_grad_norm = entry.spec.optimizer.max_grad_norm
        #: BSP: clipping factor of the newest step, by step.
        self._clip_factors: dict[int, float | None] = {}
        #: Results of Aggregate for Apply: the mean, its sum of squares, and the update without it.
        self._means: dict[int, tuple[Array | None, float, Update]] = {}
        self._shipments: dict[int, _Shipment] = {}
        #: Updates that wait for room in the log of replicated updates.
        self._waiting: deque[_Job] = deque()
        self._is_shipping = False
        #: Updates that wait for a snapshot.
        self.gate = UpdateGate[_Job](self._deliver)

    def start(self, effect: Apply | Aggregate) -> None:
        """Start carrying out ``effect``."""
        index = effect.index
        update = self._gradients.update(index, effect.step, effect.parts, self._assigned(effect))
        submitted = self._end_queue(effect)
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
            self._deliver(_Job(effect, update.scaled(effect.lr_scale), submitted=submitted))

    def _end_queue(self, effect: Apply | Aggregate) -> float:
        """Record how long contributions have waited, while a trace is recorded. Returns the time then, otherwise 0."""
        if self._spans.recorder is None:
            return 0.0
        pending = [self._gradients.by_token[token] for token in effect.parts if effect.index not in self._means]
        arrived = [(one.call.identity.worker_id, one.arrived) for one in pending]
        return self._spans.end_queue(self._name, effect.index, effect.step, arrived)

    def _assigned(self, effect: Apply | Aggregate) -> Array | None:
        """Return the weights that the slice is set to before its update, or None. No kernel is writing the slice."""
        writes = self._gradients.by_token[effect.writer].writes if effect.writer else None
        return None if writes is None else writes.onto(self._dense.export_weights(effect.index))

    def norm_known(self, step: int, norm: float) -> None:
        """BSP: set the global norm of ``step``, by which the aggregated slices are clipped."""
        self._clip_factors = {step: clip_factor(norm, self._max_grad_norm)}

    def _deliver(self, job: _Job) -> None:
        index = job.effect.index
        if self.gate.blocks(index):
            self.gate.defer(index, job)
        elif not self._replicator.needs_gradient(index):
            self._write(job)
        elif self._waiting or not self._replicator.has_room():
            self._waiting.append(job)
        else:
            self._ship(job)

    def _write(self, job: _Job) -> None:
        """Start updating a slice, with a copy before if a snapshot needs one."""
        index = job.effect.index
        self._contents.write_started(index)
        if (target := self.gate.copy_for_update(index)) is not None:
            job = job._replace(update=replace(job.update, copy=target.memory), target=target)
        self._kernels.submit(index, self._dense.carry_out, job, self._applied)

    def _ship(self, job: _Job) -> None:
        """Start an update that is sent to the replicas."""
        given = job.update
        mean = self._replicator.memory.reserve(given.index) if given.parts else None
        update = replace(given, mean=mean)
        self._write(job._replace(update=update, is_shipped=True))

    def replicated(self, index: int, lsn: int) -> None:
        """Record that all required replicas have update ``lsn`` of slice ``index``."""
        shipment = self._shipments.get(index)
        if shipment is not None and shipment.lsn == lsn:
            shipment.is_replicated = True
            self._spans.end_replication(self._name, index, shipment.effect.step, shipment.sent)
            self._end_if_done(shipment)

    def ship_waiting(self) -> None:
        """Start waiting updates while there is room."""
        if self._is_shipping:  # A caller up the stack does this: small slices are updated synchronously.
            return
        self._is_shipping = True
        try:
            while self._waiting and self._replicator.has_room():
                job = self._waiting.popleft()
                if self.gate.blocks(job.effect.index):
                    self.gate.defer(job.effect.index, job)
                else:
                    self._ship(job)
        finally:
            self._is_shipping = False

    def _end_if_done(self, shipment: _Shipment) -> None:
        index = shipment.effect.index
        if shipment.may_end and shipment.is_replicated and self._shipments.get(index) is shipment:
            del self._shipments[index]
            self._end(shipment.effect, shipment.outcome)

    def _end(self, effect: Apply, outcome: Outcome) -> None:
        self._contents.update_counted(effect.index)
        self._done(effect, outcome)

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
        self._end_kernel(SpanKind.COMBINE, job, outcome)
        self._gradients.used(effect.index, effect.parts, outcome.bad)
        rest = replace(job.update, parts=(), is_encoded=False, weights=())
        self._means[effect.index] = (outcome.mean, outcome.square, rest)
        self._done(effect, outcome)

    def _applied(self, job: _Job, applied: Applied) -> None:
        """Handle an update that is in the arrays here."""
        effect, outcome = job.effect, Outcome(*applied)
        assert isinstance(effect, Apply)
        self._end_kernel(SpanKind.APPLY, job, outcome)
        if job.is_raw:
            self._gradients.used(effect.index, effect.parts, outcome.bad)
        if job.is_shipped:
            self._send(job, outcome)
            return
        if (lsn := self._replicator.take_lsn(effect.index)) is not None:  # Replicas being filled count it, too.
            self._replicator.update(_replica_update(job, lsn))
        self._written(effect, job.target)
        self._end(effect, outcome)

    def _end_kernel(self, kind: SpanKind, job: _Job, outcome: Outcome) -> None:
        if self._spans.recorder is not None:
            effect, (seconds, ended) = job.effect, (outcome.seconds, outcome.ended)
            self._spans.end_kernel(kind, self._name, effect.index, effect.step, job.submitted, seconds, ended)

    def _send(self, job: _Job, outcome: Outcome) -> None:
        """Send an update to the replicas. This happens before the slice counts as quiescent, so the update precedes any
        copy of it."""
        effect, index = job.effect, job.effect.index
        assert isinstance(effect, Apply)
        lsn = self._replicator.take_lsn(index)
        shipment = self._shipments[index] = _Shipment(effect, lsn or 0, outcome, self._spans.now())
        if lsn is not None:
            self._replicator.update(_replica_update(job, lsn))
        else:  # The last replica left meanwhile.
            self._replicator.memory.cancel([index])
            shipment.is_replicated = True
        self._written(effect, job.target)
        shipment.may_end = True
        self._end_if_done(shipment)
        self.ship_waiting()  # This update may have left room without an acknowledgement to come.

    def _written(self, effect: Apply, target: CopyTarget | None) -> None:
        self._contents.write_ended(effect)
        if target is not None:
            target.copied()
        self._contents.notify(effect.index)

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
