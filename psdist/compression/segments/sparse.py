"""Encoders of SPARSE segments: select the elements to keep, and write them. Compiled by numba.

Large vectors are read once: the last residual is added tile by tile, and each tile is searched while it is in the
cache. After that only the kept values are needed.

The numpy version of each kernel gives the same bytes. Magnitudes are compared as float32 bits without the
sign, which sort in the same order. Ties keep the first; zeros are never kept. The kept elements of a tensor, and its
scales, do not depend on how the tensor is divided into slices.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression.casts import narrow_brain_one, narrow_by_numpy, widen_brain_one, widen_by_numpy
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.compression.kernel_runtime import FLOAT, IN, OUT, kernel, part_of_kernel, types
from psdist.compression.segments.dense import MAGIC, OUT_BYTES, pack, round_by_numpy

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Positions = NDArray[np.int64]

_U, _L, _I, _F, _S = np.uint32, np.uint64, np.int64, np.float32, np.int8
_MAGNITUDE, _INFINITY, _SIGN = _U(0x7FFFFFFF), _U(0x7F800000), _U(0x80000000)
_BRAIN_INFINITY, _BRAIN_MAGNITUDE = np.uint16(0x7F80), np.uint16(0x7FFF)
_LARGEST = _F(np.finfo(np.float32).max)
#: Multiples of the scale that 2-bit codes stand for.
SIGNED_SIZES: Final = np.array([1, 2, -1, -2], np.float32)
_TOP8, _TOP2 = _F(_LARGEST / _F(128)), _F(_LARGEST / _F(2))
_LIMIT8, _ONE_AND_HALF, _ZERO = _F(127.0), _F(1.5), _F(0.0)
#: Among 2-bit values, those above this multiple of the mean magnitude count as large while the scale is computed.
_SPLIT: Final = 1.2
#: Elements whose marks are tested together, as one number: most groups have no kept element.
_GROUP: Final = 8
#: Size of a sample: number of runs, and elements per run. A run fills a cache line; single elements would touch as
#: many lines as there are elements.
_RUNS: Final = 1024
_RUN: Final = 16
#: The threshold of the next chunk is expected at most this far below the last one: about a tenth of it.
_MARGIN: Final = _I(1 << 20)
#: Elements that are summed and then searched while they are in the first-level cache.
_TILE: Final = 4096

# --- by numpy ---------------------------------------------------------------------------------------------------------


def _magnitudes(values: Floats) -> NDArray[np.uint32]:
    """Return the bits without the sign, which sort in the order of magnitudes."""
    return values.view(np.uint32) & _MAGNITUDE


def _sums(values: Floats, addend: Floats, factor: float, sums: Floats) -> Floats:
    np.add(values, addend * _F(factor), out=sums)
    return sums


def _select_chunks_by_numpy(values: Floats, chunk: int, kept: int) -> Positions:
    found = [np.empty(0, np.int64)]
    for begin in range(0, values.size, chunk):
        magnitudes = _magnitudes(values[begin : begin + chunk])
        if magnitudes.max() >= _INFINITY:
            return np.full(1, -1, np.int64)
        found.append(_largest(magnitudes, -(-kept * magnitudes.size // chunk)) + begin)
    return np.concatenate(found)


def _add_and_select_chunks_by_numpy(
    values: Floats, addend: Floats, factor: float, chunk: int, kept: int, sums: Floats
) -> Positions:
    return _select_chunks_by_numpy(_sums(values, addend, factor, sums), chunk, kept)


def _select_largest_by_numpy(values: Floats, kept: int) -> Positions:
    magnitudes = _magnitudes(values)
    return np.full(1, -1, np.int64) if magnitudes.max() >= _INFINITY else _largest(magnitudes, kept)


def _add_and_select_largest_by_numpy(
    values: Floats, addend: Floats, factor: float, kept: int, sums: Floats
) -> Positions:
    return _select_largest_by_numpy(_sums(values, addend, factor, sums), kept)


def _largest(magnitudes: NDArray[np.uint32], kept: int) -> Positions:
    """Return the positions of the ``kept`` largest. Ties keep the first; zeros are never kept."""
    threshold = max(int(np.partition(magnitudes, magnitudes.size - kept)[magnitudes.size - kept]), 1)
    chosen = magnitudes > threshold
    ties = np.flatnonzero(magnitudes == threshold)[: kept - np.count_nonzero(chosen)]
    chosen[ties] = True
    return np.flatnonzero(chosen)


def _write_by_numpy(
    kept: Floats, where: Positions, start: int, stop: int, bits: int, chunk: int, out: Bytes, residual: Floats
) -> int:
    part = slice(*np.searchsorted(where, [start, stop]))
    inside, values = where[part], kept[part]
    if chunk:
        decoded, scales, packed = _scaled_by_numpy(kept, where, start, stop, bits, chunk, part)
    else:
        decoded, scales, packed = _plain_by_numpy(values, bits)
    gaps = _gaps_by_numpy(inside - start)
    if residual.size:
        residual[inside] = values - decoded
    size = 4 + scales.size + packed.size + gaps.size
    if bits == 32 and size > 4 * (stop - start):
        return -1
    body = np.concatenate([np.array([inside.size], "<u4").view(np.uint8), scales, packed, gaps])
    out[:size] = body
    return size


def _gaps_by_numpy(places: Positions) -> Bytes:
    """Encode the gaps between positions: a byte of 255 stands for 255 elements without a value."""
    gaps = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(gaps // 255 + 1) - 1
    written = np.full(ends[-1] + 1 if ends.size else 0, 255, np.uint8)
    written[ends] = gaps % 255
    return written


def _plain_by_numpy(kept: Floats, bits: int) -> tuple[Floats, Bytes, Bytes]:
    """Return decoded values, no scales, and the bytes of 32- or 16-bit values."""
    nothing = np.empty(0, np.uint8)
    if bits == 32:
        return kept, nothing, kept.view(np.uint8)
    brains = np.empty(kept.size, NUMPY_DTYPES["bfloat16"])
    narrow_by_numpy(kept, brains)
    words = brains.view(np.uint16)
    words[(words & 0x7FFF) == 0x7F80] -= 1
    decoded = np.empty(kept.size, np.float32)
    widen_by_numpy(brains, decoded)
    return decoded, nothing, words.view(np.uint8)


def _scaled_by_numpy(
    kept: Floats, where: Positions, start: int, stop: int, bits: int, chunk: int, part: slice
) -> tuple[Floats, Bytes, Bytes]:
    """Return the decoded values at the positions ``part``, the scales of chunks, and codes of 8 or 2 bits."""
    first = start // chunk
    borders = np.searchsorted(where, np.arange(first, -(-stop // chunk) + 1) * chunk)
    scale_of = _scale8_by_numpy if bits == 8 else _scale2_by_numpy
    scales = np.array([scale_of(kept[a:b]) for a, b in pairwise(borders)], np.float32)
    kept, each = kept[part], scales[where[part] // chunk - first]
    if bits == 8:
        codes = round_by_numpy(np.where(each > 0, kept / each, _ZERO), 127)
        return codes.astype(np.float32) * each, scales.view(np.uint8), codes.view(np.uint8)
    codes = ((kept < 0) * 2 + (np.abs(kept) > _ONE_AND_HALF * each)).astype(np.int8)
    packed = np.empty(-(-codes.size // 4), np.uint8)
    pack(codes, 2, packed)
    return SIGNED_SIZES[codes] * each, scales.view(np.uint8), packed


def _scale8_by_numpy(kept: Floats) -> Any:
    most = np.abs(kept).max(initial=np.float32(0))
    return np.minimum(most / np.float32(127), _LARGEST / np.float32(128))


def _scale2_by_numpy(kept: Floats) -> Any:
    magnitudes = np.abs(kept.astype(np.float64))
    if not kept.size:
        return np.float32(0)
    split = np.cumsum(magnitudes)[-1] / kept.size * _SPLIT
    factors = np.where(magnitudes > split, 2.0, 1.0)
    best = np.float32(np.cumsum(magnitudes * factors)[-1] / np.sum(factors * factors))
    return np.minimum(best, _LARGEST / np.float32(2))


# --- compiled ---------------------------------------------------------------------------------------------------------

POSITIONS = types.Array(types.int64, 1, "C")
IN_POSITIONS = types.Array(types.int64, 1, "C", True, None, False)


@part_of_kernel
def _count_from(magnitudes: Any, threshold: Any) -> Any:
    """Return the number of magnitudes that are at least ``threshold``."""
    count = _U(0)
    for i in range(magnitudes.size):
        count += _U(magnitudes[i] >= threshold)
    return _I(count)


@part_of_kernel
def _threshold(magnitudes: Any, kept: Any, low: Any, high: Any, guess: Any) -> Any:
    """Return a threshold with exactly ``kept`` magnitudes at or above it, or else the largest with more than ``kept``.

    At least ``kept`` magnitudes are >= ``low``, and fewer are >= ``high``. The search starts at ``guess``, in steps
    that grow until the threshold is passed.
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
def _marks() -> Any:
    """Allocate scratch memory for ``_append_tile``.

    Returns a tile's marks, the same memory viewed as one number per group, and group indices.
    """
    marks = np.empty(_TILE, np.uint8)
    return marks, marks.view(np.uint64), np.empty(_TILE // _GROUP + 1, np.int64)


@part_of_kernel
def _append_from(bits: Any, threshold: Any, base: Any, where: Any, found: Any, count: Any, marks: Any) -> Any:
    """Append magnitudes of at least ``threshold`` to ``found``, and their positions plus ``base`` to ``where``.

    Returns the new count and the largest magnitude seen. ``where`` needs room for one entry more.

    marks: scratch memory.
    """
    most = _U(0)
    for begin in range(0, bits.size, _TILE):
        tile = bits[begin : begin + _TILE]
        count, largest = _append_tile(tile, threshold, base + begin, where, found, count, marks)
        most = max(most, largest)
    return count, most


@part_of_kernel
def _append_tile(bits: Any, threshold: Any, base: Any, where: Any, found: Any, count: Any, memory: Any) -> Any:
    """Run ``_append_from`` for one tile. It branches on no value, since no processor predicts which ones are kept."""
    marks, groups, marked = memory
    most, whole = _U(0), bits.size // _GROUP
    for i in range(bits.size):
        magnitude = _U(bits[i] & _MAGNITUDE)
        marks[i] = np.uint8(magnitude >= threshold)
        most = max(most, magnitude)
    with_marks = 0
    for i in range(whole):
        marked[with_marks] = i
        with_marks += groups[i] != 0
    end = _L(count)  # numba tests signed indices for being relative to the end.
    for i in range(with_marks):
        first = _L(_GROUP * marked[i])
        for j in range(_GROUP):
            at = _L(first + _L(j))
            where[end] = base + _I(at)
            end = _L(end + _L(marks[at]))
    for i in range(whole * _GROUP, bits.size):
        where[end] = base + i
        end = _L(end + _L(marks[i]))
    for i in range(count, _I(end)):
        found[i] = bits[_L(where[i] - base)] & _MAGNITUDE
    return _I(end), most


@part_of_kernel
def _with_room(array: Any, count: Any, room: Any) -> Any:
    """Return ``array``, or a larger copy of its first ``count`` elements if it lacks room for ``room`` more."""
    if array.size - count >= room:
        return array
    larger = np.empty(max(2 * array.size, count + room), array.dtype)
    larger[:count] = array[:count]
    return larger


@part_of_kernel
def _add(values: Any, addend: Any, factor: Any, sums: Any) -> None:
    for i in range(sums.size):
        sums[i] = np.float32(values[i] + np.float32(addend[i] * factor))


@part_of_kernel
def _keep_largest(magnitudes: Any, threshold: Any, kept: Any, where: Any) -> Any:
    """Move the positions of the ``kept`` largest to the front of ``where``. Return their number.

    magnitudes: one for each position in ``where``.
    threshold: result of ``_threshold`` for them, or 1 to drop zeros.
    """
    ties, end = kept - _count_from(magnitudes, _U(threshold + _U(1))), 0
    for i in range(magnitudes.size):
        is_chosen_tie = (magnitudes[i] == threshold) & (ties > 0)
        where[end] = where[i]
        end += (magnitudes[i] > threshold) | is_chosen_tie
        ties -= is_chosen_tie
    return end


@part_of_kernel
def _append_chunk(bits: Any, base: Any, share: Any, guess: Any, where: Any, found: Any, count: Any, marks: Any) -> Any:
    """Append the positions, plus ``base``, of the ``share`` largest of a chunk.

    Returns the new count (-1 if a value is not finite) and the threshold.

    guess: threshold of the previous chunk.
    found, marks: scratch memory.
    """
    floor = _U(max(_I(_I(guess) - _MARGIN), _I(1)))
    places = where[count:]
    size, most = _append_from(bits, floor, base, places, found, _I(0), marks)
    if most >= _INFINITY:
        return _I(-1), guess
    if most == 0:
        return count, guess
    if size < share:  # The previous chunk was not like this one.
        for i in range(bits.size):
            found[i] = bits[i] & _MAGNITUDE
        floor = max(_threshold(found[: bits.size], share, _U(0), _U(most + _U(1)), guess), _U(1))
        size, _ = _append_from(bits, floor, base, places, found, _I(0), marks)
    magnitudes = found[:size]
    threshold = _threshold(magnitudes, share, floor, _U(most + _U(1)), guess) if size > share else floor
    return count + _keep_largest(magnitudes, threshold, share, places), threshold


@kernel(IN, types.int64, types.int64, result=POSITIONS, interpreted=_select_chunks_by_numpy)
def select_chunks(values: Any, chunk: Any, kept: Any) -> Any:
    """Return the positions of the ``kept`` largest of each chunk, ascending; only -1 if a value is not finite.

    A shorter chunk keeps its proportional share.
    """
    n, count, guess = values.size, _I(0), _U(1 << 30)
    where, found = np.empty(_room_for(n, chunk, kept), np.int64), np.empty(min(chunk, n), np.uint32)
    marks = _marks()
    for begin in range(0, n, chunk):
        bits = values[begin : min(begin + chunk, n)].view(np.uint32)
        share = (kept * bits.size + chunk - 1) // chunk
        count, guess = _append_chunk(bits, begin, share, guess, where, found, count, marks)
        if count < 0:
            return np.full(1, _I(-1))
    return where[:count].copy()


@kernel(
    IN, IN, FLOAT, types.int64, types.int64, OUT,
    result=POSITIONS, interpreted=_add_and_select_chunks_by_numpy,
)  # fmt: skip
def add_and_select_chunks(values: Any, addend: Any, factor: Any, chunk: Any, kept: Any, sums: Any) -> Any:
    """Write ``values + factor * addend`` to ``sums`` while it is finite, and ``select_chunks`` from that."""
    n, count, guess = values.size, _I(0), _U(1 << 30)
    where, found = np.empty(_room_for(n, chunk, kept), np.int64), np.empty(min(chunk, n), np.uint32)
    marks = _marks()
    for begin in range(0, n, chunk):
        end = min(begin + chunk, n)
        _add(values[begin:end], addend[begin:end], factor, sums[begin:end])
        share = (kept * (end - begin) + chunk - 1) // chunk
        bits = sums[begin:end].view(np.uint32)
        count, guess = _append_chunk(bits, begin, share, guess, where, found, count, marks)
        if count < 0:
            return np.full(1, _I(-1))
    return where[:count].copy()


@part_of_kernel
def _room_for(size: Any, chunk: Any, kept: Any) -> Any:
    """Return room for the positions of all chunks, plus those of the last one before ties are dropped, plus one."""
    return (size + chunk - 1) // chunk * kept + chunk + 1


@part_of_kernel
def _floor_of(sample: Any, kept: Any, size: Any) -> Any:
    """Estimate, from a sample, a threshold that slightly more than ``kept`` of ``size`` magnitudes reach."""
    wanted = min(kept * sample.size // size * 5 // 4 + 64, sample.size)
    return _threshold(sample, wanted, _U(0), _U(0x80000000), _U(1 << 30))


@part_of_kernel
def _largest_among(bits: Any, kept: Any, floor: Any, where: Any, found: Any, count: Any, most: Any) -> Any:
    """Return the positions of the ``kept`` largest.

    where, found: positions and magnitudes of all ``count`` elements that are at least ``floor``.
    most: the largest magnitude.
    """
    if most >= _INFINITY:
        return np.full(1, _I(-1))
    if count < kept:  # The sample was not like the rest.
        floor, where, found = _U(0), np.empty(bits.size + 1, np.int64), np.empty(bits.size + 1, np.uint32)
        count, most = _append_from(bits, floor, _I(0), where, found, _I(0), _marks())
    magnitudes = found[:count]
    threshold = max(_threshold(magnitudes, kept, floor, _U(most + _U(1)), floor), _U(1))
    return where[: _keep_largest(magnitudes, threshold, kept, where)].copy()


@kernel(IN, types.int64, result=POSITIONS, interpreted=_select_largest_by_numpy)
def select_largest(values: Any, kept: Any) -> Any:
    """Return the positions of the ``kept`` largest, ascending; fewer if all others are zeros.

    Returns only -1 if a value is not finite.

    kept: in (0, values.size].
    """
    bits, floor, count, most = values.view(np.uint32), _U(0), _I(0), _U(0)
    if bits.size > 2 * _RUNS * _RUN:
        sample, stride = np.empty(_RUNS * _RUN, np.uint32), bits.size // _RUNS
        for i in range(sample.size):
            sample[i] = bits[i // _RUN * stride + i % _RUN] & _MAGNITUDE
        floor = _floor_of(sample, kept, bits.size)
    where, found, marks = np.empty(2 * kept + _TILE, np.int64), np.empty(2 * kept + _TILE, np.uint32), _marks()
    for begin in range(0, bits.size, _TILE):
        tile = bits[begin : begin + _TILE]
        where, found = _with_room(where, count, _TILE + 1), _with_room(found, count, _TILE + 1)
        count, largest = _append_tile(tile, floor, begin, where, found, count, marks)
        most = max(most, largest)
    return _largest_among(bits, kept, floor, where, found, count, most)


@kernel(
    IN, IN, FLOAT, types.int64, OUT,
    result=POSITIONS, interpreted=_add_and_select_largest_by_numpy,
)  # fmt: skip
def add_and_select_largest(values: Any, addend: Any, factor: Any, kept: Any, sums: Any) -> Any:
    """Write ``values + factor * addend`` to ``sums``, and ``select_largest`` from that."""
    n, floor, count, most = values.size, _U(0), _I(0), _U(0)
    if n > 2 * _RUNS * _RUN:
        sample, stride = np.empty(_RUNS * _RUN, np.uint32), n // _RUNS
        for i in range(sample.size):
            at = i // _RUN * stride + i % _RUN
            value = np.float32(values[at] + np.float32(addend[at] * factor))
            sample[i] = _U(value.view(np.uint32) & _MAGNITUDE)
        floor = _floor_of(sample, kept, n)
    where, found, marks = np.empty(2 * kept + _TILE, np.int64), np.empty(2 * kept + _TILE, np.uint32), _marks()
    for begin in range(0, n, _TILE):
        end = min(begin + _TILE, n)
        _add(values[begin:end], addend[begin:end], factor, sums[begin:end])
        where, found = _with_room(where, count, _TILE + 1), _with_room(found, count, _TILE + 1)
        count, largest = _append_tile(sums[begin:end].view(np.uint32), floor, begin, where, found, count, marks)
        most = max(most, largest)
    return _largest_among(sums.view(np.uint32), kept, floor, where, found, count, most)


@part_of_kernel
def _scale8(kept: Any) -> Any:
    """Return the scale of a chunk's kept values: the largest maps to 127."""
    most = _U(0)
    bits = kept.view(np.uint32)
    for i in range(kept.size):
        most = max(most, _U(bits[i] & _MAGNITUDE))
    return min(_F(_U(most).view(np.float32) / _LIMIT8), _TOP8)


@part_of_kernel
def _scale2(kept: Any) -> Any:
    """Return the scale with the least squared error.

    Values above _SPLIT times the mean magnitude are taken as large, i.e. twice the scale.
    """
    total = 0.0
    for i in range(kept.size):
        total += abs(np.float64(kept[i]))
    split = total / max(kept.size, 1) * _SPLIT
    above, squares = 0.0, 0.0
    for i in range(kept.size):
        magnitude = abs(np.float64(kept[i]))
        factor = 2.0 if magnitude > split else 1.0
        above += magnitude * factor
        squares += factor * factor
    return min(_F(above / max(squares, 1.0)), _TOP2)


@part_of_kernel
def _code8(value: Any, scale: Any) -> Any:
    x = _F(value / scale) if scale > _ZERO else _ZERO
    x = _LIMIT8 if x > _LIMIT8 else x
    x = -_LIMIT8 if x < -_LIMIT8 else x
    return _S(_U(_F(x + MAGIC).view(np.uint32)))


@part_of_kernel
def _code2(value: Any, scale: Any) -> Any:
    """Return the 2-bit code: bit 1 is the sign, bit 0 is set for twice the scale."""
    return _S(2 if value < _ZERO else 0) | _S(1 if abs(value) > _ONE_AND_HALF * scale else 0)


@part_of_kernel
def _write_scaled(
    kept: Any, where: Any, first: Any, chunk: Any, bits: Any, low: Any, high: Any, body: Any, residual: Any
) -> None:
    """Write scales and codes.

    where[low:high] is in the segment; the other positions belong to its first and last chunk.
    """
    chunks = body[0]
    scales, packed = chunks.view(np.float32), body[1]
    codes = packed.view(np.int8) if bits == 8 else np.empty(high - low, np.int8)
    begin = 0
    for c in range(scales.size):
        end = begin
        while end < where.size and where[end] < first + (c + 1) * chunk:
            end += 1
        scale = _scale8(kept[begin:end]) if bits == 8 else _scale2(kept[begin:end])
        scales[c] = scale
        for i in range(max(begin, low), min(end, high)):
            code = _code8(kept[i], scale) if bits == 8 else _code2(kept[i], scale)
            codes[i - low] = code
            if residual.size:
                size = _F(code) if bits == 8 else _F((1 + (code & 1)) * (1 - (code & 2)))
                residual[where[i]] = kept[i] - size * scale
        begin = end
    if bits != 8:
        pack(codes, bits, packed)


@part_of_kernel
def _write_values(kept: Any, bits: Any, where: Any, out: Any, residual: Any) -> None:
    """Write values of 32 or 16 bits."""
    if bits == 32:
        floats = out.view(np.float32)
        for i in range(kept.size):
            floats[i] = kept[i]
            if residual.size:
                residual[where[i]] = _ZERO
        return
    words, all_bits = out.view(np.uint16), kept.view(np.uint32)
    for i in range(kept.size):
        brain = narrow_brain_one(all_bits[i])
        if np.uint16(brain & _BRAIN_MAGNITUDE) == _BRAIN_INFINITY:
            brain = np.uint16(brain - np.uint16(1))
        words[i] = brain
        if residual.size:
            residual[where[i]] = kept[i] - widen_brain_one(brain)


@part_of_kernel
def _gap_bytes(where: Any, start: Any) -> Any:
    """Return the size in bytes of the gaps between positions."""
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


@kernel(
    IN, IN_POSITIONS, types.int64, types.int64, types.int64, types.int64, OUT_BYTES, OUT,
    result=types.int64, interpreted=_write_by_numpy,
)  # fmt: skip
def write_sparse(kept: Any, where: Any, start: Any, stop: Any, bits: Any, chunk: Any, out: Any, residual: Any) -> Any:
    """Write the body for elements [start, stop) of a tensor, and the residual of kept elements to ``residual``.

    kept, where: the tensor's kept values and their positions.
    chunk: elements per scale, or 0.
    out: at least ``4 * (stop - start) + 8`` bytes.
    residual: as long as the tensor, or empty.
    Returns the body's size; or -1, with only the residual written, if all elements as float32 take less.
    """
    low, high = np.searchsorted(where, start), np.searchsorted(where, stop)
    inside, values = where[low:high], kept[low:high]
    first = start // chunk * chunk if chunk else start
    chunks = (stop - first + chunk - 1) // chunk if chunk else 0
    scales_end = 4 + 4 * chunks
    values_end = scales_end + (inside.size * bits + 7) // 8
    size = values_end + _gap_bytes(inside, start)
    if bits == 32 and size > 4 * (stop - start):
        if residual.size:
            for i in range(inside.size):
                residual[inside[i]] = _ZERO
        return _I(-1)
    out[:4].view(np.uint32)[0] = inside.size
    if chunk:
        body = (out[4:scales_end], out[scales_end:values_end])
        begin, end = np.searchsorted(where, first), np.searchsorted(where, first + chunks * chunk)
        _write_scaled(kept[begin:end], where[begin:end], first, chunk, bits, low - begin, high - begin, body, residual)
    else:
        _write_values(values, bits, inside, out[4:values_end], residual)
    _write_gaps(inside, start, out[values_end:size])
    return _I(size)


#: Kernels of this module.
KERNELS: Final = (select_chunks, add_and_select_chunks, select_largest, add_and_select_largest, write_sparse)
