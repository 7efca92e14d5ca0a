"""The other servers of the newest map, and how they are called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import grpc.aio

from psdist.errors import ServerUnreachableError
from psdist.types import ClusterMap, Replica
from psdist.v1 import server_pb2, server_pb2_grpc
from psdist.wire import auth, channels


class PeerServers:
    """Channels to the servers that ``me`` replicates to, and asks. See ``ReplicaNetwork``.

    report: called when there is something new to report to the scheduler.
    """

    def __init__(
        self, me: Replica, run_id: str, token: str, rng: Random, lease_seconds: float, report: Callable[[], None]
    ) -> None:
        self.me = me
        self.rng = rng
        self.lease_seconds = lease_seconds
        self.report = report
        self._metadata = auth.metadata(token)
        #: The map that is being followed, or was last.
        self._map = ClusterMap(run_id, 0)
        self._channels: dict[str, grpc.aio.Channel] = {}

    def follow(self, cluster: ClusterMap) -> bool:
        """A map has come; whether it is newer than those before."""
        is_newer = cluster.epoch > self._map.epoch
        self._map = cluster if is_newer else self._map
        return is_newer

    def is_live(self, replica: Replica) -> bool:
        """Whether the newest map has this incarnation of a server."""
        server = self._map.server(replica.server_id)
        return server is not None and server.incarnation == replica.incarnation

    def _channel(self, replica: Replica) -> grpc.aio.Channel:
        server = self._map.server(replica.server_id)
        if server is None or not self.is_live(replica):
            raise ServerUnreachableError(f"{replica} (incarnation {replica.incarnation}) is not a live server")
        if server.address not in self._channels:
            self._channels[server.address] = channels.open_channel(server.address)
        return self._channels[server.address]

    def fetch_norms(self, replica: Replica, request: server_pb2.FetchNormsRequest) -> Any:
        """Calls FetchNorms of another server: a stream of answers. Raises ServerUnreachableError."""
        stub = server_pb2_grpc.ServerServiceStub(self._channel(replica))
        return stub.FetchNorms(request, metadata=self._metadata)

    def method(self, replica: Replica, name: str) -> Callable[..., Any]:
        """See ReplicaNetwork."""
        return partial(self._channel(replica).stream_stream(name), metadata=self._metadata)

    def hello(self, parameters: str) -> server_pb2.ReplicateRequest:
        """See ReplicaNetwork."""
        hello = server_pb2.ReplicateRequest.Hello(
            run_id=self._map.run_id,
            server_id=self.me.server_id,
            incarnation=self.me.incarnation,
            epoch=self._map.epoch,
            parameters=parameters,
        )
        return server_pb2.ReplicateRequest(hello=hello)

    async def close(self) -> None:
        """Closes the channels."""
        for channel in self._channels.values():
            await channel.close()
