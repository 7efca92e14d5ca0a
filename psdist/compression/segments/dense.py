"""Segments whose size is known before they are encoded: INTEGER, ONE_BIT and LOW_RANK. Compiled by numba.

A block's scale depends on the whole block, even if a segment has only part of it. So the decoded values do not depend
on how a tensor is divided into slices. The numpy version of each kernel gives the same bytes.

LOW_RANK: rows of a matrix as the product of two thin matrices, with a fixed order of operations. Element (i, j) is
``P[i, 0] * Q[0, j] + P[i, 1] * Q[1, j] + ...``, added from left to right and rounded to float32 after each operation.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression.kernel_runtime import IN, OUT, interpreted_by, kernel, part_of_kernel, types
from psdist.compression.segments import random_numbers
from psdist.compression.segments.random_numbers import centred, draw, halves, salted

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

OUT_BYTES = types.Array(types.uint8, 1, "C")

_U, _L, _I, _F, _S = np.uint32, np.uint64, np.int64, np.float32, np.int8
_MAGNITUDE, _INFINITY = _U(0x7FFFFFFF), _U(0x7F800000)
_SIGN, _LAST = _U(0x80000000), _U(31)
# Adding this to a small number rounds it to an integer, ties to even; the integer is in the low bits of the sum.
MAGIC: Final = np.float32(1.5 * 2.0**23)
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
#: Magnitudes are summed in this many lanes: element i of a block belongs to lane i % LANES.
LANES: Final = 16
_TILE: Final = 1024
#: Larger products are neither sent nor accepted: their sums might not be finite.
PRODUCT_LARGEST: Final = 3.0e38


# --- INTEGER ----------------------------------------------------------------------------------------------------------


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
        codes[i] = _S(_U(_F(x + MAGIC).view(np.uint32)))


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
        codes[i] = _S(_U(_F(x + MAGIC).view(np.uint32)))


@part_of_kernel
def _store_integer_residual(values: Any, codes: Any, scale: Any, residual: Any) -> None:
    for i in range(codes.size):
        residual[i] = values[i] - _F(codes[i]) * scale


def _pack_by_numpy(codes: NDArray[Any], bits: int, out: Bytes) -> None:
    per_byte = 8 // bits
    fields = np.zeros(-(-codes.size // per_byte) * per_byte, np.uint8)
    fields[: codes.size] = codes.view(np.uint8) & np.uint8(2**bits - 1)
    np.bitwise_or.reduce(fields.reshape(-1, per_byte) << np.arange(0, 8, bits, dtype=np.uint8), axis=1, out=out)


@interpreted_by(_pack_by_numpy)
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


def _encode_integers_by_numpy(
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
    limit, top = _F(2 ** (bits - 1) - 1), np.finfo(np.float32).max / _F(2 ** (bits - 1))
    first, last = start // block * block, min(-(-stop // block) * block, values.size)
    most = np.maximum.reduceat(np.abs(values[first:last]), np.arange(0, last - first, block))
    if not np.isfinite(most).all():
        return False
    scales = np.minimum(most / limit, top)
    each = np.repeat(scales, block)[start - first : stop - first]
    part = values[start:stop]
    x: Any = part / np.where(each > 0, each, _ONE)
    if stochastic:
        numbers, (low, high) = np.arange(start, stop, dtype=np.int64), halves(_L(key))
        x = x + centred(draw(salted(low, numbers // block * block), high, _U(numbers & 0xFFFFFFFF)))
    codes = round_by_numpy(x, limit)
    if residual.size:
        residual[start:stop] = part - codes.astype(np.float32) * each
    out[: 4 * scales.size] = scales.view(np.uint8)
    if bits == 8:
        out[4 * scales.size :] = codes.view(np.uint8)
    else:
        pack(codes, bits, out[4 * scales.size :])
    return True


def round_by_numpy(values: Floats, limit: Any) -> NDArray[np.int8]:
    """Round to integers, ties to even, after clipping to [-limit, limit]."""
    return ((np.clip(values, -limit, limit) + MAGIC).view(np.uint32) & _U(255)).astype(np.uint8).view(np.int8)


@kernel(
    IN, types.int64, types.int64, types.int64, types.int64, types.boolean, types.uint64, OUT_BYTES, OUT,
    result=types.boolean, interpreted=_encode_integers_by_numpy,
)  # fmt: skip
def encode_integers(
    values: Any, start: Any, stop: Any, bits: Any, block: Any, stochastic: Any, key: Any, out: Any, residual: Any
) -> Any:
    """Write the body for elements [start, stop) of a tensor. Return False if a value is not finite.

    out: exactly the body's size.
    residual: as long as ``values``, or empty. Its elements [start, stop) receive the residual.
    """
    limit = _F((1 << (bits - 1)) - 1)
    top = _F(_U(_U(0x7F7FFFFF) - _U(_U(bits - 1) << _U(23))).view(np.float32))
    low, high = halves(key)
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
            _quantize_by_chance(
                part_values, scale, limit, salted(low, begin), high, _U(low_end & 0xFFFFFFFF), part_codes
            )
        else:
            _quantize(part_values, scale, limit, part_codes)
        if residual.size:
            _store_integer_residual(part_values, part_codes, scale, residual[low_end:high_end])
    if bits != 8:
        pack(codes, bits, packed)
    return True


# --- ONE_BIT: signs, and the mean magnitude of each block -------------------------------------------------------------


def _encode_signs_by_numpy(values: Floats, start: int, stop: int, block: int, out: Bytes, residual: Floats) -> bool:
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
def _store_sign_residual(values: Any, scale: Any, residual: Any) -> None:
    for i in range(values.size):
        sign = _U(_F(values[i]).view(np.uint32) & _SIGN)
        residual[i] = values[i] - _F(_U(_F(scale).view(np.uint32) | sign).view(np.float32))


@kernel(
    IN, types.int64, types.int64, types.int64, OUT_BYTES, OUT,
    result=types.boolean, interpreted=_encode_signs_by_numpy,
)  # fmt: skip
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
            _store_sign_residual(values[low:high], scales[b], residual[low:high])
    _pack_signs(values[start:stop], out[4 * blocks :])
    return True


# --- LOW_RANK ---------------------------------------------------------------------------------------------------------


def _add_product_by_numpy(p: Floats, q: Floats, rank: int, columns: int, column: int, out: Floats) -> None:
    rows, others = p.reshape(-1, rank), q.reshape(rank, columns)
    product = rows[:, :1] * others[:1]
    for k in range(1, rank):
        product += rows[:, k : k + 1] * others[k : k + 1]
    out += product.reshape(-1)[column : column + out.size]


@interpreted_by(_add_product_by_numpy)
def add_product(p: Any, q: Any, rank: Any, columns: Any, column: Any, out: Any) -> None:
    """Add elements of the product to ``out``, beginning at ``column`` of the first row.

    p: float32[rows * rank], row by row.
    q: float32[rank * columns], row by row.
    """
    tile = np.empty(_TILE, np.float32)
    done, row, j = 0, 0, column
    while done < out.size:
        size = min(columns - j, out.size - done, _TILE)
        part_tile = tile[:size]
        for k in range(rank):
            factor, others = p[row * rank + k], q[k * columns + j : k * columns + j + size]
            if k == 0:
                for i in range(size):
                    part_tile[i] = factor * others[i]
            else:
                for i in range(size):
                    part_tile[i] += factor * others[i]
        here = out[done : done + size]
        for i in range(size):
            here[i] += part_tile[i]
        done, j = done + size, j + size
        if j == columns:
            row, j = row + 1, 0


@kernel(IN, IN, types.int64, types.int64, types.int64, OUT, interpreted=_add_product_by_numpy)
def add_low_rank(p: Any, q: Any, rank: Any, columns: Any, column: Any, out: Any) -> None:
    """Compute ``add_product`` for encoders, which need the product that servers will add."""
    add_product(p, q, rank, columns, column, out)


def factors(matrix: Floats, rank: int, seed: int, start: int, state: Floats | None) -> tuple[Floats, Floats] | None:
    """Return P (rows, rank) and Q (rank, columns) with P Q near ``matrix``, after one step of power iteration.

    state: Q of the last push, where the iteration resumes; None for the first push.
    seed, start: seed of the initial Q, with the tensor's position in the flat vector.
    Returns None if an element of the product or of the residual could overflow float32.
    """
    columns = matrix.shape[1]
    if state is None or state.shape != (rank, columns) or not state.any():
        numbers = np.arange(rank * columns, dtype=np.uint32)
        low, high = halves(_L(random_numbers.key(seed, 0, 0, start)))
        state = centred(draw(low, high, numbers)).reshape(rank, columns)
    with np.errstate(all="ignore"):
        p = matrix @ _scaled(state).T
        if not np.isfinite(p).all():
            return None
        p = np.ascontiguousarray(np.linalg.qr(_scaled(p))[0], dtype=np.float32)
        q = np.ascontiguousarray((matrix.T @ p).T, dtype=np.float32)
    most = max(float(matrix.max()), -float(matrix.min()))  # The product is subtracted from this.
    largest = float(np.abs(p).max()) * float(np.abs(q).max()) * rank + most
    return (p, q) if largest <= PRODUCT_LARGEST else None  # None for NaN, too.


def _scaled(values: Floats) -> Floats:
    """Scale ``values`` to a largest magnitude of 1, so that nothing over- or underflows."""
    most = np.abs(values).max()
    return values / most if most > 0 and np.isfinite(np.float32(1) / most) else values


#: Kernels of this module.
KERNELS: Final = (encode_integers, encode_signs, add_low_rank)
