"""``LeasedDataLoader``: torch's loader over ranges that the scheduler leases to the workers of a run.

A loader with worker processes reads ahead: it requests batches long before the loop trains on them. This loader
therefore holds several ranges, and reports each one when the loop has used its last batch.

Invariants: A range is reported as used when the loop requests the batch after its last one, and returned if the loop
ends before that. Batches come in the order in which their indices were requested, without those of ranges that are not
held any more, because the run rolled back or the worker was expelled.

This module also detects loaders whose data the script has divided by itself, or whose order follows from a random
generator.

Not here: the samples of a range (``psdist.data``), the assignment of ranges (the scheduler).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sized
from typing import Any, Final

from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from psdist import data
from psdist.client.datasets import Range
from psdist.client.sync_client import Dataset as Leases
from psdist.errors import InvalidArgumentError, check_integer
from psdist.wire.limits import LEASES_MAX

#: Arguments of torch's loader that leases replace.
_REPLACED: Final = ("shuffle", "sampler", "batch_sampler", "drop_last")
#: A larger batch would span several ranges anyway.
_BATCH_SIZE_LAST: Final = 1 << 31
#: Batches that each process of a loader reads ahead by default.
_PREFETCH_FACTOR: Final = 2


class LeasedDataLoader(DataLoader[Any]):
    """Iterates over batches of this worker's samples until no range is left. Replaces a ``DistributedSampler``.

    It suits workers that come and go: no sample is lost with a worker.

        leases = client.dataset("train", size=len(images), range_size=256, data_epochs=3)
        for inputs, labels in psdist.torch.LeasedDataLoader(images, leases, batch_size=64, num_workers=2):

    dataset: a data set whose length is the ``size`` of ``leases``.
    leases: made by ``Client.dataset``, which shuffles.
    batch_size: samples of a batch. The last batch of a range is smaller unless it divides ``range_size``.
    options: options of torch.utils.data.DataLoader, such as num_workers and collate_fn, except those that ``leases``
        replace.

    Its length is unknown. One loop runs at a time. Batches read ahead are returned when a loop ends early. Raises
    InvalidArgumentError for a data set of another size, unsupported options, and a loader that would hold more than 64
    ranges at a time. Iterating raises the errors of ``Client.dataset``.
    """

    def __init__(self, dataset: Dataset[Any], leases: Leases, batch_size: int = 1, **options: Any) -> None:
        for name in _REPLACED:
            if options.pop(name, None):
                raise InvalidArgumentError(
                    f"{name}= does not apply to a LeasedDataLoader: samples and their order are set by "
                    "client.dataset(shuffle=, seed=, range_size=)"
                )
        if not options.get("in_order", True):
            raise InvalidArgumentError("in_order=False is not supported: a range is used when all its batches are")
        check_integer("batch_size", batch_size, 1, _BATCH_SIZE_LAST)
        size = len(dataset) if isinstance(dataset, Sized) else None
        if size != leases.spec.size:
            raise InvalidArgumentError(
                f"the data set has {'no length' if size is None else f'{size} samples'}, but {leases.name!r} was made "
                f"with size={leases.spec.size}"
            )
        _check_ahead(leases, batch_size, options)
        self._leased = _LeasedBatches(leases, batch_size)
        super().__init__(dataset, batch_sampler=self._leased, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch returns its own class
        try:
            # If pushes were dropped, their ranges return after the loader reached the end.
            while self._leased.lease_first():
                for batch in super().__iter__():
                    if self._leased.holds_next():
                        yield batch
                    self._leased.on_used()
        finally:
            self._leased.give_back()


class _LeasedBatches:
    """Indices of the next batches, and the batches that the loop has not used yet."""

    def __init__(self, leases: Leases, batch_size: int) -> None:
        self._leases = leases
        self._batch_size = batch_size
        self._first: Range | None = None
        #: One entry per requested but unused batch: its range, and True if it is the last of that range.
        self._ahead: deque[tuple[Range, bool]] = deque()
        #: Held ranges, each with True if the loop used a batch of it.
        self._held: dict[int, tuple[Range, bool]] = {}

    def lease_first(self) -> bool:
        """Lease a range. Returns False at the end of the data."""
        self._first = self._lease()
        return self._first is not None

    def __iter__(self) -> Iterator[list[int]]:
        held, self._first = self._first, None
        while held is not None:
            indices = held.indices.tolist()
            for start in range(0, len(indices), self._batch_size):
                stop = start + self._batch_size
                self._ahead.append((held, stop >= len(indices)))
                yield indices[start:stop]
            held = self._lease()

    def holds_next(self) -> bool:
        """True if the range of the oldest unused batch is still held. Otherwise it is leased again."""
        return self._leases.holds(self._ahead[0][0])

    def on_used(self) -> None:
        """Record that the loop used its oldest unused batch."""
        held, is_last = self._ahead.popleft()
        self._held[held.lease_id] = held, True
        if is_last:
            del self._held[held.lease_id]
            self._leases.finish(held)

    def give_back(self) -> None:
        """Return the remaining ranges for other workers, because the loop has ended."""
        newest = self._ahead[0][0] if self._ahead else None  # The loop may have its batch.
        self._ahead.clear()
        while self._held:
            held, is_used = self._held.popitem()[1]
            self._leases.give_back(held, is_used or (None if held is newest else False))

    def _lease(self) -> Range | None:
        held = self._leases.lease()
        if held is not None:
            self._held[held.lease_id] = held, False
        return held


def _check_ahead(leases: Leases, batch_size: int, options: dict[str, Any]) -> None:
    ahead = options.get("num_workers", 0) * (options.get("prefetch_factor") or _PREFETCH_FACTOR)
    batches = -(-leases.spec.range_size // batch_size)
    ranges = ahead // batches + 2
    if ranges > LEASES_MAX:
        raise InvalidArgumentError(
            f"num_workers and prefetch_factor read {ahead} batches ahead, which are {ranges} ranges of "
            f"{leases.spec.range_size} samples, more than {LEASES_MAX}: use fewer, or a larger range_size"
        )


def is_divided(loader: Any) -> bool:
    """True for a loader of leased ranges, with a sampler that divides, or of a stream that Hugging Face's
    ``split_dataset_by_node`` has split."""
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    samplers = (loader.sampler, getattr(batches, "sampler", None))
    return (
        isinstance(loader, LeasedDataLoader)
        or any(isinstance(sampler, DistributedSampler | data.DistributedSampler) for sampler in samplers)
        or getattr(loader.dataset, "_distributed", None) is not None
    )


def follows_generator(sampler: Any) -> bool:
    """True if the sampler draws its order from a random generator, so that it follows from all passes before."""
    return sampler is not None and hasattr(sampler, "generator") and not hasattr(sampler, "set_epoch")
