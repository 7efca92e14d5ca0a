"""The kernels in numpy, used until the compiled ones are ready. They give the same bytes.

The arguments are those of the compiled functions (``means``, ``updates``), including addresses. numpy makes one pass
over memory per operation, so vectors are processed in pieces that fit in a cache.

Invariant: Each contribution is copied before its values are examined, as it may change meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression import numpy_casts
from psdist.compression.dtypes import NUMPY_DTYPES

Floats = NDArray[np.float32]
AnyArray = NDArray[Any]

#: Element types allowed for contributions and pulled weights, by name.
DTYPES: Final = {name: NUMPY_DTYPES[name] for name in ("float32", "float16", "bfloat16")}
#: Their numbers in the arguments of kernels.
CODES: Final = {dtype: code for code, dtype in enumerate(DTYPES.values())}

#: ``sum_squares`` adds in this many lanes, element i in lane i % SUM_LANES.
SUM_LANES: Final = 256

BLOCK: Final = 4096  # elements; 16 KiB of float32 stay in the first-level cache while contributions are added to them
_PIECE: Final = 16 * BLOCK

_BY_CODE: Final = tuple(DTYPES.values())


def update(
    element: Callable[..., Any],
    arrays: AnyArray,
    segments: AnyArray,
    parts: AnyArray,
    codes: AnyArray,
    divisions: AnyArray,
    memory: AnyArray,
    bad: AnyArray,
    means: AnyArray,
    scalars: tuple[np.float32, ...],
) -> None:
    """Run a fused update. element: its arithmetic. ``memory`` is unused."""
    with np.errstate(all="ignore"):
        for k, (size, start, count) in enumerate(segments.tolist()):
            contributions = _Contributions(parts[k, :count], codes[k, :count], divisions[k], bad[k])
            mean = (
                _array(int(means[k]) + start * 4, size, DTYPES["float32"])
                if means[k] and size
                else np.empty(size, np.float32)
            )
            for at, stop in _pieces(size, _PIECE):
                gradient = mean[at:stop] = contributions.mean(start + at, stop - at)
                if np.isfinite(gradient).all():
                    _apply(element, arrays[k], at, gradient, scalars)
                    continue
                for begin, end in _pieces(stop - at, BLOCK):
                    block = contributions.finite_mean(start + at + begin, end - begin)
                    mean[at + begin : at + end] = np.nan if block is None else block
                    if block is not None:
                        _apply(element, arrays[k], at + begin, block, scalars)


def combine(out: Floats, addresses: AnyArray, codes: AnyArray, divisor: np.float32, factor: np.float32) -> bool:
    """Do the same as ``means._combine``."""
    contributions = _Contributions(addresses, codes, (divisor, factor), np.zeros(len(codes), np.uint8))
    finite = True
    with np.errstate(all="ignore"):
        for at, stop in _pieces(out.size, _PIECE):
            out[at:stop] = contributions.mean(at, stop - at)
            finite = finite and bool(np.isfinite(out[at:stop]).all())
    return finite


def add_elements(out: Floats, address: int, code: int) -> None:
    """Do the same as ``means._add_elements``."""
    part = _Contributions(np.array([address]), np.array([code]), (0, 1), np.zeros(1, np.uint8))
    with np.errstate(all="ignore"):
        for at, stop in _pieces(out.size, _PIECE):
            out[at:stop] += part.copy(0, at, stop - at)


def add_weighted(out: Floats, address: int, code: int, weight: np.float32) -> None:
    """Do the same as ``means._add_weighted``."""
    part = _Contributions(np.array([address]), np.array([code]), (0, 1), np.zeros(1, np.uint8))
    with np.errstate(all="ignore"):
        for at, stop in _pieces(out.size, _PIECE):
            out[at:stop] += np.float32(weight) * part.copy(0, at, stop - at)


def sum_squares(values: Floats) -> float:
    """Do the same as ``means._sum_squares``."""
    lanes = np.zeros(SUM_LANES, np.float64)
    for at, stop in _pieces(values.size, _PIECE):
        squares = np.zeros(-(-(stop - at) // SUM_LANES) * SUM_LANES, np.float64)
        np.square(values[at:stop], out=squares[: stop - at], dtype=np.float64)
        for row in squares.reshape(-1, SUM_LANES):
            lanes += row
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return float(lanes[0])


def all_finite(bits: AnyArray, exponent: Any) -> bool:
    """Do the same as ``means._all_finite16`` and ``_all_finite32``."""
    return not any(((bits[at:stop] & exponent) == exponent).any() for at, stop in _pieces(bits.size, _PIECE))


class _Contributions:
    """The contributions to a slice, and their divisor or factor."""

    def __init__(self, addresses: AnyArray, codes: AnyArray, division: Sequence[Any], bad: AnyArray) -> None:
        dtypes = [_BY_CODE[code] for code in codes.tolist()]
        self._parts = list(zip(addresses.tolist(), dtypes, strict=True))
        self._divisor, self._factor = division
        self._bad = bad

    def mean(self, start: int, size: int) -> Floats:
        """Return the mean of ``size`` elements from ``start``: the sum in order, divided."""
        total = self.copy(0, start, size)
        for part in range(1, len(self._parts)):
            total += self.copy(part, start, size)
        mean: Floats = total * self._factor if self._divisor == 0 else total / self._divisor
        return mean

    def finite_mean(self, start: int, size: int) -> Floats | None:
        """Return the mean of the contributions that are finite in this range, or None if it is not finite. Marks the
        others as bad."""
        good: list[Floats] = []
        for part in range(len(self._parts)):
            values = self.copy(part, start, size)
            if np.isfinite(values).all():
                good.append(values)
            else:
                self._bad[part] = 1
        if not good:
            return None
        total = good[0]
        for values in good[1:]:
            total += values
        by_factor = self._divisor == 0 and (len(good) == len(self._parts) or self._factor == 1)
        block = total * self._factor if by_factor else total / np.float32(len(good))
        return block if np.isfinite(block).all() else None

    def copy(self, part: int, start: int, size: int) -> Floats:
        """Return elements of a contribution as float32."""
        address, dtype = self._parts[part]
        values = _array(address + start * dtype.itemsize, size, dtype)
        if dtype == np.float32:
            return values.copy()
        widened = np.empty(size, np.float32)
        numpy_casts.widen(values, widened)
        return widened


def _apply(
    element: Callable[..., Any], addresses: AnyArray, at: int, gradient: Floats, scalars: tuple[np.float32, ...]
) -> None:
    """Update the weights and the state of a segment from element ``at`` on."""
    float32 = DTYPES["float32"]
    own = [_array(address + at * float32.itemsize, gradient.size, float32) for address in addresses.tolist()]
    new = element(*own, gradient, *scalars)
    for array, values in zip(own, new if isinstance(new, tuple) else (new,), strict=True):
        array[...] = values


def _array(address: int, size: int, dtype: np.dtype[Any]) -> AnyArray:
    """Return a view of the elements at an address."""
    memory = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address)
    array: AnyArray = np.frombuffer(memoryview(memory), dtype)
    return array


def _pieces(size: int, most: int) -> list[tuple[int, int]]:
    return [(at, min(size, at + most)) for at in range(0, size, most)]
