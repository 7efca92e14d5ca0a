"""Server side of segment payloads, on arrival: ``check`` that the bytes are a valid encoding. Compiled by numba.

Loops over segments, and all rules, are common to the compiled and the interpreted form; only loops over the elements of
a body have a numpy version, which gives the same result.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression.casts import INFINITY
from psdist.compression.kernel_runtime import interpreted_by, kernel, part_of_kernel, types
from psdist.compression.segments.dense import PRODUCT_LARGEST
from psdist.compression.segments.format import (
    BLOCK_ELEMENTS,
    HEADER,
    HEADER_BYTES,
    POSITION_STOP,
    Defect,
    Kind,
    payload_limit,
)
from psdist.compression.segments.random_numbers import place_count
from psdist.errors import DTypeMismatchError, MalformedPayloadError, NonFiniteGradientError, ShapeMismatchError

Bytes = NDArray[np.uint8]
AnyArray = NDArray[Any]

BYTES = types.Array(types.uint8, 1, "C", True, None, False)

_U, _I = np.uint32, np.int64
# numba accepts single numbers as constants, but not enums.
RAW32, RAW16, BRAIN16 = int(Kind.RAW32), int(Kind.RAW16), int(Kind.BRAIN16)
INTEGER, SPARSE, ONE_BIT = int(Kind.INTEGER), int(Kind.SPARSE), int(Kind.ONE_BIT)
RANDOM, LOW_RANK, _POSITION_STOP = int(Kind.RANDOM), int(Kind.LOW_RANK), POSITION_STOP
NONE, _LENGTH, _BAD_HEADER, _BODY = (int(f) for f in (Defect.NONE, Defect.LENGTH, Defect.HEADER, Defect.BODY))
_PADDING, _VALUE, _NON_FINITE = int(Defect.PADDING), int(Defect.VALUE), int(Defect.NON_FINITE)
_BLOCK_FIRST, _BLOCK_STOP = BLOCK_ELEMENTS.start, BLOCK_ELEMENTS.stop
_LARGEST: Final = _U(0x7F7FFFFF)  # bits of the largest finite float32
_LARGEST_FLOAT: Final = np.finfo(np.float32).max
_ONE_EXPONENT: Final = _U(1 << 23)
_HALF_INFINITY, _BRAIN_INFINITY = np.uint16(0x7C00), np.uint16(0x7F80)

_REASONS: Final = {
    Defect.LENGTH: "the segments do not cover the elements and the bytes exactly",
    Defect.HEADER: "the header names no known encoding",
    Defect.BODY: "the body does not have the size that its header implies",
    Defect.PADDING: "bits that must be zero are not",
    Defect.VALUE: "a scale or a count is not in its range",
}


def check(payload: memoryview | bytes | NDArray[np.uint8], elements: int) -> None:
    """Check that ``payload`` is exactly a valid encoding of ``elements`` finite float32 values. Changes nothing.

    Raises MalformedPayloadError, or NonFiniteGradientError if a NaN or Inf is the only defect.
    """
    data = as_bytes(payload)
    if data.size > payload_limit(elements):
        limit = payload_limit(elements)
        raise MalformedPayloadError(
            f"an encoded payload of {data.size} bytes for {elements} elements is too long: at most {limit} are allowed",
            bytes=data.size,
            elements=elements,
        )
    result = int(check_payload(data, elements))
    at, defect = result // 256, Defect(result % 256)
    if defect == Defect.NON_FINITE:
        raise NonFiniteGradientError(f"an encoded payload for {elements} elements has NaN or Inf, from byte {at} on")
    if defect != Defect.NONE:
        raise MalformedPayloadError(
            f"an encoded payload of {data.size} bytes for {elements} elements is malformed in the segment at byte "
            f"{at}: {_REASONS[defect]}",
            bytes=data.size,
            elements=elements,
        )


def as_bytes(payload: Any) -> NDArray[np.uint8]:
    """Return the payload as a contiguous uint8[n]."""
    if not isinstance(payload, np.ndarray):
        return np.frombuffer(payload, np.uint8)
    if payload.dtype != np.uint8:
        raise DTypeMismatchError(f"an encoded payload has dtype {payload.dtype}, not uint8", dtype=payload.dtype)
    if payload.ndim != 1 or not payload.flags.c_contiguous:
        raise ShapeMismatchError(f"an encoded payload has shape {payload.shape}: pass one contiguous vector of bytes")
    return payload


# --- compiled ---------------------------------------------------------------------------------------------------------


@interpreted_by(lambda data, at: int.from_bytes(data[at : at + 4], "little"))
def word(data: Any, at: Any) -> Any:
    """Return the little-endian uint32 at byte ``at``."""
    low = _I(data[at]) | (_I(data[at + 1]) << 8)
    return low | (_I(data[at + 2]) << 16) | (_I(data[at + 3]) << 24)


@interpreted_by(HEADER.unpack_from)
def header(payload: Any, at: Any) -> Any:
    """Return kind, bits, phase, elements, bytes of the body and parameter of the segment at byte ``at``."""
    first = word(payload, at)
    kind, bits, phase = first & 255, (first >> 8) & 255, first >> 16
    return kind, bits, phase, word(payload, at + 4), word(payload, at + 8), word(payload, at + 12)


@part_of_kernel
def block_count(phase: Any, elements: Any, block: Any) -> Any:
    """Return the number of blocks touched by a segment that begins ``phase`` elements into its first block."""
    return (phase + elements + block - 1) // block


@part_of_kernel
def structure(kind: Any, bits: Any, phase: Any, elements: Any, size: Any, parameter: Any) -> Any:
    """Return the defect of a header that is visible without the body."""
    if kind in (RAW32, RAW16, BRAIN16):
        width = 4 if kind == RAW32 else 2
        if bits != 8 * width or phase != 0 or parameter != 0:
            return _BAD_HEADER
        return NONE if size == width * elements else _BODY
    if kind in (INTEGER, ONE_BIT):
        is_width = bits == 1 if kind == ONE_BIT else bits in (8, 4, 2)
        if not is_width or not _BLOCK_FIRST <= parameter < _BLOCK_STOP or phase >= parameter:
            return _BAD_HEADER
        codes = (elements * bits + 7) // 8
        return NONE if size == 4 * block_count(phase, elements, parameter) + codes else _BODY
    if kind == SPARSE:
        if bits == 32 or bits == 16:
            return _BAD_HEADER if phase != 0 or parameter != 0 else NONE if size >= 4 else _BODY
        if bits not in (8, 2) or not _BLOCK_FIRST <= parameter < _BLOCK_STOP or phase >= parameter:
            return _BAD_HEADER
        return NONE if size >= 4 + 4 * block_count(phase, elements, parameter) else _BODY
    if kind == RANDOM:
        if bits not in (32, 16) or phase != 0 or not 1 <= parameter < _BLOCK_STOP:
            return _BAD_HEADER
        return NONE if size >= 16 else _BODY
    if kind == LOW_RANK:
        if bits == 0 or phase != 0 or parameter == 0:
            return _BAD_HEADER
        return NONE if size >= 4 else _BODY
    return _BAD_HEADER


def _floats_by_numpy(values: Bytes) -> int:
    return NONE if np.isfinite(values.view(np.float32)).all() else _NON_FINITE


def _words_by_numpy(body: Bytes, infinity: np.uint16) -> int:
    return _NON_FINITE if ((body.view(np.uint16) & infinity) == infinity).any() else NONE


def _scales_by_numpy(scales: Bytes, bits: int) -> int:
    values = scales.view(np.float32)
    if np.signbit(values).any():
        return _VALUE
    return NONE if (values <= _LARGEST_FLOAT / 2 ** (int(bits) - 1)).all() else _NON_FINITE


def places_by_numpy(gaps: Bytes) -> NDArray[np.int64]:
    """Return the positions that gaps encode. A gap of 255 is part of the next one."""
    is_place = gaps != 255
    places: NDArray[np.int64] = (np.cumsum(gaps.astype(np.int64) + is_place) - 1)[is_place]
    return places


def _gaps_by_numpy(gaps: Bytes, count: int, elements: int) -> int:
    places = places_by_numpy(gaps)
    is_open = (gaps[-1:] == 255).any()
    return _BODY if places.size != count or is_open or (places[-1:] >= elements).any() else NONE


def _largest_by_numpy(body: Bytes) -> float:
    return float(np.abs(body.view(np.float32)).max())


@interpreted_by(_floats_by_numpy)
def _check_floats(values: Any) -> Any:
    """Return NON_FINITE if one of the float32 values is not finite."""
    bits, bad = values.view(np.uint32), _U(0)
    for i in range(bits.size):
        bad |= _U(_U(bits[i] & INFINITY) == INFINITY)
    return _NON_FINITE if bad else NONE


@interpreted_by(_words_by_numpy)
def _check_words(body: Any, infinity: Any) -> Any:
    """Return NON_FINITE if one of the 16-bit values is not finite."""
    words, bad = body.view(np.uint16), np.uint16(0)
    for i in range(words.size):
        bad |= np.uint16(np.uint16(words[i] & infinity) == infinity)
    return _NON_FINITE if bad else NONE


@interpreted_by(_scales_by_numpy)
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
    return _NON_FINITE if most > largest else NONE


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


@interpreted_by(_gaps_by_numpy)
def _check_gaps(gaps: Any, count: Any, elements: Any) -> Any:
    """Return BODY unless the gaps encode ``count`` positions below ``elements`` and end with a position."""
    position, found = _I(-1), _I(0)
    for i in range(gaps.size):
        gap = _I(gaps[i])
        position += gap + (gap != 255)
        found += gap != 255
    is_open = gaps.size > 0 and gaps[gaps.size - 1] == 255
    return _BODY if found != count or is_open or position >= elements else NONE


@part_of_kernel
def _check_sparse(bits: Any, phase: Any, chunk: Any, elements: Any, body: Any) -> Any:
    count, scales_end = word(body, 0), 4 + (4 * block_count(phase, elements, chunk) if chunk else 0)
    values_end = scales_end + (count * bits + 7) // 8
    if count > elements or values_end > body.size:
        return _BODY
    defect = _check_gaps(body[values_end:], count, elements)
    if defect != NONE:
        return defect
    values = body[scales_end:values_end]
    if bits == 32:
        return _check_floats(values)
    if bits == 16:
        return _check_words(values, _BRAIN_INFINITY)
    return _PADDING if _has_spare_bits(values, bits * count) else _check_scales(body[4:scales_end], bits)


@part_of_kernel
def long_word(body: Any, at: Any) -> Any:
    """Return the little-endian uint64 at byte ``at`` as an int64."""
    return word(body, at) | (word(body, at + 4) << 32)


@part_of_kernel
def random_count(body: Any, period: Any, elements: Any) -> Any:
    """Return the number of values in a RANDOM segment, or -1 if its first element is out of range."""
    position = long_word(body, 8)
    if not 0 <= position < _POSITION_STOP:
        return _I(-1)
    return place_count(_U(word(body, 0)), _U(word(body, 4)), period, position, position + elements)


@part_of_kernel
def _check_random(bits: Any, period: Any, elements: Any, body: Any) -> Any:
    count = random_count(body, period, elements)
    if count < 0:
        return _VALUE
    if body.size != 16 + count * (bits // 8):
        return _BODY
    return _check_floats(body[16:]) if bits == 32 else _check_words(body[16:], _BRAIN_INFINITY)


@part_of_kernel
def rows_of(columns: Any, column: Any, elements: Any) -> Any:
    """Return the number of matrix rows touched by a segment that begins in ``column``."""
    return (column + elements + columns - 1) // columns


@part_of_kernel
def has_factors(rank: Any, columns: Any, column: Any, elements: Any, size: Any) -> Any:
    """True if a LOW_RANK body has the size of its two factors."""
    return column < columns and size == 4 + 4 * rank * (rows_of(columns, column, elements) + columns)


@part_of_kernel
def _check_low_rank(rank: Any, columns: Any, elements: Any, body: Any) -> Any:
    column = word(body, 0)
    if not has_factors(rank, columns, column, elements, body.size):
        return _BODY
    split = 4 + 4 * rank * rows_of(columns, column, elements)
    most_p, most_q = _largest(body[4:split]), _largest(body[split:])
    return NONE if most_p * most_q * rank <= PRODUCT_LARGEST else _NON_FINITE


@interpreted_by(_largest_by_numpy)
def _largest(body: Any) -> Any:
    """Return the largest magnitude of float32 values; NaN or Inf if one of them is."""
    bits, most = body.view(np.uint32), _U(0)
    for i in range(bits.size):
        most = max(most, _U(bits[i] & _U(0x7FFFFFFF)))
    return np.float64(_U(most).view(np.float32))


@part_of_kernel
def _check_body(kind: Any, bits: Any, phase: Any, parameter: Any, elements: Any, body: Any) -> Any:
    """Return the defect of a body whose size matches its header."""
    if kind == RAW32:
        return _check_floats(body)
    if kind == RAW16:
        return _check_words(body, _HALF_INFINITY)
    if kind == BRAIN16:
        return _check_words(body, _BRAIN_INFINITY)
    if kind == SPARSE:
        return _check_sparse(bits, phase, parameter, elements, body)
    if kind == RANDOM:
        return _check_random(bits, parameter, elements, body)
    if kind == LOW_RANK:
        return _check_low_rank(bits, parameter, elements, body)
    return _check_integers(bits, phase, parameter, elements, body)


@part_of_kernel
def _is_padded(payload: Any, stop: Any) -> Any:
    """True if all bytes between the end of a body and the next multiple of 4 are zero."""
    bad = np.uint8(0)
    for i in range(stop, (stop + 3) // 4 * 4):
        bad |= payload[i]
    return bad == 0


def _check_by_numpy(payload: Bytes, elements: int) -> int:
    return int(check_payload.function(payload, elements))


@kernel(BYTES, types.int64, result=types.int64, interpreted=_check_by_numpy)
def check_payload(payload: Any, elements: Any) -> Any:
    """Return the defect of a payload, plus 256 times the offset of the defective segment.

    Structural defects take precedence over NON_FINITE, wherever they are.
    """
    at, done, size, result = _I(0), _I(0), _I(payload.size), _I(0)
    while at < size:
        if size - at < HEADER_BYTES:
            return at * 256 + _LENGTH
        kind, bits, phase, count, length, parameter = header(payload, at)
        start = at + HEADER_BYTES
        stop = start + length
        if count == 0 or count > elements - done or (stop + 3) // 4 * 4 > size:
            return at * 256 + _LENGTH
        defect = structure(kind, bits, phase, count, length, parameter)
        if defect == NONE:
            defect = _check_body(kind, bits, phase, parameter, count, payload[start:stop])
        if defect in (NONE, _NON_FINITE) and not _is_padded(payload, stop):
            defect = _PADDING
        if defect == _NON_FINITE:
            result = at * 256 + defect if result == 0 else result
        elif defect != NONE:
            return at * 256 + defect
        done, at = done + count, (stop + 3) // 4 * 4
    return result if done == elements else at * 256 + _LENGTH
