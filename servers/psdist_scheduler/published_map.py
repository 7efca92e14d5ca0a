"""A cluster map that was published, as bytes for sessions: whole, and as what is new since earlier maps.

Most sessions have the same map before, so that each form is made once and shared by all. It is made when the first
session is sent it: a map that a newer one replaced in all outboxes costs nothing.
"""

from __future__ import annotations

from functools import cached_property

from psdist.map_difference import difference
from psdist.types import ClusterMap
from psdist.v1 import common_pb2
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert


class PublishedMap:
    """One epoch's map."""

    def __init__(self, cluster: ClusterMap) -> None:
        self.cluster = cluster
        self._since: dict[int, bytes] = {}

    @cached_property
    def message(self) -> common_pb2.ClusterMap:
        """The map as a message."""
        return convert.map_to_proto(self.cluster)

    @cached_property
    def whole(self) -> bytes:
        """A ``SessionResponse`` with all of it."""
        return _pack(pb.SessionResponse(map=self.message))

    def since(self, before: ClusterMap) -> bytes:
        """A ``SessionResponse`` with what is new to a session that has the map ``before``."""
        if before.epoch not in self._since:
            change = convert.difference_to_proto(difference(before, self.cluster))
            self._since[before.epoch] = _pack(pb.SessionResponse(map_difference=change))
        return self._since[before.epoch]


def _pack(response: pb.SessionResponse) -> bytes:
    return response.SerializeToString(deterministic=True)
