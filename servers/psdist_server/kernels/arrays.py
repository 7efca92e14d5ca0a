"""The arrays of a parameter set on one server, and the updates of them.

Weights and optimizer state are one float32 array each, virtual over the whole vector: slice i occupies
``slicing.bounds(i)``. Only held slices have memory, so P parameters with Adam cost 12 x P bytes, and shards come
and go without moving anything. Workers on this host may read the weights in place (``memory``). If workers receive
compressed differences, the published weights are one more array, and workers read these (``published``). The shard
machines decide which update runs when. Methods that compute (``combine``, ``apply``, ``digest``) release the GIL
and may run in kernel threads, at most one per slice at a time. ``hold`` and ``release`` may run concurrently for
other slices.

Invariants: Each contribution is read once, into the kernel's own memory, so that it may change meanwhile without harm.
No NaN or Inf of a contribution reaches the weights: the contribution is left out of its block of ``BLOCK`` elements
(of the whole slice if contributions have weights), and its position is returned. A block whose sum overflows is not
updated. An update by the mean of ``combine``, or by the mean that ``apply`` wrote out, gives the same bytes as the
update by its parts. Encoded contributions give the same bytes as their decoded values. The content of a released
slice is lost, except what workers read, which stays readable until ``reclaim``. Elements that an update skips keep
weights and state, and their scalars follow from their own number of updates (``core.lags``).
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.compression.specifications import pull_codec_from_text
from psdist.consistency import sums
from psdist.errors import InternalError, InvalidArgumentError
from psdist.hyperparameters import Settings
from psdist.types import ITEM_BYTES, WORDS, GroupRange, MasterDType, ParametersEntry, Slicing
from psdist_server.core.lags import LagTable, Ranges, pieces
from psdist_server.kernels import means
from psdist_server.kernels.interpreted import BLOCK, CODES, division_by
from psdist_server.kernels.memory import AnonymousMemory, WeightsMemory, joined
from psdist_server.kernels.optimizers import Rule
from psdist_server.kernels.published import PublishedWeights

Array = NDArray[np.float32]
#: A contribution as received: float32, float16 or bfloat16, aligned, possibly read-only; or uint8, encoded.
Gradient = NDArray[np.generic]
Runs = tuple[tuple[int, int, int], ...]
#: Name of the array of published weights: the last one of a slice.
PUBLISHED: Final = "published"
#: Positions of contributions that hold NaN or Inf and were left out.
Bad = tuple[int, ...]
_thread = threading.local()


@dataclass(frozen=True, slots=True)
class Update:
    """Update number ``step`` of a slice by the mean of the parts (their sum with ``BSP(reduction="sum")``), which are
    added in order. Without parts only the
    version advances.

    factor: multiplies the only part (clipping).
    mean: float32[n] that receives the applied gradient. An update by it, without a factor, gives the same bytes.
    copy: float32 array that the slice is copied to before the update (``copy_slice``).
    is_encoded: True if some of the parts are encoded.
    weights: weight of each part in the mean; empty if all are equal.
    divisor: divides the only part, if that is a sum; 0 if each part is one contribution.
    assigned: float32[n] that the weights are set to first; None if they keep their values.
    settings: hyperparameters that differ from the specification's.
    absent: elements that no part has a gradient for, and whose values are zeros in each: they are skipped.
    """

    index: int
    step: int
    parts: Sequence[Gradient]
    lr_scale: float = 1.0
    factor: float | None = None
    mean: Array | None = None
    copy: Array | None = None
    is_encoded: bool = False
    weights: tuple[float, ...] = ()
    divisor: float = 0.0
    assigned: Array | None = None
    settings: Settings = ()
    absent: Ranges = ()

    def scaled(self, lr_scale: float) -> Update:
        """Return this update with another factor on its learning rate, besides its own."""
        return self if lr_scale == 1.0 else replace(self, lr_scale=lr_scale * self.lr_scale)


class UpdateWork(Protocol):
    """Work item that carries an update."""

    @property
    def update(self) -> Update:
        """The update."""


class Applied(NamedTuple):
    """Result of an update: its duration in seconds, the positions of the parts left out, and when it ended, in seconds
    of ``perf_counter``."""

    seconds: float
    bad: Bad
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupSegment:
    """A range of a slice whose elements belong to one group and have the same lag: its start, and the addresses of its
    kernel's arrays."""

    start: int
    size: int
    group: int
    addresses: tuple[int, ...]
    lag: int = 0


#: Position of an update in its batch, the update, and one segment of its slice.
SegmentJob = tuple[int, Update, GroupSegment]


class DenseParameters:
    """The slices of ``entry`` that this server holds a copy of; initially none.

    has_states: True if the optimizer state is in host memory; False if a subclass stores it elsewhere.
    """

    def __init__(self, entry: ParametersEntry, *, has_states: bool = True) -> None:
        self.slicing = entry.slicing
        self.held: set[int] = set()
        #: The held slices, ascending.
        self.indices: tuple[int, ...] = ()
        #: Slices whose content is complete.
        self.installed: set[int] = set()
        self._ranges = entry.ranges
        self._runs: dict[int, Runs] = {}
        self._segments: dict[int, tuple[GroupSegment, ...]] = {}
        self.rule = Rule(entry.spec.optimizer, entry.state_since)
        #: True if contributions are added up and not divided.
        self.sums = sums(entry.spec.consistency)
        #: The array that workers read: the weights, or the published ones.
        self.weights = WeightsMemory(self.slicing)
        #: None if workers read the weights themselves.
        self.published: PublishedWeights | None = None
        if entry.spec.pull_compression:
            codec = pull_codec_from_text(entry.spec.pull_compression)
            self.published = PublishedWeights(codec, self.slicing, self.weights)
        states = len(self.rule.state_names) if has_states else 0
        #: Memory of the optimizer state, and of the weights if workers read the published ones.
        self._private = tuple(AnonymousMemory(self.slicing.total) for _ in range(states + (self.published is not None)))
        self.states = tuple(memory.array for memory in self._private[:states])
        self._arrived: dict[int, set[int]] = {}
        self.lags = LagTable()

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of a slice's arrays after its weights."""
        return (*self.rule.state_names, *((PUBLISHED,) if self.published is not None else ()))

    @property
    def array_count(self) -> int:
        """Number of arrays per slice."""
        return 1 + len(self.state_names)

    def _arrays(self) -> list[Array]:
        """Return the weights, the optimizer state, and the published weights if any: float32[total] each."""
        if self.published is None:
            return [self.weights.array, *self.states]
        return [self._private[-1].array, *self.states, self.weights.array]

    def hold(self, indices: Iterable[int]) -> None:
        """Allocate memory for slices; their content is set later. Slices that are already held stay unchanged.

        Raises LimitExceededError if there is no room beside the slices already held; nothing has changed then.
        """
        new = sorted(set(indices) - self.held)
        self.weights.hold(new)
        for start, stop in joined(self.slicing, new):
            for memory in self._private:
                memory.use(start, stop)
        for index in new:
            self._runs[index] = _runs_of(self._ranges, *self.slicing.bounds(index))
            self._segments[index] = self._segments_of(index)
        self.held = self.held.union(new)
        self.indices = tuple(sorted(self.held))

    def release(self, indices: Iterable[int]) -> None:
        """Free the memory of slices, in whole pages. The memory of their weights is freed by ``reclaim``. No kernel may
        be using them."""
        gone = sorted(self.held.intersection(indices))
        for start, stop in joined(self.slicing, gone):
            for memory in self._private:
                memory.give_back(start, stop)
        if self.published is not None:
            self.published.forget(gone)
        for index in gone:
            for table in (self._runs, self._segments, self._arrived):
                table.pop(index, None)
            self.lags.set(index, ())
        self.installed.difference_update(gone)
        self.held = self.held.difference(gone)
        self.indices = tuple(sorted(self.held))
        self.weights.release(gone)

    def reclaim(self, indices: Iterable[int]) -> None:
        """Free the memory of released slices' weights, in whole pages. Nothing may read them in place any more: later
        reads return zeros. Slices that are held again are skipped. Run this in a thread, like ``release`` and
        ``close``: it takes 0.1 s for a gigabyte."""
        self.weights.reclaim(indices)

    def close(self) -> None:
        """Free the arena. Workers that have mapped it keep their view."""
        self.weights.close()

    def install(self, index: int, values: Gradient, version: int = 0) -> None:
        """Set the weights of a slice, at ``version``, and the optimizer's initial state for them."""
        arrays = self.export(index)
        weights, states = arrays[0], arrays[1 : 1 + len(self.rule.state_names)]
        self.weights.sequence[index] = 2 * version + 1
        weights[...] = values
        if self.published is not None:
            self.published.begin(index, weights)
        self.weights.sequence[index] = 2 * version
        self.rule.initialize(weights, states, self._runs[index])
        self.lags.set(index, ())
        self._stored(index, dict(enumerate(arrays)))
        self.installed.add(index)

    def _stored(self, index: int, arrays: Mapping[int, Array]) -> None:
        """Called after these arrays of a slice, numbered as in ``export`` and obtained from it, were written."""

    def export(self, index: int) -> list[Array]:
        """Return the arrays of a slice, in place: its weights, then those of ``state_names``."""
        if index not in self.held:
            raise InternalError(f"slice {index} is not held here")
        part = slice(*self.slicing.bounds(index))
        return [array[part] for array in self._arrays()]

    def export_weights(self, index: int) -> Array:
        """Return the weights of a slice, in place in host memory."""
        if index not in self.held:
            raise InternalError(f"slice {index} is not held here")
        return self._arrays()[0][slice(*self.slicing.bounds(index))]

    def copy_slice(self, index: int, out: Array) -> None:
        """Copy the arrays of a slice to ``out``, one after another."""
        start = 0
        for array in self.export(index):
            out[start : start + array.size] = array
            start += array.size

    def install_state(self, index: int, array_number: int, values: Array, version: int) -> None:
        """Set one array of a slice, numbered as in ``export``, at ``version``. The slice is installed once all arrays
        are set.

        Raises InvalidArgumentError if there is no such array, or its size differs.
        """
        arrays = self.export(index)
        if not 0 <= array_number < len(arrays) or values.shape != arrays[array_number].shape:
            raise InvalidArgumentError(
                f"array {array_number} of {values.size} elements: slice {index} has {len(arrays)} arrays of "
                f"{self.slicing.size(index)}"
            )
        is_read = array_number == (0 if self.published is None else len(arrays) - 1)
        if is_read:
            self.weights.sequence[index] = 2 * version + 1
        arrays[array_number][...] = values
        if is_read:
            self.weights.sequence[index] = 2 * version
        self._stored(index, {array_number: arrays[array_number]})
        if self.published is not None:
            self.published.forget([index])
        arrived = self._arrived.setdefault(index, set())
        arrived.add(array_number)
        if len(arrived) == len(arrays):
            del self._arrived[index]
            self.installed.add(index)

    def digest(self, index: int) -> bytes:
        """Return a 16-byte digest of the arrays of a slice and its lags (xxh3_128)."""
        state = xxhash.xxh3_128()
        for array in self.export(index):
            state.update(array.data)
        if lags := self.lags.of(index):
            state.update(np.array(lags, "<i8").data)
        return state.digest()

    def read(self, index: int, dtype: str) -> memoryview:
        """Return the weights of a slice that workers read, as payload bytes: a view of them if ``dtype`` is float32."""
        if index not in self.held:
            raise InternalError(f"slice {index} is not held here")
        return means.cast(self.weights.array[slice(*self.slicing.bounds(index))], dtype).view(np.uint8).data

    def combine(
        self, index: int, parts: Sequence[Gradient], is_encoded: bool = False, weights: tuple[float, ...] = ()
    ) -> tuple[Array | None, float, Bad]:
        """Compute the mean of the finite parts of a slice, or their sum if this parameter set sums.

        is_encoded, weights: as in ``Update``.

        Returns the mean (None if no part is left), its sum of squares, and the positions of the parts left out. An
        update by the mean gives the same bytes as the update by these parts.
        """
        if not parts:
            return None, 0.0, ()
        mean = np.empty(self.slicing.size(index), np.float32)
        if weights:
            bad = _combine_weighted(mean, parts, weights, self.sums)
        else:
            bad = _combine(mean, parts, self.sums, is_encoded)
        return (None, 0.0, bad) if len(bad) == len(parts) else (mean, means.sum_squares(mean), bad)

    def carry_out(self, works: Sequence[tuple[int, UpdateWork]]) -> list[Applied]:
        """Run updates of slices in one batch, of own shards and of copies. Called in a kernel thread, or on the
        loop."""
        started, updates = time.perf_counter(), []
        for _, work in works:
            updates.append(update := work.update)
            if update.copy is not None:
                self.copy_slice(update.index, update.copy)
            if update.assigned is not None:  # ``apply`` ends the write.
                self.weights.sequence[update.index] = 2 * update.step + 1
                self.export_weights(update.index)[...] = update.assigned
                self._stored(update.index, {0: update.assigned})
        left_out = self.apply(updates)
        seconds = (time.perf_counter() - started) / len(works)
        return [Applied(seconds, bad, started + seconds * number) for number, bad in enumerate(left_out, 1)]

    def apply(self, updates: Sequence[Update]) -> list[Bad]:
        """Run updates of different slices. Returns the positions of the parts left out of each."""
        for update in updates:
            if update.is_encoded or update.weights:
                # One by one, so that the sum of a slice stays in the cache from decoding to use.
                return [self._apply_alone(one) for one in updates]
        sequence = self.weights.sequence
        # By the settings' identity, because hashing the settings of many groups would take longer than a small kernel.
        by_scalars: dict[tuple[int, float, int, int, int], list[SegmentJob]] = {}
        for number, update in enumerate(updates):
            if update.parts:
                sequence[update.index] = 2 * update.step + 1
                segments = self._segments[update.index]
                if update.absent or update.index in self.lags.by_slice:
                    segments = self._segments_of(update.index, update.absent)
                for segment in segments:
                    key = (update.step, update.lr_scale, id(update.settings), segment.group, segment.lag)
                    by_scalars.setdefault(key, []).append((number, update, segment))
        bad: dict[int, set[int]] = {}
        for (step, lr_scale, _, group, lag), jobs in by_scalars.items():
            scalars = self.rule.scalars(step, lr_scale, jobs[0][1].settings, lag)[group]
            if scalars is not None:
                for row, parts in self._run(jobs, scalars):
                    bad.setdefault(jobs[row][0], set()).update(parts)
        for update in updates:
            if update.parts and update.absent:
                skip_absent(update, self.lags)
            if self.published is not None and update.assigned is not None:
                self.published.begin(update.index, self.export_weights(update.index))
            elif self.published is not None and update.parts:
                self.published.publish(update.index, update.step + 1, self.export_weights(update.index))
            elif self.published is not None:
                self.published.unchanged(update.index)
            sequence[update.index] = 2 * update.step + 2
        return [tuple(sorted(bad.get(number, ()))) for number in range(len(updates))]

    def _apply_alone(self, update: Update) -> Bad:
        if update.weights and update.parts:
            total, divisor, bad = means.weighted_total(update.parts, update.weights, self.slicing.size(update.index))
            self.apply([replace(update, parts=[total], divisor=divisor, is_encoded=False, weights=())])
            return bad
        return self._apply_encoded(update) if update.is_encoded else self.apply([update])[0]

    def _apply_encoded(self, update: Update) -> Bad:
        """Apply an update with encoded parts: by their sum, in this thread's memory, if all of it is finite."""
        size = self.slicing.size(update.index)
        total = means.total(update.parts, size)
        by_total = replace(update, parts=[total], divisor=len(update.parts), is_encoded=False)
        if all(map(means.is_encoded, update.parts)):
            # Each was checked on arrival and cannot change. If their sum overflows, nothing is updated and no part is
            # to blame.
            self.apply([by_total])
            return ()
        if means.all_finite(total):
            return self.apply([by_total])[0]
        return self.apply([replace(update, parts=means.decoded(update.parts, size), is_encoded=False)])[0]

    def _run(self, jobs: Sequence[SegmentJob], scalars: tuple[np.float32, ...]) -> list[tuple[int, list[int]]]:
        """Run the kernel on segments of one group, with the same scalars. Returns the rows with bad parts, and those
        parts."""
        most, arrays, segments, divisions, gradients = 1, [], [], [], []
        for _, update, segment in jobs:
            most = max(most, len(update.parts))
            arrays.append(segment.addresses)
            segments.append((segment.size, segment.start, len(update.parts)))
            divisions.append(division_of(update, self.sums))
            gradients.append(0 if update.mean is None else update.mean.ctypes.data)
        parts, codes = np.zeros((len(jobs), most), np.uintp), np.zeros((len(jobs), most), np.int64)
        bad = np.zeros((len(jobs), most), np.uint8)
        for row, (_, update, _) in enumerate(jobs):
            for column, part in enumerate(update.parts):
                parts[row, column] = part.ctypes.data
                codes[row, column] = CODES[part.dtype]
        self.rule.kernels[jobs[0][2].group](
            np.array(arrays, np.uintp),
            np.array(segments, np.int64),
            parts,
            codes,
            np.array(divisions, np.float32),
            _memory(),
            bad,
            np.array(gradients, np.uintp),
            scalars,
        )
        return [(row, np.flatnonzero(bad[row]).tolist()) for row in range(len(jobs))] if bad.any() else []

    def _addresses(self, index: int) -> list[int]:
        """Return the addresses of a slice's weights and state arrays, for the kernels."""
        first = self.slicing.bounds(index)[0]
        return [array.ctypes.data + 4 * first for array in self._arrays()[: 1 + len(self.states)]]

    def _segments_of(self, index: int, absent: Ranges = ()) -> tuple[GroupSegment, ...]:
        """Return the segments of all elements of a slice but ``absent``."""
        bases = self._addresses(index)
        return tuple(
            GroupSegment(
                start, stop - start, group, tuple(bases[array] + 4 * start for array in self.rule.arrays[group]), lag
            )
            for start, stop, group, lag in pieces(self._runs[index], self.lags.of(index), absent)
        )


def _memory() -> Array:
    """Return this kernel thread's working memory, so that the steady state allocates nothing."""
    memory: Array | None = getattr(_thread, "memory", None)
    if memory is None:
        memory = _thread.memory = np.zeros(2 * BLOCK, np.float32)
    return memory


def skip_absent(update: Update, lags: LagTable) -> None:
    """Count the elements that an update with parts has skipped, and clear them in the mean that it wrote out."""
    lags.skip(update.index, update.absent)
    for start, stop in update.absent:
        if update.mean is not None:
            update.mean[start:stop] = 0.0


def division_of(update: Update, sums: bool) -> tuple[np.float32, np.float32]:
    """Return divisor and factor of an update's sum, as the kernels take them."""
    if update.factor is not None:
        return np.float32(0.0), np.float32(update.factor)
    return division_by(1 if sums else update.divisor or len(update.parts))


def _combine(out: Array, parts: Sequence[Gradient], sums: bool, is_encoded: bool) -> Bad:
    """Write the mean of the finite parts to ``out``, or their sum. Returns the positions of the others."""
    given = [means.total(parts, out.size)] if is_encoded else parts
    if means.combine(out, given, 1 if sums else len(parts)):
        return ()
    # Shared parts could change between check and sum, so copy them first. This path is rare.
    copies = [part.copy() for part in means.decoded(parts, out.size)]
    bad = tuple(place for place, part in enumerate(copies) if not means.all_finite(part))
    if len(bad) < len(copies):  # There is no bad part if the sum overflowed.
        good = [part for place, part in enumerate(copies) if place not in bad]
        means.combine(out, good, 1 if sums else len(good))
    return bad


def _combine_weighted(out: Array, parts: Sequence[Gradient], weights: Sequence[float], sums: bool) -> Bad:
    """Do the same as ``_combine`` if parts have weights."""
    total, divisor, bad = means.weighted_total(parts, weights, out.size)
    means.combine(out, [total], 1 if sums else divisor)
    return bad


def gradient_of(payload: memoryview, dtype: str) -> Gradient:
    """Return the elements of a payload, in place if it is aligned. ``psdist.wire.frames`` aligns payloads. Those of
    other clients may have to be copied, because the kernels are compiled for aligned arrays."""
    values = np.frombuffer(payload, NUMPY_DTYPES[dtype])
    return values if values.flags.aligned else values.copy()


def all_finite(values: Gradient, dtype: str) -> bool:
    """Return True if no value of a contribution or of initial weights is NaN or Inf. dtype: that of the set."""
    if WORDS[dtype] == 1:
        return means.all_finite(values)
    doubles: NDArray[Any] = values.view(np.float64)
    return bool(np.isfinite(doubles).all())


@dataclass(frozen=True, eq=False, weakref_slot=True, slots=True)
class WrittenSlice:
    """Written elements of a slice.

    starts, sizes: int64[k], ranges of elements: ascending, without overlap.
    values: float32[sum of sizes], finite.
    """

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    values: Array

    @classmethod
    def read(cls, written: Any, index: int, slicing: Slicing, dtype: MasterDType) -> WrittenSlice:
        """Check the values for slice ``index``.

        written: message ``Written``: first element and number of elements of each range, and all values.
        dtype: in which servers compute.

        Raises InvalidArgumentError for ranges that overlap, descend or leave the slice, for another number of values,
        and for NaN or Inf.
        """
        starts, sizes = np.array(written.starts, np.int64), np.array(written.sizes, np.int64)
        elements = slicing.size(index)
        if starts.shape != sizes.shape or not sizes.size or sizes.min() < 1:
            raise InvalidArgumentError(
                f"{starts.size} starts and {sizes.size} sizes of the ranges written in slice {index}: send one of each "
                "for every range, and no empty range"
            )
        stops = starts + sizes
        odd = (starts % WORDS[dtype]).any() or (sizes % WORDS[dtype]).any()
        if (starts[1:] < stops[:-1]).any() or stops[-1] > elements or odd:
            raise InvalidArgumentError(
                f"the ranges written in slice {index} must ascend without overlap and end at {elements}, where it does"
            )
        expected = int(sizes.sum()) * ITEM_BYTES["float32"]
        if len(written.values) != expected:
            raise InvalidArgumentError(
                f"the ranges written in slice {index} have {expected} bytes in float32, not {len(written.values)}"
            )
        values = gradient_of(memoryview(written.values), "float32")
        if not all_finite(values, dtype):
            raise InvalidArgumentError(
                f"the values written in slice {index} hold NaN or Inf: training cannot continue from these"
            )
        return cls(starts, sizes, values)  # type: ignore[arg-type]  # float32, as asked for above

    def onto(self, weights: Array) -> Array:
        """Return a copy of a slice's weights, float32[n], with the written elements."""
        whole, at = weights.copy(), 0
        for start, size in zip(self.starts.tolist(), self.sizes.tolist(), strict=True):
            whole[start : start + size] = self.values[at : at + size]
            at += size
        return whole


def _runs_of(ranges: Sequence[GroupRange], start: int, stop: int) -> Runs:
    """Return the group of every element of [start, stop), as ranges relative to ``start``.

    ranges: ascending; possibly one per tensor.
    """
    runs: list[tuple[int, int, int]] = []
    position = start
    first = bisect_right(ranges, start, key=lambda one: one.stop)
    for item in ranges[first : bisect_left(ranges, stop, first, key=lambda one: one.start)]:
        low, high = max(item.start, start), min(item.stop, stop)
        if position < low:
            runs.append((position - start, low - start, 0))
        runs.append((low - start, high - start, item.group))
        position = high
    if position < stop or not runs:
        runs.append((position - start, stop - start, 0))
    return tuple(runs)
