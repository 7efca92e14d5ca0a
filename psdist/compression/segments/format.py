"""The container of encoded payloads: segments, each a header and a body (CODEC_SEGMENTS on the wire).

``docs/payload-format.md`` specifies the bytes. A payload covers the elements of one slice, in order and exactly.
Everything is little-endian. A body is padded with zeros to a multiple of 4 bytes.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final


class Kind(IntEnum):
    """How a segment encodes its elements."""

    RAW32 = 1
    RAW16 = 2
    BRAIN16 = 3
    INTEGER = 4
    SPARSE = 5
    ONE_BIT = 6
    RANDOM = 7
    LOW_RANK = 8


#: kind, bits, phase, elements, bytes of the body without its padding, parameter.
HEADER: Final = Struct("<BBHIII")
HEADER_BYTES: Final = 16

#: Numbers of 64 bits in RANDOM segments: the place of the first element is below this.
POSITION_STOP: Final = 2**62

#: Elements that one scale may stand for; phases have 16 bits.
BLOCK_ELEMENTS: Final = range(16, 65537)


def payload_limit(elements: int) -> int:
    """The most bytes that a valid payload of so many elements has; ``check`` refuses longer ones.

    Encoders stay below it: see ``segment_limit``. All but the first and the last compressed segment of a payload have
    at least 64 elements, and those that are not compressed are one segment where they are adjacent.
    """
    return 5 * elements + 128 if elements else 0


def segment_limit(elements: int) -> int:
    """The most bytes that an encoder writes for a segment: 32 more than its elements as float32."""
    return 4 * elements + 32


def padded(size: int) -> int:
    """The bytes of a body with its padding."""
    return (size + 3) & ~3
