"""Weights that the script wrote, on their way to the servers with the next push. Pure.

The values belong to whole tensors. The flat vector is sent in slices, so each slice gets the elements of it that were
written. One digest covers all of them: servers compare it over the workers of a step, whichever slices they hold.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import xxhash

from psdist.client.core import flat_vector
from psdist.client.core.flat_vector import Flat
from psdist.errors import InvalidArgumentError, UnknownTensorError
from psdist.types import Layout, Slicing


class WrittenRanges(NamedTuple):
    """Written elements of a slice: the start of each range in it, ascending, the sizes, and all values as float32."""

    starts: list[int]
    sizes: list[int]
    values: bytes


class WrittenWeights:
    """Elements of some tensors in the flat vector, by the tensor's number. They do not change."""

    def __init__(self, layout: Layout, values: Mapping[int, Flat]) -> None:
        self._layout = layout
        self._values = dict(sorted(values.items()))
        #: Written ranges of the vector, ascending: neighbouring tensors make one range.
        self._ranges: list[tuple[int, int]] = []
        for number, array in self._values.items():
            start = layout.offsets[number]
            if not array.size:
                continue
            if self._ranges and self._ranges[-1][1] == start:
                start, _ = self._ranges.pop()
            self._ranges.append((start, layout.offsets[number + 1]))

    @classmethod
    def copied(
        cls, layout: Layout, values: Mapping[str, object], earlier: WrittenWeights | None = None
    ) -> WrittenWeights:
        """Return copies of ``values``, over those of ``earlier``. Raises UnknownTensorError, ShapeMismatchError,
        DTypeMismatchError, and InvalidArgumentError for NaN or Inf and for something that is no mapping."""
        if not isinstance(values, Mapping):
            raise InvalidArgumentError(f"tensors must come as a dict of arrays by name, not {type(values).__name__}")
        numbers = {tensor.name: number for number, tensor in enumerate(layout.tensors)}
        found = {} if earlier is None else dict(earlier._values)
        for name, value in values.items():
            if name not in numbers:
                raise UnknownTensorError(
                    f"tensor {name!r:.100} is unknown: these parameters have {flat_vector.tensor_names(layout)}"
                )
            array = flat_vector.as_float(name, value)  # type: ignore[arg-type]  # it checks the type
            flat_vector.check_shape(layout.tensors[numbers[name]], array.shape)
            with np.errstate(over="ignore"):  # a float64 that float32 cannot hold becomes Inf, which is refused
                copy = array.astype(layout.dtype).reshape(-1)
            if not flat_vector.is_finite(copy, layout.dtype):
                raise InvalidArgumentError(
                    f"the values written to tensor {name!r} hold NaN or Inf: training cannot continue from these",
                    tensor=name,
                )
            found[numbers[name]] = copy.view(np.float32)
        return cls(layout, found)

    @property
    def is_empty(self) -> bool:
        """True if no element was written."""
        return not self._ranges

    @cached_property
    def digest(self) -> bytes:
        """Digest of the written tensors and their values (xxh3, 16 bytes)."""
        state = xxhash.xxh3_128()
        for number, array in self._values.items():
            state.update(f"{number}:{array.size};".encode())
            state.update(array.data)
        return state.digest()

    def touches(self, slicing: Slicing, slices: Sequence[int]) -> bool:
        """Return True if any of ``slices`` has written elements."""
        return any(self._within(*slicing.bounds(index)) for index in slices)

    def _within(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the written ranges within [start, stop)."""
        first = bisect_right(self._ranges, start, key=lambda one: one[1])
        last = bisect_left(self._ranges, stop, first, key=lambda one: one[0])
        return [(max(low, start), min(high, stop)) for low, high in self._ranges[first:last]]

    def in_slice(self, slicing: Slicing, index: int) -> WrittenRanges | None:
        """Return the written elements of a slice; None if there are none."""
        start, stop = slicing.bounds(index)
        ranges = self._within(start, stop)
        if not ranges:
            return None
        values = b"".join(self._bytes(low, high) for low, high in ranges)
        return WrittenRanges([low - start for low, _ in ranges], [high - low for low, high in ranges], values)

    def _bytes(self, start: int, stop: int) -> bytes:
        """Return the values of elements [start, stop) of the vector; all were written."""
        offsets, parts = self._layout.offsets, []
        number = bisect_right(offsets, start) - 1
        while start < stop:
            end = min(stop, offsets[number + 1])
            if end > start:
                parts.append(self._values[number][start - offsets[number] : end - offsets[number]].tobytes())
            start, number = end, number + 1
        return b"".join(parts)
