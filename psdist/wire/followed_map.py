"""The cluster map of one session: a whole one first, then whole ones or differences, in the order of the stream."""

from __future__ import annotations

from psdist import map_difference
from psdist.types import ClusterMap
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert


class FollowedMap:
    """The newest map of one session. Ignores maps that arrive by other calls, because differences refer to this
    session's maps."""

    def __init__(self) -> None:
        self._cluster = ClusterMap("", 0)

    def apply(self, response: pb.SessionResponse) -> ClusterMap:
        """Apply ``response``, a whole map or a difference, and return the map. Raises StaleEpochError for a difference
        from another map than the last, and the errors of the conversions."""
        if response.HasField("map"):
            self._cluster = convert.map_from_proto(response.map)
        else:
            change = convert.difference_from_proto(response.map_difference)
            self._cluster = map_difference.apply(self._cluster, change)
        return self._cluster
