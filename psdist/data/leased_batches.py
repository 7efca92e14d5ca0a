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

    def give_back(self, held: Any, /) -> None:
        """Return a range unused."""


class LeasedBatches:
    """Batches of one loop over leased ranges.

    make: makes a batch of samples and a width.

    Invariants: a range is finished when the loop asks for the batch after the one with its last sample, and returned if
    the loop ends before that.
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
        self._leased = self._numbers = 0

    def __iter__(self) -> Iterator[Batch]:
        try:
            # If pushes were dropped, their ranges return after the end was reached.
            while (held := self._leases.lease()) is not None or self._machine.waiting:
                yield from self._batches(self._machine.flush() if held is None else self._add(held))
                while len(self._ranges) >= RANGES_HELD:
                    yield from self._batches(self._machine.take_oldest())
        finally:
            for held, _ in self._ranges.values():
                self._leases.give_back(held)

    def _add(self, held: Any) -> Iterator[SampleGroup]:
        key, self._leased = self._leased, self._leased + 1
        self._ranges[key] = held, len(held.indices)
        for index in held.indices.tolist():
            read = self._samples.read(self._numbers, index)
            self._numbers += 1
            self._unused[read.number] = read, key
            yield from self._machine.add(Item(read.number, read.length))

    def _batches(self, groups: Iterable[SampleGroup]) -> Iterator[Batch]:
        for group in groups:
            yield self._make([self._unused[number][0] for number in group.numbers], group.width)
            for number in group.numbers:
                self._on_used(self._unused.pop(number)[1])

    def _on_used(self, key: int) -> None:
        held, unused = self._ranges[key]
        self._ranges[key] = held, unused - 1
        if unused == 1:
            del self._ranges[key]
            self._leases.finish(held)
