"""The arrays of a parameter set on one server, and what an update does to them.

Weights and optimizer state are one float32 array each, virtual over the whole vector: slice i lies at its own
``slicing.bounds(i)``. Only slices that are held have memory. So P parameters with Adam cost 12 x P bytes, and shards
come and go without moving anything. Workers on this host may read the weights in place (``memory``). Where workers are
sent compressed differences, the published weights are one more array, and workers read these (``published``). The shard
machines decide which update runs when. Methods that compute (``combine``, ``apply``, ``digest``) release the GIL and
may run in kernel threads, at most one per slice at a time. ``hold`` and ``release`` may run at the same time for other
slices.

Invariants: each contribution is read once, into memory of the kernel, so that it may change meanwhile without harm. No
NaN or Inf of a contribution reaches the weights. Such a contribution is left out of its block of ``BLOCK`` elements, or
of the slice where contributions have weights, and its position is returned. A block whose sum overflows is not updated.
An update by the mean of ``combine``, or by the mean that ``apply`` wrote out, gives the bytes of the update by its
parts. Contributions that came encoded give the bytes of those that they decode to. What a released slice held is gone,
except what workers read, which can be read until ``reclaim``.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.compression.pulls import pull_codec_from_text
from psdist.errors import InternalError, InvalidArgumentError
from psdist.types import GroupRange, ParametersEntry
from psdist_server.kernels import encoded, kernels
from psdist_server.kernels.interpreted import BLOCK, CODES
from psdist_server.kernels.memory import AnonymousMemory, WeightsMemory, joined
from psdist_server.kernels.optimizers import Rule
from psdist_server.kernels.published import PublishedWeights

Array = NDArray[np.float32]
#: A contribution as it came: float32, float16 or bfloat16, aligned, perhaps read-only; or uint8, encoded.
Gradient = NDArray[np.generic]
Runs = tuple[tuple[int, int, int], ...]
#: Name of the array of published weights, which is the last one of a slice.
PUBLISHED: Final = "published"
#: Positions of contributions that hold NaN or Inf and were left out.
Bad = tuple[int, ...]
_thread = threading.local()


@dataclass(frozen=True, slots=True)
class Update:
    """Update number ``step`` of a slice, by the mean of the parts, which are added in their order. Without parts only
    the version goes on.

    factor: what the only part is multiplied by (clipping). mean: float32[n] that what is applied is written to: an
        update by it, without a factor, gives the same bytes. copy: float32 that the slice is copied to before
        (``copy_slice``). is_encoded: some of the parts came encoded. weights: what each part counts for; empty where
        all count the same. divisor: what the only part is divided by, as it is a sum; 0 where each part is one.
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


class UpdateWork(Protocol):
    """What has an update to be carried out."""

    @property
    def update(self) -> Update:
        """The update."""


class Applied(NamedTuple):
    """What came of an update: seconds that it took, and which parts were left out."""

    seconds: float
    bad: Bad


@dataclass(frozen=True, slots=True)
class GroupSegment:
    """A range of a slice whose elements belong to one group: where it begins, and where its weights and state lie."""

    start: int
    size: int
    group: int
    addresses: tuple[int, ...]


#: The number of an update in its batch, the update, and one segment of its slice.
SegmentJob = tuple[int, Update, GroupSegment]


class DenseParameters:
    """The slices of ``entry`` that this server holds a copy of; none at first.

    has_states: the optimizer's state lies in the host's memory. Else a subclass has it elsewhere.
    """

    def __init__(self, entry: ParametersEntry, *, has_states: bool = True) -> None:
        self.slicing = entry.slicing
        self.held: set[int] = set()
        #: The same, ascending.
        self.indices: tuple[int, ...] = ()
        #: Slices with all of their content.
        self.installed: set[int] = set()
        self._ranges = entry.ranges
        self._runs: dict[int, Runs] = {}
        self._segments: dict[int, tuple[GroupSegment, ...]] = {}
        self.rule = Rule(entry.spec.optimizer, entry.state_since)
        #: What workers read: the weights, or the published ones.
        self.weights = WeightsMemory(self.slicing)
        #: None where workers read the weights themselves.
        self.published: PublishedWeights | None = None
        if entry.spec.pull_compression:
            codec = pull_codec_from_text(entry.spec.pull_compression)
            self.published = PublishedWeights(codec, self.slicing, self.weights)
        states = len(self.rule.state_names) if has_states else 0
        #: Memory of the optimizer's state; and of the weights, where workers read others.
        self._private = tuple(AnonymousMemory(self.slicing.total) for _ in range(states + (self.published is not None)))
        self.states = tuple(memory.array for memory in self._private[:states])
        self._arrived: dict[int, set[int]] = {}

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of a slice's arrays after its weights."""
        return (*self.rule.state_names, *((PUBLISHED,) if self.published is not None else ()))

    @property
    def array_count(self) -> int:
        """How many arrays a slice has."""
        return 1 + len(self.state_names)

    def _arrays(self) -> list[Array]:
        """float32[total] each: the weights, the optimizer's state, and the published weights where there are some."""
        if self.published is None:
            return [self.weights.array, *self.states]
        return [self._private[-1].array, *self.states, self.weights.array]

    def hold(self, indices: Iterable[int]) -> None:
        """Gives slices memory; their content is not there yet. Those that are held stay as they are.

        Raises LimitExceededError where there is no room beside slices that are held already; then nothing has changed.
        """
        new = sorted(set(indices) - self.held)
        self.weights.hold(new)
        for start, stop in joined(self.slicing, new):
            for memory in self._private:
                memory.use(start, stop)
        for index in new:
            self._runs[index] = _runs_of(self._ranges, *self.slicing.bounds(index))
            self._segments[index] = self._segments_of(index)
        self._set_held(self.held.union(new))

    def release(self, indices: Iterable[int]) -> None:
        """Gives the memory of slices back, whole pages of it; that of their weights is given back by ``reclaim``. No
        kernel may be at them."""
        gone = sorted(self.held.intersection(indices))
        for start, stop in joined(self.slicing, gone):
            for memory in self._private:
                memory.give_back(start, stop)
        if self.published is not None:
            self.published.forget(gone)
        for index in gone:
            for table in (self._runs, self._segments, self._arrived):
                table.pop(index, None)
        self.installed.difference_update(gone)
        self._set_held(self.held.difference(gone))
        self.weights.release(gone)

    def reclaim(self, indices: Iterable[int]) -> None:
        """Gives the memory of released slices' weights back, whole pages of it. Nothing may read them in place any
        more: what is read there afterwards is zeros. Slices that are held again are left alone. In a thread, as for
        ``release`` and ``close``: it takes 0.1 s for a gigabyte."""
        self.weights.reclaim(indices)

    def _set_held(self, held: set[int]) -> None:
        self.held, self.indices = held, tuple(sorted(held))

    def close(self) -> None:
        """Gives the arena back; workers that have it mapped keep their view."""
        self.weights.close()

    def install(self, index: int, values: Gradient, version: int = 0) -> None:
        """Sets the weights of a slice, which are those of ``version``, and the state that an optimizer begins with at
        them."""
        arrays = self.export(index)
        weights, states = arrays[0], arrays[1 : 1 + len(self.rule.state_names)]
        self.weights.sequence[index] = 2 * version + 1
        weights[...] = values
        if self.published is not None:
            self.published.begin(index, weights)
        self.weights.sequence[index] = 2 * version
        self.rule.initialize(weights, states, self._runs[index])
        self._stored(index, dict(enumerate(arrays)))
        self.installed.add(index)

    def _stored(self, index: int, arrays: Mapping[int, Array]) -> None:
        """These arrays of a slice, by their numbers in ``export``, which gave them, were written to."""

    def export(self, index: int) -> list[Array]:
        """The arrays of a slice, where they lie: its weights, and those of ``state_names``."""
        if index not in self.held:
            raise InternalError(f"slice {index} is not held here")
        part = slice(*self.slicing.bounds(index))
        return [array[part] for array in self._arrays()]

    def copy_slice(self, index: int, out: Array) -> None:
        """Copies the arrays of a slice to ``out``, one after another."""
        start = 0
        for array in self.export(index):
            out[start : start + array.size] = array
            start += array.size

    def install_state(self, index: int, array_number: int, values: Array, version: int) -> None:
        """Sets one array of a slice, numbered as ``export`` has them, which is that of ``version``. The slice is
        installed with the last of them. Raises InvalidArgumentError where there is no such array, or not of this
        size."""
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
        """16 bytes that tell the arrays of a slice from any others (xxh3_128)."""
        state = xxhash.xxh3_128()
        for array in self.export(index):
            state.update(array.data)
        return state.digest()

    def read(self, index: int, dtype: str) -> memoryview:
        """What workers read of a slice as payload bytes; a view of it where ``dtype`` is float32."""
        if index not in self.held:
            raise InternalError(f"slice {index} is not held here")
        return kernels.cast(self.weights.array[slice(*self.slicing.bounds(index))], dtype).view(np.uint8).data

    def combine(
        self, index: int, parts: Sequence[Gradient], is_encoded: bool = False, weights: tuple[float, ...] = ()
    ) -> tuple[Array | None, float, Bad]:
        """The mean of the parts that are finite, its sum of squares, and the positions of the others. The mean is None
        where nothing is left. An update by it gives the bytes of the update by these parts. is_encoded, weights: as in
        ``Update``."""
        if not parts:
            return None, 0.0, ()
        mean = np.empty(self.slicing.size(index), np.float32)
        if weights:
            bad = _combine_weighted(mean, parts, weights)
        else:
            bad = _combine_encoded(mean, parts) if is_encoded else _combine(mean, parts)
        return (None, 0.0, bad) if len(bad) == len(parts) else (mean, kernels.sum_squares(mean), bad)

    def carry_out(self, works: Sequence[tuple[int, UpdateWork]]) -> list[Applied]:
        """Runs in a kernel thread, or on the loop: updates of slices that this server is the primary of, and of copies,
        in one batch."""
        started = time.perf_counter()
        updates = [work.update for _, work in works]
        for update in updates:
            if update.copy is not None:
                self.copy_slice(update.index, update.copy)
        left_out = self.apply(updates)
        seconds = (time.perf_counter() - started) / len(works)
        return [Applied(seconds, bad) for bad in left_out]

    def apply(self, updates: Sequence[Update]) -> list[Bad]:
        """Carries updates of different slices out, and returns for each which parts were left out."""
        if any(update.is_encoded or update.weights for update in updates):
            # One by one: the sum of a slice stays in the cache from its decoding to its use, in the same memory.
            return [self._apply_alone(update) for update in updates]
        return self._apply(updates)

    def _apply_alone(self, update: Update) -> Bad:
        if update.weights and update.parts:
            total, divisor, bad = encoded.weighted_total(update.parts, update.weights, self.slicing.size(update.index))
            self._apply([replace(update, parts=[total], divisor=divisor, is_encoded=False, weights=())])
            return bad
        return self._apply_encoded(update) if update.is_encoded else self._apply([update])[0]

    def _apply_encoded(self, update: Update) -> Bad:
        """Carries an update by encoded parts out: by their sum, in this thread's memory, where all of it is finite."""
        size = self.slicing.size(update.index)
        total = encoded.total(update.parts, size)
        by_total = replace(update, parts=[total], divisor=len(update.parts), is_encoded=False)
        if all(map(encoded.is_encoded, update.parts)):
            # Each was checked when it came, and stays as it was. Where their sum overflows nothing is updated, and
            # none of them is to blame.
            self._apply([by_total])
            return ()
        if kernels.all_finite(total):
            return self._apply([by_total])[0]
        return self._apply([replace(update, parts=encoded.decoded(update.parts, size), is_encoded=False)])[0]

    def _apply(self, updates: Sequence[Update]) -> list[Bad]:
        sequence = self.weights.sequence
        by_scalars: dict[tuple[int, float, int], list[SegmentJob]] = {}
        for number, update in enumerate(updates):
            if update.parts:
                sequence[update.index] = 2 * update.step + 1
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
            if self.published is not None and update.parts:
                weights = self._arrays()[0][slice(*self.slicing.bounds(update.index))]
                self.published.publish(update.index, update.step + 1, weights)
            elif self.published is not None:
                self.published.unchanged(update.index)
            sequence[update.index] = 2 * update.step + 2
        return [tuple(sorted(parts)) for parts in bad]

    def _run(self, jobs: Sequence[SegmentJob], scalars: tuple[np.float32, ...]) -> list[tuple[int, list[int]]]:
        """Runs the kernel on segments with the same scalars; rows of those that had bad parts, and the parts."""
        most = max(len(update.parts) for _, update, _ in jobs)
        parts, codes = np.zeros((len(jobs), most), np.uintp), np.zeros((len(jobs), most), np.int64)
        for row, (_, update, _) in enumerate(jobs):
            for column, part in enumerate(update.parts):
                parts[row, column] = kernels.address_of(part)
                codes[row, column] = CODES[part.dtype]
        bad = np.zeros((len(jobs), most), np.uint8)
        self.rule.fused(
            np.array([segment.addresses for _, _, segment in jobs], np.uintp),
            np.array([(segment.size, segment.start, len(update.parts)) for _, update, segment in jobs], np.int64),
            parts,
            codes,
            np.array([division_of(update) for _, update, _ in jobs], np.float32),
            _memory(),
            bad,
            np.array([kernels.address_of(one.mean) if one.mean is not None else 0 for _, one, _ in jobs], np.uintp),
            scalars,
        )
        return [(row, np.flatnonzero(bad[row]).tolist()) for row in range(len(jobs))] if bad.any() else []

    def _addresses(self, index: int) -> list[int]:
        """Where the weights of a slice begin, and its arrays of state, for the kernels."""
        first = self.slicing.bounds(index)[0]
        return [kernels.address_of(array) + 4 * first for array in self._arrays()[: 1 + len(self.states)]]

    def _segments_of(self, index: int) -> tuple[GroupSegment, ...]:
        bases = self._addresses(index)
        return tuple(
            GroupSegment(start, stop - start, group, tuple(base + 4 * start for base in bases))
            for start, stop, group in self._runs[index]
        )


def _memory() -> Array:
    """Working memory of this kernel thread, so that the steady state allocates none."""
    memory: Array | None = getattr(_thread, "memory", None)
    if memory is None:
        memory = _thread.memory = np.zeros(2 * BLOCK, np.float32)
    return memory


def division_of(update: Update) -> tuple[np.float32, np.float32]:
    """Divisor and factor of an update's sum, as the kernels take them."""
    if update.factor is not None:
        return np.float32(0.0), np.float32(update.factor)
    return kernels.division_by(update.divisor or len(update.parts))


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


def _combine_encoded(out: Array, parts: Sequence[Gradient]) -> Bad:
    """``_combine`` where some parts came encoded."""
    if kernels.combine(out, [encoded.total(parts, out.size)], len(parts)):
        return ()
    return _combine(out, encoded.decoded(parts, out.size))


def _combine_weighted(out: Array, parts: Sequence[Gradient], weights: Sequence[float]) -> Bad:
    """``_combine`` where parts count for different amounts."""
    total, divisor, bad = encoded.weighted_total(parts, weights, out.size)
    kernels.combine(out, [total], divisor)
    return bad


def gradient_of(payload: memoryview, dtype: str) -> Gradient:
    """The elements of a payload, in place. ``psdist.wire.frames`` aligns payloads; those of other clients may have to
    be copied, because the kernels are compiled for aligned arrays."""
    values = np.frombuffer(payload, NUMPY_DTYPES[dtype])
    return values if values.flags.aligned else values.copy()


def _runs_of(ranges: Sequence[GroupRange], start: int, stop: int) -> Runs:
    """The group of every element of [start, stop), as ranges relative to ``start``. ranges: ascending, of which there
    may be one for each tensor."""
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
