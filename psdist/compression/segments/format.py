"""Container format of encoded payloads: segments, each a header and a body (CODEC_SEGMENTS on the wire).

A payload covers the elements of one slice, in order and exactly. Everything is little-endian. A body is padded with
zeros to a multiple of 4 bytes. ``docs/internals/payload-format.md`` specifies the bytes.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final


class Kind(IntEnum):
    """Encoding of a segment's elements."""

    RAW32 = 1
    RAW16 = 2
    BRAIN16 = 3
    INTEGER = 4
    SPARSE = 5
    ONE_BIT = 6
    RANDOM = 7
    LOW_RANK = 8


class Defect(IntEnum):
    """Defect of a segment."""

    NONE = 0
    LENGTH = 1
    HEADER = 2
    BODY = 3
    PADDING = 4
    VALUE = 5
    NON_FINITE = 6


#: kind, bits, phase, elements, bytes of the body without its padding, parameter.
HEADER: Final = Struct("<BBHIII")
HEADER_BYTES: Final = 16

#: RANDOM segments hold the position of the first element as uint64; it is below this.
POSITION_STOP: Final = 2**62

#: Valid numbers of elements per scale; phases have 16 bits.
BLOCK_ELEMENTS: Final = range(16, 65537)


def payload_limit(elements: int) -> int:
    """Return the size limit in bytes of a valid payload for this many elements. ``check`` rejects longer ones.

    Encoders stay below it (``segment_limit``): all compressed segments of a payload, except the first and the last,
    have at least 64 elements, and adjacent uncompressed elements form one segment.
    """
    return 5 * elements + 128 if elements else 0


def segment_limit(elements: int) -> int:
    """Return the size limit of a segment that an encoder writes: 32 bytes more than its elements as float32."""
    return 4 * elements + 32


def padded(size: int) -> int:
    """Return the size of a body with its padding."""
    return (size + 3) & ~3
