"""The kernels in numpy, used until the compiled ones are ready. They give the same bytes.

The arguments are those of the compiled functions (``means``, ``updates``), including addresses. numpy makes one pass
over memory per operation, so vectors are processed in pieces that fit in a cache.

Invariant: Each contribution is copied before its values are examined, as it may change meanwhile.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression.casts import widen_by_numpy
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
_FLOAT32: Final = 0


def division_by(number: float) -> tuple[np.float32, np.float32]:
    """Return the divisor and factor by which kernels divide by a positive ``number``. Multiplying by a power of two's
    inverse equals dividing by it, bit for bit, and is cheaper."""
    if math.frexp(number)[0] == 0.5 and 2.0**-64 < number < 2.0**64:
        return np.float32(0.0), np.float32(1.0 / number)
    return np.float32(number), np.float32(0.0)


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
    for k, (size, start, count) in enumerate(segments.tolist()):
        own = _views(arrays[k].tolist(), [_FLOAT32] * arrays.shape[1], 0, size)
        given = _views(parts[k, :count].tolist(), codes[k].tolist(), start, size)
        mean = _views([int(means[k])], [_FLOAT32], start, size)[0] if means[k] else np.empty(size, np.float32)
        for at in range(0, size, _PIECE):
            piece = slice(at, min(size, at + _PIECE))
            gradient = mean[piece] = _mean(given, piece, divisions[k])
            if np.isfinite(gradient).all():
                _apply(element, own, piece, gradient, scalars)
                continue
            for begin in range(at, piece.stop, BLOCK):
                block = slice(begin, min(begin + BLOCK, piece.stop))
                found = _finite_mean(given, block, divisions[k], bad[k])
                mean[block] = np.nan if found is None else found
                if found is not None:
                    _apply(element, own, block, found, scalars)


def _apply(
    element: Callable[..., Any], own: list[AnyArray], piece: slice, gradient: Floats, scalars: tuple[np.float32, ...]
) -> None:
    """Update the elements ``piece`` of weights and state."""
    old = [array[piece] for array in own]
    new = element(*old, gradient, *scalars)
    for array, values in zip(old, new if isinstance(new, tuple) else (new,), strict=True):
        array[...] = values


def combine(out: Floats, addresses: AnyArray, codes: AnyArray, divisor: np.float32, factor: np.float32) -> bool:
    """Do the same as ``means._combine``."""
    given, is_finite = _views(addresses.tolist(), codes.tolist(), 0, out.size), True
    for at in range(0, out.size, _PIECE):
        piece = slice(at, at + _PIECE)
        out[piece] = _mean(given, piece, (divisor, factor))
        is_finite = is_finite and bool(np.isfinite(out[piece]).all())
    return is_finite


def add_elements(out: Floats, address: int, code: int, weight: np.float32 | None = None) -> None:
    """Do the same as ``means._add_elements``, and with a weight as ``means._add_weighted``."""
    (given,) = _views([address], [code], 0, out.size)
    for at in range(0, out.size, _PIECE):
        values = _copied(given[at : at + _PIECE])
        out[at : at + _PIECE] += values if weight is None else np.float32(weight) * values


def sum_squares(values: Floats) -> float:
    """Do the same as ``means._sum_squares``."""
    lanes = np.zeros(SUM_LANES, np.float64)
    for at in range(0, values.size, _PIECE):
        piece = values[at : at + _PIECE]
        squares = np.zeros(-(-piece.size // SUM_LANES) * SUM_LANES, np.float64)
        np.square(piece, out=squares[: piece.size], dtype=np.float64)
        for row in squares.reshape(-1, SUM_LANES):
            lanes += row
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return float(lanes[0])


def all_finite(bits: AnyArray, exponent: Any) -> bool:
    """Do the same as ``means._all_finite16`` and ``_all_finite32``."""
    pieces = (bits[at : at + _PIECE] for at in range(0, bits.size, _PIECE))
    return not any(((piece & exponent) == exponent).any() for piece in pieces)


def _views(addresses: Sequence[int], codes: Sequence[int], start: int, size: int) -> list[AnyArray]:
    """Return views of ``size`` elements from element ``start`` of arrays at these addresses."""
    views: list[AnyArray] = []
    for address, code in zip(addresses, codes, strict=False):
        dtype = _BY_CODE[code]
        memory = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address + start * dtype.itemsize)
        views.append(np.frombuffer(memoryview(memory), dtype) if size else np.empty(0, dtype))
    return views


def _copied(part: AnyArray) -> Floats:
    """Return elements of a contribution as float32."""
    if part.dtype == np.float32:
        return part.copy()
    widened = np.empty(part.size, np.float32)
    widen_by_numpy(part, widened)
    return widened


def _mean(given: Sequence[AnyArray], piece: slice, division: Sequence[Any]) -> Floats:
    """Return the mean of a piece of the contributions: the sum in order, divided."""
    total = _copied(given[0][piece])
    for part in given[1:]:
        total += _copied(part[piece])
    divisor, factor = division
    mean: Floats = total * factor if divisor == 0 else total / divisor
    return mean


def _finite_mean(given: Sequence[AnyArray], piece: slice, division: Sequence[Any], bad: AnyArray) -> Floats | None:
    """Return the mean of the contributions that are finite in this piece, or None if it is not finite. Marks the others
    as bad."""
    total: Floats | None = None
    good = 0
    for number, part in enumerate(given):
        values = _copied(part[piece])
        if not np.isfinite(values).all():
            bad[number] = 1
            continue
        total, good = values if total is None else total + values, good + 1
    if total is None:
        return None
    divisor, factor = division
    by_factor = divisor == 0 and (good == len(given) or factor == 1)
    mean: Floats = total * factor if by_factor else total / np.float32(good)
    return mean if np.isfinite(mean).all() else None
