"""Server side of segment payloads: ``accumulate`` them into a sum. Compiled by numba.

It is safe for any bytes, even if they changed since ``check``: each number that determines an index or a length is read
once and compared with its bound before use. Loops over segments, and all rules, are common to the compiled and the
interpreted form; only loops over the elements of a body have a numpy version, which gives the same bytes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression.casts import widen_brain_one, widen_by_numpy, widen_half_one
from psdist.compression.dtypes import NUMPY_DTYPES, check_output, check_vector
from psdist.compression.kernel_runtime import OUT, interpreted_by, kernel, part_of_kernel, types
from psdist.compression.segments.checking import (
    BYTES,
    INTEGER,
    LOW_RANK,
    NONE,
    ONE_BIT,
    RANDOM,
    RAW16,
    RAW32,
    SPARSE,
    as_bytes,
    block_count,
    check_payload,
    has_factors,
    header,
    long_word,
    places_by_numpy,
    random_count,
    rows_of,
    structure,
    word,
)
from psdist.compression.segments.dense import add_product
from psdist.compression.segments.format import HEADER_BYTES, POSITION_STOP
from psdist.compression.segments.random_numbers import place, places
from psdist.compression.segments.sparse import SIGNED_SIZES
from psdist.errors import MalformedPayloadError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
AnyArray = NDArray[Any]

_U, _I, _F, _S = np.uint32, np.int64, np.float32, np.int8
_SIGN = np.uint32(0x80000000)
_POSITION_STOP: Final = POSITION_STOP
#: Positions that are decoded before their values are added.
_PLACES: Final = 512
_FLOAT32: Final = np.dtype(np.float32)
_FLOAT16, _BFLOAT16 = np.dtype(np.float16), NUMPY_DTYPES["bfloat16"]


def accumulate(payload: memoryview | bytes | NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """Add the values of ``payload`` to float32[elements] ``out``. Elements that were not sent are unchanged.

    The payload must have passed ``check``. If it changed since, only ``out`` is written to, and MalformedPayloadError
    may be raised after part of it was added.
    """
    check_vector("out", out, _FLOAT32, out.size)
    check_output("out", out)
    if not add_payload(as_bytes(payload), out):
        raise MalformedPayloadError(f"an encoded payload for {out.size} elements changed after it was checked")


# --- compiled ---------------------------------------------------------------------------------------------------------


def _words_by_numpy(kind: int, body: Bytes, out: Floats) -> None:
    wide = np.empty(out.size, np.float32)
    widen_by_numpy(body.view(_FLOAT16 if kind == RAW16 else _BFLOAT16), wide)
    out += wide


@interpreted_by(_words_by_numpy)
def _add_words(kind: Any, body: Any, out: Any) -> None:
    """Add the values of RAW16 or BRAIN16."""
    words = body.view(np.uint16)
    if kind == RAW16:
        for i in range(out.size):
            out[i] += widen_half_one(words[i])
    else:
        for i in range(out.size):
            out[i] += widen_brain_one(words[i])


def _unpacked(codes: Bytes, bits: int, elements: int) -> NDArray[np.int8]:
    """Return signed codes as int8, by numpy."""
    if bits == 8:
        return codes.view(np.int8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    fields = (codes[:, None] >> shifts).reshape(-1)[:elements]
    return (fields << np.uint8(8 - bits)).view(np.int8) >> np.int8(8 - bits)


def _per_element(scales: Bytes, phase: int, block: int, elements: int) -> Floats:
    """Repeat the scale of each block for each of its elements, by numpy."""
    return np.repeat(scales.view(np.float32), block)[phase : phase + elements]


@part_of_kernel
def _unpack_some(codes: Any, bits: Any, start: Any, first: Any, last: Any, out: Any) -> None:
    """Unpack elements [first, last) of ``_unpack``, one by one."""
    half = _I(1) << (bits - 1)
    for i in range(first, last):
        at = (start + i) * bits
        out[i] = ((_I(codes[at >> 3]) >> (at & 7) & (2 * half - 1)) ^ half) - half


@part_of_kernel
def _unpack(codes: Any, bits: Any, start: Any, out: Any) -> None:
    """Unpack signed codes of 4 or 2 bits to int8, beginning with code number ``start``."""
    per_byte = 8 // bits
    head = min(-start % per_byte, out.size)
    whole = (out.size - head) // per_byte
    _unpack_some(codes, bits, start, 0, head, out)
    packed, aligned = codes[(start + head) // per_byte :], out[head:]
    if bits == 4:
        for i in range(whole):
            byte = _S(packed[i])
            aligned[2 * i] = _S(byte << _S(4)) >> _S(4)
            aligned[2 * i + 1] = byte >> _S(4)
    else:
        for i in range(whole):
            byte = _S(packed[i])
            aligned[4 * i] = _S(byte << _S(6)) >> _S(6)
            aligned[4 * i + 1] = _S(byte << _S(4)) >> _S(6)
            aligned[4 * i + 2] = _S(byte << _S(2)) >> _S(6)
            aligned[4 * i + 3] = byte >> _S(6)
    _unpack_some(codes, bits, start, head + whole * per_byte, out.size, out)


@part_of_kernel
def _add_block(codes: Any, scale: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] += _F(codes[i]) * scale


def _integers_by_numpy(bits: int, phase: int, block: int, body: Bytes, out: Floats) -> None:
    scales = 4 * block_count(phase, out.size, block)
    each = _per_element(body[:scales], phase, block, out.size)
    out += _unpacked(body[scales:], bits, out.size).astype(np.float32) * each


@interpreted_by(_integers_by_numpy)
def _add_integers(bits: Any, phase: Any, block: Any, body: Any, out: Any) -> None:
    """Add code * scale."""
    blocks = block_count(phase, out.size, block)
    scales, codes = body[: 4 * blocks].view(np.float32), body[4 * blocks :]
    unpacked = np.empty(0 if bits == 8 else block, np.int8)
    start = _I(0)
    for b in range(blocks):
        stop = min((b + 1) * block - phase, out.size)
        if bits == 8:
            _add_block(codes[start:stop].view(np.int8), scales[b], out[start:stop])
        else:
            tile = unpacked[: stop - start]
            _unpack(codes, bits, start, tile)
            _add_block(tile, scales[b], out[start:stop])
        start = stop


def _floats_by_numpy(body: Bytes, out: Floats) -> None:
    out += body.view(np.float32)


@interpreted_by(_floats_by_numpy)
def _add_floats(body: Any, out: Any) -> None:
    values = body.view(np.float32)
    for i in range(out.size):
        out[i] += values[i]


@part_of_kernel
def _places(gaps: Any, position: Any, where: Any) -> Any:
    """Decode gaps to ascending positions, beginning at ``position``. Return the last position and the count.

    A gap takes one byte, or several if it is 255 or more. The loop has no branch, since processors could not predict
    the one gap in ten that takes several.

    where: output, at least as long as ``gaps``.
    """
    count = _I(0)
    for i in range(gaps.size):
        gap = _I(gaps[i])
        is_place = _I(gap != 255)
        position += gap + is_place
        where[count] = position
        count += is_place
    return position, count


def _at_gaps_by_numpy(gaps: Bytes, count: int, values: AnyArray, out: Floats) -> bool:
    where = places_by_numpy(gaps)
    if where.size != count or values.size < count or (where[-1:] >= out.size).any():
        return False
    out[where] += values[:count]
    return True


@interpreted_by(_at_gaps_by_numpy)
def _add_at_gaps(gaps: Any, count: Any, values: Any, out: Any) -> Any:
    """Add float32 values at the positions that ``gaps`` encode.

    Returns False if the number of positions is wrong, or one is out of range.
    """
    position, k, elements, present = _I(-1), _I(0), _I(out.size), min(_I(count), _I(values.size))
    where = np.empty(_PLACES, np.int64)
    for at in range(0, gaps.size, _PLACES):
        position, found = _places(gaps[at : at + _PLACES], position, where)
        if found > present - k or (found > 0 and where[found - 1] >= elements):
            return False
        for i in range(found):
            out[where[i]] += values[k + i]
        k += found
    return k == count


def _codes_at_gaps_by_numpy(
    gaps: Bytes, count: int, codes: AnyArray, scales: Floats, phase: int, chunk: int, out: Floats
) -> bool:
    where = places_by_numpy(gaps)
    if where.size != count or codes.size < count or (where[-1:] >= out.size).any():
        return False
    out[where] += codes[:count].astype(np.float32) * scales[(where + phase) // chunk]
    return True


@interpreted_by(_codes_at_gaps_by_numpy)
def _add_codes_at_gaps(gaps: Any, count: Any, codes: Any, scales: Any, phase: Any, chunk: Any, out: Any) -> Any:
    """Add codes times the scale of the chunk of each position. Return as ``_add_at_gaps``."""
    position, k, elements, present = _I(-1), _I(0), _I(out.size), min(_I(count), _I(codes.size))
    border, number = _I(chunk - phase), _I(0)
    where = np.empty(_PLACES, np.int64)
    for at in range(0, gaps.size, _PLACES):
        position, found = _places(gaps[at : at + _PLACES], position, where)
        if found > present - k or (found > 0 and where[found - 1] >= elements):
            return False
        for i in range(found):
            while where[i] >= border:
                border, number = border + chunk, number + 1
            out[where[i]] += _F(codes[k + i]) * scales[number]
        k += found
    return k == count


def _sizes_by_numpy(packed: Bytes, out: NDArray[np.int8]) -> None:
    out[:] = SIGNED_SIZES[_unpacked(packed, 2, out.size) & 3]


@interpreted_by(_sizes_by_numpy)
def _signed_sizes(packed: Any, out: Any) -> None:
    """Map 2-bit codes to 1, 2, -1 or -2."""
    for i in range(out.size):
        code = _I(packed[i >> 2] >> np.uint8(2 * (i & 3))) & 3
        out[i] = (1 + (code & 1)) * (1 - (code & 2))


@interpreted_by(lambda brains, out: widen_by_numpy(brains.view(_BFLOAT16), out))
def _widen_brains(brains: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = widen_brain_one(brains[i])


@part_of_kernel
def _add_sparse(bits: Any, phase: Any, chunk: Any, body: Any, out: Any) -> Any:
    """Add the values that were sent. Return False if a position is beyond the segment."""
    count, scales_end = word(body, 0), 4 + (4 * block_count(phase, out.size, chunk) if chunk else 0)
    values_end = scales_end + (count * bits + 7) // 8
    if values_end > body.size or count > out.size:
        return False
    scales, values, gaps = body[4:scales_end].view(np.float32), body[scales_end:values_end], body[values_end:]
    if bits == 32:
        return _add_at_gaps(gaps, count, values.view(np.float32), out)
    if bits == 16:
        wide = np.empty(count, np.float32)
        _widen_brains(values.view(np.uint16), wide)
        return _add_at_gaps(gaps, count, wide, out)
    if bits == 8:
        return _add_codes_at_gaps(gaps, count, values.view(np.int8), scales, phase, chunk, out)
    sizes = np.empty(count, np.int8)
    _signed_sizes(values, sizes)
    return _add_codes_at_gaps(gaps, count, sizes, scales, phase, chunk, out)


@part_of_kernel
def _add_some_signs(signs: Any, start: Any, scale: Any, first: Any, last: Any, out: Any) -> None:
    """Add ``scale`` with the sign of each of elements [first, last), one by one.

    start: number of the sign that belongs to ``out[0]``.
    """
    for i in range(first, last):
        at = start + i
        out[i] += _U(scale ^ _U(_U(_U(signs[at >> 3]) >> _U(at & 7)) << _U(31))).view(np.float32)


def _signs_by_numpy(phase: int, block: int, body: Bytes, out: Floats) -> None:
    scales = 4 * block_count(phase, out.size, block)
    each = _per_element(body[:scales], phase, block, out.size)
    out += np.where(np.unpackbits(body[scales:], count=out.size, bitorder="little"), -each, each)


@interpreted_by(_signs_by_numpy)
def _add_signs(phase: Any, block: Any, body: Any, out: Any) -> None:
    """Add each block's scale with the element's sign."""
    blocks = block_count(phase, out.size, block)
    scales, signs = body[: 4 * blocks].view(np.uint32), body[4 * blocks :]
    start = _I(0)
    for b in range(blocks):
        stop = min((b + 1) * block - phase, out.size)
        part_out, scale = out[start:stop], scales[b]
        head = min(-start % 8, part_out.size)
        whole = (part_out.size - head) // 8
        _add_some_signs(signs, start, scale, 0, head, part_out)
        bytes_here, aligned = signs[(start + head) // 8 :], part_out[head:]
        for i in range(whole):
            byte = _U(bytes_here[i])
            for j in range(8):
                aligned[8 * i + j] += _U(scale ^ _U(_U(byte << _U(31 - j)) & _SIGN)).view(np.float32)
        _add_some_signs(signs, start, scale, head + 8 * whole, part_out.size, part_out)
        start = stop


def _at_places_by_numpy(low: Any, high: Any, period: int, position: int, values: Floats, out: Floats) -> bool:
    where = places(low, high, period, position, position + out.size) - position
    if where.size != values.size:
        return False
    out[where] += values
    return True


@interpreted_by(_at_places_by_numpy)
def _add_at_places(low: Any, high: Any, period: Any, position: Any, values: Any, out: Any) -> Any:
    """Add one value to each position drawn from the key. Return False if their numbers differ."""
    k = _I(0)
    for number in range(position // period, (position + out.size - 1) // period + 1):
        at = place(low, high, _I(number), period) - position
        if 0 <= at < out.size and k < values.size:
            out[at] += values[k]
            k += 1
    return k == values.size


@part_of_kernel
def _add_random(bits: Any, period: Any, body: Any, out: Any) -> Any:
    """Add the values that were sent. Return False if their number differs from that of the positions."""
    count, position = random_count(body, period, out.size), long_word(body, 8)
    low, high = _U(word(body, 0)), _U(word(body, 4))
    values = body[16:]
    if count < 0 or values.size != count * (bits // 8) or not 0 <= position < _POSITION_STOP:
        return False
    wide = np.empty(count, np.float32)
    if bits == 32:
        wide[:] = values.view(np.float32)
    else:
        _widen_brains(values.view(np.uint16), wide)
    return _add_at_places(low, high, period, position, wide, out)


@part_of_kernel
def _add_low_rank(rank: Any, columns: Any, body: Any, out: Any) -> Any:
    """Add rows of the product. Return False if the factors do not have its size."""
    column = word(body, 0)
    if not has_factors(rank, columns, column, out.size, body.size):
        return False
    split = 4 + 4 * rank * rows_of(columns, column, out.size)
    add_product(body[4:split].view(np.float32), body[split:].view(np.float32), rank, columns, column, out)
    return True


@part_of_kernel
def _add_body(kind: Any, bits: Any, phase: Any, parameter: Any, body: Any, out: Any) -> Any:
    """Add a segment with a checked structure. Return False if its body turns out to be invalid."""
    if kind == RAW32:
        _add_floats(body, out)
    elif kind == INTEGER:
        _add_integers(bits, phase, parameter, body, out)
    elif kind == SPARSE:
        return _add_sparse(bits, phase, parameter, body, out)
    elif kind == ONE_BIT:
        _add_signs(phase, parameter, body, out)
    elif kind == RANDOM:
        return _add_random(bits, parameter, body, out)
    elif kind == LOW_RANK:
        return _add_low_rank(bits, parameter, body, out)
    else:
        _add_words(kind, body, out)
    return True


def _add_by_numpy(payload: Bytes, out: Floats) -> bool:
    return bool(add_payload.function(payload.copy(), out))  # The original may change meanwhile.


@kernel(BYTES, OUT, result=types.boolean, interpreted=_add_by_numpy)
def add_payload(payload: Any, out: Any) -> Any:
    """Add a payload's values to ``out``. Return False, with part of it added, if the payload is invalid."""
    at, done, size, elements = _I(0), _I(0), _I(payload.size), _I(out.size)
    while size - at >= HEADER_BYTES:
        kind, bits, phase, count, length, parameter = header(payload, at)
        start = at + HEADER_BYTES
        if count == 0 or count > elements - done or length > size - start:
            return False
        if structure(kind, bits, phase, count, length, parameter) != NONE:
            return False
        if not _add_body(kind, bits, phase, parameter, payload[start : start + length], out[done : done + count]):
            return False
        done, at = done + count, (start + length + 3) // 4 * 4
    return at == size and done == elements


#: Kernels behind ``check`` and ``accumulate``.
KERNELS: Final = (check_payload, add_payload)
