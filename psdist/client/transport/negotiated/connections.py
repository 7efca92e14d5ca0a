"""Transports that are negotiated with each server over gRPC: which servers they are open to, and why not to others.

Connections follow the cluster map. Before each call, one is opened to servers that became primaries of something here.
One to a server whose shards change stays. One to a server that is no primary here any more is closed.

Invariants: a result never depends on such a transport, unless the user insists on it. A server that refused is not
asked again in the same incarnation. A connection that broke is opened again before the next call.

Not here: what is negotiated (``shm``, ``tcp``).
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

from psdist.client.core.routing import Route
from psdist.client.session.cluster_view import ClusterView
from psdist.client.session.wait_tracker import WaitTracker
from psdist.client.transport.grpc.streams import GrpcTransport
from psdist.client.transport.negotiated.calls import CallConnection
from psdist.client.transport.requests import RequestIdentity
from psdist.client.transport.transport import Transport
from psdist.ending import ending_with
from psdist.errors import PsdistError, StaleEpochError
from psdist.types import ClusterMap, ParametersEntry, Replica

logger = logging.getLogger("psdist")

_NEWER_MAP_SECONDS: Final = 1.0
_NOT_TRIED: Final = "not tried yet"

ConnectionT = TypeVar("ConnectionT", bound=CallConnection[Any])


class NegotiatedTransport(Transport, Generic[ConnectionT]):
    """The connections of one handle to the servers of its parameter set.

    grpc: opens the streams on which connections are negotiated.
    required: raise ``unavailable`` where there can be no connection to a server.
    """

    #: What says that there can be no connection to a server.
    unavailable: ClassVar[type[PsdistError]]

    def __init__(
        self,
        view: ClusterView,
        waits: WaitTracker,
        grpc: GrpcTransport,
        sender: RequestIdentity,
        entry: ParametersEntry,
        *,
        required: bool,
    ) -> None:
        self._view = view
        self._waits = waits
        self._grpc = grpc
        self._sender = sender
        #: As the map has the parameter set that was looked at last.
        self._entry = entry
        self._followed: ClusterMap | None = None
        self._required = required
        self.streams: dict[str, ConnectionT] = {}
        #: Why there is no connection to a server, by its id.
        self._reasons: dict[str, str] = {}
        #: Incarnations of servers to which there can be none.
        self._refused: set[tuple[str, int]] = set()
        self._preparing = asyncio.Lock()

    # --- the transport ------------------------------------------------------------------------------------------------

    def is_open(self, route: Route) -> bool:
        """Whether there is a connection to the route's server."""
        return self._stream_of(route) is not None

    def is_missing(self, route: Route) -> bool:
        """Whether it is to be tried to open one to the route's server, by the newest map."""
        return self._stream_of(route) is None and (route.server_id, route.incarnation) not in self._refused

    async def prepare(self, routes: Sequence[Route]) -> None:
        """Opens connections to the servers of ``routes`` where that was not tried yet, or they broke.

        Raises ``unavailable`` where the transport is required and there can be none.
        """
        async with self._preparing:
            if missing := [route for route in routes if self.is_missing(route)]:
                await self._open_all(missing)

    async def _open_all(self, routes: Sequence[Route]) -> None:
        outcomes = await asyncio.gather(*(self._open(route) for route in routes), return_exceptions=True)
        self._streams_changed()
        for error in filter(None, outcomes):
            raise error

    @abstractmethod
    async def _open(self, route: Route) -> None:
        """Opens a connection, which goes to ``streams``, or notes why there is none."""

    def why_closed(self, server_id: str) -> str:
        """Why there is no connection to the server; empty if there is one."""
        stream = self.streams.get(server_id)
        if stream is not None and stream.is_open:
            return ""
        broken = stream.broken.message if stream is not None and stream.broken is not None else _NOT_TRIED
        return self._reasons.get(server_id, broken)

    # --- opening ------------------------------------------------------------------------------------------------------

    def _stream_of(self, route: Route) -> ConnectionT | None:
        """The connection to the route's server, by the newest map."""
        self._follow()
        return self._stream_to(route.server)

    def _follow(self) -> None:
        """Takes over the newest map, if it is new."""
        cluster = self._view.cluster
        if cluster is not self._followed:
            self._followed = cluster
            self._entry = cluster.entry(self._entry.spec.name) or self._entry
            self._streams_changed()

    def _stream_to(self, server: Replica) -> ConnectionT | None:
        stream = self.streams.get(server.server_id)
        return stream if stream is not None and stream.incarnation == server.incarnation and stream.is_open else None

    def _streams_changed(self) -> None:
        """There may be other primaries, or other connections to them."""
        primaries = {shard.primary for shard in self._entry.shards}
        for server_id, stream in list(self.streams.items()):
            if Replica(server_id, stream.incarnation) not in primaries:
                stream.close()
                del self.streams[server_id]
                self._reasons.pop(server_id, None)

    async def _negotiated(
        self, route: Route, method: str, negotiate: Callable[[Any, int], Awaitable[ConnectionT]]
    ) -> ConnectionT:
        """What ``negotiate`` opens, given a stream of ``method`` and the epoch of the newest map. Raises the loss of
        the server as soon as it is known: a server that is gone may say nothing."""
        while True:
            epoch = self._view.cluster.epoch
            loss = self._view.loss_of(route.server_id, route.incarnation)
            call = self._grpc.open_stream(route.address, method)
            try:
                with ending_with(loss):
                    return await negotiate(call, epoch)
            except StaleEpochError:
                call.cancel()
                await self._view.newer_than(epoch, _NEWER_MAP_SECONDS)
            except BaseException:  # This includes cancellation.
                call.cancel()
                raise

    async def _opened(self, route: Route, stream: ConnectionT) -> None:
        """Takes a new connection into use."""
        old = self.streams.get(route.server_id)
        self.streams[route.server_id] = stream
        self._reasons.pop(route.server_id, None)
        if old is not None:
            await old.ended()
        logger.debug("%r reaches %s by %s", self._entry.spec.name, route.peer, self.name)

    def _refuse(self, route: Route, error: PsdistError) -> None:
        """There can be no connection to the route's server."""
        name = self._entry.spec.name
        if self._required:
            raise type(error)(
                f"{name!r} cannot reach {route.peer} by the transport {self.name!r}: {error.message}. "
                "Use transport='auto' to go on by another one",
                server=route.server_id,
            ) from None
        if self._reasons.get(route.server_id) != error.message:
            logger.info("%r does not reach %s by %s: %s", name, route.peer, self.name, error.message)
        self._refused.add((route.server_id, route.incarnation))
        self._reasons[route.server_id] = error.message

    # --- ending -------------------------------------------------------------------------------------------------------

    def rejoin(self, sender: RequestIdentity, entry: ParametersEntry) -> None:
        """This worker takes part anew, as ``sender``. Connections end, and servers are asked again."""
        for stream in self.streams.values():
            stream.close()
        self._sender, self._entry = sender, entry
        self._refused.clear()

    async def close(self) -> None:
        """Ends the connections."""
        for stream in self.streams.values():
            stream.close()
        await asyncio.gather(*(stream.ended() for stream in self.streams.values()))
        self.streams.clear()
