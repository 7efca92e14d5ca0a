"""Assignment of samples to workers: in advance by ``DistributedSampler``, or by leases of ``client.dataset``.

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
from collections.abc import Iterator, Sized
from typing import Final

import numpy as np
from numpy.typing import NDArray

from psdist.errors import InvalidArgumentError, check_integer
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
