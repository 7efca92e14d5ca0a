"""``DynamicBatcher``: batches of samples of different lengths, padded, within limits."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final

from numpy.typing import NDArray

from psdist.data.batch_machine import BatchLimits, BatchMachine, Item, Padding, SampleGroup, default_bounds
from psdist.data.batch_position import BATCHES, Position, PositionKeeper
from psdist.data.leased_batches import LeasedBatches, Leases
from psdist.data.padding import Batch, Sample, arrays_of, pad
from psdist.data.sample_source import IndexedSamples, Lengths, ReadSample, Source, is_indexed
from psdist.data.submissions import Submissions
from psdist.errors import InvalidArgumentError, check_integer
from psdist.wire.limits import BATCH_SAMPLES_MAX

#: Samples held by default, in batches.
_CAPACITY_BATCHES: Final = 32

#: Batchers that are saved with each parameter set.
_saved: weakref.WeakKeyDictionary[Any, weakref.WeakSet[DynamicBatcher]] = weakref.WeakKeyDictionary()


class DynamicBatcher:
    """Batches of samples of different lengths: similar ones go together, so that little is padding.

        batcher = psdist.data.DynamicBatcher(max_batch_size=64, max_tokens=8192)
        batcher.keep_in(weights)
        while batcher.data_epoch < 3:
            sampler.set_epoch(batcher.data_epoch)
            for batch in batcher.batches(texts, sampler):
                values = weights.push_pull(gradients(values, batch.values, batch.mask), weight=batch.tokens)

    A sample is an array whose first axis is its length, or a dict of arrays of one length and of single numbers. It
    waits in the bucket of its length until that has a batch. Each sample is in one batch, and those of a bucket keep
    their order.

    max_batch_size: samples of a batch.
    timeout_ms: milliseconds after which a submitted sample waits no longer for others; None for no limit. It applies to
        ``async for`` alone, so that other batches depend on the data only.
    padding: "longest" pads to the longest sample of a batch, "bucket" to the bound of its bucket, for compilers that
        need few shapes.
    max_tokens: elements of a batch, padding included; None for no limit.
    buckets: longest sample of each bucket, ascending; None for bounds that grow by a quarter, in multiples of 8; () for
        one bucket.
    pad_value: value of the padding, or a dict of them by the arrays' names (0 for the others).
    capacity: samples held at a time; None for 32 batches. The sample that reaches it sends off the oldest bucket.
    name: name of its place in snapshots; batchers of one parameter set need different ones.

    Raises InvalidArgumentError for arguments that are out of range, and for a sample that fits in no batch.
    """

    def __init__(
        self,
        max_batch_size: int = 64,
        timeout_ms: float | None = 100,
        padding: Padding = "longest",
        max_tokens: int | None = None,
        buckets: Sequence[int] | None = None,
        *,
        pad_value: float | Mapping[str, float] = 0,
        capacity: int | None = None,
        name: str = "batches",
    ) -> None:
        check_integer("max_batch_size", max_batch_size, 1, BATCH_SAMPLES_MAX)
        if not isinstance(timeout_ms, int | float | None):
            raise InvalidArgumentError(f"timeout_ms={timeout_ms!r:.40} is no number: pass milliseconds, or None")
        bounds = default_bounds() if buckets is None else tuple(buckets)
        seconds = None if timeout_ms is None else timeout_ms / 1000
        held = min(_CAPACITY_BATCHES * max_batch_size, BATCH_SAMPLES_MAX) if capacity is None else capacity
        self.limits = BatchLimits(max_batch_size, max_tokens, bounds, padding, seconds, held)
        self.name = name
        self._pad_value = pad_value
        self._keeper = PositionKeeper()
        self._submissions: Submissions | None = None

    # --- batches of data ----------------------------------------------------------------------------------------------

    @property
    def data_epoch(self) -> int:
        """Passes over the data that are over: the number of the current one."""
        return self._keeper.now.data_epoch

    def batches(
        self, samples: Iterable[Sample], order: Iterable[int] | None = None, lengths: Lengths | None = None
    ) -> Iterator[Batch]:
        """Yield the batches of one pass, from the current place on.

        samples: a sequence of samples, such as a list or a data set of torch; or any other iterable.
        order: indices of the pass, such as a ``DistributedSampler``; None for all, ascending.
        lengths: the sequence's lengths by index. With them a sample is loaded when its batch is made.

        Take a batch after the push of the one before has returned. If the run goes back to a snapshot, the next batch
        is the one that followed there; if that was in an earlier pass, the loop ends.

        Raises SettingsMismatchError if a snapshot's place is in other data, InvalidArgumentError if the run went back
        and the iterable can be read only once; the errors of samples that do not fit together.
        """
        source, data_epoch = Source(samples, order, lengths), self.data_epoch
        while self.data_epoch == data_epoch:
            yield from self._from_here(source)
            if self._keeper.end_pass():
                return

    def leased(
        self, samples: Sequence[Sample] | Any, leases: Leases, lengths: Lengths | None = None
    ) -> Iterator[Batch]:
        """Yield batches of the ranges that ``client.dataset()`` leases to this worker, until none is left.

        A range is reported as used when all its samples were in batches, and returned if the loop ends before that. Up
        to 16 ranges are held. Their place in snapshots is the scheduler's: after a restore, a range that was used in
        part is used again. So is one that is returned. ``leases.repeated`` counts both.

        samples, lengths: as for ``batches``.

        Raises InvalidArgumentError if ``samples`` is not of the data set's size, and as ``client.dataset()``.
        """
        size = len(samples) if is_indexed(samples) else None
        expected = getattr(getattr(leases, "spec", None), "size", size)
        if size is None or size != expected:
            found = "no indices" if size is None else f"{size} samples"
            raise InvalidArgumentError(f"samples has {found}, and the data set was made with size={expected}")
        indexed = IndexedSamples(samples, lengths)
        yield from LeasedBatches(BatchMachine(self.limits), indexed, leases, partial(self._pad, indexed.load))

    # --- submitted samples --------------------------------------------------------------------------------------------

    async def submit(self, sample: Sample) -> int:
        """Add a sample for ``async for batch in batcher``. Waits while ``capacity`` samples are held. Returns its
        number, from 0, which is its index in the batch. Raises ClosedError after ``end``."""
        return await self._submitted().submit(arrays_of(sample))

    async def end(self) -> None:
        """End the submitted samples: ``async for`` ends after the last batch."""
        await self._submitted().end()

    async def __aiter__(self) -> AsyncIterator[Batch]:
        while (batch := await self._submitted().take()) is not None:
            yield batch

    # --- the place in snapshots ---------------------------------------------------------------------------------------

    def keep_in(self, parameters: Any) -> Any:
        """Save the place of ``batches`` in snapshots, with the pushes of ``parameters``.

        In a run that resumes, and after a rollback, batches continue with the one that followed there. The number of
        workers, the data and its order must be the same.

        parameters: a handle of ``client.parameters()``, or ``optimizer.handle`` of ``psdist.torch``. For an
            ``AsyncParameters``, await the result. Call it before the first push.

        Raises InvalidArgumentError if another batcher of this name is saved with the parameters.
        """
        others = _saved.setdefault(parameters, weakref.WeakSet())
        if any(other.name == self.name and other is not self for other in others):
            raise InvalidArgumentError(f"another batcher is saved as {self.name!r} already: pass another name=")
        others.add(self)
        return parameters.keep_state(self._keeper.save, self._keeper.restore, prefix=f"{BATCHES}{self.name}.")

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return the place after the newest batch of ``batches``, for a checkpoint of one's own."""
        return self._keeper.now.to_arrays()

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from the place of ``state_dict``. Raises InvalidArgumentError."""
        self._keeper.restore(state)

    def __repr__(self) -> str:
        return f"<DynamicBatcher {self.name!r}: up to {self.limits.samples_max} samples, data epoch {self.data_epoch}>"

    # --- inner --------------------------------------------------------------------------------------------------------

    def _from_here(self, source: Source) -> Iterator[Batch]:
        """Yield batches from the current place to the end of the pass, or until another place is restored."""
        start, machine = self._keeper.start(), BatchMachine(self.limits)
        held: dict[int, ReadSample] = {}

        def ends() -> Iterator[list[SampleGroup]]:
            for read in source.read(start):
                held[read.number] = read
                yield machine.add(Item(read.number, read.length))
            yield machine.flush()

        for groups in ends():
            for place, group in enumerate(groups):
                later = [number for other in groups[place + 1 :] for number in other.numbers]
                pending = tuple(sorted([*machine.numbers(), *later]))
                batch = self._pad(source.load, [held.pop(number) for number in group.numbers], group.width)
                if not self._keeper.on_batch(Position(start.data_epoch, source.taken, pending, source.digest)):
                    return
                yield batch

    def _pad(
        self, load: Callable[[ReadSample], Mapping[str, NDArray[Any]]], reads: list[ReadSample], width: int
    ) -> Batch:
        return pad([load(read) for read in reads], [read.index for read in reads], width, self._pad_value)

    def _submitted(self) -> Submissions:
        if self._submissions is None:
            load = attrgetter("arrays")
            self._submissions = Submissions(BatchMachine(self.limits), partial(self._pad, load))
        return self._submissions
