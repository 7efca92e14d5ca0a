"""Estimates of workers' gradients (EF21), kept here so that workers push differences to them. Pure.

The gradient of such a push is the estimate after it. A worker has the same estimate, as both add the same segments in
float32. A server keeps it only to be sent less: it is in no snapshot, and no replica has it. A server that has another
one than a push is a difference to refuses the push, and is sent the whole gradient.

Source: Richtarik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
Feedback" (arXiv 2106.05203), algorithm 2.

Invariants: there is at most one estimate of a slice for each live worker. An array that was given out never changes.
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
    """The gradient of one slice in one push. push: the incarnation of the worker, and the push's number."""

    push: tuple[int, int]
    values: Floats


class GradientEstimates:
    """The estimates for one parameter set."""

    def __init__(self, slicing: Slicing) -> None:
        self._slicing = slicing
        #: By worker and slice.
        self._kept: dict[tuple[str, int], _Estimate] = {}
        #: What all of them take. Each heartbeat reports it.
        self.bytes = 0

    def add(self, worker: Identity, difference: GradientDifference, index: int, payload: NDArray[np.uint8]) -> Floats:
        """The gradient of a push, whose segments were checked. ``keep`` keeps it. Raises StaleEstimateError where the
        gradient to which they are a difference is not kept here."""
        number, from_zeros = difference
        kept = self._kept.get((worker.worker_id, index))
        if from_zeros:
            values = np.zeros(self._slicing.size(index), np.float32)
        elif kept is not None and kept.push == (worker.incarnation, number):
            return kept.values  # It was sent again.
        elif kept is not None and kept.push == (worker.incarnation, number - 1):
            values = kept.values.copy()
        else:
            raise StaleEstimateError(
                f"push {number} of slice {index} is a difference to the gradient of push {number - 1}, which is not "
                "kept here: send the whole gradient",
                slice=index,
            )
        segments.accumulate(payload, values)
        return values

    def keep(self, worker: Identity, difference: GradientDifference, index: int, values: Floats) -> None:
        """``values`` are the gradient of a push, to which the next one is a difference."""
        self.discard(worker.worker_id, index)
        self._kept[worker.worker_id, index] = _Estimate((worker.incarnation, difference.number), values)
        self.bytes += values.nbytes

    def fence(self, live: Mapping[str, int]) -> None:
        """Forgets workers that are no longer ``live`` (incarnation by worker id)."""
        for key, estimate in list(self._kept.items()):
            if live.get(key[0]) != estimate.push[0]:
                self.discard(*key)

    def discard(self, worker_id: str, index: int) -> None:
        """Forgets a worker's estimate of a slice."""
        if (estimate := self._kept.pop((worker_id, index), None)) is not None:
            self.bytes -= estimate.values.nbytes

    def discard_slices(self, indices: Collection[int]) -> None:
        """Forgets slices that are not served here any more."""
        for key in [key for key in self._kept if key[1] in indices]:
            self.discard(*key)
