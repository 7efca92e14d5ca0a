"""Estimates of workers' gradients (EF21), which let workers push differences instead of gradients. Pure.

The gradient of such a push is the updated estimate. The worker computes the same estimate, since both sides add the
same segments in float32. Estimates only save bandwidth: they are in no snapshot and on no replica. If the server's
estimate is not the one that a push is a difference to, the server refuses the push and the worker sends the whole
gradient.

Source: Richtarik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
Feedback" (arXiv 2106.05203), algorithm 2.

Invariants: There is at most one estimate per slice and live worker. A returned array never changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from psdist.compression import segments
from psdist.errors import StaleEstimateError
from psdist.types import GradientDifference, Identity, Slicing

Floats = NDArray[np.float32]


class _Estimate(NamedTuple):
    """The gradient of one slice in one push. push: the worker's incarnation and the push's number."""

    push: tuple[int, int]
    values: Floats


class GradientEstimates:
    """The estimates for one parameter set."""

    def __init__(self, slicing: Slicing) -> None:
        self._slicing = slicing
        #: By worker and slice.
        self._kept: dict[tuple[str, int], _Estimate] = {}
        #: Total size of the estimates. Reported in each heartbeat.
        self.bytes = 0

    def add(self, worker: Identity, difference: GradientDifference, index: int, payload: NDArray[np.uint8]) -> Floats:
        """Return the gradient of a push whose segments have been checked. The caller stores it by ``keep``.

        Raises StaleEstimateError if the base of the difference is not stored here.
        """
        number, from_zeros = difference
        kept = self._kept.get((worker.worker_id, index))
        if from_zeros:
            values = np.zeros(self._slicing.size(index), np.float32)
        elif kept is not None and kept.push == (worker.incarnation, number):
            return kept.values  # A retry.
        elif kept is not None and kept.push == (worker.incarnation, number - 1):
            values = kept.values.copy()
        else:
            raise StaleEstimateError(
                f"push {number} of slice {index} is a difference to the gradient of push {number - 1}, which is not "
                "stored here: send the whole gradient",
                slice=index,
            )
        segments.accumulate(payload, values)
        return values

    def keep(self, worker: Identity, difference: GradientDifference, index: int, values: Floats) -> None:
        """Store the gradient of a push, as the base of the worker's next difference."""
        self.discard(worker.worker_id, index)
        self._kept[worker.worker_id, index] = _Estimate((worker.incarnation, difference.number), values)
        self.bytes += values.nbytes

    def fence(self, live: Mapping[str, int]) -> None:
        """Discard the estimates of workers that are no longer ``live`` (incarnation by worker id)."""
        for key, estimate in list(self._kept.items()):
            if live.get(key[0]) != estimate.push[0]:
                self.discard(*key)

    def discard(self, worker_id: str, index: int) -> None:
        """Discard a worker's estimate of a slice."""
        if (estimate := self._kept.pop((worker_id, index), None)) is not None:
            self.bytes -= estimate.values.nbytes

    def discard_slices(self, indices: Collection[int]) -> None:
        """Discard the estimates of slices that are no longer served here."""
        for key in [key for key in self._kept if key[1] in indices]:
            self.discard(*key)
