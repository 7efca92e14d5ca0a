"""Dense parameters on one server: the arrays, and what an update does to them.

Weights, optimizer state and, where clipping needs it, aggregated gradients are one float32 array each for all slices of
this server, so that P parameters with Adam cost 12 bytes x P and nothing else. Which update runs when is the
shard machines' decision; here are only the arrays. Methods that compute (``aggregate``, ``apply``) release the GIL and
may run in kernel threads, at most one per slice at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psdist.compression import NUMPY_DTYPES
from psdist.types import ParametersEntry
from psdist_server import kernels
from psdist_server.optimizers import Rule, clip_factor

Array = NDArray[np.float32]
#: A contribution as it came: float32, float16 or bfloat16, aligned, perhaps read-only.
Gradient = NDArray[np.generic]
Runs = tuple[tuple[int, int, int], ...]


class DenseParameters:
    """The slices of ``entry`` that ``server_id`` is the primary of."""

    def __init__(self, entry: ParametersEntry, server_id: str) -> None:
        self.slicing = entry.slicing
        self.indices = entry.slices_of(server_id)
        self.installed: set[int] = set()
        sizes = [self.slicing.size(index) for index in self.indices]
        ends = np.cumsum(sizes, dtype=np.int64).tolist()
        self._bounds = {i: (end - size, end) for i, size, end in zip(self.indices, sizes, ends, strict=True)}
        self._runs = {index: _runs_of(entry, *self.slicing.bounds(index)) for index in self.indices}
        self._total: int = ends[-1] if ends else 0
        self._max_grad_norm = entry.spec.optimizer.max_grad_norm
        self.rule = Rule(entry.spec.optimizer)
        self.weights: Array = np.zeros(self._total, np.float32)
        self.states = tuple(np.zeros(self._total, np.float32) for _ in self.rule.state_names)
        self._gradients = np.zeros(self._total if self._max_grad_norm else 0, np.float32)
        self._aggregated: dict[int, bool] = {}
        self._scratch = threading.local()

    @property
    def total(self) -> int:
        """Elements on this server."""
        return self._total

    def install(self, index: int, values: Gradient) -> None:
        """Sets the initial weights of a slice, and the optimizer state that goes with them."""
        start, stop = self._bounds[index]
        self.weights[start:stop] = values
        states = tuple(state[start:stop] for state in self.states)
        self.rule.initialize(self.weights[start:stop], states, self._runs[index])
        self.installed.add(index)

    def read(self, index: int, dtype: str) -> memoryview:
        """The weights of a slice as payload bytes; a view of the live weights where ``dtype`` is float32."""
        start, stop = self._bounds[index]
        return kernels.cast(self.weights[start:stop], dtype).view(np.uint8).data

    def aggregate(self, index: int, parts: Sequence[Gradient]) -> float:
        """Keeps the mean of the parts for ``apply_aggregated``; its sum of squares (0 where there are no parts)."""
        self._aggregated[index] = bool(parts)
        if not parts:
            return 0.0
        gradient = self._gradients[slice(*self._bounds[index])]
        kernels.combine(gradient, parts, len(parts))
        return kernels.sum_squares(gradient)

    def apply(self, index: int, step: int, parts: Sequence[Gradient], lr_scale: float) -> None:
        """One update of a slice by the mean of the parts, which are added in their order."""
        gradient = self._scratch_for(self.slicing.size(index))
        kernels.combine(gradient, parts, len(parts))
        self._update(index, step, gradient, lr_scale)

    def apply_clipped(self, index: int, step: int, part: Gradient, norm: float, lr_scale: float) -> None:
        """One update of a slice by one part, scaled down by its push's global norm (SSP and ASP)."""
        gradient = self._scratch_for(self.slicing.size(index))
        kernels.combine(gradient, [part], 1)
        kernels.scale(gradient, clip_factor(norm, self._max_grad_norm))
        self._update(index, step, gradient, lr_scale)

    def apply_aggregated(self, index: int, step: int, norm: float) -> None:
        """One update of a slice by what ``aggregate`` kept, scaled down by the step's global norm."""
        if self._aggregated.pop(index):
            gradient = self._gradients[slice(*self._bounds[index])]
            kernels.scale(gradient, clip_factor(norm, self._max_grad_norm))
            self._update(index, step, gradient, 1.0)

    def _update(self, index: int, step: int, gradient: Array, lr_scale: float) -> None:
        start, stop = self._bounds[index]
        states = tuple(state[start:stop] for state in self.states)
        self.rule.apply(self.weights[start:stop], states, gradient, step, lr_scale, self._runs[index])

    def _scratch_for(self, size: int) -> Array:
        """A buffer of this kernel thread, so that the steady state allocates nothing."""
        buffer: Array | None = getattr(self._scratch, "buffer", None)
        if buffer is None or buffer.size < size:
            buffer = self._scratch.buffer = np.empty(self.slicing.slice_elements, np.float32)
        return buffer[:size]


def gradient_of(payload: memoryview, dtype: str) -> Gradient:
    """The elements of a payload, in place. ``psdist.wire.frames`` aligns payloads; those of other clients may have to
    be copied, because the kernels are compiled for aligned arrays."""
    values = np.frombuffer(payload, NUMPY_DTYPES[dtype])
    return values if values.flags.aligned else values.copy()


def _runs_of(entry: ParametersEntry, start: int, stop: int) -> Runs:
    """The group of every element of [start, stop), as ranges relative to ``start``."""
    runs: list[tuple[int, int, int]] = []
    position = start
    for item in entry.ranges:
        low, high = max(item.start, start), min(item.stop, stop)
        if low >= high:
            continue
        if position < low:
            runs.append((position - start, low - start, 0))
        runs.append((low - start, high - start, item.group))
        position = high
    if position < stop or not runs:
        runs.append((position - start, stop - start, 0))
    return tuple(runs)
