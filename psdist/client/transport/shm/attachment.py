"""The shared-memory transport: what one handle shares with servers of this host, and with which of them.

``SharedMemory`` attaches one Share stream per server (``stream``), offers the handle's gradient arena, and shows the
weights of the servers as one vector where that is possible. Where a server cannot be shared with, the next transport is
used, and the reason is kept for status and statistics.

Attachments follow the cluster map. Before each call, servers that became primaries of something here are attached. A
stream to a server whose shards change stays. A stream to a server that is no primary here any more is closed. A slice
that is answered by a server whose memory is not shown in the vector is copied.

Invariants: a result never depends on sharing, unless the transport is "shm". A server that refused is not asked again
in the same incarnation. A stream that broke is opened again before the next call. No call is made by a map before the
vector has stopped showing servers that lost shards by that map, because they free that memory when such a call arrives.
"""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import Sequence
from typing import Any, Final

from numpy.typing import NDArray

from psdist.client.core.partition import Flat
from psdist.client.core.routing import Route
from psdist.client.session.cluster_view import ClusterView
from psdist.client.session.wait_tracker import Wait, WaitTracker
from psdist.client.transport.grpc.streams import GrpcTransport
from psdist.client.transport.requests import Request, RequestIdentity
from psdist.client.transport.shm.offered_arena import OfferedArena
from psdist.client.transport.shm.stream import SharedStream, attach
from psdist.client.transport.shm.weights_view import WeightsView
from psdist.client.transport.transport import Loss, Transport
from psdist.errors import PsdistError, SharingUnavailableError, StaleEpochError
from psdist.types import ClusterMap, DType, ParametersEntry, Replica
from psdist.v1 import common_pb2, server_pb2
from psdist.wire import convert
from psdist.wire.shm import GradientArena, WeightsArena

logger = logging.getLogger("psdist")

#: Here loads are done in the order in which the program has them, which sequence locks rely on.
_ORDERED_MACHINES: Final = ("x86_64", "AMD64")
_NEWER_MAP_SECONDS: Final = 1.0
_NOT_TRIED: Final = "not tried yet"


class SharedMemory(Transport):
    """What one handle shares with the servers of its parameter set: an arena for gradients, a Share stream per server.

    grpc: opens the streams on which servers are attached.
    dtype: of gradients on the wire.
    required: raise SharingUnavailableError where a server cannot be shared with.
    member: whether the handle ever pushes; else its arena has no room for gradients.
    stable: the weights of a slice stand still until this worker pushes it again (BSP members without backup workers).
    """

    name = "shm"

    def __init__(
        self,
        view: ClusterView,
        waits: WaitTracker,
        grpc: GrpcTransport,
        sender: RequestIdentity,
        entry: ParametersEntry,
        dtype: DType,
        *,
        required: bool,
        member: bool,
        stable: bool,
    ) -> None:
        self._view = view
        self._waits = waits
        self._grpc = grpc
        self._sender = sender
        #: As the map has the parameter set that was looked at last.
        self._entry = entry
        self._followed: ClusterMap | None = None
        self._required = required
        self._stable = stable
        self._settled = True
        self._arena = OfferedArena(entry.total if member else 0, dtype)
        self._weights = WeightsView()
        self.streams: dict[str, SharedStream] = {}
        #: Why a server is not shared with, by its id.
        self._reasons: dict[str, str] = {}
        #: Incarnations of servers that cannot be shared with.
        self._refused: set[tuple[str, int]] = set()
        self._preparing = asyncio.Lock()

    # --- the transport ------------------------------------------------------------------------------------------------

    def is_open(self, route: Route) -> bool:
        """Whether the route's server is attached."""
        return self._stream_of(route) is not None

    def is_missing(self, route: Route) -> bool:
        """Whether it is to be tried to share with the route's server, by the newest map."""
        return self._stream_of(route) is None and (route.server_id, route.incarnation) not in self._refused

    async def prepare(self, routes: Sequence[Route]) -> None:
        """Attaches to the servers of ``routes`` where that was not tried yet, or broke.

        Raises SharingUnavailableError where sharing is required and a server cannot be shared with.
        """
        async with self._preparing:
            missing = [route for route in routes if self.is_missing(route)]
            if missing and (reason := await self._make_arena()):
                for route in missing:
                    self._refuse(route, SharingUnavailableError(reason))
            elif missing:
                outcomes = await asyncio.gather(*(self._attach(route) for route in missing), return_exceptions=True)
                self._streams_changed()
                for error in filter(None, outcomes):
                    raise error

    async def exchange(self, request: Request, route: Route, wait: Wait, loss: Loss) -> None:
        """One call on the stream of the route's server. See ``Transport.exchange``."""
        stream = self._stream_of(route)
        assert stream is not None, "a transport that is not open was chosen"
        await stream.exchange(request, route, wait, self)

    def why_closed(self, server_id: str) -> str:
        """Why the server is not shared with; empty if it is."""
        stream = self.streams.get(server_id)
        if stream is not None and stream.is_open:
            return ""
        broken = stream.broken.message if stream is not None and stream.broken is not None else _NOT_TRIED
        return self._reasons.get(server_id, broken)

    # --- attaching ----------------------------------------------------------------------------------------------------

    def _stream_of(self, route: Route) -> SharedStream | None:
        """The stream to the route's server, by the newest map."""
        self._follow()
        return self._stream_to(route.server)

    def _follow(self) -> None:
        """Takes over the newest map, if it is new."""
        cluster = self._view.cluster
        if cluster is not self._followed:
            self._followed = cluster
            self._entry = cluster.entry(self._entry.spec.name) or self._entry
            self._streams_changed()

    def _stream_to(self, server: Replica) -> SharedStream | None:
        stream = self.streams.get(server.server_id)
        return stream if stream is not None and stream.incarnation == server.incarnation and stream.is_open else None

    def _streams_changed(self) -> None:
        """There may be other primaries, or other streams to them."""
        self._weights.update(self._entry, self._stream_to)
        primaries = {shard.primary for shard in self._entry.shards}
        for server_id, stream in list(self.streams.items()):
            if Replica(server_id, stream.incarnation) not in primaries:
                stream.close()
                del self.streams[server_id]
                self._reasons.pop(server_id, None)

    async def _make_arena(self) -> str:
        """Makes the arena. Returns why that cannot be; empty if it is there."""
        if not self._stable and platform.machine() not in _ORDERED_MACHINES:
            return f"weights that change while they are read need a processor of x86-64, not {platform.machine()}"
        return await self._arena.prepare()

    async def _attach(self, route: Route) -> None:
        arena, generation = self._arena.offer(), self._arena.generation
        stream: SharedStream | None = None
        try:
            stream = await self._attached(route, arena)
        except SharingUnavailableError as error:
            if generation == self._arena.generation:
                self._refuse(route, error)
        except PsdistError as error:  # That is for the data path to handle, and sharing is tried again then.
            self._reasons[route.server_id] = f"attaching failed: {error.message}"
        if generation != self._arena.generation:
            # The arena is another one since, or gone: what was attached, or refused, is not it. The next call tries
            # again; until then another transport is used.
            self._reasons[route.server_id] = "the memory was replaced while it was offered"
            if stream is not None:
                stream.close()
                await stream.ended()
        elif stream is not None:
            old = self.streams.get(route.server_id)
            self.streams[route.server_id] = stream
            self._reasons.pop(route.server_id, None)
            if old is not None:
                await old.ended()
            logger.debug("sharing memory of %r with %s", self._entry.spec.name, route.peer)

    async def _attached(self, route: Route, arena: GradientArena) -> SharedStream:
        """A stream to the server, by the newest map."""
        slicing = self._entry.slicing
        loss = self._view.loss_of(route.server_id, route.incarnation)
        dtype = convert.dtype_to_proto(self._arena.dtype) if self._arena.elements else common_pb2.DTYPE_UNSPECIFIED
        with self._waits.open(f"for {route.peer} to share memory"):
            while True:
                epoch = self._view.cluster.epoch
                attaching = server_pb2.Attach(identity=self._sender.identity(epoch), dtype=dtype)
                call = self._grpc.open_stream(route.address, "Share")
                try:
                    weights, connection = await attach(call, attaching, arena, slicing, loss, route.peer)
                    stream = SharedStream(call, route, arena, weights, slicing, loss, stable=self.is_stable)
                    await stream.open(connection)
                    return stream
                except StaleEpochError:
                    call.cancel()
                    await self._view.newer_than(epoch, _NEWER_MAP_SECONDS)
                except BaseException:  # This includes cancellation.
                    call.cancel()
                    raise

    def _refuse(self, route: Route, error: SharingUnavailableError) -> None:
        name = self._entry.spec.name
        if self._required:
            raise SharingUnavailableError(
                f"{name!r} cannot be shared with {route.peer}, and the transport is 'shm': {error.message}. "
                "Use transport='auto' to go on without shared memory",
                server=route.server_id,
            ) from None
        if self._reasons.get(route.server_id) != error.message:
            logger.info("not sharing memory of %r with %s: %s", name, route.peer, error.message)
        self._refused.add((route.server_id, route.incarnation))
        self._reasons[route.server_id] = error.message

    # --- what is shared -----------------------------------------------------------------------------------------------

    @property
    def gradients(self) -> NDArray[Any] | None:
        """The whole gradient vector in the arena, if there is one and it is float32."""
        return self._arena.gradients

    @property
    def weights(self) -> Flat | None:
        """All weights where they lie, if that is one vector that stands still between this worker's pushes. It is
        always the same vector."""
        self._follow()
        shards = self._entry.shards[: self._entry.slicing.count]
        if not self.is_stable or not shards or not all(self._stream_to(shard.primary) for shard in shards):
            return None
        return self._weights.vector(self._entry, self._stream_to)

    def shows(self, index: int, arena: WeightsArena) -> bool:
        """Whether the vector of all weights shows a slice as it is in ``arena``."""
        return self._weights.shows(index % len(self._entry.shards), arena)

    @property
    def is_replicated(self) -> bool:
        """Whether other servers have copies."""
        return any(len(shard.replicas) > 1 for shard in self._entry.shards)

    @property
    def is_stable(self) -> bool:
        """Whether weights stand still now. After a push that did not end well they may not: others can go on with what
        of it reached the servers, until this worker knows that all of it did."""
        return self._stable and self._settled

    # --- ending -------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """A push ended well: all of it is in the weights."""
        if not self._settled:
            self._settled = True
            for stream in self.streams.values():
                stream.stable = self._stable

    def renew(self) -> None:
        """A push did not end well: its servers lose the gradient arena, and memory that no server has takes its
        place."""
        self._settled = False
        if self._arena.is_offered:
            for stream in self.streams.values():
                stream.close()
            self._arena.renew()

    def rejoin(self, sender: RequestIdentity, entry: ParametersEntry) -> None:
        """This worker takes part anew, as ``sender``. What was shared ends, and servers are asked again."""
        self.renew()
        self._sender, self._entry = sender, entry
        self._refused.clear()

    async def close(self) -> None:
        """Ends the streams."""
        for stream in self.streams.values():
            stream.close()
        self._arena.close()
        await asyncio.gather(*(stream.ended() for stream in self.streams.values()))
        self.streams.clear()
        self._weights.close()
