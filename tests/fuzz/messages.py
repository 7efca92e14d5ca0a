"""Random valid protobuf messages, made from their descriptors, and mutated bytes.

Most values are such that a message gets far: names and ids that exist, small numbers, payloads of the right size.
Others are the ends of their types' ranges, numbers that are not finite, unknown enum values, and odd texts.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

Fd = FieldDescriptor
#: Messages inside of messages: deeper ones stay empty.
_DEPTH_MAX: Final = 6
_COUNTS: Final = (0, 1, 1, 1, 2, 2, 3, 7)
_MANY: Final = (64, 300, 5000)
_MANY_MESSAGES: Final = (64, 300)
_TEXTS: Final = (
    "", "x", "a/b", "../../etc/passwd", ".", "a" * 256, "b" * 257, "c" * 5000, "naïve", "\0", "\n\x1b[31m", "%s{0}",
    "127.0.0.1:1", "[::1]:0", "host:99999", "\ud7ff", "🚀" * 80,
)  # fmt: skip
_FLOATS: Final = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-3, 3.0, 1e30, 1.8e308, 5e-324, math.nan, math.inf, -math.inf)
_BYTES: Final = (b"", b"\0", b"\xff" * 7, bytes(16), bytes(32), bytes(4096), b"\x80" * 20000)
_TYPES: Final = {Fd.TYPE_STRING: str, Fd.TYPE_BYTES: bytes, Fd.TYPE_DOUBLE: float}
_ID_FIELDS: Final = ("worker_id", "member_id", "server_id", "agent_id")
_BOUNDS: Final = {
    Fd.TYPE_INT32: (-(1 << 31), (1 << 31) - 1), Fd.TYPE_SINT32: (-(1 << 31), (1 << 31) - 1),
    Fd.TYPE_INT64: (-(1 << 63), (1 << 63) - 1), Fd.TYPE_SINT64: (-(1 << 63), (1 << 63) - 1),
    Fd.TYPE_UINT32: (0, (1 << 32) - 1), Fd.TYPE_UINT64: (0, (1 << 64) - 1),
}  # fmt: skip


@dataclass
class Known:
    """Members and values of a run. values: by the name of a field, those that the run knows."""

    members: Sequence[tuple[str, int]] = ()
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)


class MessageGenerator:
    """Makes messages. rng: decides everything. known: read at each message."""

    def __init__(self, rng: random.Random, known: Known) -> None:
        self._rng = rng
        self._known = known

    def message(self, kind: Descriptor, depth: int = 0) -> Any:
        """Return a message of this type."""
        made = message_factory.GetMessageClass(kind)()
        if depth < _DEPTH_MAX:
            chosen = {one.name: self._rng.choice(one.fields) for one in kind.oneofs}
            for wired in kind.fields:
                of = wired.containing_oneof
                is_due = chosen[of.name] is wired if of is not None else True
                if is_due and self._rng.random() < 0.8:
                    self.set_field(made, wired, depth)
        if self._rng.random() < 0.85:
            self._name_member(made)
        return made

    def stream(self, kind: Descriptor) -> list[Any]:
        """Return the messages of one stream: most begin as they should, with the sender."""
        made = [self.message(kind) for _ in range(self._rng.choice((1, 1, 2, 3, 6)))]
        first = next((one for one in ("header", "identity", "hello", "attach") if one in kind.fields_by_name), None)
        if first is not None and self._rng.random() < 0.9:
            self.set_field(made[0], kind.fields_by_name[first], 0)
            for later in made[1:]:
                if self._rng.random() < 0.8:
                    later.ClearField(first)
        return made

    def set_field(self, made: Any, wired: FieldDescriptor, depth: int) -> None:
        """Give one field a value."""
        if wired.message_type is not None and wired.message_type.GetOptions().map_entry:
            self._fill_map(getattr(made, wired.name), wired.message_type, depth)
        elif wired.is_repeated:
            made.ClearField(wired.name)
            getattr(made, wired.name).extend(self._value(wired, depth) for _ in range(self._count(depth, wired)))
        elif wired.message_type is not None:
            getattr(made, wired.name).CopyFrom(self._value(wired, depth))
        else:
            setattr(made, wired.name, self._value(wired, depth))

    def _fill_map(self, place: Any, entry: Descriptor, depth: int) -> None:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        for _ in range(self._count(depth, value)):
            place[self._text("parameters") if key.type == Fd.TYPE_STRING else self._value(key, depth)] = self._value(
                value, depth
            )

    def _count(self, depth: int, wired: FieldDescriptor) -> int:
        if depth >= 2 or self._rng.random() >= 0.01:
            return self._rng.choice(_COUNTS)
        return self._rng.choice(_MANY_MESSAGES if wired.message_type is not None else _MANY)

    def _value(self, wired: FieldDescriptor, depth: int) -> Any:
        if wired.message_type is not None:
            return self.message(wired.message_type, depth + 1)
        known = self._known.values.get(wired.name)
        if known and self._rng.random() < 0.85 and isinstance(known[0], _TYPES.get(wired.type, int)):
            return self._rng.choice(known)
        return self._by_type(wired)

    def _by_type(self, wired: FieldDescriptor) -> Any:
        rng = self._rng
        makers: dict[int, Callable[[], Any]] = {
            Fd.TYPE_BOOL: lambda: rng.random() < 0.5,
            Fd.TYPE_DOUBLE: lambda: rng.choice(_FLOATS),
            Fd.TYPE_STRING: lambda: self._text(wired.name),
            Fd.TYPE_BYTES: lambda: rng.choice((*_BYTES, rng.randbytes(rng.randrange(200)))),
            Fd.TYPE_ENUM: lambda: rng.choice((*(one.number for one in wired.enum_type.values), -1, 99, 1 << 30)),
        }
        return makers[wired.type]() if wired.type in makers else self._integer(*_BOUNDS[wired.type])

    def _integer(self, low: int, high: int) -> int:
        if self._rng.random() < 0.75:
            return self._rng.choice((0, 1, 1, 2, 3, 4, 10, 100))
        edges = (low, low + 1, high, high - 1, high >> 1, (high >> 1) + 1, (1 << 31) - 1, 1 << 20, 4097)
        return min(high, max(low, self._rng.choice(edges)))

    def _text(self, name: str) -> str:
        known = self._known.values.get(name)
        is_known = known and isinstance(known[0], str) and self._rng.random() < 0.7
        return self._rng.choice(known) if known and is_known else self._rng.choice(_TEXTS)

    def _name_member(self, made: Any) -> None:
        """Name a member that exists, in its incarnation."""
        fields = made.DESCRIPTOR.fields_by_name
        if self._known.members and "incarnation" in fields:
            for name in _ID_FIELDS:
                if name in fields:
                    member_id, made.incarnation = self._rng.choice(self._known.members)
                    setattr(made, name, member_id)


def floats(elements: int, value: float = 0.25) -> bytes:
    """Return a payload of float32 elements."""
    return struct.pack("<f", value) * elements


def mutate_message(rng: random.Random, generator: MessageGenerator, message: Message) -> None:
    """Change one field of a message, or of a message in it."""
    place: Any = message
    while True:
        inner = [value for wired, value in place.ListFields() if wired.message_type and not wired.is_repeated]
        if not inner or rng.random() < 0.4:
            break
        place = rng.choice(inner)
    if place.DESCRIPTOR.fields:
        wired = rng.choice(place.DESCRIPTOR.fields)
        if rng.random() < 0.2:
            place.ClearField(wired.name)
        else:
            generator.set_field(place, wired, 1)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Change, cut, repeat or extend ``data``."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0 if at < len(changed):
                changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 1:
                del changed[at:]
            case 2:
                changed[at:at] = rng.randbytes(rng.choice((1, 4, 40)))
            case 3:
                changed[at:at] = changed[at : at + 64]
            case _ if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)
