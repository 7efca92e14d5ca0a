"""Encoder of ONE_BIT segments, compiled by numba: signs, and the mean magnitude of each block."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression.compiled import IN, OUT, kernel, part_of_kernel
from psdist.compression.deferred import types
from psdist.compression.segments.integers import OUT_BYTES, largest_bits

_U, _F, _B = np.uint32, np.float32, np.uint8
_INFINITY, _SIGN, _LAST = _U(0x7F800000), _U(0x80000000), _U(31)
#: Magnitudes are summed in this many lanes: element i of a block belongs to lane i % LANES.
LANES: Final = 16


def _encode_by_numpy(
    values: NDArray[np.float32],
    start: int,
    stop: int,
    block: int,
    out: NDArray[np.uint8],
    residual: NDArray[np.float32],
) -> bool:
    scales = []
    for begin in range(start // block * block, stop, block):
        one = values[begin : begin + block]
        if not np.isfinite(one).all():
            return False
        lanes = np.zeros(-(-one.size // LANES) * LANES)
        lanes[: one.size] = np.abs(one)
        total = np.cumsum(np.cumsum(lanes.reshape(-1, LANES), axis=0)[-1])[-1]
        scales.append(np.float32(total / one.size))
    part_values, phase = values[start:stop], start % block
    negative = np.signbit(part_values)
    if residual.size:
        each = np.repeat(np.array(scales, np.float32), block)[phase : phase + stop - start]
        residual[start:stop] = part_values - np.where(negative, -each, each)
    out[: 4 * len(scales)] = np.array(scales, np.float32).view(np.uint8)
    out[4 * len(scales) :] = np.packbits(negative, bitorder="little")
    return True


@part_of_kernel
def _mean_magnitude(values: Any) -> Any:
    lanes = np.zeros(LANES, np.float64)
    whole = values.size // LANES * LANES
    for at in range(0, whole, LANES):
        for i in range(LANES):
            lanes[i] += np.float64(abs(values[at + i]))
    for i in range(whole, values.size):
        lanes[i - whole] += np.float64(abs(values[i]))
    total = 0.0
    for i in range(LANES):
        total += lanes[i]
    return _F(total / values.size)


@part_of_kernel
def _pack_signs(values: Any, out: Any) -> None:
    bits, whole = values.view(np.uint32), values.size // 8
    for i in range(whole):
        byte = _U(0)
        for j in range(8):
            byte |= _U(_U(bits[8 * i + j] >> _LAST) << _U(j))
        out[i] = byte
    if whole * 8 < bits.size:
        byte = _U(0)
        for i in range(whole * 8, bits.size):
            byte |= _U(_U(bits[i] >> _LAST) << _U(i - whole * 8))
        out[whole] = byte


@part_of_kernel
def _store_residual(values: Any, scale: Any, residual: Any) -> None:
    for i in range(values.size):
        sign = _U(_F(values[i]).view(np.uint32) & _SIGN)
        residual[i] = values[i] - _F(_U(_F(scale).view(np.uint32) | sign).view(np.float32))


@kernel(IN, types.int64, types.int64, types.int64, OUT_BYTES, OUT, result=types.boolean, interpreted=_encode_by_numpy)
def encode_signs(values: Any, start: Any, stop: Any, block: Any, out: Any, residual: Any) -> Any:
    """Write the body for elements [start, stop) of a tensor. Return False if a value is not finite.

    out: exactly the body's size.
    residual: as long as ``values``, or empty. Its elements [start, stop) receive the residual.
    """
    first, blocks = start // block, (stop + block - 1) // block - start // block
    scales = out[: 4 * blocks].view(np.float32)
    for b in range(blocks):
        begin = (first + b) * block
        whole = values[begin : min(begin + block, values.size)]
        if largest_bits(whole) >= _INFINITY:
            return False
        scales[b] = _mean_magnitude(whole)
        if residual.size:
            low, high = max(begin, start), min(begin + block, stop)
            _store_residual(values[low:high], scales[b], residual[low:high])
    _pack_signs(values[start:stop], out[4 * blocks :])
    return True


#: Kernels of this module.
KERNELS: Final = (encode_signs,)
