"""Encoders of INTEGER segments by numpy, used until the compiled ones exist. Equal bytes."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression.segments.random_numbers import centred_all, draw_all

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_MAGIC: Final = np.float32(1.5 * 2.0**23)


def encode(
    values: Floats,
    start: int,
    stop: int,
    bits: int,
    block: int,
    stochastic: bool,
    key: int,
    out: Bytes,
    residual: Floats,
) -> bool:
    """Compute ``integers.encode_integers``."""
    limit, top = np.float32(2 ** (bits - 1) - 1), np.finfo(np.float32).max / np.float32(2 ** (bits - 1))
    first, last = start // block * block, min(-(-stop // block) * block, values.size)
    most = np.maximum.reduceat(np.abs(values[first:last]), np.arange(0, last - first, block))
    if not np.isfinite(most).all():
        return False
    scales = np.minimum(most / limit, top)
    per_element = np.repeat(scales, block)[start - first : stop - first]
    part = values[start:stop]
    with np.errstate(all="ignore"):
        x = part / np.where(per_element > 0, per_element, np.float32(1))
        if stochastic:
            x = x + _chances(start, stop, block, key)
        codes = ((np.clip(x, -limit, limit) + _MAGIC).view(np.uint32) & 255).astype(np.uint8).view(np.int8)
        if residual.size:
            residual[start:stop] = part - codes.astype(np.float32) * per_element
    out[: 4 * scales.size] = scales.view(np.uint8)
    out[4 * scales.size :] = pack(codes, bits)
    return True


def _chances(start: int, stop: int, block: int, key: int) -> Floats:
    """Return the random offsets that are added to elements before rounding."""
    numbers = np.arange(start, stop, dtype=np.uint64)
    salts = (numbers // np.uint64(block) * np.uint64(block) >> np.uint64(32)).astype(np.uint32) * np.uint32(0x85EBCA6B)
    low, high = np.uint32(key & 0xFFFFFFFF), key >> 32
    chances = np.empty(numbers.size, np.float32)
    for salt in np.unique(salts):
        chosen = salts == salt
        salted = int(low) + int(salt) & 0xFFFFFFFF | high << 32
        chances[chosen] = centred_all(draw_all(salted, numbers[chosen].astype(np.uint32)))
    return chances


def pack(codes: NDArray[Any], bits: int) -> Bytes:
    """Pack codes of 8, 4 or 2 bits, the first one in the lowest bits of the first byte."""
    if bits == 8:
        return codes.view(np.uint8)
    per_byte = 8 // bits
    fields = np.zeros(-(-codes.size // per_byte) * per_byte, np.uint8)
    fields[: codes.size] = codes.view(np.uint8) & np.uint8(2**bits - 1)
    shifted = fields.reshape(-1, per_byte) << np.arange(0, 8, bits, dtype=np.uint8)
    packed: Bytes = np.bitwise_or.reduce(shifted, axis=1)
    return packed
