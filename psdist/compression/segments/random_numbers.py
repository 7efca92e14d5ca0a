"""Counter-based random numbers, and RANDOM segments, whose positions are drawn from them.

Each number is a function of a key and the element's number. They need no state, and do not depend on how a vector is
divided into slices. ``docs/internals/payload-format.md`` specifies them. They are not for secrets. ``draw``,
``centred`` and ``place`` accept numbers (also numba's) and arrays.

A RANDOM segment holds one element per period of a tensor, at a position derived from a key. The position in period
number p is ``p * period + (draw(p) * period >> 32)``. In a shorter last period it may be beyond the tensor; then none
is sent.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression.casts import INFINITY
from psdist.compression.kernel_runtime import FLOAT, IN, OUT, kernel, part_of_kernel, types

Floats = NDArray[np.float32]

_U, _L, _I, _F = np.uint32, np.uint64, np.int64, np.float32
_STEP, _FIRST, _SECOND = _U(0x9E3779B9), _U(0x21F0AAAD), _U(0x735A2D97)
_SALT = _U(0x85EBCA6B)
_FIFTEEN, _SIXTEEN, _EIGHT = _U(15), _U(16), _U(8)
_PLACE: Final = np.float32(2.0**-24)
_HALF: Final = np.float32(0.5 - 2.0**-25)
_MASK64: Final = 2**64 - 1


def key(seed: int, rank: int, ordinal: int, start: int) -> int:
    """Return the 64-bit key of a tensor's random numbers in one push.

    rank: the worker's rank.
    ordinal: number of the worker's push.
    start: the tensor's position in the flat vector.
    """
    mixed = 0
    for number in (seed, rank, ordinal, start):
        mixed = (mixed ^ number) * 0x9E3779B97F4A7C15 & _MASK64
        mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & _MASK64
        mixed ^= mixed >> 32
    return mixed


@part_of_kernel
def halves(key: Any) -> Any:
    """Return the lower and the upper half of a key, which is a uint64."""
    return _U(key & _L(0xFFFFFFFF)), _U(key >> _L(32))


@part_of_kernel
def salted(low: Any, number: Any) -> Any:
    """Return the lower half of the key for elements from this one on, which are numbered by its lower 32 bits."""
    return _U(low + _U(_U(number >> 32) * _SALT))


@part_of_kernel
def draw(low: Any, high: Any, number: Any) -> Any:
    """Return 32 random bits for ``number``.

    low, high: halves of the key.
    """
    x = _U(_U(number * _STEP) + low)
    x = _U(_U(x ^ _U(x >> _SIXTEEN)) * _FIRST)
    x = _U(x + high)
    x = _U(_U(x ^ _U(x >> _FIFTEEN)) * _SECOND)
    return _U(x ^ _U(x >> _FIFTEEN))


@part_of_kernel
def centred(bits: Any) -> Any:
    """Map random bits to a float32 uniform in (-0.5, 0.5)."""
    return _F(_F(_U(bits >> _EIGHT)) * _PLACE - _HALF)


@part_of_kernel
def place(low: Any, high: Any, number: Any, period: Any) -> Any:
    """Return the position sent from period ``number``.

    low, high: halves of the key.
    """
    drawn = _L(draw(salted(low, number), high, _U(number & 0xFFFFFFFF)))
    return number * period + _I((drawn * _L(period)) >> _L(32))


@part_of_kernel
def place_count(low: Any, high: Any, period: Any, start: Any, stop: Any) -> Any:
    """Return the number of positions in [start, stop), which must not be empty."""
    first, last = start // period, (stop - 1) // period
    count = last - first + 1
    if place(low, high, first, period) < start or (first == last and place(low, high, first, period) >= stop):
        count -= 1
    if first != last and place(low, high, last, period) >= stop:
        count -= 1
    return count


def places(low: Any, high: Any, period: int, start: int, stop: int) -> NDArray[np.int64]:
    """Return the positions in [start, stop), by numpy."""
    found = place(low, high, np.arange(start // period, -(-stop // period), dtype=np.int64), period)
    inside: NDArray[np.int64] = found[(found >= start) & (found < stop)]
    return inside


def _select_by_numpy(
    values: Floats, start: int, stop: int, key: int, period: int, factor: float, out: Floats, residual: Floats
) -> int:
    if not np.isfinite(values[start:stop]).all():
        return -1
    low, high = halves(_L(key))
    found = places(low, high, period, start, stop)
    sent = values[found] * _F(factor)
    if not np.isfinite(sent).all():
        return -1
    out[: found.size] = sent
    if residual.size:
        residual[start:stop] = values[start:stop]
        residual[found] = 0.0
    return int(found.size)


@kernel(
    IN, types.int64, types.int64, types.uint64, types.int64, FLOAT, OUT, OUT,
    result=types.int64, interpreted=_select_by_numpy,
)  # fmt: skip
def select_random(
    values: Any, start: Any, stop: Any, key: Any, period: Any, factor: Any, out: Any, residual: Any
) -> Any:
    """Write the selected values in [start, stop), times ``factor``, to ``out``.

    Returns their number, or -1 if one is not finite.

    residual: as long as ``values``, receives the values that are not sent; or empty.
    """
    low, high = halves(key)
    here, bad, count = values[start:stop], _U(0), 0
    bits = here.view(np.uint32)
    for i in range(bits.size):
        bad |= _U(_U(bits[i] & INFINITY) == INFINITY)
    if bad:
        return _I(-1)
    if residual.size:
        unsent = residual[start:stop]
        for i in range(unsent.size):
            unsent[i] = here[i]
    for number in range(start // period, (stop + period - 1) // period):
        at = place(low, high, _I(number), period) - start
        if 0 <= at < here.size:
            out[count] = here[at] * factor
            if not np.isfinite(out[count]):
                return _I(-1)
            count += 1
            if residual.size:
                residual[start + at] = _F(0.0)
    return _I(count)


#: Kernels of this module.
KERNELS: Final = (select_random,)
