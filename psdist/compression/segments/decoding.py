"""Decoders of segments: validate a payload, and add its values to a sum. Compiled by numba.

``accumulate`` is safe for any bytes, even if they changed since ``check``: each number that determines an index or a
length is read once and compared with its bound before use. ``numpy_decoding`` is the same without a compiler, with
equal results and bytes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from psdist.compression.casts import INFINITY, widen_brain_one, widen_half_one
from psdist.compression.compiled import OUT, kernel, part_of_kernel
from psdist.compression.deferred import types
from psdist.compression.segments import numpy_decoding
from psdist.compression.segments.format import HEADER_BYTES, POSITION_STOP, Kind
from psdist.compression.segments.low_rank import PRODUCT_LARGEST, add_product
from psdist.compression.segments.numpy_decoding import Defect
from psdist.compression.segments.random_places import place, place_count

BYTES = types.Array(types.uint8, 1, "C", True, None, False)

_U, _I, _F, _S = np.uint32, np.int64, np.float32, np.int8
_SIGN = np.uint32(0x80000000)
# numba accepts single numbers as constants, but not enums.
_HEADER: Final = HEADER_BYTES
_RAW32, _RAW16, _BRAIN16 = int(Kind.RAW32), int(Kind.RAW16), int(Kind.BRAIN16)
_INTEGER, _SPARSE, _ONE_BIT = int(Kind.INTEGER), int(Kind.SPARSE), int(Kind.ONE_BIT)
_RANDOM, _LOW_RANK, _POSITION_STOP = int(Kind.RANDOM), int(Kind.LOW_RANK), POSITION_STOP
_NONE, _LENGTH, _BAD_HEADER, _BODY = (int(f) for f in (Defect.NONE, Defect.LENGTH, Defect.HEADER, Defect.BODY))
_PADDING, _VALUE, _NON_FINITE = int(Defect.PADDING), int(Defect.VALUE), int(Defect.NON_FINITE)
_BLOCK_FIRST, _BLOCK_STOP = numpy_decoding.BLOCK_FIRST, numpy_decoding.BLOCK_STOP
_LARGEST: Final = _U(0x7F7FFFFF)  # bits of the largest finite float32
#: Positions that are decoded before their values are added.
_PLACES: Final = 512
_ONE_EXPONENT: Final = _U(1 << 23)
_HALF_INFINITY, _BRAIN_INFINITY = np.uint16(0x7C00), np.uint16(0x7F80)


@part_of_kernel
def word(data: Any, at: Any) -> Any:
    """Return the little-endian uint32 at byte ``at``."""
    low = _I(data[at]) | (_I(data[at + 1]) << 8)
    return low | (_I(data[at + 2]) << 16) | (_I(data[at + 3]) << 24)


@part_of_kernel
def block_count(phase: Any, elements: Any, block: Any) -> Any:
    """Return the number of blocks touched by a segment that begins ``phase`` elements into its first block."""
    return (phase + elements + block - 1) // block


@part_of_kernel
def _structure(kind: Any, bits: Any, phase: Any, elements: Any, size: Any, parameter: Any) -> Any:
    """Return the defect of a header that is visible without the body."""
    if kind in (_RAW32, _RAW16, _BRAIN16):
        width = 4 if kind == _RAW32 else 2
        if bits != 8 * width or phase != 0 or parameter != 0:
            return _BAD_HEADER
        return _NONE if size == width * elements else _BODY
    if kind in (_INTEGER, _ONE_BIT):
        is_width = bits == 1 if kind == _ONE_BIT else bits in (8, 4, 2)
        if not is_width or not _BLOCK_FIRST <= parameter < _BLOCK_STOP or phase >= parameter:
            return _BAD_HEADER
        codes = (elements * bits + 7) // 8
        return _NONE if size == 4 * block_count(phase, elements, parameter) + codes else _BODY
    if kind == _SPARSE:
        if bits == 32 or bits == 16:
            return _BAD_HEADER if phase != 0 or parameter != 0 else _NONE if size >= 4 else _BODY
        if bits not in (8, 2) or not _BLOCK_FIRST <= parameter < _BLOCK_STOP or phase >= parameter:
            return _BAD_HEADER
        return _NONE if size >= 4 + 4 * block_count(phase, elements, parameter) else _BODY
    if kind == _RANDOM:
        if bits not in (32, 16) or phase != 0 or not 1 <= parameter < _BLOCK_STOP:
            return _BAD_HEADER
        return _NONE if size >= 16 else _BODY
    if kind == _LOW_RANK:
        if bits == 0 or phase != 0 or parameter == 0:
            return _BAD_HEADER
        return _NONE if size >= 4 else _BODY
    return _BAD_HEADER


@part_of_kernel
def _check_floats(values: Any) -> Any:
    """Return NON_FINITE if one of the float32 values is not finite."""
    bits, bad = values.view(np.uint32), _U(0)
    for i in range(bits.size):
        bad |= _U(_U(bits[i] & INFINITY) == INFINITY)
    return _NON_FINITE if bad else _NONE


@part_of_kernel
def _check_words(body: Any, infinity: Any) -> Any:
    """Return NON_FINITE if one of the 16-bit values is not finite."""
    words, bad = body.view(np.uint16), np.uint16(0)
    for i in range(words.size):
        bad |= np.uint16(np.uint16(words[i] & infinity) == infinity)
    return _NON_FINITE if bad else _NONE


@part_of_kernel
def _check_scales(scales: Any, bits: Any) -> Any:
    """Return VALUE for a negative scale, NON_FINITE for one that is too large, or NONE.

    A scale is too large if its product with the largest code is not finite.
    """
    words, largest, negative = scales.view(np.uint32), _U(_LARGEST - _U(_U(bits - 1) * _ONE_EXPONENT)), _U(0)
    most = _U(0)
    for i in range(words.size):
        negative |= _U(words[i] >> _U(31))
        most = max(most, _U(words[i] & _U(0x7FFFFFFF)))
    if negative:
        return _VALUE
    return _NON_FINITE if most > largest else _NONE


@part_of_kernel
def _has_spare_bits(codes: Any, used: Any) -> Any:
    """True if a bit beyond the first ``used`` ones is set."""
    left = used % 8
    return left != 0 and (codes[codes.size - 1] >> left) != 0


@part_of_kernel
def _check_integers(bits: Any, phase: Any, block: Any, elements: Any, body: Any) -> Any:
    scales = 4 * block_count(phase, elements, block)
    if _has_spare_bits(body[scales:], bits * elements):
        return _PADDING
    return _check_scales(body[:scales], bits)


@part_of_kernel
def _check_gaps(gaps: Any, count: Any, elements: Any) -> Any:
    """Return BODY unless the gaps encode ``count`` positions below ``elements`` and end with a position."""
    position, found = _I(-1), _I(0)
    for i in range(gaps.size):
        gap = _I(gaps[i])
        position += gap + (gap != 255)
        found += gap != 255
    is_open = gaps.size > 0 and gaps[gaps.size - 1] == 255
    return _BODY if found != count or is_open or position >= elements else _NONE


@part_of_kernel
def _check_sparse(bits: Any, phase: Any, chunk: Any, elements: Any, body: Any) -> Any:
    count, scales_end = word(body, 0), 4 + (4 * block_count(phase, elements, chunk) if chunk else 0)
    values_end = scales_end + (count * bits + 7) // 8
    if count > elements or values_end > body.size:
        return _BODY
    defect = _check_gaps(body[values_end:], count, elements)
    if defect != _NONE:
        return defect
    values = body[scales_end:values_end]
    if bits == 32:
        return _check_floats(values)
    if bits == 16:
        return _check_words(values, _BRAIN_INFINITY)
    return _PADDING if _has_spare_bits(values, bits * count) else _check_scales(body[4:scales_end], bits)


@part_of_kernel
def _long_word(body: Any, at: Any) -> Any:
    """Return the little-endian uint64 at byte ``at`` as an int64."""
    return word(body, at) | (word(body, at + 4) << 32)


@part_of_kernel
def _random_count(body: Any, period: Any, elements: Any) -> Any:
    """Return the number of values in a RANDOM segment, or -1 if its first element is out of range."""
    position = _long_word(body, 8)
    if not 0 <= position < _POSITION_STOP:
        return _I(-1)
    return place_count(_U(word(body, 0)), _U(word(body, 4)), period, position, position + elements)


@part_of_kernel
def _check_random(bits: Any, period: Any, elements: Any, body: Any) -> Any:
    count = _random_count(body, period, elements)
    if count < 0:
        return _VALUE
    if body.size != 16 + count * (bits // 8):
        return _BODY
    return _check_floats(body[16:]) if bits == 32 else _check_words(body[16:], _BRAIN_INFINITY)


@part_of_kernel
def _rows(columns: Any, column: Any, elements: Any) -> Any:
    """Return the number of matrix rows touched by a segment that begins in ``column``."""
    return (column + elements + columns - 1) // columns


@part_of_kernel
def _has_factors(rank: Any, columns: Any, column: Any, elements: Any, size: Any) -> Any:
    """True if a LOW_RANK body has the size of its two factors."""
    return column < columns and size == 4 + 4 * rank * (_rows(columns, column, elements) + columns)


@part_of_kernel
def _check_low_rank(rank: Any, columns: Any, elements: Any, body: Any) -> Any:
    column = word(body, 0)
    if not _has_factors(rank, columns, column, elements, body.size):
        return _BODY
    split = 4 + 4 * rank * _rows(columns, column, elements)
    most_p, most_q = _largest(body[4:split]), _largest(body[split:])
    return _NONE if most_p * most_q * rank <= PRODUCT_LARGEST else _NON_FINITE


@part_of_kernel
def _largest(body: Any) -> Any:
    """Return the largest magnitude of float32 values; NaN or Inf if one of them is."""
    bits, most = body.view(np.uint32), _U(0)
    for i in range(bits.size):
        most = max(most, _U(bits[i] & _U(0x7FFFFFFF)))
    return np.float64(_U(most).view(np.float32))


@part_of_kernel
def _check_body(kind: Any, bits: Any, phase: Any, parameter: Any, elements: Any, body: Any) -> Any:
    """Return the defect of a body whose size matches its header."""
    if kind == _RAW32:
        return _check_floats(body)
    if kind == _RAW16:
        return _check_words(body, _HALF_INFINITY)
    if kind == _BRAIN16:
        return _check_words(body, _BRAIN_INFINITY)
    if kind == _SPARSE:
        return _check_sparse(bits, phase, parameter, elements, body)
    if kind == _RANDOM:
        return _check_random(bits, parameter, elements, body)
    if kind == _LOW_RANK:
        return _check_low_rank(bits, parameter, elements, body)
    return _check_integers(bits, phase, parameter, elements, body)


@part_of_kernel
def _is_padded(payload: Any, stop: Any) -> Any:
    """True if all bytes between the end of a body and the next multiple of 4 are zero."""
    bad = np.uint8(0)
    for i in range(stop, (stop + 3) // 4 * 4):
        bad |= payload[i]
    return bad == 0


@kernel(BYTES, types.int64, result=types.int64, interpreted=numpy_decoding.check)
def check_payload(payload: Any, elements: Any) -> Any:
    """Return the defect of a payload, plus 256 times the offset of the defective segment.

    Structural defects take precedence over NON_FINITE, wherever they are.
    """
    at, done, size, result = _I(0), _I(0), _I(payload.size), _I(0)
    while at < size:
        if size - at < _HEADER:
            return at * 256 + _LENGTH
        kind, bits = _I(payload[at]), _I(payload[at + 1])
        phase = _I(payload[at + 2]) | (_I(payload[at + 3]) << 8)
        count, length, parameter = word(payload, at + 4), word(payload, at + 8), word(payload, at + 12)
        start = at + _HEADER
        stop = start + length
        if count == 0 or count > elements - done or (stop + 3) // 4 * 4 > size:
            return at * 256 + _LENGTH
        defect = _structure(kind, bits, phase, count, length, parameter)
        if defect == _NONE:
            defect = _check_body(kind, bits, phase, parameter, count, payload[start:stop])
        if defect in (_NONE, _NON_FINITE) and not _is_padded(payload, stop):
            defect = _PADDING
        if defect == _NON_FINITE:
            result = at * 256 + defect if result == 0 else result
        elif defect != _NONE:
            return at * 256 + defect
        done, at = done + count, (stop + 3) // 4 * 4
    return result if done == elements else at * 256 + _LENGTH


@part_of_kernel
def _add_words(kind: Any, body: Any, out: Any) -> None:
    """Add the values of RAW16 or BRAIN16."""
    words = body.view(np.uint16)
    if kind == _RAW16:
        for i in range(out.size):
            out[i] += widen_half_one(words[i])
    else:
        for i in range(out.size):
            out[i] += widen_brain_one(words[i])


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


@part_of_kernel
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


@part_of_kernel
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


@part_of_kernel
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


@part_of_kernel
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


@part_of_kernel
def _signed_sizes(packed: Any, out: Any) -> None:
    """Map 2-bit codes to 1, 2, -1 or -2."""
    for i in range(out.size):
        code = _I(packed[i >> 2] >> np.uint8(2 * (i & 3))) & 3
        out[i] = (1 + (code & 1)) * (1 - (code & 2))


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
        wide, brains = np.empty(count, np.float32), values.view(np.uint16)
        for i in range(count):
            wide[i] = widen_brain_one(brains[i])
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


@part_of_kernel
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


@part_of_kernel
def _add_random(bits: Any, period: Any, body: Any, out: Any) -> Any:
    """Add the values that were sent. Return False if their number differs from that of the positions."""
    count, position = _random_count(body, period, out.size), _long_word(body, 8)
    low, high = _U(word(body, 0)), _U(word(body, 4))
    values = body[16:]
    if count < 0 or values.size != count * (bits // 8) or not 0 <= position < _POSITION_STOP:
        return False
    wide = np.empty(count, np.float32)
    if bits == 32:
        wide[:] = values.view(np.float32)
    else:
        brains = values.view(np.uint16)
        for i in range(count):
            wide[i] = widen_brain_one(brains[i])
    k = _I(0)
    for number in range(position // period, (position + out.size - 1) // period + 1):
        at = place(low, high, _I(number), period) - position
        if 0 <= at < out.size and k < count:
            out[at] += wide[k]
            k += 1
    return k == count


@part_of_kernel
def _add_low_rank(rank: Any, columns: Any, body: Any, out: Any) -> Any:
    """Add rows of the product. Return False if the factors do not have its size."""
    column = word(body, 0)
    if not _has_factors(rank, columns, column, out.size, body.size):
        return False
    split = 4 + 4 * rank * _rows(columns, column, out.size)
    add_product(body[4:split].view(np.float32), body[split:].view(np.float32), rank, columns, column, out)
    return True


@part_of_kernel
def _add_body(kind: Any, bits: Any, phase: Any, parameter: Any, body: Any, out: Any) -> Any:
    """Add a segment with a checked structure. Return False if its body turns out to be invalid."""
    if kind == _RAW32:
        _add_floats(body, out)
    elif kind == _INTEGER:
        _add_integers(bits, phase, parameter, body, out)
    elif kind == _SPARSE:
        return _add_sparse(bits, phase, parameter, body, out)
    elif kind == _ONE_BIT:
        _add_signs(phase, parameter, body, out)
    elif kind == _RANDOM:
        return _add_random(bits, parameter, body, out)
    elif kind == _LOW_RANK:
        return _add_low_rank(bits, parameter, body, out)
    else:
        _add_words(kind, body, out)
    return True


@kernel(BYTES, OUT, result=types.boolean, interpreted=numpy_decoding.accumulate)
def add_payload(payload: Any, out: Any) -> Any:
    """Add a payload's values to ``out``. Return False, with part of it added, if the payload is invalid."""
    at, done, size, elements = _I(0), _I(0), _I(payload.size), _I(out.size)
    while size - at >= _HEADER:
        kind, bits = _I(payload[at]), _I(payload[at + 1])
        phase = _I(payload[at + 2]) | (_I(payload[at + 3]) << 8)
        count, length, parameter = word(payload, at + 4), word(payload, at + 8), word(payload, at + 12)
        start = at + _HEADER
        if count == 0 or count > elements - done or length > size - start:
            return False
        if _structure(kind, bits, phase, count, length, parameter) != _NONE:
            return False
        if not _add_body(kind, bits, phase, parameter, payload[start : start + length], out[done : done + count]):
            return False
        done, at = done + count, (start + length + 3) // 4 * 4
    return at == size and done == elements


#: Kernels of this module.
KERNELS: Final = (check_payload, add_payload)
