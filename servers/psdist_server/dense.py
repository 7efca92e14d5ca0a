"""Dense parameters on one server: the arrays, and what an update does to them.

Weights, optimizer state and, where clipping needs it, aggregated gradients are one float32 array each for all slices of
this server, so that P parameters with Adam cost 12 bytes x P and nothing else. The weights lie in an arena
(``psdist.wire.shm``), which workers on this host may read in place; where there can be none, in plain memory. Which
update runs when is the shard machines' decision; here are only the arrays. Methods that compute (``aggregate``,
``apply``) release the GIL and may run in kernel threads, at most one per slice at a time.

Invariants: each contribution is read once, into memory of the kernel's own, so that it may change meanwhile without
harm. No NaN or Inf of a contribution reaches the weights: the contribution is left out, where slices are updated for
the block of ``kernels.BLOCK`` elements that has it, and its position is returned. The arena's sequence of a slice is
twice its version, and odd while its weights are written.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Update:
    """Update number ``step`` of a slice, by the mean of the parts, which are added in their order. Without parts only
    the version goes on.

    factor: what the only part is multiplied by (clipping).
    """

    index: int
    step: int
    parts: Sequence[Gradient]
    lr_scale: float = 1.0
    factor: float | None = None


@dataclass(frozen=True, slots=True)
class _Segment:
    """A range of a slice whose elements belong to one group: where it begins, and where its weights and state lie."""

    start: int
    size: int
    group: int
    addresses: tuple[int, ...]


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
        self._segments = {index: self._segments_of(index) for index in self.indices}
        self._thread = threading.local()

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

    def apply_clipped(self, index: int, step: int, part: Gradient, norm: float, lr_scale: float) -> Bad:
        """One update by one part, scaled down by its push's global norm (SSP and ASP)."""
        factor = clip_factor(norm, self._max_grad_norm)
        return self.apply([Update(index, step, [part], lr_scale, factor)])[0]

    def apply_aggregated(self, index: int, step: int, norm: float) -> None:
        """One update by what ``aggregate`` kept, scaled down by the step's global norm."""
        kept = [self._gradients[slice(*self._bounds[index])]] if self._aggregated.pop(index) else []
        self.apply([Update(index, step, kept, factor=clip_factor(norm, self._max_grad_norm))])

    def apply(self, updates: Sequence[Update]) -> list[Bad]:
        """Carries updates of different slices out, and returns for each which parts were left out."""
        by_scalars: dict[tuple[int, float, int], list[tuple[int, Update, _Segment]]] = {}
        for number, update in enumerate(updates):
            if update.parts:
                self._sequence[self._place[update.index]] = 2 * update.step + 1
                for segment in self._segments[update.index]:
                    key = (update.step, update.lr_scale, segment.group)
                    by_scalars.setdefault(key, []).append((number, update, segment))
        bad: list[set[int]] = [set() for _ in updates]
        for (step, lr_scale, group), jobs in by_scalars.items():
            scalars = self.rule.scalars(step, lr_scale)[group]
            if scalars is not None:
                for row, parts in self._run(jobs, scalars):
                    bad[jobs[row][0]].update(parts)
        for update in updates:
            self._sequence[self._place[update.index]] = 2 * update.step + 2
        return [tuple(sorted(parts)) for parts in bad]

    def _run(
        self, jobs: Sequence[tuple[int, Update, _Segment]], scalars: tuple[np.float32, ...]
    ) -> list[tuple[int, list[int]]]:
        """Runs the kernel on segments with the same scalars; rows of those that had bad parts, and the parts."""
        counts = [len(update.parts) for _, update, _ in jobs]
        most = max(counts)
        parts, codes = np.zeros((len(jobs), most), np.uintp), np.zeros((len(jobs), most), np.int64)
        for row, (_, update, _) in enumerate(jobs):
            for column, part in enumerate(update.parts):
                parts[row, column] = kernels.address_of(part)
                codes[row, column] = kernels.CODES[part.dtype]
        divisions = [_division(update) for _, update, _ in jobs]
        bad = np.zeros((len(jobs), most), np.uint8)
        self.rule.fused(
            np.array([segment.addresses for _, _, segment in jobs], np.uintp),
            np.array([segment.size for _, _, segment in jobs], np.int64),
            np.array([segment.start for _, _, segment in jobs], np.int64),
            parts,
            codes,
            np.array(counts, np.int64),
            np.array([divisor for divisor, _ in divisions], np.float32),
            np.array([factor for _, factor in divisions], np.float32),
            self._memory(),
            bad,
            scalars,
        )
        return [(row, np.flatnonzero(bad[row]).tolist()) for row in range(len(jobs))] if bad.any() else []

    def _memory(self) -> Array:
        """Working memory of this kernel thread, so that the steady state allocates none."""
        memory: Array | None = getattr(self._thread, "memory", None)
        if memory is None:
            memory = self._thread.memory = np.zeros(2 * kernels.BLOCK, np.float32)
        return memory

    def _segments_of(self, index: int) -> tuple[_Segment, ...]:
        first = self._bounds[index][0]
        bases = [kernels.address_of(array) for array in (self.weights, *self.states)]
        return tuple(
            _Segment(start, stop - start, group, tuple(base + 4 * (first + start) for base in bases))
            for start, stop, group in self._runs[index]
        )


def _division(update: Update) -> tuple[np.float32, np.float32]:
    if update.factor is not None:
        return np.float32(0.0), np.float32(update.factor)
    return kernels.division_by(len(update.parts))


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
