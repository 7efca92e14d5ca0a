"""Counter-based random numbers: each is a function of a key and the element's number.

They need no state, and do not depend on how a vector is divided into slices. ``docs/payload-format.md`` specifies
them. They are not for secrets. The functions accept numbers (also numba's) and arrays.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression.compiled import part_of_kernel

_U = np.uint32
_STEP, _FIRST, _SECOND = _U(0x9E3779B9), _U(0x21F0AAAD), _U(0x735A2D97)
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


def _draw(low: Any, high: Any, number: Any) -> Any:
    """Return 32 random bits for ``number``.

    low, high: halves of the key.
    """
    x = _U(_U(number * _STEP) + low)
    x = _U(_U(x ^ _U(x >> _SIXTEEN)) * _FIRST)
    x = _U(x + high)
    x = _U(_U(x ^ _U(x >> _FIFTEEN)) * _SECOND)
    return _U(x ^ _U(x >> _FIFTEEN))


def _centred(bits: Any) -> Any:
    """Map random bits to a float32 uniform in (-0.5, 0.5)."""
    return np.float32(np.float32(_U(bits >> _EIGHT)) * _PLACE - _HALF)


draw = part_of_kernel(_draw)
centred = part_of_kernel(_centred)


def draw_all(number_key: int, numbers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Compute ``draw`` for each of ``numbers``, by numpy."""
    low, high = _U(number_key & 0xFFFFFFFF), _U(number_key >> 32)
    x = numbers * _STEP + low
    x = (x ^ (x >> _SIXTEEN)) * _FIRST
    x = x + high
    x = (x ^ (x >> _FIFTEEN)) * _SECOND
    return x ^ (x >> _FIFTEEN)


def centred_all(bits: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Compute ``centred`` for each element, by numpy."""
    return (bits >> _EIGHT).astype(np.float32) * _PLACE - _HALF
