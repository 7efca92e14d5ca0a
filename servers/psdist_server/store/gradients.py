"""Gradients of a store: those that wait for their update, and the global norm of a step's.

Pushed gradients are checked on arrival, and stored by token. Contributions in gRPC messages and encoded contributions
are checked for NaN and Inf on arrival. Others are checked by the kernel that reads them, since those in shared memory
could change in between. Encoded contributions are stored encoded.

For the global gradient norm of a BSP step every server adds the squares of all slices in slice order, in float64. So
all servers compute the same norm, whatever their number. The squares of a step are stored until no server can ask for
them any more: a slice of step t + 2 can be aggregated only when every server knew the norm of step t.

A server records three kinds of squares: those of its own slices when they are aggregated; those of its backup shards as
they arrive with the updates, for the case that it is promoted; and those that other servers send.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np

from psdist.compression import segments
from psdist.consistency import BSP, check_weight
from psdist.errors import InvalidArgumentError, MalformedPayloadError, NonFiniteGradientError, PsdistError
from psdist.hyperparameters import Settings
from psdist.types import ITEM_BYTES, WORDS, ParametersMember, ParametersSpec, Slicing
from psdist.v1 import server_pb2
from psdist.wire.limits import TENSORS_MAX
from psdist_server.core.contributions import (
    ContributionComparison,
    Decision,
    GradientEstimates,
    LateRefusals,
    SettingsCheck,
    Stated,
)
from psdist_server.core.lags import RangeEdges, Ranges, common, within
from psdist_server.core.shard import Forget
from psdist_server.kernels import means
from psdist_server.kernels.arrays import Array, Bad, Gradient, Update, WrittenSlice, all_finite, gradient_of
from psdist_server.kernels.means import is_encoded
from psdist_server.store.rpc_call import Call, PushedGradient
from psdist_server.store.statistics import Counters


@dataclass(slots=True)
class PendingGradient:
    """A contribution that waits for its update.

    is_shared: it is in memory of the worker, and this server holds nothing for it.
    member: its worker in the map by which it was accepted.
    writes: values that its worker's script wrote to weights of the slice.
    arrived: time of its arrival, while a trace is recorded; 0 otherwise.
    """

    index: int
    call: Call
    values: Gradient
    is_shared: bool
    member: ParametersMember | None = None
    writes: WrittenSlice | None = None
    arrived: float = 0.0


class PendingGradients:
    """The unused contributions of one parameter set.

    prepare_sums: called when the first push starts that is encoded or has a weight.
    """

    def __init__(
        self,
        spec: ParametersSpec,
        slicing: Slicing,
        counters: Counters,
        prepare_sums: Callable[[], None] = lambda: None,
    ) -> None:
        self._prepare_sums = prepare_sums
        #: A push was encoded or had a weight, so contributions may have to be summed before the update.
        self._has_sums = False
        #: A push stated a learning rate or hyperparameters.
        self._has_settings = False
        self._settings_check = SettingsCheck(spec.optimizer)
        #: Latest header that passed the checks, as received and as checked. Most pushes repeat it.
        self._received = self._checked = PushedGradient()
        self._absent_edges = RangeEdges(spec.name, slicing.total, WORDS[spec.dtype])
        self._spec = spec
        self._slicing = slicing
        self._counters = counters
        #: SSP and ASP clip each push by its own norm, which the worker sends.
        self._needs_norm = spec.optimizer.max_grad_norm > 0 and not isinstance(spec.consistency, BSP)
        self.by_token: dict[int, PendingGradient] = {}
        self.estimates = GradientEstimates(slicing)
        self.comparison = ContributionComparison(spec)
        self._late_refusals = LateRefusals()
        #: Values that scripts wrote, by slice and digest. Equal ones of several workers are stored once.
        self._writes: WeakValueDictionary[tuple[int, bytes], WrittenSlice] = WeakValueDictionary()

    def begin_push(self, call: Call) -> None:
        """Check the header of a push.

        Raises InvalidArgumentError if a required global norm is missing, if the weight is out of range or nothing is
        averaged, if the factor on the learning rate or a hyperparameter is out of range, for written weights that the
        optimizer cannot take, and for elements without a gradient that are not those of tensors.
        """
        needed, norm = self._needs_norm and not call.abstain, call.gradient.norm
        if needed and not (math.isfinite(norm) and norm >= 0):
            raise InvalidArgumentError(f"grad_norm={norm} must be finite: the optimizer has max_grad_norm")
        if call.gradient != self._received:
            received = call.gradient
            self._received, self._checked = received, self._check(received)
        call.gradient = self._checked
        if self._spec.dtype != "float32" and (call.is_encoded or call.dtype != "float32"):
            raise InvalidArgumentError(
                f"{self._spec.name!r} is in {self._spec.dtype}: send gradients as DTYPE_FLOAT32, without segments"
            )
        if (call.is_encoded or call.gradient.weight != 1.0) and not self._has_sums:
            self._has_sums = True
            self._prepare_sums()

    def _check(self, gradient: PushedGradient) -> PushedGradient:
        """Return a header with checked settings. Raises as ``begin_push``."""
        if gradient.weight != 1.0:
            check_weight(gradient.weight, self._spec.consistency)
        if not gradient.weight:
            raise InvalidArgumentError("weight=0 counts for nothing: abstain instead, or send a weight above 0")
        if gradient.written:
            self._spec.check_assignable()
        factor, settings = gradient.lr_factor, gradient.settings
        if factor is not None or settings is not None:
            self._has_settings = True
            checked = self._settings_check.check(settings or (), factor)
            if settings is not None:
                gradient = replace(gradient, settings=checked)
        if gradient.absent:
            self._absent_edges.add(gradient.absent, TENSORS_MAX)
        return gradient

    def receive(self, call: Call, index: int, payload: memoryview) -> tuple[Gradient, bool]:
        """Return a payload's contribution, and True if it counts. It does not count if the push abstains, or if it is
        not finite and the policy is to skip.

        Raises InvalidArgumentError for a size that the slice cannot have, NonFiniteGradientError if the policy is to
        reject, MalformedPayloadError if it is encoded and cannot be decoded, and StaleEstimateError for a difference
        whose base is not stored here.
        """
        values = self._decode(call, index, payload)
        if call.abstain or not self._is_finite(call, index, values):
            return values, False
        if (difference := call.gradient.difference) is None:
            return values, True
        gradient = self.estimates.add(call.identity, difference, index, values.view(np.uint8))
        if not means.all_finite(gradient):
            self._count_non_finite(call, index)
            return gradient, False
        self.estimates.keep(call.identity, difference, index, gradient)
        return gradient, True

    def receive_writes(self, call: Call, index: int, message: server_pb2.Written) -> WrittenSlice:
        """Return the values that a script wrote to weights of a slice. Raises InvalidArgumentError as
        ``WrittenSlice.read``, and for values of a push without a digest."""
        if not call.gradient.written:
            raise InvalidArgumentError(f"slice {index} has written weights: send their digest in the push's header")
        key = (index, call.gradient.written)
        writes = self._writes.get(key)
        if writes is None:
            writes = self._writes[key] = WrittenSlice.read(message, index, self._slicing, self._spec.dtype)
        return writes

    def _decode(self, call: Call, index: int, payload: memoryview) -> Gradient:
        """Return a payload's elements, or its bytes if it is encoded, in place. Raises InvalidArgumentError if the size
        does not fit the slice."""
        if call.is_encoded and not call.abstain:
            self.check_size(index, len(payload))
            return np.frombuffer(payload, np.uint8)
        expected = 0 if call.abstain else self._slicing.size(index) * ITEM_BYTES[call.dtype]
        if len(payload) != expected:
            raise InvalidArgumentError(
                f"slice {index} has {expected} bytes in {call.dtype}, not {len(payload)}", slice=index
            )
        return gradient_of(payload, call.dtype)

    def check_size(self, index: int, size: int) -> None:
        """Raise MalformedPayloadError if no encoding of slice ``index`` has ``size`` bytes."""
        elements = self._slicing.size(index)
        most = segments.payload_limit(elements)
        if not 0 < size <= most:
            raise MalformedPayloadError(
                f"slice {index}, of {elements} elements, has 1 to {most} bytes as segments, not {size}", slice=index
            )

    def _is_finite(self, call: Call, index: int, values: Gradient) -> bool:
        """Return True if all elements are finite. Raises NonFiniteGradientError if they are not and the policy is to
        reject, and MalformedPayloadError if they are encoded and cannot be decoded."""
        if self._check_encoded(call, index, values) if call.is_encoded else all_finite(values, self._spec.dtype):
            return True
        self._count_non_finite(call, index)
        return False

    def _count_non_finite(self, call: Call, index: int) -> None:
        """Count a contribution that is not finite. Raises NonFiniteGradientError if the policy is to reject it."""
        self._counters.workers[call.identity.worker_id].non_finite += 1
        if self._spec.non_finite != "skip":
            raise _non_finite(self._spec, self._slicing, index)

    def _check_encoded(self, call: Call, index: int, values: Gradient) -> bool:
        """Do the same as ``_is_finite`` for an encoded payload."""
        elements, is_finite = self._slicing.size(index), True
        try:
            segments.check(values.view(np.uint8), elements)
        except NonFiniteGradientError:
            is_finite = False
        except MalformedPayloadError as error:
            raise MalformedPayloadError(
                f"slice {index}: {error.message}", **(error.details | {"slice": index})
            ) from None
        self._counters.workers[call.identity.worker_id].saved_bytes += elements * ITEM_BYTES["float32"] - values.nbytes
        return is_finite

    def add(self, token: int, gradient: PendingGradient) -> PsdistError | None:
        """Store a contribution until it is used or discarded. Returns its error if it repeats one of a push that was
        refused."""
        if not gradient.is_shared:
            self._counters.bytes_held += gradient.values.nbytes
        self.by_token[token] = gradient
        return self._error_of_repeat(gradient) if self._late_refusals.by_producer else None

    def _error_of_repeat(self, gradient: PendingGradient) -> PsdistError | None:
        call, index, member, refusals = gradient.call, gradient.index, gradient.member, self._late_refusals
        if member is None or call.abstain:
            return None
        if error := refusals.settings_error(member.producer, call.step, index, _stated(gradient)):
            return error
        was_refused = refusals.was_not_finite(member.producer, call.step, index)
        if was_refused and not all_finite(gradient.values, self._spec.dtype):
            return _non_finite(self._spec, self._slicing, index)
        return None

    def update(self, index: int, step: int, tokens: Sequence[int], assigned: Array | None) -> Update:
        """Return the update of a slice by these contributions, which are in rank order. assigned: weights that the
        slice is set to first; None if it keeps its own."""
        pending = [self.by_token[token] for token in tokens]
        values = [one.values for one in pending]
        some_encoded = False
        weights: tuple[float, ...] = ()
        if self._has_sums:
            some_encoded = any(map(is_encoded, values))
            weights = tuple([one.call.gradient.weight for one in pending])
            if all(weight == 1.0 for weight in weights):
                weights = ()
        if len(pending) > 1 and not some_encoded and self.comparison.needs(step):
            self.comparison.compare(step, {one.call.identity.worker_id: one.values for one in pending})
        lr_factor = 1.0
        settings: Settings = ()
        if self._has_settings:
            if (alike := _stated_by_all(pending)) is None:
                decision = Decision(self._spec.optimizer, map(_stated, pending))
                lr_factor, settings = decision.lr_factor, decision.settings
            else:
                lr_factor = 1.0 if alike.lr_factor is None else alike.lr_factor
                settings = alike.settings or ()
        absent: Ranges = ()
        if self._absent_edges.edges:
            start, stop = self._slicing.bounds(index)
            absent = common(within(one.call.gradient.absent, start, stop) for one in pending)
        return Update(
            index, step, values, lr_factor, is_encoded=some_encoded, weights=weights, assigned=assigned,
            settings=settings, absent=absent,
        )  # fmt: skip

    def used(self, index: int, tokens: tuple[int, ...], left_out: Bad) -> None:
        """Discard contributions that an update of slice ``index`` has read.

        Those at positions ``left_out`` held NaN or Inf and were skipped; their calls fail if the policy is to reject.
        Calls whose learning rate or hyperparameters differ from the update's fail, too.
        """
        if self._has_settings:
            self._compare_settings(index, tokens)
        for position in left_out:
            gradient = self.by_token[tokens[position]]
            call = gradient.call
            self._counters.workers[call.identity.worker_id].non_finite += 1
            if self._spec.non_finite == "reject":
                call.fail(_non_finite(self._spec, self._slicing, index))
                if gradient.member is not None:
                    self._late_refusals.add_not_finite(gradient.member.producer, call.step, index)
        for token in tokens:
            self.discard(token)

    def _compare_settings(self, index: int, tokens: tuple[int, ...]) -> None:
        """Fail the calls whose settings differ from those of the update."""
        pending = [self.by_token[token] for token in tokens]
        if _stated_by_all(pending) is not None:
            return
        decision = Decision(self._spec.optimizer, map(_stated, pending))
        for gradient in pending:
            call, stated = gradient.call, _stated(gradient)
            mine, used, decider = decision.difference(stated)
            if not mine:
                continue
            error = InvalidArgumentError(
                f"{mine} in step {call.step} of {self._spec.name!r}, which was made with {used}, set by {decider}: a "
                "step has one learning rate and one set of hyperparameters, so all workers must set the same, "
                "including those that restarted or joined later"
            )
            call.fail(error)
            if gradient.member is not None:
                self._late_refusals.add_settings(gradient.member.producer, call.step, index, stated, error)

    def refused(self, token: int) -> None:
        """Discard a contribution that was refused, so that no later one can be a difference to it."""
        gradient = self.by_token.get(token)
        if gradient is not None and gradient.call.gradient.difference is not None:
            self.estimates.discard(gradient.call.identity.worker_id, gradient.index)
        self.discard(token)

    def forget(self, forget: Forget) -> None:
        """Discard a contribution that will never be used."""
        self.discard(forget.token)

    def discard(self, token: int) -> None:
        """Discard a contribution."""
        gradient = self.by_token.pop(token, None)
        if gradient is not None and not gradient.is_shared:
            self._counters.bytes_held -= gradient.values.nbytes
            gradient.call.release_payload()

    def discard_slices(self, indices: Collection[int]) -> None:
        """Discard all contributions to these slices, and their estimates."""
        self.estimates.discard_slices(indices)
        for token in [token for token, gradient in self.by_token.items() if gradient.index in indices]:
            self.discard(token)


def _stated(gradient: PendingGradient) -> Stated:
    pushed, first_step = gradient.call.gradient, gradient.member.first_step if gradient.member is not None else 0
    return Stated(gradient.call.identity.worker_id, first_step, pushed.lr_factor, pushed.settings)


def _stated_by_all(pending: Sequence[PendingGradient]) -> PushedGradient | None:
    """Return the header of a contribution if all state the same learning rate and hyperparameters, as is usual."""
    if not pending:
        return None
    first = pending[0].call.gradient
    for one in pending[1:]:
        other = one.call.gradient
        if (other.lr_factor, other.settings) != (first.lr_factor, first.settings):
            return None
    return first


def _non_finite(spec: ParametersSpec, slicing: Slicing, index: int) -> NonFiniteGradientError:
    start, stop = slicing.bounds(index)
    return NonFiniteGradientError(
        f"the gradient of {spec.name!r} holds NaN or Inf in elements {start} to {stop - 1} (slice {index}); find out "
        "why, or set non_finite='skip'"
    )


# --- the global gradient norm -----------------------------------------------------------------------------------------


_STEPS_KEPT: Final = 2


class NormBoard:
    """Known squared norms of slices, by step."""

    def __init__(self) -> None:
        self._squares: dict[int, dict[int, float]] = {}
        self._changed = asyncio.Event()

    def record(self, step: int, index: int, square: float) -> None:
        """Record the square of one slice."""
        self.merge(step, {index: square})

    def merge(self, step: int, squares: Mapping[int, float]) -> None:
        """Record the squares of several slices."""
        if step not in self._squares:
            for old in [key for key in self._squares if key < step - _STEPS_KEPT]:
                del self._squares[old]
        self._squares.setdefault(step, {}).update(squares)

    def known(self, step: int) -> Mapping[int, float]:
        """Return the known squares of ``step``, by slice."""
        return self._squares.get(step, {})

    def wake(self) -> None:
        """Make waiters check again, after a step became complete here or a new map arrived."""
        self._changed.set()
        self._changed = asyncio.Event()

    def wait(self) -> Coroutine[Any, Any, bool]:
        """Wait for the next ``wake`` from now on, even if the result is awaited later."""
        return self._changed.wait()


class Aggregation:
    """Tracks the slices served here that have yet to be aggregated, by step.

    version: returns the version of a slice that is served here.
    complete: called with a step when all slices served here are aggregated.
    """

    def __init__(self, board: NormBoard, version: Callable[[int], int], complete: Callable[[int], None]) -> None:
        self._board = board
        self._version = version
        self._complete = complete
        self._indices: tuple[int, ...] = ()
        self._missing: dict[int, set[int]] = {}

    def serve(self, indices: tuple[int, ...]) -> None:
        """Set the slices served here."""
        self._indices = indices
        self._missing.clear()

    def is_complete(self, step: int) -> bool:
        """Return True if every slice is aggregated for ``step``."""
        return not self._find_missing(step)

    def aggregated(self, step: int, index: int) -> None:
        """Record that slice ``index``, whose square is recorded, is aggregated for ``step``."""
        if step not in self._missing:
            self._missing = {old: left for old, left in self._missing.items() if old >= step - 1}
            self._missing[step] = self._find_missing(step)
        self._missing[step].discard(index)
        if not self._missing[step]:
            self._board.wake()
            self._complete(step)

    def _find_missing(self, step: int) -> set[int]:
        known = self._board.known(step)
        return {index for index in self._indices if index not in known and self._version(index) <= step}


def global_norm(squares: Mapping[int, float]) -> float:
    """Return the L2 norm from the squares of all slices, added in slice order."""
    total = 0.0
    for index in sorted(squares):
        total += squares[index]
    return math.sqrt(total)
