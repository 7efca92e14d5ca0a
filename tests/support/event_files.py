"""Reader of TensorBoard event files that shares no code with their writer.

TFRecord framing, as in TensorFlow's ``record_writer.h``: length (8 bytes), its masked CRC-32C, data, its masked
CRC-32C, all little-endian. The messages are parsed by their wire format: Event has wall_time = 1 (double), step = 2,
file_version = 3, summary = 5, session_log = 7; Summary has value = 1; Value has tag = 1 and simple_value = 2 (float).
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

#: Castagnoli's polynomial, reflected.
_POLYNOMIAL = 0x82F63B78


def crc32c(data: bytes) -> int:
    """Compute CRC-32C bit by bit, as it is defined."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(data: bytes) -> Iterator[bytes]:
    """Iterate over the records of a file, checking that each is intact."""
    assert crc32c(b"123456789") == 0xE3069283  # check value of CRC-32C
    while data:
        (length,) = struct.unpack_from("<Q", data)
        assert struct.unpack_from("<I", data, 8)[0] == masked(crc32c(data[:8]))
        record = data[12 : 12 + length]
        assert len(record) == length
        assert struct.unpack_from("<I", data, 12 + length)[0] == masked(crc32c(record))
        yield record
        data = data[16 + length :]


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Iterate over the fields of a protobuf message: number and value."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}[kind] if kind in (1, 5) else varint()
        yield number, message[position : position + size]
        position += size


class EventFile:
    """Content of one file.

    scalars: by tag, (step, value) in the order written.
    restarts: steps of its session starts.
    """

    def __init__(self, path: Path) -> None:
        self.version = ""
        self.scalars: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self.restarts: list[int] = []
        for record in records(path.read_bytes()):
            self._add(dict(fields(record)))

    def _add(self, event: dict[int, int | bytes]) -> None:
        step = event.get(2, 0)
        assert isinstance(step, int) and 1 in event
        if isinstance(version := event.get(3), bytes):
            self.version = version.decode()
        if 7 in event:
            self.restarts.append(step)
        summary = event.get(5, b"")
        assert isinstance(summary, bytes)
        for _, value in fields(summary):
            assert isinstance(value, bytes)
            parts = dict(fields(value))
            tag, number = parts[1], parts.get(2, bytes(4))
            assert isinstance(tag, bytes) and isinstance(number, bytes)
            self.scalars[tag.decode()].append((step, struct.unpack("<f", number)[0]))
