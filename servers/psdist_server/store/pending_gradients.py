"""Gradients that were pushed and wait for their update: checked when they arrive, and kept by token until then.

Contributions in gRPC messages, and those that are encoded, are checked for NaN and Inf when they arrive. Others are
checked by the kernel that reads them: those in shared memory could change in between. What is encoded is kept as it
came until then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from psdist.compression import segments
from psdist.consistency import BSP, check_weight
from psdist.errors import InvalidArgumentError, MalformedPayloadError, NonFiniteGradientError
from psdist.types import ITEM_BYTES, ParametersSpec, Slicing
from psdist_server.core.gradient_estimates import GradientEstimates
from psdist_server.kernels import kernels
from psdist_server.kernels.arrays import Bad, Gradient, gradient_of
from psdist_server.kernels.encoded import is_encoded
from psdist_server.store.rpc_call import Call
from psdist_server.store.statistics import Counters

#: Factors of workers that compute them by other libraries differ in the last digits.
_LR_FACTOR_TOLERANCE: Final = 1e-6


@dataclass(slots=True)
class PendingGradient:
    """A contribution that waits for its update. is_shared: it lies in memory of the worker, and this server holds
    nothing for it. first_step: BSP: since when its worker takes part."""

    index: int
    call: Call
    values: Gradient
    is_shared: bool
    first_step: int = 0


class PendingGradients:
    """The contributions of one parameter set that are not used yet.

    prepare_sums: called when the first push begins that is encoded or has a weight.
    """

    def __init__(
        self,
        spec: ParametersSpec,
        slicing: Slicing,
        counters: Counters,
        prepare_sums: Callable[[], None] = lambda: None,
    ) -> None:
        self._prepare_sums = prepare_sums
        #: There was a push that was encoded or had a weight, so that contributions are summed up before the update.
        self._has_sums = False
        #: There was a push with a factor on the learning rate.
        self._has_lr_factors = False
        self._spec = spec
        self._slicing = slicing
        self._counters = counters
        #: SSP and ASP clip each push by its own norm, which the worker sends.
        self._needs_norm = spec.optimizer.max_grad_norm > 0 and not isinstance(spec.consistency, BSP)
        self._by_token: dict[int, PendingGradient] = {}
        self.estimates = GradientEstimates(slicing)

    def begin_push(self, call: Call) -> None:
        """A push whose header was read. Raises InvalidArgumentError where it must bring its gradient's global norm and
        does not, for a weight that is out of range, or where nothing is averaged, and for a factor on the learning
        rate that is out of range."""
        needed, norm = self._needs_norm and not call.abstain, call.gradient.norm
        if needed and not (math.isfinite(norm) and norm >= 0):
            raise InvalidArgumentError(f"grad_norm={norm} must be finite: the optimizer has max_grad_norm")
        if call.gradient.weight != 1.0:
            check_weight(call.gradient.weight, self._spec.consistency)
        if not call.gradient.weight:
            raise InvalidArgumentError("weight=0 counts for nothing: abstain instead, or send a weight above 0")
        if call.gradient.lr_factor is not None:
            self._spec.optimizer.check_lr_factor(call.gradient.lr_factor)
            self._has_lr_factors = True
        if (call.is_encoded or call.gradient.weight != 1.0) and not self._has_sums:
            self._has_sums = True
            self._prepare_sums()

    def receive(self, call: Call, index: int, payload: memoryview) -> tuple[Gradient, bool]:
        """What a payload contributes, and whether it counts. It does not where the push abstains, or where it is not
        finite and the policy is to skip that.

        Raises InvalidArgumentError for a size that the slice cannot have, NonFiniteGradientError where the policy is to
        reject, MalformedPayloadError where it is encoded and cannot be decoded, StaleEstimateError for a difference
        to what is not kept here.
        """
        values = self._decode(call, index, payload)
        if call.abstain or not self._is_finite(call, index, values):
            return values, False
        if (difference := call.gradient.difference) is None:
            return values, True
        gradient = self.estimates.add(call.identity, difference, index, values.view(np.uint8))
        if not kernels.all_finite(gradient):
            self._count_non_finite(call, index)
            return gradient, False
        self.estimates.keep(call.identity, difference, index, gradient)
        return gradient, True

    def _decode(self, call: Call, index: int, payload: memoryview) -> Gradient:
        """A payload's elements, or its bytes where it is encoded, in place. Raises InvalidArgumentError where they are
        not as many as the slice's, or more than it can have."""
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
        """Raises MalformedPayloadError where no encoding of slice ``index`` has ``size`` bytes."""
        elements = self._slicing.size(index)
        most = segments.payload_limit(elements)
        if not 0 < size <= most:
            raise MalformedPayloadError(
                f"slice {index}, of {elements} elements, has 1 to {most} bytes as segments, not {size}", slice=index
            )

    def _is_finite(self, call: Call, index: int, values: Gradient) -> bool:
        """Whether all elements are finite. Raises NonFiniteGradientError where they are not and the policy is to
        reject, MalformedPayloadError where they are encoded and cannot be decoded."""
        if self._check_encoded(call, index, values) if call.is_encoded else kernels.all_finite(values):
            return True
        self._count_non_finite(call, index)
        return False

    def _count_non_finite(self, call: Call, index: int) -> None:
        """A contribution is not finite. Raises NonFiniteGradientError where the policy is to reject it."""
        self._counters.of(call.identity.worker_id).non_finite += 1
        if self._spec.non_finite != "skip":
            raise self._non_finite(index)

    def _check_encoded(self, call: Call, index: int, values: Gradient) -> bool:
        """``_is_finite`` of an encoded payload."""
        elements, is_finite = self._slicing.size(index), True
        try:
            segments.check(values.view(np.uint8), elements)
        except NonFiniteGradientError:
            is_finite = False
        except MalformedPayloadError as error:
            raise MalformedPayloadError(
                f"slice {index}: {error.message}", **(error.details | {"slice": index})
            ) from None
        self._counters.of(call.identity.worker_id).saved_bytes += elements * ITEM_BYTES["float32"] - values.nbytes
        return is_finite

    def _non_finite(self, index: int) -> NonFiniteGradientError:
        start, stop = self._slicing.bounds(index)
        return NonFiniteGradientError(
            f"the gradient of {self._spec.name!r} holds NaN or Inf in elements {start} to {stop - 1} (slice "
            f"{index}); find out why, or set non_finite='skip'"
        )

    def add(self, token: int, gradient: PendingGradient) -> None:
        """Keeps a contribution until it is used or discarded."""
        if not gradient.is_shared:
            self._counters.bytes_held += gradient.values.nbytes
        self._by_token[token] = gradient

    def values(self, tokens: Iterable[int]) -> list[Gradient]:
        """The elements of contributions, or what they are encoded as."""
        return [self._by_token[token].values for token in tokens]

    def are_encoded(self, values: Iterable[Gradient]) -> bool:
        """Whether some of these contributions are encoded."""
        return self._has_sums and any(map(is_encoded, values))

    def norm(self, token: int) -> float:
        """The global norm of the gradient that a contribution is part of, as the worker sent it."""
        return self._by_token[token].call.gradient.norm

    def weights(self, tokens: Iterable[int]) -> tuple[float, ...]:
        """What each contribution counts for; empty where all count the same as one that says nothing."""
        if not self._has_sums:
            return ()
        found = tuple(self._by_token[token].call.gradient.weight for token in tokens)
        return found if any(weight != 1.0 for weight in found) else ()

    def lr_factor(self, tokens: Iterable[int]) -> float:
        """The factor on the learning rate of an update by these contributions, which are in rank order."""
        decides = self._decides(tokens)
        return 1.0 if decides is None else decides[1]

    def _decides(self, tokens: Iterable[int]) -> tuple[PendingGradient, float] | None:
        """Which contribution decides on the learning rate, and its factor: of those that have one, that of the worker
        that has taken part longest. One that was started again has perhaps not heard of the run's rate."""
        if not self._has_lr_factors:
            return None
        gradients = (self._by_token[token] for token in tokens)
        stated = ((one, factor) for one in gradients if (factor := one.call.gradient.lr_factor) is not None)
        return min(stated, key=lambda pair: pair[0].first_step, default=None)

    def used(self, index: int, tokens: tuple[int, ...], left_out: Bad) -> None:
        """An update of slice ``index`` has read these contributions. Those at positions ``left_out`` held NaN or Inf
        and are not in it, which their workers learn where the policy is to reject. So do workers whose factor on the
        learning rate is not the update's."""
        self._compare_lr_factors(tokens)
        for position in left_out:
            call = self._by_token[tokens[position]].call
            self._counters.of(call.identity.worker_id).non_finite += 1
            if self._spec.non_finite == "reject":
                call.fail(self._non_finite(index))
        for token in tokens:
            self.discard(token)

    def _compare_lr_factors(self, tokens: tuple[int, ...]) -> None:
        """Fails the calls that have another factor than the update was made with."""
        if (decides := self._decides(tokens)) is None:
            return
        gradient, used = decides
        for token in tokens:
            call = self._by_token[token].call
            factor = used if call.gradient.lr_factor is None else call.gradient.lr_factor
            if abs(factor - used) > _LR_FACTOR_TOLERANCE * used:
                call.fail(
                    InvalidArgumentError(
                        f"lr_factor={factor!r} in step {call.step} of {self._spec.name!r}, which was made with "
                        f"lr_factor={used!r}, set by {gradient.call.identity.worker_id}: a step has one learning rate, "
                        "so all workers must set the same factor, also one that was started again or joined later"
                    )
                )

    def refused(self, token: int) -> None:
        """A contribution was not taken, so that none may be a difference to it."""
        gradient = self._by_token.get(token)
        if gradient is not None and gradient.call.gradient.difference is not None:
            self.estimates.discard(gradient.call.identity.worker_id, gradient.index)
        self.discard(token)

    def discard(self, token: int) -> None:
        """A contribution is needed no more."""
        gradient = self._by_token.pop(token, None)
        if gradient is not None and not gradient.is_shared:
            self._counters.bytes_held -= gradient.values.nbytes
            gradient.call.release_payload()

    def discard_slices(self, indices: Collection[int]) -> None:
        """All contributions to these slices, and estimates of them, are needed no more."""
        self.estimates.discard_slices(indices)
        for token in [token for token, gradient in self._by_token.items() if gradient.index in indices]:
            self.discard(token)
