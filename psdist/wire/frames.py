"""Slice messages: protobuf with as few copies of the payload as possible.

A slice message has a few header fields and, last on the wire, ``bytes payload = 15``. ``pack`` joins the serialized
header, the payload's tag and length, and the array's memory, padded so that the payload starts at a multiple of four
bytes. ``unpack`` walks over the header fields and returns a memoryview of the payload, so that the array is read where
the transport received it.

Both are plain protobuf. Any parser reads the output of ``pack``, and ``unpack`` passes messages with another field
order to the real parser.

``psdist.v1`` defines the messages, and codecs define the content of payloads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from psdist.errors import InvalidArgumentError

PAYLOAD_FIELD: Final = 15
_PAYLOAD_TAG: Final = bytes([PAYLOAD_FIELD << 3 | 2])
_VARINT_BYTES_MAX: Final = 10
#: Alignment of payloads, in bytes from the start of the message.
_ALIGNMENT: Final = 4
#: The field ``bytes padding = 14`` with a total length of 0, 1, 2 or 3 modulo 4; an empty one takes two bytes.
_PADDINGS: Final = (b"", b"\x72\x03\0\0\0", b"\x72\x00", b"\x72\x01\0")

M = TypeVar("M", bound=Message)


@dataclass(slots=True)
class Frame(Generic[M]):
    """Received message: ``header`` is the message with its payload left empty."""

    header: M
    payload: memoryview


def pack(header: Message, payload: bytes | memoryview) -> bytes:
    """Serialize ``header`` with ``payload`` in field 15. ``header`` must not have a payload of its own."""
    head = header.SerializeToString()
    size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    if size == 0:
        return head
    length = _varint(size)
    padding = _PADDINGS[-(len(head) + len(_PAYLOAD_TAG) + len(length)) % _ALIGNMENT]
    return b"".join((head, padding, _PAYLOAD_TAG, length, payload))


def parse(cls: type[M], data: bytes) -> M:
    """Parse ``data``. Raises InvalidArgumentError if it is not valid protobuf.

    gRPC's own parsing has no typed error for this and prints a traceback, so services register their methods without
    it.
    """
    try:
        return cls.FromString(data)
    except DecodeError as error:
        raise InvalidArgumentError(f"{len(data)} bytes are not a valid {cls.DESCRIPTOR.full_name}: {error}") from None


def unpack(cls: type[M], data: bytes) -> Frame[M]:
    """Parse ``data`` as message ``cls``. Raises InvalidArgumentError if it is not valid protobuf."""
    try:
        start, body, end = _find_payload(data)
        if end == len(data) and start < end:
            return Frame(cls.FromString(data[:start]), memoryview(data)[body:end])
    except DecodeError:
        pass  # The real parser decides, and has the better error message.
    message = parse(cls, data)
    payload: bytes = message.payload  # type: ignore[attr-defined]  # of every class that is unpacked
    message.ClearField("payload")
    return Frame(message, memoryview(payload))


def _find_payload(data: bytes) -> tuple[int, int, int]:
    """Return the positions of the payload's tag, of its first byte, and of the byte after it. All three are the length
    of the data if there is no payload, or if the walk meets a field that it leaves to the real parser."""
    position, length = 0, len(data)
    while 0 <= position < length:
        if data[position] == _PAYLOAD_TAG[0]:
            size, body = _read_varint(data, position + 1)
            return position, body, body + size
        position = _skip_field(data, position)
    return length, length, length


def _skip_field(data: bytes, position: int) -> int:
    """Return the position after the field at ``position``, or -1 for a wire type that only the real parser knows."""
    tag, position = _read_varint(data, position)
    match tag & 7:
        case 0:
            return _read_varint(data, position)[1]
        case 1:
            return position + 8
        case 2:
            size, position = _read_varint(data, position)
            return position + size
        case 5:
            return position + 4
    return -1


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    for byte in data[position : position + _VARINT_BYTES_MAX]:
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise DecodeError("a varint does not end")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
