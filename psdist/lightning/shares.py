"""Shares of a loader's samples: each worker has its part of every batch of a single process.

Lightning's own sampler for distributed training shuffles a loader that the script does not shuffle. This one keeps the
script's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler, SequentialSampler

from psdist.errors import InvalidArgumentError


class SharedSampler(Sampler[int]):
    """Yields this worker's share of the indices of ``sampler``.

    With N workers and loaders of B samples, each N * B consecutive indices are a batch of all workers, and each worker
    takes B of them. The last batch may be smaller.

    pads: repeat up to N - 1 of the first indices, so that all workers have as many.

    Each pass starts with a broadcast of rank 0's indices, unless they are in order. Raises InvalidArgumentError for
    indices that are not whole numbers.
    """

    def __init__(self, sampler: Any, batch_size: int, rank: int, world_size: int, *, pads: bool) -> None:
        self._sampler = sampler
        self._batch = batch_size
        self._rank = rank
        self._world_size = world_size
        self._pads = pads

    def __iter__(self) -> Iterator[int]:
        indices = self._indices()
        whole = self._batch * self._world_size
        for start in range(0, len(indices), whole):
            part = indices[start : start + whole]
            if self._pads:
                missing = -len(part) % self._world_size
                part += (indices * -(-missing // len(indices)))[:missing]
            size, more = divmod(len(part), self._world_size)
            first = self._rank * size + min(self._rank, more)
            yield from part[first : first + size + (self._rank < more)]

    def __len__(self) -> int:
        whole = self._batch * self._world_size
        full, rest = divmod(_length(self._sampler), whole)
        share, more = divmod(rest, self._world_size)
        return full * self._batch + share + (more > 0 if self._pads else self._rank < more)

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the data epoch to a sampler that wants it."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    def _indices(self) -> list[int]:
        found = list(self._sampler)
        if isinstance(self._sampler, SequentialSampler):
            return found
        if not all(isinstance(one, int) for one in found):
            raise InvalidArgumentError(
                "a loader's sampler yields other values than whole numbers: divide the data by rank in the script, "
                "and pass use_distributed_sampler=False to the Trainer"
            )
        order = torch.tensor(found)
        dist.broadcast(order, 0)
        indices: list[int] = order.tolist()
        return indices


def _length(sampler: Sized) -> int:
    return len(sampler)
