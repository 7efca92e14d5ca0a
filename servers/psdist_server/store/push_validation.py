"""Checks of a call before a slice takes its contribution, and the errors for NaN and Inf."""

from __future__ import annotations

import math

from psdist.errors import InvalidArgumentError, NonFiniteGradientError
from psdist.types import ITEM_BYTES, ParametersSpec, Slicing
from psdist_server.kernels import kernels
from psdist_server.kernels.arrays import Gradient, gradient_of
from psdist_server.store.rpc_call import Call
from psdist_server.store.statistics import Counters


class Contributions:
    """Checks for one parameter set. needs_norm: a push must bring its gradient's global norm."""

    def __init__(self, spec: ParametersSpec, slicing: Slicing, counters: Counters, needs_norm: bool) -> None:
        self._spec = spec
        self._slicing = slicing
        self._counters = counters
        self._needs_norm = needs_norm

    def check_norm(self, call: Call) -> None:
        """Raises InvalidArgumentError where a push must bring its gradient's global norm and does not."""
        needed = self._needs_norm and not call.abstain
        if needed and not (math.isfinite(call.grad_norm) and call.grad_norm >= 0):
            raise InvalidArgumentError(f"grad_norm={call.grad_norm} must be finite: the optimizer has max_grad_norm")

    def gradient(self, call: Call, index: int, payload: memoryview) -> Gradient:
        """A payload's elements, in place. Raises InvalidArgumentError where they are not as many as the slice's."""
        expected = 0 if call.abstain else self._slicing.size(index) * ITEM_BYTES[call.dtype]
        if len(payload) != expected:
            raise InvalidArgumentError(
                f"slice {index} has {expected} bytes in {call.dtype}, not {len(payload)}", slice=index
            )
        return gradient_of(payload, call.dtype)

    def is_finite(self, call: Call, index: int, values: Gradient) -> bool:
        """Whether all elements are finite; where not, the policy decides between NonFiniteGradientError and False."""
        if kernels.all_finite(values):
            return True
        self._counters.of(call.identity.worker_id).non_finite += 1
        if self._spec.non_finite == "skip":
            return False
        raise self._non_finite(index)

    def left_out(self, call: Call, index: int) -> None:
        """A shared contribution turned out to hold NaN or Inf when the slice was updated, and is not in the update."""
        self._counters.of(call.identity.worker_id).non_finite += 1
        if self._spec.non_finite == "reject":
            call.fail(self._non_finite(index))

    def _non_finite(self, index: int) -> NonFiniteGradientError:
        start, stop = self._slicing.bounds(index)
        return NonFiniteGradientError(
            f"the gradient of {self._spec.name!r} holds NaN or Inf in elements {start} to {stop - 1} (slice "
            f"{index}); find out why, or set non_finite='skip'"
        )
