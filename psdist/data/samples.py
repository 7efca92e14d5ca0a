"""Samples of a worker: their assignment to workers, and sources that know their position.

``DistributedSampler`` divides the indices of a data set among the ranks of a world of fixed size, with the semantics
of torch.utils.data.DistributedSampler.

``client.dataset(...)`` (see ``psdist.client.datasets``) leases ranges of a data set to the current workers. The
scheduler assigns a data epoch and a range's number. ``RangeOrder`` computes the samples from the settings alone: with
``shuffle``, the order of a data epoch is ``default_rng((seed, data_epoch)).permutation(size)`` of numpy.random, as in
``DistributedSampler``; otherwise it is ascending. Range r is the part of that order from ``r * range_size`` up to ``(r
+ 1) * range_size`` or the end. The samples of the whole data set are therefore mixed, which takes 8 bytes of memory
per sample during a data epoch.

Invariants of ``DistributedSampler``, for one (size, num_replicas, shuffle, seed, drop_last, data epoch):

* every rank gets the same number of indices, ``len(sampler)``;
* without ``drop_last`` the ranks together cover every index; if the size is not divisible, the first indices of the
  order are used a second time as padding;
* with ``drop_last`` no index is used twice; the last ``size % num_replicas`` of the order are skipped;
* the order depends only on (seed, data epoch) and the size, so that ranks agree without communication.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from psdist.data.batches import arrays_of, length_of
from psdist.errors import InvalidArgumentError, SettingsMismatchError, ShapeMismatchError, check_integer
from psdist.types import DatasetSpec

_SEED_MAX: Final = (1 << 63) - 1


class DistributedSampler:
    """Iterable over this rank's indices of a data set, in the order of the current data epoch.

    dataset: a sized data set, or its size (0 or more).
    num_replicas: number of workers that share the data; None reads ``WORLD_SIZE`` from the environment, default 1.
    rank: this worker's number, from 0; None reads ``RANK`` from the environment, default 0.
    shuffle: True for a new permutation in each data epoch, False for ascending order.
    seed: seed of the permutations, equal on all ranks.
    drop_last: skip the tail instead of repeating samples from the start.

    Raises InvalidArgumentError for a value out of its range.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.size = _size_of(dataset)
        self.num_replicas = _from_environment("WORLD_SIZE", 1) if num_replicas is None else num_replicas
        self.rank = _from_environment("RANK", 0) if rank is None else rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        check_integer("num_replicas", self.num_replicas, 1, _SEED_MAX)
        check_integer("rank", self.rank, 0, self.num_replicas - 1)
        check_integer("seed", seed, 0, _SEED_MAX)

    def set_epoch(self, epoch: int) -> None:
        """Set the data epoch, from 0. Call it before each pass; otherwise every pass has the same order."""
        check_integer("epoch", epoch, 0, _SEED_MAX)
        self.epoch = epoch

    def indices(self) -> NDArray[np.int64]:
        """Return this rank's indices in iteration order, int64[len(self)]."""
        order = _permutation(self.size, self.seed, self.epoch) if self.shuffle else np.arange(self.size, dtype=np.int64)
        total = len(self) * self.num_replicas
        # Without ``drop_last`` the order is repeated from its start, as often as needed.
        order = order[:total] if total <= self.size else np.resize(order, total)
        return order[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def __len__(self) -> int:
        left_over = 0 if self.drop_last else self.num_replicas - 1
        return (self.size + left_over) // self.num_replicas

    def __repr__(self) -> str:
        return (
            f"<DistributedSampler rank {self.rank} of {self.num_replicas}: {len(self)} of {self.size} samples, "
            f"data epoch {self.epoch}>"
        )


class RangeOrder:
    """Samples of each range of a data set. Caches the orders of the last two data epochs."""

    def __init__(self, spec: DatasetSpec) -> None:
        self.spec = spec
        self._orders: dict[int, NDArray[np.int64]] = {}

    def knows(self, data_epoch: int) -> bool:
        """True if ``indices`` need not shuffle first."""
        return not self.spec.shuffle or data_epoch in self._orders

    def indices(self, data_epoch: int, number: int) -> NDArray[np.int64]:
        """Return the samples of range ``number``, in order, as int64."""
        start, stop = self.spec.bounds(number)
        if not self.spec.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        order = self._orders.pop(data_epoch, None)
        if order is None:
            order = _permutation(self.spec.size, self.spec.seed, data_epoch)
        while len(self._orders) > 1:
            del self._orders[next(iter(self._orders))]
        self._orders[data_epoch] = order
        return order[start:stop].copy()


def _permutation(size: int, seed: int, data_epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, data_epoch)).permutation(size).astype(np.int64, copy=False)


def _size_of(dataset: Sized | int) -> int:
    if isinstance(dataset, int) and not isinstance(dataset, bool):
        check_integer("dataset size", dataset, 0, _SEED_MAX)
        return dataset
    if not isinstance(dataset, Sized):
        raise InvalidArgumentError(f"dataset of type {type(dataset).__name__} has no length: pass its size instead")
    return len(dataset)


def _from_environment(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    try:
        return int(text)
    except ValueError:
        raise InvalidArgumentError(f"the environment's {variable}={text!r:.40} is not a whole number") from None


Lengths = Sequence[int] | NDArray[np.integer[Any]]
#: Prefix of a place's arrays among the states of a worker in a snapshot.
BATCHES: Final = "psdist-batches."
_FIELDS: Final = ("data_epoch", "taken", "digest")


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two batches. A snapshot holds the one from the call that made its last push.

    data_epoch: passes over the data that are over.
    taken: samples that were read in this pass.
    pending: numbers of those that were in no batch yet, ascending.
    digest: digest of the samples that were read, by which another order is noticed.
    """

    data_epoch: int = 0
    taken: int = 0
    pending: tuple[int, ...] = ()
    digest: int = 0

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the place as arrays, for a snapshot or a file."""
        numbers = {name: np.array([getattr(self, name)], np.uint64) for name in _FIELDS}
        return {**numbers, "pending": np.array(self.pending, np.uint64)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Position:
        """Return the place of ``to_arrays``; the beginning for an empty dict. Raises InvalidArgumentError."""
        if not arrays:
            return cls()
        try:
            numbers = {name: int(arrays[name].item()) for name in _FIELDS}
            pending = tuple(map(int, arrays["pending"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidArgumentError(f"the state of a DynamicBatcher is incomplete: {error!r}") from None
        position = cls(**numbers, pending=pending)
        if list(pending) != sorted(set(pending)) or (pending and not 0 <= pending[0] <= pending[-1] < position.taken):
            raise InvalidArgumentError(
                f"the state of a DynamicBatcher is wrong: {len(pending)} of {position.taken} samples are pending, and "
                "their numbers do not ascend below that"
            )
        return position


class PositionKeeper:
    """The current place. Threads may save and restore."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = Position()
        self._is_restored = False

    @property
    def now(self) -> Position:
        """The place after the newest batch."""
        return self._now

    def start(self) -> Position:
        """Return the place from which to continue."""
        with self._lock:
            self._is_restored = False
            return self._now

    def on_batch(self, after: Position) -> bool:
        """Record that a batch is taken, after which the place is ``after``. Returns False if another place was restored
        meanwhile, so that the batch does not come next."""
        with self._lock:
            if self._is_restored:
                return False
            self._now = after
            return True

    def end_pass(self) -> bool:
        """Start the next pass over the data. Returns False if another place was restored meanwhile."""
        with self._lock:
            if not self._is_restored:
                self._now = Position(self._now.data_epoch + 1)
            return not self._is_restored

    def save(self) -> dict[str, NDArray[Any]]:
        """Return the current place, for ``restore``."""
        with self._lock:
            return self._now.to_arrays()

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a saved place. Raises InvalidArgumentError."""
        position = Position.from_arrays(state)
        with self._lock:
            self._now, self._is_restored = position, True


@dataclass(frozen=True, slots=True)
class ReadSample:
    """A sample that was read. number: its place in the pass. arrays: None if it is loaded later, by its index."""

    number: int
    index: int
    length: int
    arrays: Mapping[str, NDArray[Any]] | None


class IndexedSamples:
    """Samples by index, such as a list or a data set of torch.

    lengths: lengths by index. With them a sample is loaded when its batch is made, else when it is read.
    """

    def __init__(self, samples: Any, lengths: Lengths | None) -> None:
        self._samples = samples
        self._lengths = lengths
        if lengths is not None and len(lengths) != len(samples):
            raise InvalidArgumentError(f"lengths= has {len(lengths)} entries for {len(samples)} samples: pass one each")

    def read(self, number: int, index: int) -> ReadSample:
        """Return the sample at ``index``."""
        if self._lengths is not None:
            return ReadSample(number, index, int(self._lengths[index]), None)
        arrays = arrays_of(self._samples[index])
        return ReadSample(number, index, length_of(arrays), arrays)

    def load(self, read: ReadSample) -> Mapping[str, NDArray[Any]]:
        """Return the arrays of a sample. Raises ShapeMismatchError if its length is not that in ``lengths``."""
        if read.arrays is not None:
            return read.arrays
        arrays = arrays_of(self._samples[read.index])
        if length_of(arrays) != read.length:
            raise ShapeMismatchError(
                f"sample {read.index} has the length {length_of(arrays)}, and lengths= has {read.length}: correct it"
            )
        return arrays


class Source:
    """The samples of one pass, which can be read again from any place.

    samples: a sequence of samples, or an iterable of them.
    order: indices of a sequence in the order of the pass; None for ascending.

    Raises InvalidArgumentError for an order or lengths of samples that have no indices.
    """

    def __init__(self, samples: Any, order: Iterable[int] | None, lengths: Lengths | None) -> None:
        self._entries: Iterable[Any] = samples
        self._indexed: IndexedSamples | None = None
        if is_indexed(samples):
            self._indexed = IndexedSamples(samples, lengths)
            self._entries = range(len(samples)) if order is None else order
        elif order is not None or lengths is not None:
            raise InvalidArgumentError(
                f"samples of type {type(samples).__name__} have no indices, so order= and lengths= do not apply: pass "
                "a sequence, or leave them out"
            )
        self._has_read = False
        #: Number of samples that were read, and the digest of their order.
        self.taken, self._hash = 0, xxhash.xxh3_64()

    @property
    def digest(self) -> int:
        """Digest of the samples that were read: of their indices, or of their lengths."""
        return self._hash.intdigest()

    def read(self, start: Position) -> Iterator[ReadSample]:
        """Yield the pending samples of a place, and then all later ones.

        Raises InvalidArgumentError if the data can be read only once, SettingsMismatchError if it is not the data of
        ``start``.
        """
        entries = iter(self._entries)
        if entries is self._entries and self._has_read:
            raise InvalidArgumentError(
                f"the run went back to a snapshot, and a {type(entries).__name__} can be read only once: pass a list, "
                "a sampler, or another iterable that starts again with each loop"
            )
        self._has_read, self.taken, self._hash = True, 0, xxhash.xxh3_64()
        pending = set(start.pending)
        for number, entry in enumerate(entries):
            arrays = self._count(entry)
            if self.taken == start.taken:
                self._check_same(start)
            if number >= start.taken or number in pending:
                yield self._sample(number, entry, arrays)
        if self.taken < start.taken:
            self._check_same(start)

    def load(self, read: ReadSample) -> Mapping[str, NDArray[Any]]:
        """Return the arrays of a sample."""
        if self._indexed is not None:
            return self._indexed.load(read)
        assert read.arrays is not None
        return read.arrays

    def _count(self, entry: Any) -> Mapping[str, NDArray[Any]] | None:
        """Count a sample as read. Returns its arrays, unless it has an index."""
        self.taken += 1
        if self._indexed is not None:
            self._hash.update(int(entry).to_bytes(8, "little", signed=True))
            return None
        arrays = arrays_of(entry)
        self._hash.update(length_of(arrays).to_bytes(8, "little"))
        return arrays

    def _sample(self, number: int, entry: Any, arrays: Mapping[str, NDArray[Any]] | None) -> ReadSample:
        if self._indexed is not None:
            return self._indexed.read(number, int(entry))
        assert arrays is not None
        return ReadSample(number, number, length_of(arrays), arrays)

    def _check_same(self, start: Position) -> None:
        if (self.taken, self.digest) != (start.taken, start.digest):
            raise SettingsMismatchError(
                f"the first {start.taken} samples are not those, in their order, that the batches of the snapshot came "
                "from: resume with the same data, seed and number of workers, or start a new run"
            )


def is_indexed(samples: Any) -> bool:
    """Return True if samples have indices: a sequence, an array, or a data set of torch with a length."""
    return hasattr(samples, "__getitem__") and hasattr(samples, "__len__") and not isinstance(samples, Mapping)
