"""Frames: slices as protobuf messages, with as few copies of the payload as possible.

A slice message has a few header fields and, last on the wire, ``bytes payload = 15``. ``pack`` writes the serialized
header, the tag and length of the payload, and the array's memory, in one join, so that the payload begins at a multiple
of four bytes. ``unpack`` walks over the header fields to the payload and takes a memoryview of it, so that the array
can be read where the transport put it.

Both are plain protobuf: any parser reads what ``pack`` writes, and a message whose fields come in another order is
given to the real parser.

Not here: which messages exist (``psdist.v1``), what the payload means (codecs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from psdist.errors import InvalidArgumentError

PAYLOAD_FIELD: Final = 15
_PAYLOAD_TAG: Final = bytes([PAYLOAD_FIELD << 3 | 2])
_VARINT_BYTES_MAX: Final = 10
#: Payloads begin at a multiple of this many bytes from the start of the message.
_ALIGNMENT: Final = 4
#: The field ``bytes padding = 14`` whose length is 0, 1, 2 or 3 modulo 4; an empty one takes two bytes.
_PADDINGS: Final = (b"", b"\x72\x03\0\0\0", b"\x72\x00", b"\x72\x01\0")

M = TypeVar("M", bound=Message)


@dataclass(slots=True)
class Frame(Generic[M]):
    """A received message: ``header`` is the message with its payload left empty."""

    header: M
    payload: memoryview


def pack(header: Message, payload: bytes | memoryview) -> bytes:
    """The wire form of ``header`` with ``payload`` in field 15. ``header`` must not have a payload of its own."""
    head = header.SerializeToString()
    size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    if size == 0:
        return head
    length = _varint(size)
    padding = _PADDINGS[-(len(head) + len(_PAYLOAD_TAG) + len(length)) % _ALIGNMENT]
    return b"".join((head, padding, _PAYLOAD_TAG, length, payload))


def parse(cls: type[M], data: bytes) -> M:
    """The message that ``data`` is. Raises InvalidArgumentError where it is none; gRPC's own parsing has no typed error
    for that, and writes a traceback, so services register their methods without it."""
    try:
        return cls.FromString(data)
    except DecodeError as error:
        raise InvalidArgumentError(f"{len(data)} bytes are not a valid {cls.DESCRIPTOR.full_name}: {error}") from None


def unpack(cls: type[M], data: bytes) -> Frame[M]:
    """Parses ``data`` as message ``cls``. Raises InvalidArgumentError where it is not valid protobuf."""
    try:
        start, body, end = _find_payload(data)
        if end == len(data) and start < end:
            return Frame(cls.FromString(data[:start]), memoryview(data)[body:end])
    except DecodeError:
        pass  # The real parser has the last word, and the better message.
    message = parse(cls, data)
    payload: bytes = message.payload  # type: ignore[attr-defined]
    message.ClearField("payload")
    return Frame(message, memoryview(payload))


def _find_payload(data: bytes) -> tuple[int, int, int]:
    """Where the payload's tag, its bytes and what follows them begin. Where the walk finds no payload, or something
    that it leaves to the real parser, all three are the length of the data."""
    position, length = 0, len(data)
    while 0 <= position < length:
        if data[position] == _PAYLOAD_TAG[0]:
            size, body = _read_varint(data, position + 1)
            return position, body, body + size
        position = _skip_field(data, position)
    return length, length, length


def _skip_field(data: bytes, position: int) -> int:
    """Position after the field that begins at ``position``; -1 for a wire type that only the real parser knows."""
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
