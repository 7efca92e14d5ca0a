"""Encoders of INTEGER segments, compiled by numba. ``numpy_integers`` is the same without a compiler, byte for byte.

A block's scale depends on the whole block, even if a segment has only part of it. So the decoded values do not depend
on how a tensor is divided into slices.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from psdist.compression.compiled import IN, OUT, kernel, part_of_kernel
from psdist.compression.deferred import types
from psdist.compression.segments import numpy_integers
from psdist.compression.segments.random_numbers import centred, draw

OUT_BYTES = types.Array(types.uint8, 1, "C")

_U, _I, _F, _S = np.uint32, np.int64, np.float32, np.int8
_MAGNITUDE, _INFINITY = _U(0x7FFFFFFF), _U(0x7F800000)
# Adding this to a small number rounds it to an integer, ties to even; the integer is in the low bits of the sum.
_MAGIC: Final = np.float32(1.5 * 2.0**23)
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


@part_of_kernel
def largest_bits(values: Any) -> Any:
    """Return the bits of the largest magnitude; at least those of infinity if a value is not finite."""
    bits, most = values.view(np.uint32), _U(0)
    for i in range(bits.size):
        most = max(most, _U(bits[i] & _MAGNITUDE))
    return most


@part_of_kernel
def _quantize(values: Any, scale: Any, limit: Any, codes: Any) -> None:
    """Round to the nearest multiple of the scale."""
    divisor = scale if scale > _ZERO else _ONE
    for i in range(codes.size):
        x = _F(values[i] / divisor)
        x = limit if x > limit else x
        x = -limit if x < -limit else x
        codes[i] = _S(_U(_F(x + _MAGIC).view(np.uint32)))


@part_of_kernel
def _quantize_by_chance(values: Any, scale: Any, limit: Any, low: Any, high: Any, first: Any, codes: Any) -> None:
    """Round to one of the two nearest multiples of the scale, at random.

    first: number of the first element.
    """
    divisor = scale if scale > _ZERO else _ONE
    for i in range(codes.size):
        x = _F(_F(values[i] / divisor) + centred(draw(low, high, _U(first + _U(i)))))
        x = limit if x > limit else x
        x = -limit if x < -limit else x
        codes[i] = _S(_U(_F(x + _MAGIC).view(np.uint32)))


@part_of_kernel
def _store_residual(values: Any, codes: Any, scale: Any, residual: Any) -> None:
    for i in range(codes.size):
        residual[i] = values[i] - _F(codes[i]) * scale


@part_of_kernel
def pack(codes: Any, bits: Any, out: Any) -> None:
    """Pack codes of 4 or 2 bits, the first one in the lowest bits of the first byte."""
    per_byte = 8 // bits
    mask = np.uint8((1 << bits) - 1)
    whole = codes.size // per_byte
    for i in range(whole):
        if bits == 4:
            out[i] = np.uint8(codes[2 * i] & 15) | np.uint8(np.uint8(codes[2 * i + 1] & 15) << np.uint8(4))
        else:
            low = np.uint8(codes[4 * i] & 3) | np.uint8(np.uint8(codes[4 * i + 1] & 3) << np.uint8(2))
            high = np.uint8(codes[4 * i + 2] & 3) | np.uint8(np.uint8(codes[4 * i + 3] & 3) << np.uint8(2))
            out[i] = low | np.uint8(high << np.uint8(4))
    if whole * per_byte < codes.size:
        last = np.uint8(0)
        for i in range(whole * per_byte, codes.size):
            last |= np.uint8(np.uint8(np.uint8(codes[i]) & mask) << np.uint8(bits * (i - whole * per_byte)))
        out[whole] = last


@kernel(
    IN, types.int64, types.int64, types.int64, types.int64, types.boolean, types.uint64, OUT_BYTES, OUT,
    result=types.boolean, interpreted=numpy_integers.encode,
)  # fmt: skip
def encode_integers(
    values: Any,
    start: Any,
    stop: Any,
    bits: Any,
    block: Any,
    stochastic: Any,
    key: Any,
    out: Any,
    residual: Any,
) -> Any:
    """Write the body for elements [start, stop) of a tensor. Return False if a value is not finite.

    out: exactly the body's size.
    residual: as long as ``values``, or empty. Its elements [start, stop) receive the residual.
    """
    limit = _F((1 << (bits - 1)) - 1)
    top = _F(_U(_U(0x7F7FFFFF) - _U(_U(bits - 1) << _U(23))).view(np.float32))
    low, high = _U(key & np.uint64(0xFFFFFFFF)), _U(key >> np.uint64(32))
    first, blocks = start // block, (stop + block - 1) // block - start // block
    scales, packed = out[: 4 * blocks].view(np.float32), out[4 * blocks :]
    codes = packed.view(np.int8) if bits == 8 else np.empty(stop - start, np.int8)
    for b in range(blocks):
        begin = (first + b) * block
        most = largest_bits(values[begin : min(begin + block, values.size)])
        if most >= _INFINITY:
            return False
        scale = min(_F(_U(most).view(np.float32) / limit), top)
        scales[b] = scale
        low_end, high_end = max(begin, start), min(begin + block, stop)
        part_values, part_codes = values[low_end:high_end], codes[low_end - start : high_end - start]
        if stochastic:
            salt = _U(low + _U(_U(begin >> 32) * _U(0x85EBCA6B)))
            _quantize_by_chance(part_values, scale, limit, salt, high, _U(low_end & 0xFFFFFFFF), part_codes)
        else:
            _quantize(part_values, scale, limit, part_codes)
        if residual.size:
            _store_residual(part_values, part_codes, scale, residual[low_end:high_end])
    if bits != 8:
        pack(codes, bits, packed)
    return True


#: Kernels of this module.
KERNELS: Final = (encode_integers,)
