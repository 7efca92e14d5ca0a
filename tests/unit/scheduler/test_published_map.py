"""A published map as bytes: whole, and as what is new."""

from __future__ import annotations

from psdist.types import ClusterMap, WorkerEntry
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire.member_session import FollowedMap
from psdist_scheduler.run.open_calls import PublishedMap

MAPS = [ClusterMap("run", epoch, workers=tuple(WorkerEntry(f"w{n}", 1, n) for n in range(epoch))) for epoch in range(4)]


def test_sessions_with_the_same_map_share_the_bytes_of_the_next() -> None:
    published = PublishedMap(MAPS[3])
    assert published.whole is published.whole
    assert published.since(MAPS[2]) is published.since(MAPS[2])
    for first in (0, 2):
        followed = FollowedMap()
        followed.apply(pb.SessionResponse.FromString(PublishedMap(MAPS[first]).whole))
        assert followed.apply(pb.SessionResponse.FromString(published.since(MAPS[first]))) == MAPS[3]


def test_a_difference_does_not_grow_with_the_run() -> None:
    workers = tuple(WorkerEntry(f"worker-{n}", 1, n) for n in range(1000))
    after = PublishedMap(ClusterMap("run", 8, workers=workers))
    assert len(after.whole) > 16_000
    assert len(after.since(ClusterMap("run", 7, workers=workers[:-1]))) < 40
