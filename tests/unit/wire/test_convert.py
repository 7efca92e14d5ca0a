"""Conversion by field names. Ranges of overrides in the cluster map: up to one for each tensor, and converted once, not
in each epoch."""

from __future__ import annotations

import pytest

from psdist import optim
from psdist.consistency import BSP
from psdist.errors import InvalidArgumentError, InvalidNameError
from psdist.types import GroupRange, ParametersEntry, ParametersSpec, Replica, Restore, Shard
from psdist.v1 import common_pb2
from psdist.wire import convert


def entry(count: int, ready: bool = False, ranges: tuple[GroupRange, ...] | None = None) -> ParametersEntry:
    if ranges is None:
        ranges = tuple(GroupRange(20 * number, 20 * number + 10, 1) for number in range(count))
    spec = ParametersSpec("p", optim.SGD(), BSP(), slice_elements=1 << 12)
    return ParametersEntry(spec, 20 * max(1, count), (Shard(Replica("server-0", 1)),), ranges=ranges, ready=ready)


def test_ranges_come_back_as_they_were() -> None:
    for count in [0, 1, 63, 64, 20_000]:
        mine = entry(count)
        data = convert.entry_to_proto(mine).SerializeToString()
        assert convert.entry_from_proto(common_pb2.ParametersEntry.FromString(data)) == mine


def test_ranges_of_a_later_epoch_are_not_converted_again() -> None:
    before = entry(1000)
    after = entry(1000, ready=True, ranges=before.ranges)
    first, second = convert.entry_to_proto(before), convert.entry_to_proto(after)
    assert convert._ranges_to_proto(before.ranges) is convert._ranges_to_proto(after.ranges)
    taken = [convert.entry_from_proto(message) for message in (first, second)]
    assert taken[0].ranges is taken[1].ranges and taken == [before, after]


def test_ranges_of_equal_length_are_told_apart() -> None:
    one, other = entry(100), entry(100, ranges=tuple(GroupRange(20 * n, 20 * n + 10, 2) for n in range(100)))
    for mine in (one, other, one):
        assert convert.entry_from_proto(convert.entry_to_proto(mine)) == mine


def test_a_huge_table_is_converted_and_not_kept() -> None:
    """Check that peers cannot make the cache grow."""
    count = convert._KEPT_RANGES_BYTES // 8
    before = convert._ranges_from_bytes.cache_info().currsize
    mine = entry(count)
    assert convert.entry_from_proto(convert.entry_to_proto(mine)) == mine
    assert convert._ranges_from_bytes.cache_info().currsize == before


# --- fields of the same name ------------------------------------------------------------------------------------------


def test_types_with_other_fields_than_their_message_are_refused() -> None:
    with pytest.raises(AssertionError, match="the fields of Replica and of its message differ"):
        convert.pair(Replica, common_pb2.Restore)


def test_absent_messages_read_as_the_default() -> None:
    message = convert.entry_to_proto(entry(1))
    assert not message.HasField("restore") and convert.entry_from_proto(message).restore is None
    message.restore.directory = "snapshot-1"
    assert convert.entry_from_proto(message).restore == Restore("snapshot-1", b"")


def test_fields_of_nested_messages_are_checked() -> None:
    message = convert.entry_to_proto(entry(1))
    message.restore.directory = "../other"
    with pytest.raises(InvalidNameError, match="cannot name a file of a snapshot"):
        convert.entry_from_proto(message)
    message = convert.entry_to_proto(entry(1))
    message.spec.MergeFromString(b"\x20\x09")  # non_finite: 9
    with pytest.raises(InvalidArgumentError, match="non_finite 9 is unknown: use one of 0, 1, 2"):
        convert.entry_from_proto(message)
