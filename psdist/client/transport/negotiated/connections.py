"""Connections of transports that are negotiated with each server over gRPC, and the reasons for missing ones.

Connections follow the cluster map. Before each call, connections are opened to servers that became primaries of this
parameter set. A server keeps its connection while its shards change. Connections to servers that are no longer
primaries are closed.

Invariants: No result depends on such a transport, unless the user requires it. No call waits for a server that refused
before (``refusals``). A broken connection is reopened before the next call.

``shm`` and ``tcp`` implement the negotiation: a new transport is one more subclass of ``NegotiatedTransport``.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

from psdist.client.core.routing import Route
from psdist.client.session.cluster_view import ClusterView
from psdist.client.session.wait_tracker import WaitTracker
from psdist.client.transport.grpc.streams import GrpcTransport
from psdist.client.transport.negotiated.calls import CallConnection
from psdist.client.transport.negotiated.refusals import Refusals
from psdist.client.transport.requests import RequestIdentity
from psdist.client.transport.transport import Transport
from psdist.errors import PsdistError, StaleEpochError
from psdist.link.ending import ending_with
from psdist.types import ClusterMap, ParametersEntry, Replica

logger = logging.getLogger("psdist")

_NEWER_MAP_SECONDS: Final = 1.0
_NOT_TRIED: Final = "not tried yet"

ConnectionT = TypeVar("ConnectionT", bound=CallConnection[Any])


class NegotiatedTransport(Transport, Generic[ConnectionT]):
    """Connections of one handle to the servers of its parameter set.

    grpc: opens the streams on which connections are negotiated.
    required: raise ``unavailable`` if no connection to a server is possible.
    """

    #: Method of ServerService on whose streams connections are negotiated.
    method: ClassVar[str]
    #: Error that says that no connection to a server is possible.
    unavailable: ClassVar[type[PsdistError]]
    #: See ``Refusals``.
    retry_seconds: ClassVar[float] = math.inf
    #: Reason for a missing connection whose negotiation became obsolete.
    obsolete: ClassVar[str] = "this worker rejoined while it connected"

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
        #: Parameter set in the latest map looked at.
        self._entry = entry
        self._adopted: ClusterMap | None = None
        self._required = required
        self.streams: dict[str, ConnectionT] = {}
        #: Reason for a missing connection, by server id.
        self._reasons: dict[str, str] = {}
        self._refusals = Refusals[ConnectionT](self.retry_seconds)
        self._preparing = asyncio.Lock()

    # --- transport ----------------------------------------------------------------------------------------------------

    def is_open(self, route: Route) -> bool:
        """True if there is a connection to the route's server."""
        return self._stream_of(route) is not None

    def is_missing(self, route: Route) -> bool:
        """True if ``prepare`` should try to connect to the route's server, by the newest map."""
        return self._stream_of(route) is None and self._refusals.may_agree(
            route.server, lambda: self._negotiated(route)
        )

    async def prepare(self, routes: Sequence[Route]) -> None:
        """Open missing or broken connections to the servers of ``routes``.

        Raises ``unavailable`` if the transport is required and no connection is possible.
        """
        async with self._preparing:
            if missing := [route for route in routes if self.is_missing(route)]:
                await self._open_all(missing)

    async def _open_all(self, routes: Sequence[Route]) -> None:
        outcomes = await asyncio.gather(*(self._open(route) for route in routes), return_exceptions=True)
        self._streams_changed()
        for error in filter(None, outcomes):
            raise error

    def why_closed(self, server_id: str) -> str:
        """Return why there is no connection to the server; empty if there is one."""
        stream = self.streams.get(server_id)
        if stream is not None and stream.is_open:
            return ""
        broken = stream.broken.message if stream is not None and stream.broken is not None else _NOT_TRIED
        return self._reasons.get(server_id, broken)

    # --- opening ------------------------------------------------------------------------------------------------------

    def _stream_of(self, route: Route) -> ConnectionT | None:
        """Return the connection to the route's server, by the newest map."""
        self._adopt_map()
        return self._stream_to(route.server)

    def _adopt_map(self) -> None:
        """Adopt the newest map."""
        cluster = self._view.cluster
        if cluster is not self._adopted:
            self._adopted = cluster
            self._entry = cluster.entry(self._entry.spec.name) or self._entry
            self._streams_changed()

    def _stream_to(self, server: Replica) -> ConnectionT | None:
        stream = self.streams.get(server.server_id)
        return stream if stream is not None and stream.incarnation == server.incarnation and stream.is_open else None

    def _streams_changed(self) -> None:
        """Close connections to servers that are not primaries any more. Called when the primaries or connections
        change."""
        primaries = {shard.primary for shard in self._entry.shards}
        for server_id, stream in list(self.streams.items()):
            if Replica(server_id, stream.incarnation) not in primaries:
                stream.close()
                del self.streams[server_id]
                self._reasons.pop(server_id, None)
        self._refusals.keep(primaries)

    @abstractmethod
    async def _connect(self, call: Any, epoch: int, route: Route) -> ConnectionT:
        """Negotiate a connection on ``call``, a new stream of ``method``, by the map of ``epoch``."""

    def _offered(self) -> tuple[object, ...]:
        """Return the objects that connections are negotiated for. If one changes, a negotiation is obsolete."""
        return (self._sender,)

    async def _open(self, route: Route) -> None:
        """Open a connection and add it to ``streams``, or record the reason for its absence."""
        offered, stream = self._offered(), None
        try:
            with self._waits.open(f"for a connection to {route.peer} by {self.name}"):
                stream = await (self._refusals.take(route.server) or self._negotiated(route))
        except self.unavailable as error:
            if self._offered() == offered:
                self._refuse(route, error)
        except PsdistError as error:  # The data path handles it, and connecting is tried again.
            self._reasons[route.server_id] = f"connecting failed: {error.message}"
        if self._offered() != offered:
            # A later call tries again. Another transport is used meanwhile.
            self._reasons[route.server_id] = self.obsolete
            if stream is not None:
                stream.close()
                await stream.ended()
        elif stream is not None:
            await self._opened(route, stream)

    async def _negotiated(self, route: Route) -> ConnectionT:
        """Return a new connection, by the newest map. Raises the loss of the server as soon as it is known: a lost
        server may stay silent."""
        while True:
            epoch = self._view.cluster.epoch
            loss = self._view.loss_of(route.server_id, route.incarnation)
            call = self._grpc.open_stream(route.address, self.method)
            try:
                with ending_with(loss):
                    return await self._connect(call, epoch, route)
            except StaleEpochError:
                call.cancel()
                await self._view.newer_than(epoch, _NEWER_MAP_SECONDS)
            except BaseException:  # Includes cancellation.
                call.cancel()
                raise

    async def _opened(self, route: Route, stream: ConnectionT) -> None:
        """Put a new connection into use."""
        old = self.streams.get(route.server_id)
        self.streams[route.server_id] = stream
        self._reasons.pop(route.server_id, None)
        if old is not None:
            await old.ended()
        logger.debug("%r opened a connection to %s over %s", self._entry.spec.name, route.peer, self.name)

    def _refuse(self, route: Route, error: PsdistError) -> None:
        """Record that no connection to the route's server is possible."""
        name = self._entry.spec.name
        if self._required:
            raise type(error)(
                f"{name!r} cannot reach {route.peer} by the transport {self.name!r}: {error.message}. "
                "Use transport='auto' to fall back to another one",
                server=route.server_id,
            ) from None
        if self._reasons.get(route.server_id) != error.message:
            logger.info(
                "%r opened no connection to %s over %s: %s",
                name,
                route.peer,
                self.name,
                error.message,
                extra={"peer": str(route.peer)},
            )
        self._refusals.add(route.server)
        self._reasons[route.server_id] = error.message

    # --- closing ------------------------------------------------------------------------------------------------------

    def rejoin(self, sender: RequestIdentity, entry: ParametersEntry) -> None:
        """Close the connections after this worker rejoined as ``sender``. Servers are asked again."""
        for stream in self.streams.values():
            stream.close()
        self._sender, self._entry = sender, entry
        self._refusals.keep(set())

    async def close(self) -> None:
        """Close the connections."""
        self._refusals.keep(set())
        for stream in self.streams.values():
            stream.close()
        await asyncio.gather(*(stream.ended() for stream in self.streams.values()))
        self.streams.clear()
