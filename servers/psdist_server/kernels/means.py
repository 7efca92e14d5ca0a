"""Sums and means of contributions, and the parts that fused updates share. Compiled by numba.

These free functions know nothing of slices, steps or schedules. They read and write memory once. The same arithmetic
in plain numpy is in ``tests/support/reference.py``. Without ``fastmath`` every float32 operation is rounded as written,
so each function gives the same bytes as its numpy reference, on any vector width. (A NaN is a NaN; its payload bits are
unspecified.)

Fused updates (``updates``) compute the mean of contributions and the optimizer's arithmetic (``arithmetic``) in one
pass over memory, block by block: contributions to a block are added in the first-level cache, and then the block's
weights and state are updated from there. One call updates several segments (a segment is a range of one slice whose
elements have the same scalars), because a thread needs the interpreter between calls, and the kernel has evicted the
interpreter's memory from the caches. Their arguments, for n segments:

- arrays uintp[n, 1 to 4]: addresses of the segment's weights, then of its state in the optimizer's order;
- segments int64[n, 3]: its size in elements, its start in each contribution, the number of contributions;
- parts uintp[n, m], codes int64[n, m]: addresses and types (``CODES``) of the contributions to the slice;
- divisions float32[n, 2]: ``division_by``, or a divisor of 0 and any factor; for several contributions a factor of 1
  keeps their sum, also if some of them are left out;
- memory float32[2 * BLOCK]: the thread's own;
- bad uint8[n, m]: set to 1 for contributions that were left out of a block;
- means uintp[n]: address of the memory for the slice's mean, float32, which is written while it is in the cache; 0 for
  none. A block that is not updated is NaN there, so that an update by this mean does not update it either;
- scalars: as ``optimizers`` computes them.

A block in which contributions have NaN or Inf is updated by the mean of the others. A block whose mean is still not
finite (its sum overflows) is not updated. Each value of a contribution is read once before it is used, so memory that
is written meanwhile cannot introduce such a value. Fused updates check nothing; only ``arrays`` calls them.

Encoded contributions, and those with weights, are added up before the update. An encoded gradient is defined as what
its segments (``psdist.compression.segments``) add to zeros. It is decoded while it is added to a sum, straight from the
received bytes. So the contributions to a slice, encoded or not, are added in order to zeros in the kernel thread's
memory, and the cost of each is proportional to its bytes. The sum is then treated as an only contribution. The result
has the same bytes as the update by decoded contributions, because with an encoded contribution among them no sum is
-0.0.

Invariants:

- Elements do not influence each other, except in ``sum_squares``, whose order of additions is fixed.
- The compiled loops check no bounds. The public functions check lengths and types first.
- Nothing is compiled at import. A kernel is compiled, or loaded from numba's cache beside this file, at its first call,
  which takes up to seconds. In a server the background compiler does this while numpy does the work (``interpreted``).
  The GIL is released while a kernel runs.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final

import numpy as np

from psdist.compression import casts, segments
from psdist.compression.casts import INFINITY, narrow, widen_brain_one, widen_half_one
from psdist.compression.dtypes import check_output, check_vector
from psdist.compression.kernel_runtime import (
    FLOAT,
    IN,
    IN_BITS16,
    IN_BITS32,
    OUT,
    Deferred,
    Kernel,
    PartOfKernel,
    kernel,
    numba,
    part_of_kernel,
    types,
)
from psdist.errors import DTypeMismatchError, InvalidArgumentError
from psdist_server.kernels import interpreted
from psdist_server.kernels.interpreted import BLOCK, CODES, DTYPES, SUM_LANES, AnyArray, Floats, division_by

#: The values of ``CODES``, as separate numbers because numba accepts only these as constants.
_FLOAT32, _FLOAT16, _BFLOAT16 = range(3)

_U = np.uint32
_thread = threading.local()


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
    addresses = np.array([part.ctypes.data for part in parts], np.uintp)
    codes = np.array([CODES[part.dtype] for part in parts], np.int64)
    return bool(_combine(out, addresses, codes, *division_by(divisor)))


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


# --- fused updates ----------------------------------------------------------------------------------------------------

_ADDRESSES = types.Array(types.uintp, 2, "C")
_INTEGERS = types.Array(types.int64, 2, "C")
_JOB = (
    *(_ADDRESSES, _INTEGERS, _ADDRESSES, _INTEGERS, types.Array(FLOAT, 2, "C"), OUT, types.Array(types.uint8, 2, "C")),
    types.Array(types.uintp, 1, "C"),
)


class FusedUpdate(Kernel):
    """Fused update of one optimizer. element: its arithmetic, a function of single elements or of whole arrays."""

    def __init__(self, function: Callable[..., Any], element: PartOfKernel) -> None:
        self.element: Callable[..., Any] = element.py_func
        names = list(inspect.signature(self.element).parameters)
        scalars = types.UniTuple(FLOAT, len(names) - names.index("g") - 1)
        super().__init__(function, (*_JOB, scalars), interpreted=partial(interpreted.update, self.element))


def updates_by(element: Any) -> Callable[[Callable[..., Any]], FusedUpdate]:
    """Return a decorator that turns a function into the fused update with this arithmetic."""
    return lambda function: FusedUpdate(function, element)


@part_of_kernel
def block_mean(segment: Any, at: Any, parts: Any, codes: Any, division: Any, memory: Any, bad: Any, mean: Any) -> Any:
    """Compute the mean of the contributions to the block at element ``at`` of a segment, into ``memory``, and also into
    address ``mean`` if that is not 0. Returns the block's size, or 0 if no contribution to it is finite, or the mean is
    not."""
    start = segment[1] + at
    size = _mean_in_cache(min(BLOCK, segment[0] - at), start, segment[2], parts, codes, division, memory, bad)
    if mean != np.uintp(0):
        out = floats_at(mean, start, min(BLOCK, segment[0] - at))
        for i in range(size):
            out[i] = memory[i]
        for i in range(size, out.size):
            out[i] = np.float32(np.nan)
    return size


@part_of_kernel
def _mean_in_cache(
    size: Any, start: Any, count: Any, parts: Any, codes: Any, division: Any, memory: Any, bad: Any
) -> Any:
    divisor, factor = division[0], division[1]
    block = memory[:size]
    if mean_of_block(block, parts, codes, count, start, divisor, factor) == np.uint32(0):
        return size
    # Rare. Each contribution is copied before it is examined, as it may change.
    spare = memory[BLOCK : BLOCK + size]
    good = 0
    for part in range(count):
        add_to_block(spare, parts[part], codes[part], start, True)
        finite = True
        for i in range(size):
            finite = finite and np.isfinite(spare[i])
        if not finite:
            bad[part] = 1
            continue
        for i in range(size):
            block[i] = spare[i] if good == 0 else block[i] + spare[i]
        good += 1
    if good == 0:
        return 0
    finite = True
    by_factor = divisor == np.float32(0.0) and (good == count or factor == np.float32(1.0))
    for i in range(size):
        block[i] = block[i] * factor if by_factor else block[i] / np.float32(good)
        finite = finite and np.isfinite(block[i])
    return size if finite else 0


@part_of_kernel
def floats_at(address: Any, start: Any, size: Any) -> Any:
    """Return ``size`` floats from element ``start``."""
    return carray(pointer(address + np.uintp(4 * start)), (size,), np.float32)


# --- encoded and weighted contributions -------------------------------------------------------------------------------


def is_encoded(part: AnyArray) -> bool:
    """True if a contribution is encoded: bytes, not elements."""
    return part.itemsize == 1


def total(parts: Sequence[AnyArray], size: int) -> Floats:
    """Return the sum of contributions to a slice of ``size`` elements, added in order.

    The sum is in this thread's memory, which the next call reuses. It is not finite if a part holds NaN or Inf, or if
    it overflows.
    """
    out = _memory(size)
    out.fill(0.0)
    for part in parts:
        _add(part, out)
    return out


def weighted_total(
    parts: Sequence[AnyArray], weights: Sequence[float], size: int
) -> tuple[Floats, float, tuple[int, ...]]:
    """Return the weighted sum of contributions to a slice, the sum of the weights, and the positions left out.

    Contributions that hold NaN or Inf are left out of both sums. The sum starts at zeros, to which float32 products are
    added in order. It is in this thread's memory, like that of ``total``. It is not finite if it overflows, and NaN if
    all contributions are left out.
    """
    out = _memory(size)
    _add_all(parts, weights, out)
    if all_finite(out):
        return out, sum(weights), ()
    # Shared parts could change between check and sum, so copy them first. This path is rare.
    copies = [_decoded(part, size) if is_encoded(part) else part.copy() for part in parts]
    good = [place for place, part in enumerate(copies) if all_finite(part)]
    _add_all([copies[place] for place in good], [weights[place] for place in good], out)
    if not good:
        out.fill(np.nan)
    return out, sum(weights[place] for place in good) or 1.0, tuple(sorted(set(range(len(parts))).difference(good)))


def _add_all(parts: Sequence[AnyArray], weights: Sequence[float], out: Floats) -> None:
    out.fill(0.0)
    for part, weight in zip(parts, weights, strict=True):
        values = _decoded(part, out.size) if is_encoded(part) else part
        _add_weighted(out, values.ctypes.data, CODES[values.dtype], np.float32(weight))


def decoded(parts: Sequence[AnyArray], size: int) -> list[AnyArray]:
    """Return the contributions, the encoded ones decoded to new float32 arrays."""
    return [_decoded(part, size) if is_encoded(part) else part for part in parts]


def _decoded(part: AnyArray, size: int) -> Floats:
    out = np.zeros(size, np.float32)
    _add(part, out)
    return out


def _add(part: AnyArray, out: Floats) -> None:
    if is_encoded(part):
        segments.accumulate(part, out)
    else:
        _add_elements(out, part.ctypes.data, CODES[part.dtype])


@kernel(OUT, types.uintp, types.int64, interpreted=interpreted.add_elements)
def _add_elements(out: Any, address: Any, code: Any) -> None:
    """Add a contribution that is not encoded. It is read once."""
    for start in range(0, out.size, BLOCK):
        add_to_block(out[start : start + BLOCK], address, code, start, False)


@kernel(OUT, types.uintp, types.int64, FLOAT, interpreted=interpreted.add_elements)
def _add_weighted(out: Any, address: Any, code: Any, weight: Any) -> None:
    """Add a contribution that is not encoded, multiplied by its weight. It is read once."""
    block = np.empty(BLOCK, np.float32)
    for start in range(0, out.size, BLOCK):
        size = min(BLOCK, out.size - start)
        add_to_block(block[:size], address, code, start, True)
        for i in range(size):
            out[start + i] += weight * block[i]


def _memory(size: int) -> Floats:
    """Return float32[size] of this thread, shared by all parameter sets: the steady state allocates nothing."""
    memory: Floats | None = getattr(_thread, "memory", None)
    if memory is None or memory.size < size:
        memory = _thread.memory = np.empty(size, np.float32)
    return memory[:size]


#: Kernels that every parameter set needs, besides its fused updates.
KERNELS: Final = (_combine, _sum_squares, _all_finite32, _all_finite16, *casts.KERNELS)
#: Kernels needed once a push is encoded or has a weight.
ENCODED_KERNELS: Final = (*segments.DECODERS, _add_elements, _add_weighted)
