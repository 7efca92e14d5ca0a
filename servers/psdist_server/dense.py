"""Dense parameters on one server: the arrays, and what an update does to them.

Weights, optimizer state and, where clipping needs it, aggregated gradients are one float32 array each for all slices of
this server, so that P parameters with Adam cost 12 bytes x P and nothing else. The weights lie in an arena
(``psdist.wire.shm``), which workers on this host may read in place; where there can be none, in plain memory. Which
update runs when is the shard machines' decision; here are only the arrays. Methods that compute (``aggregate``,
``apply``) release the GIL and may run in kernel threads, at most one per slice at a time.

Invariants: each contribution is read once, into memory of the kernel's own, so that it may change meanwhile without
harm. No NaN or Inf of a contribution reaches the weights: the contribution is left out and its position returned. The
arena's sequence of a slice is twice its version, and odd while its weights are written.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psdist.compression import NUMPY_DTYPES
from psdist.types import ParametersEntry
from psdist.wire.shm import WeightsArena, reason_of
from psdist_server import kernels
from psdist_server.optimizers import Rule, clip_factor

Array = NDArray[np.float32]
#: A contribution as it came: float32, float16 or bfloat16, aligned, perhaps read-only.
Gradient = NDArray[np.generic]
Runs = tuple[tuple[int, int, int], ...]
#: Positions of contributions that hold NaN or Inf and were left out.
Bad = tuple[int, ...]


class DenseParameters:
    """The slices of ``entry`` that ``server_id`` is the primary of."""

    def __init__(self, entry: ParametersEntry, server_id: str) -> None:
        self.slicing = entry.slicing
        self.indices = entry.slices_of(server_id)
        self.installed: set[int] = set()
        self._place = {index: place for place, index in enumerate(self.indices)}
        sizes = [self.slicing.size(index) for index in self.indices]
        ends = np.cumsum(sizes, dtype=np.int64).tolist()
        self._bounds = {i: (end - size, end) for i, size, end in zip(self.indices, sizes, ends, strict=True)}
        self._runs = {index: _runs_of(entry, *self.slicing.bounds(index)) for index in self.indices}
        self._total: int = ends[-1] if ends else 0
        self._max_grad_norm = entry.spec.optimizer.max_grad_norm
        self.rule = Rule(entry.spec.optimizer)
        self.arena, self.arena_error = _make_arena(len(self.indices), self._total)
        arena = self.arena
        self.weights: Array = arena.weights if arena is not None else np.zeros(self._total, np.float32)
        self._sequence = arena.sequence if arena is not None else np.zeros(len(self.indices), np.uint64)
        self.states = tuple(np.zeros(self._total, np.float32) for _ in self.rule.state_names)
        self._gradients = np.zeros(self._total if self._max_grad_norm else 0, np.float32)
        self._aggregated: dict[int, bool] = {}
        self._scratch = threading.local()

    @property
    def total(self) -> int:
        """Elements on this server."""
        return self._total

    def close(self) -> None:
        """Gives the arena back; workers that have it mapped keep their view."""
        if self.arena is not None:
            self.arena.close()

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

    def aggregate(self, index: int, parts: Sequence[Gradient]) -> tuple[float, Bad]:
        """Keeps the mean of the parts for ``apply_aggregated``; its sum of squares (0 where there are no parts)."""
        gradient = self._gradients[slice(*self._bounds[index])]
        bad = _combine(gradient, parts) if parts else ()
        self._aggregated[index] = len(bad) < len(parts)
        return (kernels.sum_squares(gradient) if self._aggregated[index] else 0.0), bad

    def apply(self, index: int, step: int, parts: Sequence[Gradient], lr_scale: float) -> Bad:
        """Update number ``step`` of a slice, by the mean of the parts, which are added in their order."""
        gradient = self._scratch_for(self.slicing.size(index))
        bad = _combine(gradient, parts) if parts else ()
        self._update(index, step, gradient if len(bad) < len(parts) else None, lr_scale)
        return bad

    def apply_clipped(self, index: int, step: int, part: Gradient, norm: float, lr_scale: float) -> Bad:
        """Update number ``step`` of a slice by one part, scaled down by its push's global norm (SSP and ASP)."""
        gradient = self._scratch_for(self.slicing.size(index))
        bad = _combine(gradient, [part])
        if not bad:
            kernels.scale(gradient, clip_factor(norm, self._max_grad_norm))
        self._update(index, step, None if bad else gradient, lr_scale)
        return bad

    def apply_aggregated(self, index: int, step: int, norm: float) -> None:
        """Update number ``step`` of a slice by what ``aggregate`` kept, scaled down by the step's global norm."""
        gradient = None
        if self._aggregated.pop(index):
            gradient = self._gradients[slice(*self._bounds[index])]
            kernels.scale(gradient, clip_factor(norm, self._max_grad_norm))
        self._update(index, step, gradient, 1.0)

    def _update(self, index: int, step: int, gradient: Array | None, lr_scale: float) -> None:
        """Without a gradient only the version goes on."""
        place = self._place[index]
        if gradient is not None:
            start, stop = self._bounds[index]
            states = [state[start:stop] for state in self.states]
            scalars = self.rule.scalars(step, lr_scale)
            self._sequence[place] = 2 * step + 1
            self.rule.update(self.weights[start:stop], states, gradient, scalars, self._runs[index])
        self._sequence[place] = 2 * step + 2

    def _scratch_for(self, size: int) -> Array:
        """A buffer of this kernel thread, so that the steady state allocates nothing."""
        buffer: Array | None = getattr(self._scratch, "buffer", None)
        if buffer is None or buffer.size < size:
            buffer = self._scratch.buffer = np.empty(self.slicing.slice_elements, np.float32)
        return buffer[:size]


def _make_arena(slices: int, elements: int) -> tuple[WeightsArena | None, str]:
    """An arena for the weights, or why there is none."""
    if not elements:
        return None, "this server holds no slice"
    try:
        return WeightsArena.create(slices, elements), ""
    except OSError as error:
        return None, f"at the server: {reason_of(error)}"


def _combine(out: Array, parts: Sequence[Gradient]) -> Bad:
    """The mean of the parts that are finite; the positions of the others."""
    if kernels.combine(out, parts, len(parts)):
        return ()
    # Shared parts could change between the look and the sum, so these are copies. It is rare enough.
    copies = [part.copy() for part in parts]
    good = [part for part in copies if kernels.all_finite(part)]
    if good:  # All of them where the sum overflowed.
        kernels.combine(out, good, len(good))
    return tuple(place for place, part in enumerate(copies) if not kernels.all_finite(part))


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
