"""Shared-memory transport: the memory of one handle that servers on this host map.

``SharedMemory`` attaches one Share stream per server (``stream``), offers the handle's gradient arena, and shows the
servers' weights as one vector if possible. Slices answered by a server whose memory is not part of the vector are
copied.

Invariant: No call is made by a map before the vector has stopped showing servers that lost shards in that map. These
servers free the memory when such a call arrives.

``negotiated`` decides which servers are asked, and when.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from numpy.typing import NDArray

from psdist.client.core.flat_vector import Flat
from psdist.client.core.routing import Route
from psdist.client.session.cluster_view import ClusterView
from psdist.client.session.wait_tracker import Wait, WaitTracker
from psdist.client.transport.grpc.streams import GrpcTransport
from psdist.client.transport.negotiated.connections import NegotiatedTransport
from psdist.client.transport.requests import Request, RequestIdentity
from psdist.client.transport.shm.offered_arena import OfferedArena
from psdist.client.transport.shm.stream import SharedStream, attach
from psdist.client.transport.shm.weights_view import WeightsView
from psdist.client.transport.transport import ServerLoss
from psdist.errors import SharingUnavailableError
from psdist.off_loop import off_loop
from psdist.types import DType, ParametersEntry, Replica
from psdist.v1 import common_pb2, server_pb2
from psdist.wire import convert
from psdist.wire.shm import WeightsArena

#: Machines that perform loads in program order, which sequence locks rely on.
_ORDERED_MACHINES: Final = ("x86_64", "AMD64")
_DETACHED: Final = "the memory was withdrawn from the servers; the next push shares it again"


class SharedMemory(NegotiatedTransport[SharedStream]):
    """Memory that one handle shares with the servers of its parameter set: a gradient arena, and a Share stream per
    server.

    dtype: dtype of gradients on the wire.
    member: True if the handle ever pushes; otherwise its arena has no room for gradients.
    stable: the weights of a slice do not change until this worker pushes it again (BSP members without backup workers).
    Other arguments as for ``NegotiatedTransport``.
    """

    name = "shm"
    method = "Share"
    unavailable = SharingUnavailableError
    obsolete = "the memory was withdrawn while it was offered"

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
        #: Number of times that servers lost the arena, so that waiting callers notice.
        self._detachments = 0
        #: True if this handle has given servers the arena's file.
        self._is_offered = False
        #: Called before the pages at the address of ``gradients`` are replaced.
        self.before_replaced: Callable[[], None] = lambda: None
        self._weights = WeightsView()
        self._is_view_stale = False
        self._showing = asyncio.Lock()

    async def exchange(self, request: Request, route: Route, wait: Wait, loss: ServerLoss) -> None:
        """Make one call on the stream of the route's server. See ``Transport.exchange``."""
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
        """Update the vector of all weights to the current place of each shard."""
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
        if self._arena.is_detached:  # Until the next gradients; another transport is used meanwhile.
            self._reasons.update((route.server_id, _DETACHED) for route in routes)
        elif reason:
            for route in routes:
                self._refuse(route, SharingUnavailableError(reason))
        else:
            await super()._open_all(routes)
        await self._show()

    async def _make_arena(self) -> str:
        """Create the arena. Return why that is impossible; empty on success."""
        if not self._stable and platform.machine() not in _ORDERED_MACHINES:
            return f"weights that change while they are read require an x86-64 processor, not {platform.machine()}"
        return await self._arena.prepare()

    async def _open(self, route: Route) -> None:
        if self._arena.is_detached:
            self._reasons[route.server_id] = _DETACHED
        else:
            self._is_offered = True
            await super()._open(route)

    def _offered(self) -> tuple[object, ...]:
        return (*super()._offered(), self._detachments, self._arena.releases)

    async def _connect(self, call: Any, epoch: int, route: Route) -> SharedStream:
        arena, slicing = self._arena.offer(), self._entry.slicing
        loss = self._view.loss_of(route.server_id, route.incarnation)
        dtype = convert.dtype_to_proto(self._arena.dtype) if self._arena.elements else common_pb2.DTYPE_UNSPECIFIED
        attaching = server_pb2.Attach(identity=self._sender.identity(epoch), dtype=dtype)
        weights, connection = await attach(call, attaching, arena, slicing, route.peer)
        stream = SharedStream(call, route, arena, weights, slicing, loss, stable=self.is_stable)
        await stream.open(connection)
        return stream

    # --- shared memory ------------------------------------------------------------------------------------------------

    @property
    def gradients(self) -> NDArray[Any] | None:
        """Whole gradient vector in the arena if there is one and it is float32."""
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
        """Share memory again that was withdrawn from servers. Nobody may write to ``gradients`` during the call."""
        if self._arena.is_detached:
            await self._arena.share()

    def check_turns(self, other: SharedMemory) -> None:
        """Raise InvalidArgumentError if this handle's gradients do not fit the arena of ``other``."""
        other._arena.check_like(self._arena)

    async def take_turns(self, other: SharedMemory | None) -> None:
        """Move this handle's gradients to the arena of ``other``, or to its own for None. No push may be in
        progress."""
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
        """All weights in place, if they form one vector that does not change between this worker's pushes. It is always
        the same vector."""
        self._adopt_map()
        shards = self._entry.shards[: self._entry.slicing.count]
        if not self.is_stable or not shards or not all(self._stream_to(shard.primary) for shard in shards):
            return None
        return self._weights.vector(self._entry, self._stream_to)

    def shows(self, index: int, arena: WeightsArena) -> bool:
        """True if the vector of all weights shows a slice from ``arena``."""
        return self._weights.shows(index % len(self._entry.shards), arena)

    @property
    def is_replicated(self) -> bool:
        """True if other servers hold copies of a shard."""
        return any(len(shard.replicas) > 1 for shard in self._entry.shards)

    @property
    def is_stable(self) -> bool:
        """True if weights do not change between pushes now. After a failed push they may: others can continue with the
        part that reached the servers, until this worker knows that all of it did."""
        return self._stable and self._settled

    # --- closing ------------------------------------------------------------------------------------------------------

    def on_push_completed(self) -> None:
        """Record that a push completed: the weights contain all of it."""
        if not self._settled:
            self._settled = True
            for stream in self.streams.values():
                stream.stable = self._stable

    async def release_memory(self, *, shared: bool) -> None:
        """Return the gradients' memory to the system until it is written again. No push may be in progress.

        shared: do this even if other handles use the same arena.
        """
        if shared or not self._arena.is_shared:
            await self._arena.release()

    async def withdraw(self) -> None:
        """Withdraw the gradient arena from the servers before returning, after a failed push."""
        self._settled = False
        if self._is_offered and self._arena.elements:
            await self._arena.detach()

    def rejoin(self, sender: RequestIdentity, entry: ParametersEntry) -> None:
        """See ``NegotiatedTransport.rejoin``. Call ``withdraw`` first."""
        self._arena.no_file = ""
        super().rejoin(sender, entry)

    async def close(self) -> None:
        """Close the streams and the shared memory."""
        if any(stream.calls for stream in self.streams.values()):
            await self.withdraw()
        self.on_detached()
        await self._arena.leave(self)
        await super().close()
        self._weights.close()
