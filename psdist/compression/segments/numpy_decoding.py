"""Decoders of segments by numpy, used until the compiled ones exist. Equal results and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psdist.compression import numpy_casts
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.compression.segments.format import BLOCK_ELEMENTS, HEADER, HEADER_BYTES, POSITION_STOP, Kind, padded
from psdist.compression.segments.low_rank import add_product_by_numpy, is_product_finite
from psdist.compression.segments.random_places import places

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

BLOCK_FIRST: Final = BLOCK_ELEMENTS.start
BLOCK_STOP: Final = BLOCK_ELEMENTS.stop
_WIDTHS: Final = {Kind.RAW32: 4, Kind.RAW16: 2, Kind.BRAIN16: 2}
_DTYPES: Final = {Kind.RAW32: "float32", Kind.RAW16: "float16", Kind.BRAIN16: "bfloat16"}
_LARGEST: Final = np.finfo(np.float32).max


class Defect(IntEnum):
    """Defect of a segment."""

    NONE = 0
    LENGTH = 1
    HEADER = 2
    BODY = 3
    PADDING = 4
    VALUE = 5
    NON_FINITE = 6


class Segment(NamedTuple):
    """Segment of a payload. Its body is shorter than ``length`` if the payload ends early."""

    at: int
    kind: int
    bits: int
    phase: int
    elements: int
    length: int
    parameter: int
    body: Bytes

    @property
    def stop(self) -> int:
        """Offset of the next segment."""
        return self.at + HEADER_BYTES + padded(self.length)

    def blocks(self) -> int:
        """Return the number of blocks that the segment touches."""
        return -(-(self.phase + self.elements) // self.parameter) if self.parameter else 0

    def per_element(self, values: Floats) -> Floats:
        """Repeat one value per block for each of the block's elements."""
        return np.repeat(values, self.parameter)[self.phase : self.phase + self.elements]


def segments(payload: Bytes) -> Iterator[Segment | None]:
    """Iterate over the segments of a payload. Yields None, and stops, if a header is cut short."""
    at = 0
    while at < payload.size:
        if payload.size - at < HEADER_BYTES:
            yield None
            return
        kind, bits, phase, elements, length, parameter = HEADER.unpack(payload[at : at + HEADER_BYTES].tobytes())
        start = at + HEADER_BYTES
        segment = Segment(at, kind, bits, phase, elements, length, parameter, payload[start : start + length])
        yield segment
        at = segment.stop


def check(payload: Bytes, elements: int) -> int:
    """Compute ``decoding.check_payload``."""
    done, at, result = 0, 0, 0
    for segment in segments(payload):
        if segment is None:
            return at * 256 + Defect.LENGTH
        if not 0 < segment.elements <= elements - done or segment.stop > payload.size:
            return at * 256 + Defect.LENGTH
        defect = structure(segment) or check_body(segment)
        if (
            defect in (Defect.NONE, Defect.NON_FINITE)
            and payload[at + HEADER_BYTES + segment.length : segment.stop].any()
        ):
            defect = Defect.PADDING
        if defect == Defect.NON_FINITE:
            result = result or at * 256 + defect
        elif defect:
            return at * 256 + defect
        done, at = done + segment.elements, segment.stop
    return result if done == elements else at * 256 + Defect.LENGTH


def structure(s: Segment) -> Defect:
    """Return the defect of a header that is visible without the body."""
    if s.kind in _WIDTHS:
        width = _WIDTHS[Kind(s.kind)]
        if s.bits != 8 * width or s.phase or s.parameter:
            return Defect.HEADER
        return Defect.NONE if s.length == width * s.elements else Defect.BODY
    if s.kind in (Kind.INTEGER, Kind.ONE_BIT):
        widths = (8, 4, 2) if s.kind == Kind.INTEGER else (1,)
        if s.bits not in widths or s.parameter not in BLOCK_ELEMENTS or s.phase >= s.parameter:
            return Defect.HEADER
        return Defect.NONE if s.length == 4 * s.blocks() + -(-s.elements * s.bits // 8) else Defect.BODY
    if s.kind == Kind.SPARSE:
        if s.bits in (32, 16):
            if s.phase or s.parameter:
                return Defect.HEADER
        elif s.bits not in (8, 2) or s.parameter not in BLOCK_ELEMENTS or s.phase >= s.parameter:
            return Defect.HEADER
        return Defect.NONE if s.length >= 4 + 4 * s.blocks() else Defect.BODY
    if s.kind == Kind.RANDOM:
        if s.bits not in (32, 16) or s.phase or not 1 <= s.parameter < BLOCK_STOP:
            return Defect.HEADER
        return Defect.NONE if s.length >= 16 else Defect.BODY
    if s.kind == Kind.LOW_RANK:
        if not s.bits or s.phase or not s.parameter:
            return Defect.HEADER
        return Defect.NONE if s.length >= 4 else Defect.BODY
    return Defect.HEADER


def check_body(s: Segment) -> Defect:
    """Return the defect of a body whose size matches its header."""
    if s.kind in _DTYPES:
        values = s.body.view(NUMPY_DTYPES[_DTYPES[Kind(s.kind)]])
        return Defect.NONE if np.isfinite(values).all() else Defect.NON_FINITE
    if s.kind == Kind.SPARSE:
        return check_sparse(s)
    if s.kind == Kind.RANDOM:
        return check_random(s)
    if s.kind == Kind.LOW_RANK:
        found = low_rank_factors(s)
        if found is None:
            return Defect.BODY
        with np.errstate(all="ignore"):
            return Defect.NONE if is_product_finite(found[0], found[1], s.bits) else Defect.NON_FINITE
    scales, codes = s.body[: 4 * s.blocks()].view(np.float32), s.body[4 * s.blocks() :]
    if has_spare_bits(codes, s.bits * s.elements):
        return Defect.PADDING
    return check_scales(scales, s.bits)


class Sparse(NamedTuple):
    """Parts of a SPARSE segment's body, and the positions that its gaps encode."""

    kept: int
    scales: Floats
    values: Bytes
    places: NDArray[np.int64]
    is_open: bool


def sparse(s: Segment) -> Sparse | None:
    """Return the parts of a SPARSE segment, or None if the body is too short for its values."""
    count, scales_end = int(s.body[:4].view("<u4")[0]), 4 + 4 * s.blocks()
    values_end = scales_end + -(-count * s.bits // 8)
    if values_end > s.body.size:
        return None
    gaps = s.body[values_end:].astype(np.int64)
    places = np.cumsum(gaps + (gaps != 255)) - 1
    is_open = bool(gaps.size and gaps[-1] == 255)
    scales, values = s.body[4:scales_end].view(np.float32), s.body[scales_end:values_end]
    return Sparse(count, scales, values, places[gaps != 255], is_open)


def check_sparse(s: Segment) -> Defect:
    """Return the defect of a SPARSE segment's body."""
    body = sparse(s)
    if body is None or body.kept > s.elements or body.places.size != body.kept or body.is_open:
        return Defect.BODY
    if body.kept and body.places[-1] >= s.elements:
        return Defect.BODY
    if s.bits in (32, 16):
        values = body.values.view(NUMPY_DTYPES["float32" if s.bits == 32 else "bfloat16"])
        return Defect.NONE if np.isfinite(values).all() else Defect.NON_FINITE
    if has_spare_bits(body.values, s.bits * body.kept):
        return Defect.PADDING
    return check_scales(body.scales, s.bits)


def add_sparse(s: Segment, out: Floats) -> bool:
    """Add the values that were sent. Return False if a position is beyond the segment."""
    body = sparse(s)
    if body is None or body.places.size != body.kept or (body.kept and body.places[-1] >= out.size):
        return False
    if s.bits in (32, 16):
        values = _wide(body.values, s.bits)
    else:
        codes = unpack(body.values, s.bits, body.kept)
        sizes = codes.astype(np.float32) if s.bits == 8 else np.array([1, 2, -1, -2], np.float32)[codes & 3]
        values = sizes * body.scales[(body.places + s.phase) // s.parameter]
    out[body.places] += values
    return True


def random_places_of(s: Segment) -> NDArray[np.int64] | None:
    """Return the positions of a RANDOM segment's values, or None if its first element is out of range."""
    key, position = (int(number) for number in s.body[:16].view("<u8"))
    if position >= POSITION_STOP:
        return None
    return places(key, s.parameter, position, position + s.elements) - position


def check_random(s: Segment) -> Defect:
    """Return the defect of a RANDOM segment's body."""
    found = random_places_of(s)
    if found is None:
        return Defect.VALUE
    if s.body.size != 16 + found.size * (s.bits // 8):
        return Defect.BODY
    values = s.body[16:].view(NUMPY_DTYPES["float32" if s.bits == 32 else "bfloat16"])
    return Defect.NONE if np.isfinite(values).all() else Defect.NON_FINITE


def add_random(s: Segment, out: Floats) -> bool:
    """Add the values that were sent. Return False if their number differs from that of the positions."""
    found = random_places_of(s)
    if found is None or s.body.size != 16 + found.size * (s.bits // 8):
        return False
    out[found] += _wide(s.body[16:], s.bits)
    return True


def low_rank_factors(s: Segment) -> tuple[Floats, Floats, int] | None:
    """Return the two flat factors of a LOW_RANK segment and its first column, or None if the body has another size."""
    column = int(s.body[:4].view("<u4")[0])
    rows = -(-(column + s.elements) // s.parameter)
    if column >= s.parameter or s.body.size != 4 + 4 * s.bits * (rows + s.parameter):
        return None
    values = s.body[4:].view(np.float32)
    return values[: s.bits * rows], values[s.bits * rows :], column


def _wide(values: Bytes, bits: int) -> Floats:
    """Widen float32 or bfloat16 values to float32."""
    if bits == 32:
        return values.view(np.float32)
    wide = np.empty(values.size // 2, np.float32)
    numpy_casts.widen(values.view(NUMPY_DTYPES["bfloat16"]), wide)
    return wide


def has_spare_bits(codes: Bytes, used: int) -> bool:
    """True if a bit beyond the first ``used`` ones is set."""
    return bool(used % 8 and codes[-1] >> (used % 8))


def check_scales(scales: Floats, bits: int) -> Defect:
    """Return VALUE for a negative scale, NON_FINITE for one that is too large, or NONE.

    A scale is too large if its product with the largest code is not finite.
    """
    if np.signbit(scales).any():
        return Defect.VALUE
    return Defect.NONE if (scales <= _LARGEST / 2 ** (bits - 1)).all() else Defect.NON_FINITE


def accumulate(payload: Bytes, out: Floats) -> bool:
    """Compute ``decoding.add_payload``."""
    done, at = 0, 0
    payload = payload.copy()  # The original may change meanwhile.
    for segment in segments(payload):
        if segment is None or not 0 < segment.elements <= out.size - done or segment.body.size < segment.length:
            return False
        if structure(segment):
            return False
        with np.errstate(all="ignore"):
            if not add_body(segment, out[done : done + segment.elements]):
                return False
        done, at = done + segment.elements, segment.stop
    return at == payload.size and done == out.size


def add_body(s: Segment, out: Floats) -> bool:
    """Add a segment with a checked structure. Return False if its body turns out to be invalid."""
    if s.kind == Kind.RAW32:
        out += s.body.view(np.float32)
    elif s.kind == Kind.SPARSE:
        return add_sparse(s, out)
    elif s.kind == Kind.RANDOM:
        return add_random(s, out)
    elif s.kind == Kind.LOW_RANK:
        found = low_rank_factors(s)
        if found is None:
            return False
        add_product_by_numpy(found[0], found[1], s.bits, s.parameter, found[2], out)
    elif s.kind == Kind.ONE_BIT:
        scales, signs = s.body[: 4 * s.blocks()].view(np.float32), s.body[4 * s.blocks() :]
        each = s.per_element(scales)
        out += np.where(np.unpackbits(signs, count=s.elements, bitorder="little"), -each, each)
    elif s.kind == Kind.INTEGER:
        scales, codes = s.body[: 4 * s.blocks()].view(np.float32), s.body[4 * s.blocks() :]
        out += unpack(codes, s.bits, s.elements).astype(np.float32) * s.per_element(scales)
    else:
        values = np.empty(out.size, np.float32)
        numpy_casts.widen(s.body.view(NUMPY_DTYPES[_DTYPES[Kind(s.kind)]]), values)
        out += values
    return True


def unpack(codes: Bytes, bits: int, elements: int) -> NDArray[Any]:
    """Return the signed codes as int8."""
    if bits == 8:
        return codes.view(np.int8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    fields = (codes[:, None] >> shifts).reshape(-1)[:elements]
    return (fields << np.uint8(8 - bits)).view(np.int8) >> np.int8(8 - bits)
