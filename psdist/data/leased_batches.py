"""Batches of ranges that the scheduler leases: a range is reported as used when all its samples are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol

from psdist.data.batch_machine import BatchMachine, Item, SampleGroup
from psdist.data.padding import Batch
from psdist.data.sample_source import IndexedSamples, ReadSample

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
