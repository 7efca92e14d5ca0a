"""Calls that a member may make and that change the training beside the fuzzing: another run gets them.

The holder of a token is a full member (SECURITY.md). What is left must not change a byte of the set "model".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from google.protobuf.message import Message

from tests.fuzz.messages import Known
from tests.fuzz.run import MEMBER, SETS

#: By method: why all of its calls go elsewhere.
ALWAYS: Final = {
    "Drain": "it moves the shards of a server",
    "Scale": "it moves shards, and stops servers",
}
_READ_ONLY: Final = ("FetchNorms", "GetStatistics")
_KEPT: Final = {*SETS, ""}


def why_harmful(method: str, messages: Sequence[Any], known: Known) -> str:
    """Return why a call would legally change the training; empty if it would not."""
    if method in ALWAYS:
        return ALWAYS[method]
    first = messages[0]
    if method == "Register" and first.role == 1:
        return "a server that does not exist would get shards"
    if method == "CreateParameters" and first.spec.name not in SETS:
        return "it creates a set"
    if method not in _READ_ONLY and any(_speaks_for_another(one, known) for one in messages):
        return "it speaks for another member, with its incarnation"
    if method == "Replicate" and any(one.hello.parameters not in _KEPT for one in messages):
        return "it speaks for a server that is the primary"
    return ""


def _speaks_for_another(message: Message, known: Known) -> bool:
    others = {member for member in known.members if member[0] != MEMBER}
    data = message.SerializeToString()
    if not any(name.encode() in data for name, _ in others):
        return False
    return any(_member(inner) & others for inner in _inner(message))


def _inner(message: Message) -> Iterator[Any]:
    """Yield a message and all messages in it."""
    yield message
    for wired, value in message.ListFields():
        if wired.message_type is None or wired.message_type.GetOptions().map_entry:
            continue
        for one in value if wired.is_repeated else (value,):
            yield from _inner(one)


def _member(message: Any) -> set[tuple[str, int]]:
    """Return the member that a message names."""
    names = message.DESCRIPTOR.fields_by_name
    if "incarnation" not in names:
        return set()
    ids = (getattr(message, name) for name in ("worker_id", "member_id", "server_id") if name in names)
    return {(one, message.incarnation) for one in ids}
