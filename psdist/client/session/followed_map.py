"""The cluster map of one session: a whole one first, and then whole ones or differences, in the order of the stream."""

from __future__ import annotations

from psdist import map_difference
from psdist.types import ClusterMap
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert


class FollowedMap:
    """The map that came last on one session. Maps that come by other calls are none of its, since differences are to
    what this session was sent."""

    def __init__(self) -> None:
        self._cluster = ClusterMap("", 0)

    def follow(self, response: pb.SessionResponse) -> ClusterMap:
        """The map after ``response``, which has one or a difference. Raises StaleEpochError for a difference from
        another map than the last, and what the conversions raise."""
        if response.HasField("map"):
            self._cluster = convert.map_from_proto(response.map)
        else:
            change = convert.difference_from_proto(response.map_difference)
            self._cluster = map_difference.apply(self._cluster, change)
        return self._cluster
