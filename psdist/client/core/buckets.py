"""Buckets: the gradient of one push, given piece by piece. Pure.

This module decides which slices a piece completes, and which are still missing. A slice is ready when every tensor that
touches it was given, so slices are sent while the rest of the gradient is still computed.

Invariants: A slice becomes ready once, after the last of its tensors was given. If its bucket fails before the slice is
answered, the slice becomes ready again when all of its tensors are given again.

Not here: values (``flat_vector``), sending (``push``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from psdist.client.core.flat_vector import join_names, tensor_names
from psdist.errors import InvalidArgumentError, UnknownTensorError
from psdist.types import Layout, Slicing


@dataclass(frozen=True)
class SliceIndex:
    """Mapping between tensors and the slices that they touch."""

    layout: Layout
    slicing: Slicing

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Number of each tensor by its name."""
        return {tensor.name: number for number, tensor in enumerate(self.layout.tensors)}

    def slices_of(self, number: int) -> range:
        """Return the slices that hold elements of a tensor; none for an empty tensor."""
        start, stop = self.layout.offsets[number], self.layout.offsets[number + 1]
        return range(
            start // self.slicing.slice_elements, -(-stop // self.slicing.slice_elements) if stop > start else 0
        )

    def named(self, names: Iterable[str]) -> frozenset[int]:
        """Return the numbers of tensors. Raises UnknownTensorError."""
        numbers = set()
        for name in names:
            if name not in self.numbers:
                raise UnknownTensorError(
                    f"tensor {name!r:.100} is unknown: these parameters have {tensor_names(self.layout)}"
                )
            numbers.add(self.numbers[name])
        return frozenset(numbers)

    def ranges_of(self, numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Return the elements of tensors as ranges: (start, stop), ascending; neighbours as one range."""
        ranges: list[tuple[int, int]] = []
        for number in sorted(numbers):
            start, stop = self.layout.offsets[number], self.layout.offsets[number + 1]
            if ranges and ranges[-1][1] == start:
                ranges[-1] = ranges[-1][0], stop
            elif stop > start:
                ranges.append((start, stop))
        return tuple(ranges)

    def slices_of_all(self, numbers: Iterable[int]) -> frozenset[int]:
        """Return the slices that hold elements of any of these tensors."""
        return frozenset(index for number in numbers for index in self.slices_of(number))

    def tensors_of(self, index: int) -> list[int]:
        """Return the tensors with elements in a slice, ascending."""
        start, stop = self.slicing.bounds(index)
        offsets = self.layout.offsets
        around = range(bisect_right(offsets, start) - 1, bisect_left(offsets, stop))
        return [number for number in around if offsets[number + 1] > offsets[number]]

    @cached_property
    def touching(self) -> tuple[int, ...]:
        """Number of tensors that touch each slice."""
        counts = [0] * self.slicing.count
        for number in range(len(self.layout.tensors)):
            for index in self.slices_of(number):
                counts[index] += 1
        return tuple(counts)


@dataclass(frozen=True, slots=True)
class ReadySlices:
    """Slices to be sent now, ascending.

    valued: slices that are sent with their values.
    abstaining: slices that are sent without values, because one of their tensors abstains.
    """

    valued: tuple[int, ...]
    abstaining: tuple[int, ...]


class PushProgress:
    """Progress of one push: the tensors given, the slices under way, and those answered.

    needs_all: True if the servers answer no slice before they have the whole push (clipping by the global norm), so
        every slice needs all tensors.
    """

    def __init__(self, index: SliceIndex, *, needs_all: bool) -> None:
        self.index = index
        self._needs_all = needs_all
        #: Given tensors; True if the tensor abstains.
        self._given: dict[int, bool] = {}
        #: Number of tensors that each slice still needs.
        self._needs = list(index.touching)
        self._under_way: set[int] = set()
        self._unanswered = set(range(index.slicing.count))

    def give_all(self, *, abstain: bool) -> ReadySlices:
        """Add all tensors, of which none was given. Returns all slices."""
        self._given = dict.fromkeys(range(len(self.index.layout.tensors)), abstain)
        self._needs = [0] * len(self._needs)
        self._under_way = set(self._unanswered)
        every = tuple(range(len(self._needs)))
        return ReadySlices((), every) if abstain else ReadySlices(every, ())

    def choose(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the numbers of tensors that may be given, ascending.

        Raises UnknownTensorError, and InvalidArgumentError for a tensor that was given before, or for an empty list.
        """
        if not names:
            raise InvalidArgumentError("the bucket names no tensor: give at least one")
        chosen: set[int] = set()
        for name in names:
            number = self.index.numbers.get(name) if isinstance(name, str) else None
            if number is None:
                raise UnknownTensorError(
                    f"tensor {name!r:.100} is unknown: these parameters have {tensor_names(self.index.layout)}"
                )
            if number in self._given or number in chosen:
                raise InvalidArgumentError(
                    f"tensor {name!r} was given twice in one step, which still misses {self.missing_names() or 'none'}"
                )
            chosen.add(number)
        return tuple(sorted(chosen))

    def give(self, numbers: Iterable[int], *, abstain: bool) -> ReadySlices:
        """Add tensors that ``choose`` has accepted. Returns the slices that can be sent now."""
        ready = []
        for number in numbers:
            self._given[number] = abstain
            for index in self.index.slices_of(number):
                self._needs[index] -= 1
                if not self._needs[index] and index in self._unanswered and index not in self._under_way:
                    ready.append(index)
        self._under_way.update(ready)
        abstaining = {index for index in ready if self._abstains(index)}
        return ReadySlices(tuple(sorted(set(ready) - abstaining)), tuple(sorted(abstaining)))

    def answer(self, slices: Iterable[int]) -> None:
        """Mark slices as answered."""
        answered = set(slices)
        assert answered <= self._under_way
        self._unanswered -= answered
        self._under_way -= answered

    def take_back(self, numbers: Iterable[int], slices: Iterable[int]) -> None:
        """Mark tensors, and slices of them that were under way, as missing again."""
        self._under_way.difference_update(slices)
        for number in numbers:
            del self._given[number]
            for index in self.index.slices_of(number):
                self._needs[index] += 1

    def restart(self) -> None:
        """Mark all tensors and slices as missing again."""
        self.take_back(list(self._given), list(self._under_way))

    def _abstains(self, index: int) -> bool:
        return any(self._given[number] for number in self.index.tensors_of(index))

    @property
    def missing(self) -> list[int]:
        """Tensors that were not given, ascending."""
        return [number for number in range(len(self.index.layout.tensors)) if number not in self._given]

    @property
    def finished(self) -> bool:
        """True if every tensor was given and every slice answered."""
        return not self._unanswered and len(self._given) == len(self.index.layout.tensors)

    def missing_names(self) -> str:
        """Return the names of the tensors that were not given, for a message."""
        return join_names([self.index.layout.tensors[number].name for number in self.missing])

    def is_complete(self, slices: Iterable[int]) -> bool:
        """Return True if all of ``slices`` are answered."""
        return self._unanswered.isdisjoint(slices)

    def missing_for(self, slices: Iterable[int]) -> str:
        """Return the missing tensors that block ``slices``, for a message; empty if all slices are on their way."""
        waited = self._unanswered.intersection(slices)
        if waited and self._needs_all:
            return self.missing_names()
        needed = {number for index in waited - self._under_way for number in self.index.tensors_of(index)}
        tensors = self.index.layout.tensors
        return join_names([tensors[number].name for number in sorted(needed - self._given.keys())])
