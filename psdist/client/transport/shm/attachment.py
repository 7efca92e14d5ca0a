"""The shared-memory transport: what one handle shares with servers of this host.

``SharedMemory`` attaches one Share stream per server (``stream``), offers the handle's gradient arena, and shows the
weights of the servers as one vector where that is possible. A slice that is answered by a server whose memory is not
shown in the vector is copied.

Invariant: no call is made by a map before the vector has stopped showing servers that lost shards by that map, because
they free that memory when such a call arrives.

Not here: which servers are asked, and when (``negotiated``).
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from numpy.typing import NDArray

from psdist.client.core.partition import Flat
from psdist.client.core.routing import Route
from psdist.client.session.cluster_view import ClusterView
from psdist.client.session.wait_tracker import Wait, WaitTracker
from psdist.client.transport.grpc.streams import GrpcTransport
from psdist.client.transport.negotiated.connections import NegotiatedTransport
from psdist.client.transport.requests import Request, RequestIdentity
from psdist.client.transport.shm.offered_arena import OfferedArena
from psdist.client.transport.shm.stream import SharedStream, attach
from psdist.client.transport.shm.weights_view import WeightsView
from psdist.client.transport.transport import Loss
from psdist.errors import PsdistError, SharingUnavailableError
from psdist.off_loop import off_loop
from psdist.types import DType, ParametersEntry, Replica
from psdist.v1 import common_pb2, server_pb2
from psdist.wire import convert
from psdist.wire.shm import GradientArena, WeightsArena

#: Here loads are done in the order in which the program has them, which sequence locks rely on.
_ORDERED_MACHINES: Final = ("x86_64", "AMD64")
_DETACHED: Final = "the memory was withdrawn from servers, and is shared again with the next push"


class SharedMemory(NegotiatedTransport[SharedStream]):
    """What one handle shares with the servers of its parameter set: an arena for gradients, a Share stream per server.

    dtype: of gradients on the wire.
    member: whether the handle ever pushes; else its arena has no room for gradients.
    stable: the weights of a slice stand still until this worker pushes it again (BSP members without backup workers).
    Other arguments as for ``NegotiatedTransport``.
    """

    name = "shm"
    unavailable = SharingUnavailableError

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
        super().__init__(view, waits, grpc, sender, entry, required=required)
        self._stable = stable
        self._settled = True
        self._arena = OfferedArena(entry.total if member else 0, dtype)
        self._arena.join(self)
        #: Counts how often servers lost the arena, so that who waited can see that.
        self._detachments = 0
        #: Whether servers may have its file from this handle.
        self._is_offered = False
        #: Called before other pages lie where ``gradients`` does.
        self.before_replaced: Callable[[], None] = lambda: None
        self._weights = WeightsView()
        self._is_view_stale = False
        self._showing = asyncio.Lock()

    async def exchange(self, request: Request, route: Route, wait: Wait, loss: Loss) -> None:
        """One call on the stream of the route's server. See ``Transport.exchange``."""
        stream = self._stream_of(route)
        assert stream is not None, "a transport that is not open was chosen"
        if self._is_view_stale or self._showing.locked():
            await self._show()
        await stream.exchange(request, route, wait, self)

    # --- attaching ----------------------------------------------------------------------------------------------------

    def _streams_changed(self) -> None:
        super()._streams_changed()
        self._is_view_stale = True

    async def _show(self) -> None:
        """Show each shard where it is now, in the vector of all weights."""
        async with self._showing:
            while self._is_view_stale:
                self._is_view_stale = False
                entry, servers = self._entry, self._view.cluster.servers
                live = {Replica(server.server_id, server.incarnation) for server in servers}
                if moves := self._weights.moves(entry, self._stream_to, live.__contains__):
                    elements = entry.total // len(entry.shards) * len(moves)
                    await off_loop(elements, partial(self._weights.show, entry, moves))

    async def _open_all(self, routes: Sequence[Route]) -> None:
        reason = "" if self._arena.is_detached else await self._make_arena()
        if self._arena.is_detached:  # Only until gradients are given again; until then another transport is used.
            self._reasons.update((route.server_id, _DETACHED) for route in routes)
        elif reason:
            for route in routes:
                self._refuse(route, SharingUnavailableError(reason))
        else:
            await super()._open_all(routes)
        await self._show()

    async def _make_arena(self) -> str:
        """Makes the arena. Returns why that cannot be; empty if it is there."""
        if not self._stable and platform.machine() not in _ORDERED_MACHINES:
            return f"weights that change while they are read need a processor of x86-64, not {platform.machine()}"
        return await self._arena.prepare()

    async def _open(self, route: Route) -> None:
        if self._arena.is_detached:
            self._reasons[route.server_id] = _DETACHED
            return
        arena, detachments, releases = self._arena.offer(), self._detachments, self._arena.releases
        self._is_offered = True
        stream: SharedStream | None = None
        try:
            stream = await self._attached(route, arena)
        except SharingUnavailableError as error:
            if (detachments, releases) == (self._detachments, self._arena.releases):
                self._refuse(route, error)
            else:
                self._reasons[route.server_id] = "the memory was given back while it was offered"
        except PsdistError as error:  # That is for the data path to handle, and sharing is tried again then.
            self._reasons[route.server_id] = f"attaching failed: {error.message}"
        if detachments != self._detachments:
            # The file is another one since, or gone: what was attached, or refused, is not it. A later call tries
            # again; until then another transport is used.
            self._reasons[route.server_id] = "the memory was withdrawn while it was offered"
            if stream is not None:
                stream.close()
                await stream.ended()
        elif stream is not None:
            await self._opened(route, stream)

    async def _attached(self, route: Route, arena: GradientArena) -> SharedStream:
        """A stream to the server, by the newest map."""
        slicing = self._entry.slicing
        loss = self._view.loss_of(route.server_id, route.incarnation)
        dtype = convert.dtype_to_proto(self._arena.dtype) if self._arena.elements else common_pb2.DTYPE_UNSPECIFIED

        async def negotiate(call: Any, epoch: int) -> SharedStream:
            attaching = server_pb2.Attach(identity=self._sender.identity(epoch), dtype=dtype)
            weights, connection = await attach(call, attaching, arena, slicing, route.peer)
            stream = SharedStream(call, route, arena, weights, slicing, loss, stable=self.is_stable)
            try:
                await stream.open(connection)
            except BaseException:  # This includes cancellation.
                stream.close()
                raise
            return stream

        with self._waits.open(f"for {route.peer} to share memory"):
            return await self._negotiated(route, "Share", negotiate)

    # --- what is shared -----------------------------------------------------------------------------------------------

    @property
    def gradients(self) -> NDArray[Any] | None:
        """The whole gradient vector in the arena, if there is one and it is float32."""
        return self._arena.gradients

    def on_pages_replaced(self) -> None:
        """See ``ArenaUser``."""
        self.before_replaced()

    def on_detached(self) -> None:
        """See ``ArenaUser``."""
        self._detachments += 1
        self._is_offered = False
        for stream in self.streams.values():
            stream.close()

    async def share_gradients(self) -> None:
        """Has memory that servers lost shared again. Nobody writes to ``gradients`` meanwhile."""
        if self._arena.is_detached:
            await self._arena.share()

    def check_turns(self, other: SharedMemory) -> None:
        """Raises InvalidArgumentError where this handle's gradients cannot lie where those of ``other`` do."""
        other._arena.check_like(self._arena)

    async def take_turns(self, other: SharedMemory | None) -> None:
        """Has gradients where ``other`` has its from now on; None: in memory of its own. No push is under way."""
        if other is not None:
            arena = other._arena
        else:
            arena = OfferedArena(self._arena.elements, self._arena.dtype) if self._arena.is_shared else self._arena
        if arena is not self._arena:
            await self._arena.leave(self)
            self.on_detached()
            self._arena = arena
            arena.join(self)

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

    async def release_memory(self, *, shared: bool) -> None:
        """Gives the memory of gradients back to the system until some are written again. No push is under way.

        shared: even if other handles have their gradients there."""
        if shared or not self._arena.is_shared:
            await self._arena.release()

    async def withdraw(self) -> None:
        """A push did not end well: its servers lose the gradient arena, before this returns."""
        self._settled = False
        if self._is_offered and self._arena.elements:
            await self._arena.detach()

    def rejoin(self, sender: RequestIdentity, entry: ParametersEntry) -> None:
        """See ``NegotiatedTransport.rejoin``. Comes after ``withdraw``."""
        self._arena.no_file = ""
        super().rejoin(sender, entry)

    async def close(self) -> None:
        """Ends the streams, and what is shared."""
        if any(stream.calls for stream in self.streams.values()):
            await self.withdraw()
        self.on_detached()
        await self._arena.leave(self)
        await super().close()
        self._weights.close()
