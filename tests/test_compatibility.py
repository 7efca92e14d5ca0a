"""Messages and calls of protocol version 6 still exist with the same numbers, types and cardinality.

``tests/compat/protocol-6.binpb.gz`` is the FileDescriptorSet of that version, by ``protoc --descriptor_set_out`` and
``gzip -9n``. It is written again only when ``PROTOCOL_VERSION`` is raised. Names may not change either: errors and
metrics show them.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2 as d

from psdist.v1 import common_pb2, scheduler_pb2, server_pb2, worker_pb2
from psdist.wire import limits

STORED = Path(__file__).parent / "compat" / f"protocol-{limits.PROTOCOL_VERSION}.binpb.gz"


def facts(files: d.FileDescriptorSet) -> set[str]:
    """Return a line for each thing that a peer relies on."""
    found: set[str] = set()
    for file in files.file:
        for message in file.message_type:
            found.update(_of_message(message, file.package))
        for enum in file.enum_type:
            found.update(_of_enum(enum, file.package))
        for service in file.service:
            found.update(
                f"rpc {file.package}.{service.name}/{call.name} {call.client_streaming} {call.input_type} -> "
                f"{call.server_streaming} {call.output_type}"
                for call in service.method
            )
    return found


def _of_message(message: d.DescriptorProto, scope: str) -> Iterator[str]:
    name = f"{scope}.{message.name}"
    for field in message.field:
        oneof = ""
        if field.HasField("oneof_index") and not field.proto3_optional:
            oneof = message.oneof_decl[field.oneof_index].name
        yield (
            f"field {name}.{field.name} = {field.number} {field.type} {field.type_name} {field.label} "
            f"{field.proto3_optional} {oneof}"
        )
    for nested in message.nested_type:
        yield from _of_message(nested, name)
    for enum in message.enum_type:
        yield from _of_enum(enum, name)


def _of_enum(enum: d.EnumDescriptorProto, scope: str) -> Iterator[str]:
    return (f"value {scope}.{enum.name}.{value.name} = {value.number}" for value in enum.value)


def today() -> d.FileDescriptorSet:
    files = d.FileDescriptorSet()
    for module in (common_pb2, scheduler_pb2, server_pb2, worker_pb2):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    return files


def stored() -> d.FileDescriptorSet:
    return d.FileDescriptorSet.FromString(gzip.decompress(STORED.read_bytes()))


def test_nothing_that_a_peer_relies_on_has_changed() -> None:
    before = facts(stored())
    assert len(before) > 300, "the stored descriptors are empty: this test would pass on nothing"
    broken = sorted(before - facts(today()))
    assert not broken, f"add fields beside these, or raise PROTOCOL_VERSION: {broken}"


@pytest.mark.parametrize("change", ["number", "type", "label", "name"])
def test_a_changed_field_is_found(change: str) -> None:
    changed = today()
    field = next(one for one in changed.file[1].message_type if one.name == "RegisterRequest").field[0]
    setattr(field, change, {"number": 99, "type": 9, "label": 3, "name": "other"}[change])
    assert len(facts(stored()) - facts(changed)) == 1


def test_a_removed_call_is_found_and_an_added_field_is_not() -> None:
    changed = today()
    changed.file[1].message_type[0].field.add(name="added", number=99, type=9, label=1)
    assert facts(stored()) <= facts(changed)
    del changed.file[1].service[0].method[0]
    assert len(facts(stored()) - facts(changed)) == 1
