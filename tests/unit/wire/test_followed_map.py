"""The map of one session: whole maps, and differences from the previous one."""

from __future__ import annotations

import pytest

from psdist.errors import StaleEpochError
from psdist.map_difference import difference
from psdist.types import ClusterMap, WorkerEntry
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert
from psdist.wire.followed_map import FollowedMap

MAPS = [ClusterMap("run", epoch, workers=tuple(WorkerEntry(f"w{n}", 1, n) for n in range(epoch))) for epoch in range(4)]


def whole(epoch: int) -> pb.SessionResponse:
    return pb.SessionResponse(map=convert.map_to_proto(MAPS[epoch]))


def change(before: int, after: int) -> pb.SessionResponse:
    return pb.SessionResponse(map_difference=convert.difference_to_proto(difference(MAPS[before], MAPS[after])))


def test_maps_and_differences_in_any_order() -> None:
    followed = FollowedMap()
    assert [followed.apply(one) for one in (whole(0), change(0, 2), whole(1), change(1, 3))] == [
        MAPS[epoch] for epoch in (0, 2, 1, 3)
    ]


def test_a_difference_to_a_map_that_did_not_come_changes_nothing() -> None:
    followed = FollowedMap()
    followed.apply(whole(1))
    with pytest.raises(StaleEpochError, match="map 2 to 3 does not apply to map 1"):
        followed.apply(change(2, 3))
    assert followed.apply(change(1, 3)) == MAPS[3]
