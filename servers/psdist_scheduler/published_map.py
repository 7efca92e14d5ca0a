"""A published cluster map in its serialized forms for sessions: whole, and as changes since earlier maps.

Most sessions have the same earlier map, so each form is made once and shared. It is made when the first session is sent
it: a map that a newer one replaced in all outboxes costs nothing.
"""

from __future__ import annotations

from functools import cached_property

from psdist.map_difference import difference
from psdist.types import ClusterMap
from psdist.v1 import common_pb2
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert


class PublishedMap:
    """The map of one epoch."""

    def __init__(self, cluster: ClusterMap) -> None:
        self.cluster = cluster
        self._since: dict[int, bytes] = {}

    @cached_property
    def message(self) -> common_pb2.ClusterMap:
        """The map as a message."""
        return convert.map_to_proto(self.cluster)

    @cached_property
    def whole(self) -> bytes:
        """A serialized ``SessionResponse`` with the whole map."""
        return _pack(pb.SessionResponse(map=self.message))

    def since(self, before: ClusterMap) -> bytes:
        """Return a serialized ``SessionResponse`` with the changes for a session that has the map ``before``."""
        if before.epoch not in self._since:
            change = convert.difference_to_proto(difference(before, self.cluster))
            self._since[before.epoch] = _pack(pb.SessionResponse(map_difference=change))
        return self._since[before.epoch]


def _pack(response: pb.SessionResponse) -> bytes:
    return response.SerializeToString(deterministic=True)
