"""RANDOM segments: one element per period of a tensor is sent, at a position derived from a key.

The position in period number p is ``p * period + (draw(p) * period >> 32)``. In a shorter last period it may be beyond
the tensor; then none is sent. Compiled by numba; the numpy version beside it gives the same bytes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression.casts import INFINITY
from psdist.compression.compiled import FLOAT, IN, OUT, kernel, part_of_kernel
from psdist.compression.deferred import types
from psdist.compression.segments import random_numbers
from psdist.compression.segments.random_numbers import draw

_U, _I, _F = np.uint32, np.int64, np.float32
_SALT: Final = 0x85EBCA6B


@part_of_kernel
def place(low: Any, high: Any, number: Any, period: Any) -> Any:
    """Return the position sent from period ``number``.

    low, high: halves of the key.
    """
    salt = _U(low + _U(_U(number >> 32) * _U(_SALT)))
    drawn = np.uint64(draw(salt, high, _U(number & 0xFFFFFFFF)))
    return number * period + _I((drawn * np.uint64(period)) >> np.uint64(32))


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


def places(key: int, period: int, start: int, stop: int) -> NDArray[np.int64]:
    """Return the positions in [start, stop), by numpy."""
    numbers = np.arange(start // period, -(-stop // period), dtype=np.int64)
    salts = (numbers >> 32).astype(np.uint32) * _U(_SALT)
    found = np.empty(numbers.size, np.int64)
    for salt in np.unique(salts):
        chosen = salts == salt
        salted = (key + int(salt)) & 0xFFFFFFFF | (key >> 32) << 32
        drawn = random_numbers.draw_all(salted, numbers[chosen].astype(np.uint32)).astype(np.uint64)
        found[chosen] = numbers[chosen] * period + (drawn * np.uint64(period) >> np.uint64(32)).astype(np.int64)
    return found[(found >= start) & (found < stop)]


def _select_by_numpy(
    values: NDArray[np.float32],
    start: int,
    stop: int,
    key: int,
    period: int,
    factor: float,
    out: NDArray[np.float32],
    residual: NDArray[np.float32],
) -> int:
    if not np.isfinite(values[start:stop]).all():
        return -1
    found = places(key, period, start, stop)
    with np.errstate(all="ignore"):
        sent = values[found] * np.float32(factor)
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
    low, high = _U(key & np.uint64(0xFFFFFFFF)), _U(key >> np.uint64(32))
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
