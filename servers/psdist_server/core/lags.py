"""Elements that an update skips because no worker has a gradient for them, and the lags that follow from it. Pure.

An update leaves weights and state of skipped elements unchanged. The *lag* of an element is the number of its slice's
updates that it has skipped, so version minus lag is the element's own count of updates, as torch counts the steps of
each parameter. Lags are stored as ranges; elements in none have a lag of 0.

Invariants: Ranges ascend without overlap. Neighbouring ranges of equal lag are one, so equal lags compare equal.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from psdist.errors import InvalidArgumentError

#: (start, stop): elements of a vector, or of a slice.
Ranges = tuple[tuple[int, int], ...]
#: (start, stop, lag): elements of a slice, with a lag above 0.
Lags = tuple[tuple[int, int, int], ...]
#: (start, stop, group): every element of a slice.
Runs = tuple[tuple[int, int, int], ...]
#: (slice, start, stop, lag): lags of several slices.
LagRows = tuple[tuple[int, int, int, int], ...]

_R = TypeVar("_R", tuple[int, int], tuple[int, int, int])


def ranges_of(starts: Sequence[int], sizes: Sequence[int], elements: int, what: str) -> Ranges:
    """Return ranges that a peer named.

    elements: number of elements that the ranges divide.

    Raises InvalidArgumentError unless they ascend without overlap, within the elements.
    """
    if len(starts) != len(sizes):
        raise InvalidArgumentError(f"{len(starts)} starts and {len(sizes)} sizes of {what}: send one of each")
    ranges, end = [], 0
    for start, size in zip(starts, sizes, strict=True):
        if start < end or size < 1:
            raise InvalidArgumentError(
                f"{size} elements from {start} in {what}: ranges must ascend without overlap, and none may be empty"
            )
        end = start + size
        ranges.append((start, end))
    if end > elements:
        raise InvalidArgumentError(f"element {end - 1} in {what}: there are {elements} elements, counted from 0")
    return tuple(ranges)


def within(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the parts of ``ranges`` in [start, stop), relative to ``start``."""
    first = bisect_right(ranges, start, key=lambda one: one[1])
    last = bisect_left(ranges, stop, first, key=lambda one: one[0])
    return tuple((max(low, start) - start, min(high, stop) - start) for low, high in ranges[first:last])


def common(parts: Iterable[Ranges]) -> Ranges:
    """Return the elements that are in all of ``parts``; none if there are no parts."""
    found: Ranges | None = None
    for ranges in parts:
        found = ranges if found is None else _common(found, ranges)
        if not found:
            return ()
    return found or ()


def _common(some: Ranges, others: Ranges) -> Ranges:
    found, at = [], 0
    for low, high in some:
        while at < len(others) and others[at][1] <= low:
            at += 1
        here = at
        while here < len(others) and others[here][0] < high:
            found.append((max(low, others[here][0]), min(high, others[here][1])))
            here += 1
    return tuple(found)


def advanced(lags: Lags, absent: Ranges) -> Lags:
    """Return the lags after an update that skipped ``absent``."""
    result: list[tuple[int, int, int]] = []
    for low, high in pairwise(_edges(lags, absent)):
        lag = _lag_at(lags, low) + (_range_at(absent, low) is not None)
        if lag:
            _append(result, (low, high, lag))
    return tuple(result)


def pieces(runs: Runs, lags: Lags, absent: Ranges) -> list[tuple[int, int, int, int]]:
    """Return (start, stop, group, lag) of all elements that an update does not skip. runs: groups of all elements."""
    found = []
    for low, high in pairwise(_edges(runs, lags, absent)):
        run = _range_at(runs, low)
        if run is not None and _range_at(absent, low) is None:
            found.append((low, high, run[2], _lag_at(lags, low)))
    return found


def rows(lags: Mapping[int, Lags]) -> LagRows:
    """Return the lags of several slices as rows, ascending."""
    return tuple((index, *one) for index in sorted(lags) for one in lags[index])


def checked(found: Iterable[tuple[int, int, int, int]], sizes: Mapping[int, int], what: str) -> dict[int, Lags]:
    """Return rows by slice. sizes: elements of each slice that may be named.

    Raises InvalidArgumentError for rows that no slices can have.
    """
    lags: dict[int, list[tuple[int, int, int]]] = {}
    for index, start, stop, lag in found:
        known = lags.setdefault(index, [])
        end = known[-1][1] if known else 0
        if not end <= start < stop <= sizes.get(index, 0) or lag < 1:
            raise InvalidArgumentError(
                f"a lag of {lag} updates for elements {start} to {stop - 1} of slice {index} in {what}: lags are at "
                "least 1, for ranges that ascend within the slice"
            )
        known.append((start, stop, lag))
    return {index: tuple(some) for index, some in lags.items()}


class LagTable:
    """Lags of a server's slices."""

    def __init__(self) -> None:
        #: Only slices with lags.
        self.by_slice: dict[int, Lags] = {}

    def of(self, index: int) -> Lags:
        """Return the lags of a slice. The value does not change later."""
        return self.by_slice.get(index, ())

    def set(self, index: int, lags: Lags) -> None:
        """Set the lags of a slice; none drops them."""
        self.by_slice.pop(index, None)
        if lags:
            self.by_slice[index] = lags

    def skip(self, index: int, absent: Ranges) -> None:
        """Count an update of a slice that skipped ``absent``."""
        if absent:
            self.by_slice[index] = advanced(self.of(index), absent)

    def rows(self, indices: Iterable[int]) -> LagRows:
        """Return the lags of these slices."""
        return rows({index: self.of(index) for index in indices})


class RangeEdges:
    """Ends of the ranges without a gradient in all pushes to a parameter set. They divide slices into pieces with lags
    of their own, so their number is limited.

    name, elements: of the parameter set.
    words: elements of one value.
    """

    def __init__(self, name: str, elements: int, words: int) -> None:
        self._name = name
        self._elements = elements
        self._words = words
        #: Empty while no push has named elements without a gradient.
        self.edges: set[int] = set()

    def add(self, absent: Ranges, tensors_max: int) -> None:
        """Add the ends of a push's ranges, at least one. Raises InvalidArgumentError if these cannot be
        tensors of the set, or are of more than ``tensors_max`` tensors with those before."""
        edges = {edge for one in absent for edge in one}
        if absent[-1][1] > self._elements or any(edge % self._words for edge in edges):
            raise InvalidArgumentError(
                f"elements {absent[0][0]} to {absent[-1][1] - 1} of {self._name!r} have no gradient: name whole values "
                f"of its {self._elements} elements"
            )
        edges |= self.edges
        if len(edges) > 2 * tensors_max:
            raise InvalidArgumentError(
                f"the ranges without a gradient in {self._name!r} so far have {len(edges)} ends: name whole tensors, "
                f"at most {tensors_max}"
            )
        self.edges = edges


def _edges(*parts: Sequence[Sequence[int]]) -> list[int]:
    return sorted({edge for ranges in parts for one in ranges for edge in one[:2]})


def _range_at(ranges: Sequence[_R], element: int) -> _R | None:
    """Return the range that contains an element, or None."""
    place = bisect_right(ranges, element, key=lambda one: one[0]) - 1
    return ranges[place] if place >= 0 and element < ranges[place][1] else None


def _lag_at(lags: Lags, element: int) -> int:
    found = _range_at(lags, element)
    return 0 if found is None else found[2]


def _append(ranges: list[tuple[int, int, int]], one: tuple[int, int, int]) -> None:
    """Add a range, as part of the last one if both are one."""
    if ranges and (ranges[-1][1], ranges[-1][2]) == (one[0], one[2]):
        ranges[-1] = ranges[-1][0], one[1], one[2]
    else:
        ranges.append(one)
