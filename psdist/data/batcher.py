"""``DynamicBatcher``: batches of samples of different lengths, padded, within limits.

``LeasedBatches`` takes the samples from ranges that the scheduler leases: a range is reported as used when all its
samples are. ``Submissions`` takes them from tasks that submit one by one, within limits of time and memory.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final, Protocol

from numpy.typing import NDArray

from psdist.data.batches import (
    Batch,
    BatchLimits,
    BatchMachine,
    Item,
    Padding,
    Sample,
    SampleGroup,
    arrays_of,
    default_bounds,
    length_of,
    pad,
)
from psdist.data.samples import (
    BATCHES,
    IndexedSamples,
    Lengths,
    Position,
    PositionKeeper,
    ReadSample,
    Source,
    is_indexed,
)
from psdist.errors import ClosedError, InvalidArgumentError, check_integer
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
        workers, the data and its order must be the same. Call this before the first push; await the result of a handle
        of ``AsyncParameters``.

        parameters: a handle of ``client.parameters()``, or ``optimizer.handle`` of ``psdist.torch``.

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


#: Ranges that are held at a time. The scheduler allows more, but other workers need some, too.
RANGES_HELD: Final = 16


class Leases(Protocol):
    """The part of ``psdist.Dataset`` that hands out ranges, each with its ``indices``."""

    def lease(self) -> Any:
        """Return another range, or None at the end of the data."""

    def finish(self, held: Any, /) -> None:
        """Mark a range as used."""

    def holds(self, held: Any, /) -> bool:
        """Return False for a range that will be leased again: the run rolled back, or the worker was expelled."""

    def give_back(self, held: Any, is_used: bool | None = None, /) -> None:
        """Return a range. is_used: True if some of its samples are in the weights; None if newer pushes may have
        them."""


class LeasedBatches:
    """Batches of one loop over leased ranges.

    make: makes a batch of samples and a width.

    Invariants: a range is finished when the loop asks for the batch after the one with its last sample, and returned if
    the loop ends before that. No sample of a range that is not held any more begins a batch.
    """

    def __init__(
        self,
        machine: BatchMachine,
        samples: IndexedSamples,
        leases: Leases,
        make: Callable[[list[ReadSample], int], Batch],
    ) -> None:
        self._machine = machine
        self._samples = samples
        self._leases = leases
        self._make = make
        #: Samples of held ranges that are in no used batch, by number, each with its range's key.
        self._unused: dict[int, tuple[ReadSample, int]] = {}
        #: Held ranges with the number of their unused samples.
        self._ranges: dict[int, tuple[Any, int]] = {}
        #: Ranges with samples in the batch that the loop has now.
        self._in_batch: set[int] = set()
        self._leased = self._numbers = 0

    def __iter__(self) -> Iterator[Batch]:
        try:
            # If pushes were dropped, their ranges return after the end was reached.
            while (held := self._leases.lease()) is not None or self._machine.waiting:
                yield from self._batches(self._machine.flush() if held is None else self._add(held))
                while len(self._ranges) >= RANGES_HELD:
                    yield from self._batches(self._machine.take_oldest())
        finally:
            for key, (held, unused) in self._ranges.items():
                is_used = unused < len(held.indices)
                self._leases.give_back(held, is_used or (None if key in self._in_batch else False))

    def _add(self, held: Any) -> Iterator[SampleGroup]:
        key, self._leased = self._leased, self._leased + 1
        self._ranges[key] = held, len(held.indices)
        for index in held.indices.tolist():
            if key not in self._ranges:  # It was lost during one of its batches.
                return
            read = self._samples.read(self._numbers, index)
            self._numbers += 1
            self._unused[read.number] = read, key
            yield from self._machine.add(Item(read.number, read.length))

    def _batches(self, groups: Iterable[SampleGroup]) -> Iterator[Batch]:
        for group in groups:
            self._forget_lost()
            if not (numbers := [number for number in group.numbers if number in self._unused]):
                continue
            self._in_batch = {self._unused[number][1] for number in numbers}
            yield self._make([self._unused[number][0] for number in numbers], group.width)
            self._in_batch = set()
            for number in numbers:
                self._on_used(self._unused.pop(number)[1])

    def _forget_lost(self) -> None:
        """Forget the samples of ranges that are leased again."""
        lost = {key for key, (held, _) in self._ranges.items() if not self._leases.holds(held)}
        for key in lost:
            self._leases.give_back(self._ranges.pop(key)[0], False)
        if lost:
            self._unused = {number: entry for number, entry in self._unused.items() if entry[1] not in lost}

    def _on_used(self, key: int) -> None:
        held, unused = self._ranges[key]
        self._ranges[key] = held, unused - 1
        if unused == 1:
            del self._ranges[key]
            self._leases.finish(held)


class Submissions:
    """The submitted samples of one event loop.

    make: makes a batch of samples and a width.

    Invariant: at most ``capacity`` samples are held, waiting or in batches that nobody has taken.
    """

    def __init__(self, machine: BatchMachine, make: Callable[[list[ReadSample], int], Batch]) -> None:
        self._machine = machine
        self._make = make
        self._held: dict[int, ReadSample] = {}
        self._ready: deque[SampleGroup] = deque()
        self._numbers = 0
        self._has_ended = False
        self._changed = asyncio.Condition()

    async def submit(self, arrays: Mapping[str, NDArray[Any]]) -> int:
        """Add a sample, once there is room. Returns its number, from 0. Raises ClosedError after ``end``."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_ended or self._has_room)
            if self._has_ended:
                raise ClosedError("the DynamicBatcher takes no more samples: end() was called")
            read = ReadSample(self._numbers, self._numbers, length_of(arrays), arrays)
            groups = self._machine.add(Item(read.number, read.length, asyncio.get_running_loop().time()))
            self._numbers += 1
            self._held[read.number] = read
            self._ready += groups
            self._changed.notify_all()
            return read.number

    async def end(self) -> None:
        """Take no more samples: the waiting ones are the last batches."""
        async with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    async def take(self) -> Batch | None:
        """Return the next batch; None after the last one."""
        async with self._changed:
            while not self._ready:
                if self._has_ended:
                    self._ready += self._machine.flush()
                    if not self._ready:
                        return None
                elif not await self._wait():
                    self._ready += self._machine.on_time(asyncio.get_running_loop().time())
            group = self._ready.popleft()
            samples = [self._held.pop(number) for number in group.numbers]
            self._changed.notify_all()
        return self._make(samples, group.width)

    async def _wait(self) -> bool:
        """Wait for a change. Returns False once a group's time is over."""
        try:
            async with asyncio.timeout_at(self._machine.deadline):
                return await self._changed.wait()
        except TimeoutError:
            return False

    @property
    def _has_room(self) -> bool:
        # If no batch is ready, the sample that reaches the capacity ends one.
        return len(self._held) < self._machine.limits.capacity
