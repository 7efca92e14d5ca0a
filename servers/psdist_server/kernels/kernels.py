"""The servers' arithmetic apart from updates: functions on flat float32 arrays, compiled by numba.

These free functions read and write memory once. They know nothing of slices, steps or schedules. The same arithmetic in
plain numpy is in ``tests/support/reference.py``.

Without ``fastmath`` every float32 operation is rounded as written. So each function gives the same bytes as its numpy
reference, on any vector width. (A NaN is a NaN; its payload bits are unspecified.)

Invariants:

- Elements do not influence each other, except in ``sum_squares``, whose order of additions is fixed.
- The compiled loops check no bounds. The public functions check lengths and types first.
- Nothing is compiled at import. A kernel is compiled, or loaded from numba's cache beside this file, at its first call,
  which takes up to seconds. In a server ``background_compiler`` does this while numpy does the work (``interpreted``).
  The GIL is released while a kernel runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

import numpy as np

from psdist.compression import casts
from psdist.compression.casts import INFINITY, check_output, check_vector, narrow, widen_brain_one, widen_half_one
from psdist.compression.compiled import FLOAT, IN, IN_BITS16, IN_BITS32, OUT, Kernel, kernel, part_of_kernel
from psdist.compression.deferred import Deferred, numba, types
from psdist.errors import DTypeMismatchError, InvalidArgumentError
from psdist_server.kernels import interpreted
from psdist_server.kernels.interpreted import BLOCK, CODES, DTYPES, SUM_LANES, AnyArray, Floats

#: The values of ``CODES``, as separate numbers because numba accepts only these as constants.
_FLOAT32, _FLOAT16, _BFLOAT16 = range(3)

_U = np.uint32


def cast(values: Floats, dtype: str) -> AnyArray:
    """Return float32[n] ``values`` as "float32" (the array itself), "float16" or "bfloat16" (a new array; see
    ``narrow``).

    Raises DTypeMismatchError for any other ``dtype``.
    """
    wanted = DTYPES.get(dtype)
    if wanted is None:
        raise DTypeMismatchError(f"dtype {dtype!r:.40} cannot be pulled: use one of {', '.join(DTYPES)}", dtype=dtype)
    if wanted == values.dtype:
        return values
    out = np.empty(values.size, wanted)
    narrow(values, out)
    return out


def _type_pointer(_context: Any, _address: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr.value))

    return types.voidptr(types.uintp).value, generate


pointer = Deferred(lambda: import_module("numba.extending").intrinsic(_type_pointer))
carray = numba.carray


@part_of_kernel
def add_to_block(block: Any, address: Any, code: Any, start: Any, first: Any) -> None:
    """Accumulate one part's block: copy it if it is the first part, else add it."""
    size = block.size
    if code == _FLOAT32:
        floats = carray(pointer(address + np.uintp(4 * start)), (size,), np.float32)
        for i in range(size):
            block[i] = floats[i] if first else block[i] + floats[i]
    elif code == _BFLOAT16:
        brains = carray(pointer(address + np.uintp(2 * start)), (size,), np.uint16)
        for i in range(size):
            block[i] = widen_brain_one(brains[i]) if first else block[i] + widen_brain_one(brains[i])
    else:
        halves = carray(pointer(address + np.uintp(2 * start)), (size,), np.uint16)
        for i in range(size):
            block[i] = widen_half_one(halves[i]) if first else block[i] + widen_half_one(halves[i])


@part_of_kernel
def _add_last(block: Any, one: Any, other: Any, start: Any, first: Any, divisor: Any, factor: Any) -> Any:
    """Add the last two parts, both float32, and divide and check in the same pass. Returns 0 if everything is
    finite."""
    size = block.size
    ones = carray(pointer(one + np.uintp(4 * start)), (size,), np.float32)
    others = carray(pointer(other + np.uintp(4 * start)), (size,), np.float32)
    bad = _U(0)
    if divisor == np.float32(0.0):
        for i in range(size):
            value = np.float32(((ones[i] if first else block[i] + ones[i]) + others[i]) * factor)
            block[i] = value
            bad |= _U(_U(np.float32(value).view(np.uint32) & INFINITY) == INFINITY)
    else:
        for i in range(size):
            value = np.float32(((ones[i] if first else block[i] + ones[i]) + others[i]) / divisor)
            block[i] = value
            bad |= _U(_U(np.float32(value).view(np.uint32) & INFINITY) == INFINITY)
    return bad


@part_of_kernel
def _take_one(block: Any, address: Any, start: Any, factor: Any) -> Any:
    """Copy the only part, float32, multiplied by ``factor``, and check it. Returns 0 if everything is finite."""
    values = carray(pointer(address + np.uintp(4 * start)), (block.size,), np.float32)
    bad = _U(0)
    for i in range(block.size):
        value = np.float32(values[i] * factor)
        block[i] = value
        bad |= _U(_U(np.float32(value).view(np.uint32) & INFINITY) == INFINITY)
    return bad


@part_of_kernel
def _divide(block: Any, divisor: Any, factor: Any) -> Any:
    """Divide and check a block that holds its sum. Returns 0 if everything is finite."""
    bad = _U(0)
    if divisor == np.float32(0.0):
        for i in range(block.size):
            block[i] = block[i] * factor
    else:
        for i in range(block.size):
            block[i] = block[i] / divisor
    bits = block.view(np.uint32)
    for i in range(block.size):
        bad |= _U(_U(bits[i] & INFINITY) == INFINITY)
    return bad


@part_of_kernel
def mean_of_block(block: Any, addresses: Any, codes: Any, count: Any, start: Any, divisor: Any, factor: Any) -> Any:
    """Compute the mean of ``count`` parts' elements from ``start`` into ``block``: their sum over ``divisor``, or times
    ``factor`` if the divisor is 0. Returns 0 if everything is finite.

    Parts are passed as addresses because they differ in number and type, and one compiled function per combination
    would be too many.
    """
    if count == 1 and codes[0] == _FLOAT32 and divisor == np.float32(0.0):
        return _take_one(block, addresses[0], start, factor)
    paired = count >= 2 and codes[count - 2] == _FLOAT32 and codes[count - 1] == _FLOAT32
    for part in range(count - 2 if paired else count):
        add_to_block(block, addresses[part], codes[part], start, part == 0)
    if paired:
        return _add_last(block, addresses[count - 2], addresses[count - 1], start, count == 2, divisor, factor)
    return _divide(block, divisor, factor)


@kernel(
    OUT, types.Array(types.uintp, 1, "C"), types.Array(types.int64, 1, "C"), FLOAT, FLOAT,
    result=types.boolean, interpreted=interpreted.combine,
)  # fmt: skip
def _combine(out: Any, addresses: Any, codes: Any, divisor: Any, factor: Any) -> Any:
    # Block by block, so that ``out`` is written to memory once for any number of parts.
    bad = _U(0)
    for start in range(0, out.size, BLOCK):
        bad |= mean_of_block(out[start : start + BLOCK], addresses, codes, codes.size, start, divisor, factor)
    return bad == _U(0)


def combine(out: Floats, parts: Sequence[AnyArray], divisor: float) -> bool:
    """Compute ``out = (parts[0] + parts[1] + ...) / float32(divisor)``, added in this order in float32. Returns True if
    all of it is finite. It is not if a part holds NaN or Inf, or if the sum overflows. Each part is read once.

    out: float32[n], overwritten; overlaps no part.
    parts: at least one, each contiguous float32[n], float16[n] or bfloat16[n], in any mix; 16-bit values are widened
        exactly.
    divisor: above 0.

    Raises InvalidArgumentError, DTypeMismatchError or ShapeMismatchError, and then ``out`` is unchanged.
    """
    if not parts or not divisor > 0:
        raise InvalidArgumentError(f"{len(parts)} parts over divisor {divisor}: use at least one, and one above 0")
    check_vector("out", out, DTYPES["float32"], out.size)
    check_output("out", out)
    for part in parts:
        check_vector("part", part, part.dtype, out.size)
        if part.dtype not in CODES:
            raise DTypeMismatchError(f"part has dtype {part.dtype}: use one of {', '.join(DTYPES)}", dtype=part.dtype)
    addresses = np.array([address_of(part) for part in parts], np.uintp)
    codes = np.array([CODES[part.dtype] for part in parts], np.int64)
    return bool(_combine(out, addresses, codes, *division_by(divisor)))


def address_of(array: AnyArray) -> int:
    """Return the address of the array's memory."""
    address: int = array.__array_interface__["data"][0]
    return address


def division_by(number: float) -> tuple[np.float32, np.float32]:
    """Return the divisor and factor by which kernels divide by a positive ``number``. Multiplying by a power of two's
    inverse equals dividing by it, bit for bit, and is cheaper."""
    if math.frexp(number)[0] == 0.5 and 2.0**-64 < number < 2.0**64:
        return np.float32(0.0), np.float32(1.0 / number)
    return np.float32(number), np.float32(0.0)


@kernel(IN, result=types.float64, interpreted=interpreted.sum_squares)
def _sum_squares(values: Any) -> Any:
    lanes = np.zeros(SUM_LANES, np.float64)
    whole = values.size // SUM_LANES * SUM_LANES
    for start in range(0, whole, SUM_LANES):
        for lane in range(SUM_LANES):
            value = np.float64(values[start + lane])
            lanes[lane] += value * value
    for lane in range(values.size - whole):
        value = np.float64(values[whole + lane])
        lanes[lane] += value * value
    width = SUM_LANES // 2
    while width:
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
        width //= 2
    return lanes[0]


def sum_squares(values: Floats) -> float:
    """Return the sum of the squares of float32[n] ``values``, in float64.

    The order is fixed: element i is added to lane i % SUM_LANES, in ascending order; then the upper half of the lanes
    is added to the lower half until one is left. (The square of a float32 is exact in float64.)
    """
    check_vector("values", values, DTYPES["float32"], values.size)
    return float(_sum_squares(values))


def _all_finite(bits: Any, exponent: Any) -> Any:
    for start in range(0, bits.size, BLOCK):
        block = bits[start : start + BLOCK]
        bad = bits.dtype.type(0)
        for i in range(block.size):
            bad |= bits.dtype.type(bits.dtype.type(block[i] & exponent) == exponent)
        if bad:
            return False
    return True


_all_finite16 = Kernel(_all_finite, (IN_BITS16, types.uint16), types.boolean, interpreted.all_finite)
_all_finite32 = Kernel(_all_finite, (IN_BITS32, types.uint32), types.boolean, interpreted.all_finite)


def all_finite(values: AnyArray) -> bool:
    """Return True if no element of ``values`` (float32[n], float16[n] or bfloat16[n]) is NaN or infinite.

    Stops at the first block of 4096 elements that holds one. Raises DTypeMismatchError.
    """
    check_vector("values", values, values.dtype, values.size)
    code = CODES.get(values.dtype)
    if code is None:
        raise DTypeMismatchError(f"values have dtype {values.dtype}: use one of {', '.join(DTYPES)}")
    if code == _FLOAT32:
        return bool(_all_finite32(values.view(np.uint32), INFINITY))
    return bool(_all_finite16(values.view(np.uint16), np.uint16(0x7C00 if code == _FLOAT16 else 0x7F80)))


#: Kernels that every parameter set needs.
KERNELS: Final = (_combine, _sum_squares, _all_finite32, _all_finite16, *casts.KERNELS)
