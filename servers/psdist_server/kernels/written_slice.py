"""Values that a script wrote to weights of one slice, as they arrive with its push."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from psdist.errors import InvalidArgumentError
from psdist.types import ITEM_BYTES, WORDS, MasterDType, Slicing
from psdist_server.kernels.arrays import Array, gradient_of
from psdist_server.kernels.double import all_finite


class Ranges(Protocol):
    """Written elements of a slice, as they are sent."""

    @property
    def starts(self) -> Sequence[int]:
        """First element of each range."""

    @property
    def sizes(self) -> Sequence[int]:
        """Number of elements of each range."""

    @property
    def values(self) -> bytes:
        """All values, float32."""


@dataclass(frozen=True, eq=False, weakref_slot=True, slots=True)
class WrittenSlice:
    """Written elements of a slice.

    starts, sizes: int64[k], ranges of elements: ascending, without overlap.
    values: float32[sum of sizes], finite.
    """

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    values: Array

    @classmethod
    def read(cls, written: Ranges, index: int, slicing: Slicing, dtype: MasterDType) -> WrittenSlice:
        """Check the values for slice ``index``.

        dtype: in which servers compute.

        Raises InvalidArgumentError for ranges that overlap, descend or leave the slice, for another number of values,
        and for NaN or Inf.
        """
        starts, sizes = np.array(written.starts, np.int64), np.array(written.sizes, np.int64)
        elements = slicing.size(index)
        if starts.shape != sizes.shape or not sizes.size or sizes.min() < 1:
            raise InvalidArgumentError(
                f"{starts.size} starts and {sizes.size} sizes of the ranges written in slice {index}: send one of each "
                "for every range, and no empty range"
            )
        stops = starts + sizes
        odd = (starts % WORDS[dtype]).any() or (sizes % WORDS[dtype]).any()
        if (starts[1:] < stops[:-1]).any() or stops[-1] > elements or odd:
            raise InvalidArgumentError(
                f"the ranges written in slice {index} must ascend without overlap and end at {elements}, where it does"
            )
        expected = int(sizes.sum()) * ITEM_BYTES["float32"]
        if len(written.values) != expected:
            raise InvalidArgumentError(
                f"the ranges written in slice {index} have {expected} bytes in float32, not {len(written.values)}"
            )
        values = gradient_of(memoryview(written.values), "float32")
        if not all_finite(values, dtype):
            raise InvalidArgumentError(
                f"the values written in slice {index} hold NaN or Inf: training cannot continue from these"
            )
        return cls(starts, sizes, values)  # type: ignore[arg-type]  # float32, as asked for above

    def onto(self, weights: Array) -> Array:
        """Return a copy of a slice's weights, float32[n], with the written elements."""
        whole, at = weights.copy(), 0
        for start, size in zip(self.starts.tolist(), self.sizes.tolist(), strict=True):
            whole[start : start + size] = self.values[at : at + size]
            at += size
        return whole
