"""Encoders of SPARSE segments: which elements are kept, and writing them. Compiled by numba.

``numpy_sparse`` has the same without a compiler, byte for byte. Magnitudes are compared as the bits of float32 without
their sign, which are in the same order. Of equal ones the first are kept; zeros never are. What is kept of a tensor,
and its scales, do not depend on how the tensor is cut into slices.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from psdist.compression.casts import narrow_brain_one, widen_brain_one
from psdist.compression.compiled import IN, OUT, kernel, part_of_kernel
from psdist.compression.deferred import types
from psdist.compression.segments import numpy_sparse
from psdist.compression.segments.integers import OUT_BYTES, pack

_U, _I, _F, _S = np.uint32, np.int64, np.float32, np.int8
_MAGNITUDE, _INFINITY, _SIGN = _U(0x7FFFFFFF), _U(0x7F800000), _U(0x80000000)
_BRAIN_INFINITY, _BRAIN_MAGNITUDE = np.uint16(0x7F80), np.uint16(0x7FFF)
_MAGIC: Final = np.float32(1.5 * 2.0**23)
_LARGEST = _F(np.finfo(np.float32).max)
_TOP8, _TOP2 = _F(_LARGEST / _F(128)), _F(_LARGEST / _F(2))
_LIMIT8, _ONE_AND_HALF, _ZERO = _F(127.0), _F(1.5), _F(0.0)
_SPLIT: Final = numpy_sparse.SPLIT
#: Elements that are looked at together: most have none that is kept.
_GROUP: Final = 16
_SAMPLES: Final = 16384

POSITIONS = types.Array(types.int64, 1, "C")
IN_POSITIONS = types.Array(types.int64, 1, "C", True, None, False)


@part_of_kernel
def _count_from(magnitudes: Any, threshold: Any) -> Any:
    """How many are at least ``threshold``."""
    count = _U(0)
    for i in range(magnitudes.size):
        count += _U(magnitudes[i] >= threshold)
    return _I(count)


@part_of_kernel
def _threshold(magnitudes: Any, kept: Any, low: Any, high: Any, guess: Any) -> Any:
    """A number that exactly ``kept`` are at least; where there is none, the largest that more are.

    At least ``kept`` are at least ``low``, and fewer are at least ``high``. The search begins at ``guess``, in steps
    that grow until the number is passed.
    """
    low, high, step = _I(low), _I(high), _I(1 << 19)
    middle = _I(guess)
    while high - low > 1:
        if not low < middle < high:
            middle = (low + high) >> 1
        count = _count_from(magnitudes, _U(middle))
        if count == kept:
            return _U(middle)
        if count > kept:
            low = middle
            middle += step
        else:
            high = middle
            middle -= step
        if low + step < high:
            step *= 2
        else:
            middle = (low + high) >> 1
    return _U(low)


@part_of_kernel
def _append_from(bits: Any, threshold: Any, base: Any, where: Any, count: Any) -> Any:
    """Appends the places, plus ``base``, of magnitudes of at least ``threshold``. Returns the new count.

    ``where`` needs room for all.
    """
    whole = bits.size // _GROUP * _GROUP
    for at in range(0, whole, _GROUP):
        most = _U(0)
        for i in range(_GROUP):
            most = max(most, _U(bits[at + i] & _MAGNITUDE))
        if most >= threshold:
            for i in range(at, at + _GROUP):
                where[count] = base + i
                count += _U(bits[i] & _MAGNITUDE) >= threshold
    for i in range(whole, bits.size):
        if _U(bits[i] & _MAGNITUDE) >= threshold:
            where[count] = base + i
            count += 1
    return count


@part_of_kernel
def _drop_ties(bits: Any, threshold: Any, base: Any, surplus: Any, where: Any) -> Any:
    """Takes the last ``surplus`` of those that equal ``threshold`` out of places. Returns the new count."""
    at = where.size
    while surplus > 0:
        at -= 1
        surplus -= _U(bits[where[at] - base] & _MAGNITUDE) == threshold
    keep = at
    for i in range(at, where.size):
        if _U(bits[where[i] - base] & _MAGNITUDE) != threshold:
            where[keep] = where[i]
            keep += 1
    return keep


@kernel(
    IN, types.int64, types.int64, types.int64, types.int64, POSITIONS,
    result=types.int64, interpreted=numpy_sparse.select_chunks,
)  # fmt: skip
def select_chunks(values: Any, first: Any, last: Any, chunk: Any, kept: Any, where: Any) -> Any:
    """Writes the places of the ``kept`` largest of each chunk in [first, last) to ``where``; returns how many.

    The range begins at a chunk's border, and ends at one or with ``values``. A shorter chunk keeps its share. -1 where
    a value is not finite. where: as long as the range, and one more.
    """
    all_bits, count, guess = values.view(np.uint32), _I(0), _U(1 << 30)
    magnitudes = np.empty(min(chunk, last - first), np.uint32)
    for begin in range(first, last, chunk):
        bits = all_bits[begin : min(begin + chunk, last)]
        size = bits.size
        share = (kept * size + chunk - 1) // chunk
        tile, most = magnitudes[:size], _U(0)
        for i in range(size):
            magnitude = _U(bits[i] & _MAGNITUDE)
            tile[i] = magnitude
            most = max(most, magnitude)
        if most >= _INFINITY:
            return _I(-1)
        if most == 0:
            continue
        guess = _threshold(tile, share, _U(0), _U(most + _U(1)), guess)
        threshold = max(guess, _U(1))
        end = _append_from(bits, threshold, begin, where, count)
        surplus = end - count - share
        count = end if surplus <= 0 else count + _drop_ties(bits, threshold, begin, surplus, where[count:end])
    return count


@part_of_kernel
def _gather_from(bits: Any, threshold: Any, out: Any) -> Any:
    """Writes the magnitudes of at least ``threshold`` to ``out``. Returns how many, and the largest of all."""
    whole, count, largest_of_all = bits.size // _GROUP * _GROUP, _I(0), _U(0)
    for at in range(0, whole, _GROUP):
        most = _U(0)
        for i in range(_GROUP):
            most = max(most, _U(bits[at + i] & _MAGNITUDE))
        if most >= threshold:
            largest_of_all = max(largest_of_all, most)
            for i in range(at, at + _GROUP):
                magnitude = _U(bits[i] & _MAGNITUDE)
                out[count] = magnitude
                count += magnitude >= threshold
    for i in range(whole, bits.size):
        magnitude = _U(bits[i] & _MAGNITUDE)
        largest_of_all = max(largest_of_all, magnitude)
        if magnitude >= threshold:
            out[count] = magnitude
            count += 1
    return count, largest_of_all


@kernel(IN, types.int64, result=types.UniTuple(types.int64, 2), interpreted=numpy_sparse.largest)
def largest(values: Any, kept: Any) -> Any:
    """The magnitude bits from which on values are kept, and the place from which on those equal to it are not.

    So that ``kept`` are kept, or all but zeros. The first is -1 where a value is not finite. 0 < kept <= values.size.
    """
    bits, n = values.view(np.uint32), values.size
    stride = max(n // _SAMPLES, 1)
    sample = np.empty((n + stride - 1) // stride, np.uint32)
    for i in range(sample.size):
        sample[i] = bits[i * stride] & _MAGNITUDE
    wanted = min(kept // stride + kept // stride // 4 + 64, sample.size)
    floor = _threshold(sample, wanted, _U(0), _U(0x80000000), _U(1 << 30)) if stride > 1 else _U(0)
    candidates = np.empty(n, np.uint32)
    count, most = _gather_from(bits, floor, candidates)
    if count < kept:  # The sample was not like the rest.
        floor = _U(0)
        count, most = _gather_from(bits, floor, candidates)
    if most >= _INFINITY:
        return _I(-1), _I(0)
    threshold = _threshold(candidates[:count], kept, floor, _U(most + _U(1)), floor)
    if threshold == 0:
        return _I(1), n
    surplus, at = _count_from(candidates[:count], threshold) - kept, n
    while surplus > 0:
        at -= 1
        surplus -= _U(bits[at] & _MAGNITUDE) == threshold
    return _I(threshold), at


@kernel(
    IN, types.int64, types.int64, types.int64, types.int64, POSITIONS,
    result=types.int64, interpreted=numpy_sparse.select_above,
)  # fmt: skip
def select_above(values: Any, first: Any, last: Any, threshold: Any, ties_stop: Any, where: Any) -> Any:
    """Writes the places in [first, last) of what ``largest`` keeps to ``where``; returns how many.

    where: as long as the range, and one more.
    """
    bits = values.view(np.uint32)
    limit = _U(threshold)
    border = min(max(ties_stop, first), last)
    count = _append_from(bits[first:border], limit, first, where, _I(0))
    return _append_from(bits[border:last], _U(limit + _U(1)), border, where, count)


@part_of_kernel
def _scale8(values: Any, where: Any) -> Any:
    """The scale of the kept values of a chunk: the largest becomes 127."""
    most = _U(0)
    bits = values.view(np.uint32)
    for i in range(where.size):
        most = max(most, _U(bits[where[i]] & _MAGNITUDE))
    return min(_F(_U(most).view(np.float32) / _LIMIT8), _TOP8)


@part_of_kernel
def _scale2(values: Any, where: Any) -> Any:
    """The scale with the least squared error, if the split into small and large ones is that of the mean."""
    total = 0.0
    for i in range(where.size):
        total += abs(np.float64(values[where[i]]))
    split = total / max(where.size, 1) * _SPLIT
    above, squares = 0.0, 0.0
    for i in range(where.size):
        magnitude = abs(np.float64(values[where[i]]))
        factor = 2.0 if magnitude > split else 1.0
        above += magnitude * factor
        squares += factor * factor
    return min(_F(above / max(squares, 1.0)), _TOP2)


@part_of_kernel
def _code8(value: Any, scale: Any) -> Any:
    x = _F(value / scale) if scale > _ZERO else _ZERO
    x = _LIMIT8 if x > _LIMIT8 else x
    x = -_LIMIT8 if x < -_LIMIT8 else x
    return _S(_U(_F(x + _MAGIC).view(np.uint32)))


@part_of_kernel
def _code2(value: Any, scale: Any) -> Any:
    """Bit 1 is the sign, and bit 0 whether it is twice the scale."""
    return _S(2 if value < _ZERO else 0) | _S(1 if abs(value) > _ONE_AND_HALF * scale else 0)


@part_of_kernel
def _write_scaled(
    values: Any,
    first: Any,
    start: Any,
    chunk: Any,
    bits: Any,
    where: Any,
    low: Any,
    high: Any,
    body: Any,
    residual: Any,
) -> None:
    """Writes scales and codes. where[low:high] is in the segment; the others are in its first and last chunk."""
    chunks = body[0]
    scales, packed = chunks.view(np.float32), body[1]
    codes = packed.view(np.int8) if bits == 8 else np.empty(high - low, np.int8)
    begin = 0
    for c in range(scales.size):
        end = begin
        while end < where.size and where[end] < first + (c + 1) * chunk:
            end += 1
        inside = where[begin:end]
        scale = _scale8(values, inside) if bits == 8 else _scale2(values, inside)
        scales[c] = scale
        for i in range(max(begin, low), min(end, high)):
            value = values[where[i]]
            code = _code8(value, scale) if bits == 8 else _code2(value, scale)
            codes[i - low] = code
            if residual.size:
                size = _F(code) if bits == 8 else _F((1 + (code & 1)) * (1 - (code & 2)))
                residual[where[i]] = value - size * scale
        begin = end
    if bits != 8:
        pack(codes, bits, packed)


@part_of_kernel
def _write_values(values: Any, bits: Any, where: Any, out: Any, residual: Any) -> None:
    """Writes values of 32 or 16 bits."""
    if bits == 32:
        floats = out.view(np.float32)
        for i in range(where.size):
            floats[i] = values[where[i]]
            if residual.size:
                residual[where[i]] = _ZERO
        return
    words, all_bits = out.view(np.uint16), values.view(np.uint32)
    for i in range(where.size):
        brain = narrow_brain_one(all_bits[where[i]])
        if np.uint16(brain & _BRAIN_MAGNITUDE) == _BRAIN_INFINITY:
            brain = np.uint16(brain - np.uint16(1))
        words[i] = brain
        if residual.size:
            residual[where[i]] = values[where[i]] - widen_brain_one(brain)


@part_of_kernel
def _gap_bytes(where: Any, start: Any) -> Any:
    """The bytes that the gaps between places take."""
    size, previous = where.size, start - 1
    for i in range(where.size):
        size += (where[i] - previous - 1) // 255
        previous = where[i]
    return size


@part_of_kernel
def _write_gaps(where: Any, start: Any, out: Any) -> None:
    at, previous = 0, start - 1
    for i in range(where.size):
        gap = where[i] - previous - 1
        while gap >= 255:
            out[at] = 255
            at += 1
            gap -= 255
        out[at] = gap
        at += 1
        previous = where[i]


@part_of_kernel
def _copy(values: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = values[i]


@kernel(
    IN, types.int64, types.int64, types.int64, types.int64, IN_POSITIONS, OUT_BYTES, OUT,
    result=types.int64, interpreted=numpy_sparse.write,
)  # fmt: skip
def write_sparse(values: Any, start: Any, stop: Any, bits: Any, chunk: Any, where: Any, out: Any, residual: Any) -> Any:
    """Writes the body for elements [start, stop) of a tensor, and what it leaves out of them to ``residual``.

    where: the places that are kept, also those of the rest of the first and the last chunk. chunk: of scales, or 0.
    out: at least ``4 * (stop - start) + 8`` bytes. residual: as long as ``values``, or empty.
    Returns the body's size; -1, with only the residual written, where all elements as float32 take less.
    """
    low, high = np.searchsorted(where, start), np.searchsorted(where, stop)
    inside = where[low:high]
    first = start // chunk * chunk if chunk else start
    chunks = (stop - first + chunk - 1) // chunk if chunk else 0
    scales_end = 4 + 4 * chunks
    values_end = scales_end + (inside.size * bits + 7) // 8
    size = values_end + _gap_bytes(inside, start)
    if residual.size:
        _copy(values[start:stop], residual[start:stop])
    if bits == 32 and size > 4 * (stop - start):
        if residual.size:
            for i in range(inside.size):
                residual[inside[i]] = _ZERO
        return _I(-1)
    out[:4].view(np.uint32)[0] = inside.size
    if chunk:
        body = (out[4:scales_end], out[scales_end:values_end])
        _write_scaled(values, first, start, chunk, bits, where, low, high, body, residual)
    else:
        _write_values(values, bits, inside, out[4:values_end], residual)
    _write_gaps(inside, start, out[values_end:size])
    return _I(size)


#: All that is compiled here.
KERNELS: Final = (select_chunks, largest, select_above, write_sparse)
