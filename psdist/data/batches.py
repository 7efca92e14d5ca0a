"""Batches of variable-length samples: padding, and the decisions which samples make a batch. Pure.

A sample waits in the bucket of its length, and a bucket becomes a group (a batch without its values) when it is full:
when it has ``samples_max`` samples, when no further sample fits below ``tokens_max``, or before a sample that does not
fit. A group also ends with the data, when its first sample has waited ``seconds``, and when ``capacity`` samples wait
in all buckets; then it is the one whose first sample has waited longest.

Invariants: each sample is in exactly one group. The samples of a bucket leave in the order in which they came. Groups
depend on the sequence of lengths alone, unless ``seconds`` is set. A machine that is given the waiting samples of
another, in their order, continues as that one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psdist.errors import DTypeMismatchError, InvalidArgumentError, ShapeMismatchError, check_integer
from psdist.wire.limits import BATCH_SAMPLES_MAX, BATCH_TOKENS_MAX

#: A sample: an array whose first axis is its length, or several of them by name, of one length, beside single numbers.
Sample = ArrayLike | Mapping[str, ArrayLike]
_KINDS: Final = "biufc"


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one step.

    values: the padded samples, [samples, length, ...], by name if the samples have names; single numbers are [samples].
    mask: bool[samples, length]; False for padding.
    lengths: int64[samples], the lengths without padding.
    indices: int64[samples], the samples' indices in the data.
    """

    values: Any
    mask: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    indices: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        """Elements without padding: the weight of a step whose loss is their mean."""
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)


def arrays_of(sample: Sample) -> dict[str, NDArray[Any]]:
    """Return the arrays of a sample; one without a name is "". Raises InvalidArgumentError if they are no numbers."""
    named = sample if isinstance(sample, Mapping) else {"": sample}
    arrays = {name: np.asarray(value) for name, value in named.items()}
    for name, array in arrays.items():
        if array.dtype.kind not in _KINDS:
            raise InvalidArgumentError(
                f"a sample{_named(name)} of type {type(named[name]).__name__} is no array of numbers: pass arrays or "
                "lists of numbers, or a dict of them"
            )
    return arrays


def length_of(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Return the length of a sample. Raises ShapeMismatchError if it has none, or more than one."""
    lengths = {name: len(array) for name, array in arrays.items() if array.ndim}
    if len(set(lengths.values())) != 1:
        found = f"arrays of lengths {lengths}" if lengths else "no array with an axis"
        raise ShapeMismatchError(f"a sample has {found}: its arrays need one common length, the first axis")
    return next(iter(lengths.values()))


def pad(
    samples: Sequence[Mapping[str, NDArray[Any]]],
    indices: Sequence[int],
    width: int,
    value: float | Mapping[str, float],
) -> Batch:
    """Return a batch.

    samples: their arrays, as ``arrays_of`` returns them.
    width: length to pad to.
    value: value of the padding, or values by name.

    Raises InvalidArgumentError, ShapeMismatchError and DTypeMismatchError if the samples differ in more than length.
    """
    lengths = np.array([length_of(sample) for sample in samples], np.int64)
    names = samples[0].keys()
    if any(sample.keys() != names for sample in samples):
        raise InvalidArgumentError(f"samples of one batch have different names than {sorted(names)}: use the same")
    values = value if isinstance(value, Mapping) else dict.fromkeys(names, value)
    padded = {name: _pad(name, [sample[name] for sample in samples], width, values.get(name, 0)) for name in names}
    mask = np.arange(width) < lengths[:, None]
    return Batch(padded[""] if list(names) == [""] else padded, mask, lengths, np.asarray(indices, np.int64))


def _pad(name: str, arrays: Sequence[NDArray[Any]], width: int, value: float) -> NDArray[Any]:
    first = arrays[0]
    for array in arrays:
        if array.dtype != first.dtype:
            raise DTypeMismatchError(
                f"samples{_named(name)} of one batch are {first.dtype} and {array.dtype}: convert them to one dtype"
            )
        if array.shape[1:] != first.shape[1:] or array.ndim != first.ndim:
            raise ShapeMismatchError(
                f"samples{_named(name)} of one batch have the shapes {first.shape} and {array.shape}: they may differ "
                "in the first axis only"
            )
    if not first.ndim:
        return np.array(arrays)
    padded = np.full((len(arrays), width, *first.shape[1:]), _checked(value, first.dtype), first.dtype)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return padded


def _checked(value: float, dtype: np.dtype[Any]) -> float:
    """Return ``value`` if the dtype has it, else raise InvalidArgumentError."""
    with np.errstate(all="ignore"):
        is_kept = dtype.kind in "fc" or np.asarray(value).astype(dtype).astype(np.float64) == value
    if not is_kept:
        raise InvalidArgumentError(f"pad_value={value!r} is no value of {dtype}: choose one, or convert the samples")
    return value


def _named(name: str) -> str:
    return f" {name!r:.80}" if name else ""


Padding = Literal["longest", "bucket"]

#: Buckets by default: each bound is about a quarter above the one before, in multiples of 8.
_STEP: Final = 8
_GROWTH: Final = 4


def default_bounds() -> tuple[int, ...]:
    """Return the default bounds, up to the longest sample."""
    bounds = [_STEP]
    while bounds[-1] < BATCH_TOKENS_MAX:
        grown = bounds[-1] + bounds[-1] // _GROWTH
        bounds.append(max(bounds[-1] + _STEP, -(-grown // _STEP) * _STEP))
    return (*bounds[:-1], BATCH_TOKENS_MAX)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of batches.

    samples_max: samples of a batch.
    tokens_max: elements of a batch after padding; None for no limit.
    bounds: longest sample of each bucket, ascending; empty for one bucket.
    padding: "longest" pads to the longest sample of a batch, "bucket" to the bound of its bucket.
    seconds: longest wait of a sample; None for no limit.
    capacity: samples that wait in all buckets.
    """

    samples_max: int
    tokens_max: int | None
    bounds: tuple[int, ...]
    padding: Padding
    seconds: float | None
    capacity: int

    def __post_init__(self) -> None:
        check_integer("max_batch_size", self.samples_max, 1, BATCH_SAMPLES_MAX)
        if self.tokens_max is not None:
            check_integer("max_tokens", self.tokens_max, 1, BATCH_TOKENS_MAX)
        check_integer("capacity", self.capacity, self.samples_max, BATCH_SAMPLES_MAX)
        for bound in self.bounds:
            check_integer("a bound of buckets", bound, 1, BATCH_TOKENS_MAX)
        if any(bound >= after for bound, after in zip(self.bounds, self.bounds[1:], strict=False)):
            raise InvalidArgumentError(f"buckets={self.bounds!r:.80} do not ascend: sort them, each once")
        if self.padding not in ("longest", "bucket"):
            raise InvalidArgumentError(f'padding={self.padding!r:.40} is unknown: use "longest" or "bucket"')
        if self.padding == "bucket" and not self.bounds:
            raise InvalidArgumentError('padding="bucket" pads to the bounds of buckets, and buckets=() has none')
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise InvalidArgumentError(
                f"timeout_ms={self.seconds * 1000:g} is not possible: pass milliseconds above 0, or None"
            )

    def bound(self, length: int) -> int:
        """Return the bound of a sample's bucket; 0 if there is one bucket. Raises InvalidArgumentError for a sample
        that no batch can have."""
        place = bisect_left(self.bounds, length)
        if self.bounds and place == len(self.bounds):
            raise InvalidArgumentError(
                f"a sample of length {length} is longer than the last bucket, {self.bounds[-1]}: add a larger bound to "
                "buckets=, or cut the sample"
            )
        bound = self.bounds[place] if self.bounds else 0
        if self.tokens_max is not None and self.width(bound, length) > self.tokens_max:
            raise InvalidArgumentError(
                f"a sample of length {length}, padded to {self.width(bound, length)}, is larger than "
                f"max_tokens={self.tokens_max}: raise it, or cut the sample"
            )
        return bound

    def width(self, bound: int, longest: int) -> int:
        """Return the length to which a batch is padded."""
        return bound if self.padding == "bucket" else longest

    def fits(self, samples: int, width: int) -> bool:
        """Return True if a batch may have this number of samples of this width."""
        return samples <= self.samples_max and (self.tokens_max is None or samples * width <= self.tokens_max)


@dataclass(frozen=True, slots=True)
class Item:
    """A waiting sample. number: its place in the sequence of all samples."""

    number: int
    length: int
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """Samples of one batch, and the length that they are padded to."""

    numbers: tuple[int, ...]
    width: int


class BatchMachine:
    """The waiting samples."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        #: Waiting samples by bound, without empty buckets.
        self._buckets: dict[int, list[Item]] = {}
        self.waiting = 0

    def numbers(self) -> list[int]:
        """Return the numbers of the waiting samples, ascending."""
        return sorted(item.number for bucket in self._buckets.values() for item in bucket)

    def add(self, item: Item) -> list[SampleGroup]:
        """Add a sample. Returns the groups that end, in order. Raises InvalidArgumentError as ``BatchLimits.bound``."""
        limits, bound, groups = self.limits, self.limits.bound(item.length), list[SampleGroup]()
        bucket = self._buckets.get(bound, [])
        longest = max((each.length for each in bucket), default=0)
        if bucket and not limits.fits(len(bucket) + 1, limits.width(bound, max(longest, item.length))):
            groups.append(self._take(bound))
            longest = 0
        bucket = self._buckets.setdefault(bound, [])
        bucket.append(item)
        self.waiting += 1
        if not limits.fits(len(bucket) + 1, limits.width(bound, max(longest, item.length))):
            groups.append(self._take(bound))
        if self.waiting >= limits.capacity:
            groups += self.take_oldest()
        return groups

    def on_time(self, now: float) -> list[SampleGroup]:
        """Return the groups whose first sample has waited long enough, longest first."""
        groups = list[SampleGroup]()
        while (deadline := self.deadline) is not None and deadline <= now:
            groups += self.take_oldest()
        return groups

    @property
    def deadline(self) -> float | None:
        """Time at which ``on_time`` ends the next group; None if no sample waits, or without a limit."""
        if self.limits.seconds is None or not self._buckets:
            return None
        return self._buckets[self._oldest()][0].since + self.limits.seconds

    def take_oldest(self) -> list[SampleGroup]:
        """Return the group whose first sample has waited longest, if there is one."""
        return [self._take(self._oldest())] if self._buckets else []

    def flush(self) -> list[SampleGroup]:
        """Return all waiting samples in groups, because no more come."""
        groups = list[SampleGroup]()
        while self._buckets:
            groups += self.take_oldest()
        return groups

    def validate(self) -> None:
        """Check the invariants."""
        assert self.waiting == sum(map(len, self._buckets.values())) < self.limits.capacity
        for bound, bucket in self._buckets.items():
            numbers = [item.number for item in bucket]
            assert numbers and numbers == sorted(set(numbers))
            assert all(self.limits.bound(item.length) == bound for item in bucket)
            assert self.limits.fits(len(bucket), self.limits.width(bound, max(item.length for item in bucket)))

    def _oldest(self) -> int:
        return min(self._buckets, key=lambda bound: self._buckets[bound][0].number)

    def _take(self, bound: int) -> SampleGroup:
        bucket = self._buckets.pop(bound)
        self.waiting -= len(bucket)
        width = self.limits.width(bound, max(item.length for item in bucket))
        return SampleGroup(tuple(item.number for item in bucket), width)
