"""What one handle shares with the servers of its parameter set, and with which of them.

``SharedMemory`` makes the gradient arena of the handle, attaches one Share stream per server (``stream``), and shows
the weights of the servers as one vector where that is possible. Where a server cannot be shared with, gRPC is used, and
the reason is kept for status and statistics.

Attachments follow the cluster map. Before each call, servers that became primaries of something here are attached. A
stream to a server whose shards change stays. A stream to a server that is no primary here any more is closed. The
vector of all weights, which the user may be reading, stays at its address: shards that moved are shown in the memory of
their new primary, where the bytes are the same, or kept as they are. A slice that is answered by a server whose memory
is not shown is copied.

Invariants: a result never depends on sharing, unless the transport is "shm". A server that refused is not asked again
in the same incarnation. A stream that broke is opened again before the next call. No call is made by a map before the
vector has stopped showing servers that lost shards by that map, because they free that memory when such a call arrives.
"""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from numpy.typing import NDArray

from psdist.client.core.partition import Flat
from psdist.client.core.routing import Route
from psdist.client.session.scheduler_session import WorkerSession
from psdist.client.transport.requests import RequestIdentity
from psdist.client.transport.shm.stream import SharedStream, attach
from psdist.errors import PsdistError, SharingUnavailableError, StaleEpochError
from psdist.settings.config import Transport
from psdist.types import ClusterMap, DType, ParametersEntry, Replica
from psdist.v1 import common_pb2, server_pb2
from psdist.wire import convert, fd_passing
from psdist.wire.shm import GradientArena, MappedVector, Piece, WeightsArena, reason_of

if TYPE_CHECKING:
    from psdist.client.transport.data_path import DataPath

logger = logging.getLogger("psdist")

#: Here loads are done in the order in which the program has them, which sequence locks rely on.
_ORDERED_MACHINES: Final = ("x86_64", "AMD64")
_NEWER_MAP_SECONDS: Final = 1.0
_NOT_TRIED: Final = "not tried yet"


class SharedMemory:
    """What one handle shares with the servers of its parameters: one arena for gradients, one Share stream per server.

    dtype: of gradients on the wire.
    member: whether it ever pushes; else its arena has no room for gradients.
    stable: the weights of a slice stand still until this worker pushes it again (BSP members without backup workers).
    """

    def __init__(
        self,
        link: WorkerSession,
        data: DataPath,
        sender: RequestIdentity,
        entry: ParametersEntry,
        dtype: DType,
        transport: Transport,
        *,
        member: bool,
        stable: bool,
    ) -> None:
        self.parameters = entry.spec.name
        self._link = link
        self._data = data
        self._sender = sender
        #: As the map has them that was looked at last.
        self._entry = entry
        self._followed: ClusterMap | None = None
        self._dtype: DType = dtype
        self._transport = transport
        self._elements = entry.total if member else 0
        self._stable = stable
        self._settled = True
        #: Counts the files that were in the place of the arena, so that who waited can see that it is another.
        self._generation = 0
        self._arena: GradientArena | None = None
        self._streams: dict[str, SharedStream] = {}
        self._stitched: MappedVector | None = None
        #: Whose memory the vector of all weights is, by shard, and the nonce of that memory.
        self._shown: dict[int, tuple[Replica, bytes]] = {}
        self._can_stitch = True
        #: Why a server is not shared with, by its id.
        self._reasons: dict[str, str] = {}
        #: Incarnations of servers that cannot be shared with.
        self._refused: set[tuple[str, int]] = set()
        #: Whether a server may have the arena's file.
        self._offered = False
        self._turn = asyncio.Lock()
        link.shared_memories.append(self)

    # --- attaching ----------------------------------------------------------------------------------------------------

    def is_missing(self, routes: Sequence[Route]) -> bool:
        """Whether ``ensure`` would do anything, by the newest map. Call it before each call."""
        self._follow()
        return any(self._is_missing(route) for route in routes)

    async def ensure(self, routes: Sequence[Route]) -> None:
        """Attaches to the servers of ``routes`` where that was not tried yet, or broke.

        Raises SharingUnavailableError where the transport is "shm" and a server cannot be shared with.
        """
        async with self._turn:
            missing = [route for route in routes if self._is_missing(route)]
            if missing and (reason := await self._prepare()):
                for route in missing:
                    self._refuse(route, SharingUnavailableError(reason))
            elif missing:
                outcomes = await asyncio.gather(*(self._attach(route) for route in missing), return_exceptions=True)
                self._streams_changed()
                for error in filter(None, outcomes):
                    raise error

    def _is_missing(self, route: Route) -> bool:
        """Whether it is to be tried to share with the server of ``route``."""
        return (
            self._transport != "grpc"
            and self.stream_to(route) is None
            and (route.server_id, route.incarnation) not in self._refused
        )

    def _follow(self) -> None:
        """Looks at the newest map, if it is new."""
        cluster = self._link.watch.cluster
        if cluster is not self._followed:
            self._followed = cluster
            self._entry = cluster.entry(self.parameters) or self._entry
            self._streams_changed()

    def _streams_changed(self) -> None:
        """There may be other primaries, or other streams to them."""
        if self._stitched is not None:
            self._show(self._stitched)
        primaries = {shard.primary for shard in self._entry.shards}
        for server_id, stream in list(self._streams.items()):
            if Replica(server_id, stream.incarnation) not in primaries:
                stream.close()
                del self._streams[server_id]
                self._reasons.pop(server_id, None)

    async def _prepare(self) -> str:
        """Makes the arena; why that cannot be, or "" if it is there."""
        if not self._stable and platform.machine() not in _ORDERED_MACHINES:
            return f"weights that change while they are read need a processor of x86-64, not {platform.machine()}"
        if self._arena is None:
            fd_passing.sweep()
            try:
                # In a thread, because clearing a large file takes longer than heartbeats may.
                self._arena = await asyncio.to_thread(GradientArena.create, self._elements, self._dtype)
            except OSError as error:
                return reason_of(error)
        return "" if self._arena.shareable else "no room in shared memory for another arena"

    async def _attach(self, route: Route) -> None:
        assert self._arena is not None
        self._offered = True
        generation = self._generation
        stream: SharedStream | None = None
        try:
            stream = await self._attached(route, self._arena)
        except SharingUnavailableError as error:
            if generation == self._generation:
                self._refuse(route, error)
        except PsdistError as error:  # That is for the data path to handle, and sharing is tried again then.
            self._reasons[route.server_id] = f"attaching failed: {error.message}"
        if generation != self._generation:
            # The arena is another one since, or gone: what was attached, or refused, is not it. The next call tries
            # again; until then gRPC is used.
            self._reasons[route.server_id] = "the memory was replaced while it was offered"
            if stream is not None:
                stream.close()
                await stream.ended()
        elif stream is not None:
            old = self._streams.get(route.server_id)
            self._streams[route.server_id] = stream
            self._reasons.pop(route.server_id, None)
            if old is not None:
                await old.ended()
            logger.debug("sharing memory of %r with %s", self.parameters, route.peer)

    async def _attached(self, route: Route, arena: GradientArena) -> SharedStream:
        """A stream to the server, by the newest map."""
        slicing = self._entry.slicing
        loss = self._link.watch.loss_of(route.server_id, route.incarnation)
        with self._link.waits.open(f"for {route.peer} to share memory"):
            while True:
                epoch = self._link.watch.cluster.epoch
                attaching = server_pb2.Attach(
                    identity=self._sender.identity(epoch),
                    dtype=convert.dtype_to_proto(self._dtype) if self._elements else common_pb2.DTYPE_UNSPECIFIED,
                )
                call = self._data.method(route.address, "Share")(metadata=self._link.metadata)
                try:
                    weights, connection = await attach(call, attaching, arena, slicing, loss, route.peer)
                    stream = SharedStream(call, route, arena, weights, slicing, loss, stable=self.stable)
                    await stream.open(connection)
                    return stream
                except StaleEpochError:
                    call.cancel()
                    await self._link.watch.newer_than(epoch, _NEWER_MAP_SECONDS)
                except BaseException:
                    call.cancel()
                    raise

    def _refuse(self, route: Route, error: SharingUnavailableError) -> None:
        if self._transport == "shm":
            raise SharingUnavailableError(
                f"{self.parameters!r} cannot be shared with {route.peer}, and the transport is 'shm': {error.message}. "
                "Use transport='auto' to go on without shared memory",
                server=route.server_id,
            ) from None
        if self._reasons.get(route.server_id) != error.message:
            logger.info("not sharing memory of %r with %s: %s", self.parameters, route.peer, error.message)
        self._refused.add((route.server_id, route.incarnation))
        self._reasons[route.server_id] = error.message

    # --- what is shared -----------------------------------------------------------------------------------------------

    @property
    def gradients(self) -> NDArray[Any] | None:
        """The whole gradient vector in the arena, if there is one and it is float32."""
        return self._arena.flat if self._arena is not None and self._elements and self._dtype == "float32" else None

    def stream_to(self, route: Route) -> SharedStream | None:
        """The stream to the route's server; None where gRPC is to be used."""
        self._follow()
        return self._stream_to(route.server)

    def _stream_to(self, server: Replica) -> SharedStream | None:
        stream = self._streams.get(server.server_id)
        return stream if stream is not None and stream.incarnation == server.incarnation and stream.is_open else None

    @property
    def weights(self) -> Flat | None:
        """All weights where they lie, if that is one vector that stands still between this worker's pushes. It is
        always the same vector."""
        self._follow()
        shards = self._entry.shards[: self._entry.slicing.count]
        if not self.stable or not shards or not all(self._stream_to(shard.primary) for shard in shards):
            return None
        if self._stitched is None:
            self._stitched = MappedVector(self._entry.total)
        self._show(self._stitched)
        return self._stitched.vector if self._can_stitch else None

    def _show(self, stitched: MappedVector) -> None:
        """Lets the vector show each shard where it is now, or keep it where that is not shared."""
        slicing, count = self._entry.slicing, len(self._entry.shards)
        moved: dict[int, SharedStream | None] = {}
        for number, shard in enumerate(self._entry.shards):
            shown, stream = self._shown.get(number), self._stream_to(shard.primary)
            if stream is not None and shown != (shard.primary, stream.weights.nonce):
                moved[number] = stream
                self._shown[number] = shard.primary, stream.weights.nonce
            elif stream is None and shown is not None and shown[0] != shard.primary:
                moved[number] = None
                del self._shown[number]
        if not moved or not self._can_stitch:
            return
        pieces = (
            Piece(slicing.bounds(index)[0], stream.weights if stream is not None else None, slicing.size(index))
            for index in range(slicing.count)
            if (number := index % count) in moved
            for stream in (moved[number],)
        )
        try:
            self._can_stitch = stitched.show(pieces)
        except OSError as error:
            logger.info("weights of %r are copied: %s", self.parameters, reason_of(error))
            self._can_stitch = False

    def shows(self, index: int, arena: WeightsArena) -> bool:
        """Whether the vector of all weights shows a slice as it is in ``arena``."""
        shown = self._shown.get(index % len(self._entry.shards))
        return self._can_stitch and shown is not None and shown[1] == arena.nonce

    @property
    def is_replicated(self) -> bool:
        """Whether other servers have copies."""
        return any(len(shard.replicas) > 1 for shard in self._entry.shards)

    @property
    def _holders(self) -> tuple[str, ...]:
        """The servers that have slices; a shard of few slices may have none."""
        return tuple(dict.fromkeys(self._entry.primaries[: self._entry.slicing.count]))

    def transports(self) -> dict[str, str]:
        """How each server is reached: "shm", or "grpc: " and the reason."""
        if self._transport == "grpc":
            return dict.fromkeys(self._holders, "grpc: the transport is 'grpc'")
        return {server_id: self._transport_to(server_id) for server_id in self._holders}

    def _transport_to(self, server_id: str) -> str:
        stream = self._streams.get(server_id)
        if stream is not None and stream.is_open:
            return "shm"
        broken = stream.broken.message if stream is not None and stream.broken is not None else _NOT_TRIED
        return f"grpc: {self._reasons.get(server_id, broken)}"

    # --- ending -------------------------------------------------------------------------------------------------------

    @property
    def stable(self) -> bool:
        """Whether weights stand still now. After a push that did not end well they may not: others can go on with what
        of it reached the servers, until this worker knows that all of it did."""
        return self._stable and self._settled

    def settle(self) -> None:
        """A push ended well: all of it is in the weights."""
        if not self._settled:
            self._settled = True
            for stream in self._streams.values():
                stream.stable = self._stable

    def renew(self) -> None:
        """Puts memory that no server has in the place of the gradient arena, with the same content at the same address:
        after a push that did not end well a server may read the old one for as long as it likes."""
        self._settled = False
        if self._arena is not None and self._offered:
            self._offered = False
            self._generation += 1
            for stream in self._streams.values():
                stream.close()
            self._arena.renew()

    def rejoin(self, sender: RequestIdentity, entry: ParametersEntry) -> None:
        """This worker takes part anew, as ``sender``. What was shared ends, and servers are asked again."""
        self.renew()
        self._sender, self._entry = sender, entry
        self._refused.clear()

    async def close(self) -> None:
        """Ends the streams."""
        self._generation += 1
        if self in self._link.shared_memories:
            self._link.shared_memories.remove(self)
        for stream in self._streams.values():
            stream.close()
        await asyncio.gather(*(stream.ended() for stream in self._streams.values()))
        self._streams.clear()
        self._stitched = None
        if self._arena is not None:
            self._arena.close()
