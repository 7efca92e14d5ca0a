"""Shared-memory transport: calls to servers on this host, whose payloads are in memory mapped by both processes.

``ShmTransport`` attaches one Share stream per server, offers the handle's gradient arena, and shows the servers'
weights as one vector if possible. Slices answered by a server whose memory is not part of the vector are copied. Calls
use the socket on which the memory files were exchanged (``psdist.link.frame_connection``).

Invariants: The content of the arena is not modified between a request and its answer. Only slices that the server has
just answered are read from its arena, within their bounds. Weights that may change are copied under the sequence lock:
the copy is repeated if the slice was written in between. If the copy has a newer version than the answer, replicas may
lack it, and the server must confirm it before it counts. No call is made by a map before the vector has stopped showing
servers that lost shards in that map: these free the memory when such a call arrives.

``negotiation`` implements calls and decides which servers are asked, ``buffers`` has the memory, and ``delivery``
resends after a failure.
"""

from __future__ import annotations

import asyncio
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psdist.client.core.flat_vector import Flat
from psdist.client.core.routing import Route
from psdist.client.session.membership import ClusterView
from psdist.client.session.waits import Wait, WaitTracker
from psdist.client.transport.buffers import OfferedArena, PullTarget, WeightsView
from psdist.client.transport.grpc import GrpcTransport
from psdist.client.transport.negotiation import CallConnection, NegotiatedTransport, PendingCall, ask, encode_pull
from psdist.client.transport.transport import PullRequest, PushRequest, Request, RequestIdentity, ServerLoss
from psdist.compression import casts
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import (
    InternalError,
    NotMemberError,
    ServerUnreachableError,
    SharingUnavailableError,
    copy_error,
)
from psdist.link import processes
from psdist.link.arenas import GradientArena, MemoryOffer, WeightsArena
from psdist.off_loop import off_loop
from psdist.types import ITEM_BYTES, DType, ParametersEntry, Replica, Slicing
from psdist.v1 import common_pb2, server_pb2
from psdist.wire import convert

#: Machines that perform loads in program order, which sequence locks rely on.
_ORDERED_MACHINES: Final = ("x86_64", "AMD64")
_DETACHED: Final = "the memory was withdrawn from the servers; the next push shares it again"
#: Number of checks of a slice under write before the event loop gets a turn.
_SPINS: Final = 4
_SPIN_SECONDS: Final = 0.0005
#: Number of such turns before the slice is requested again: it may have moved to another server.
_WAITS_MAX: Final = 2000
#: Minimum elements of a slice after which the event loop gets a turn.
_LARGE_SLICE: Final = 1 << 16


async def attach(
    call: Any, attaching: server_pb2.Attach, arena: GradientArena, slicing: Slicing, peer: str
) -> tuple[WeightsArena, socket.socket]:
    """Attach on ``call``, a new Share stream. Return the server's weights arena, and the connection for calls, which
    the caller closes.

    attaching: the request, without the socket.

    Raises SharingUnavailableError, or the server's refusal.
    """
    async with MemoryOffer(arena, "worker", swaps=True) as offer:
        attaching.socket = offer.name
        request = server_pb2.ShareRequest(attach=attaching).SerializeToString()
        # The server reports a failed exchange.
        response = server_pb2.ShareResponse.FromString(
            await ask(call, request, peer, "shared memory", SharingUnavailableError)
        )
        if response.WhichOneof("kind") != "attached":
            raise InternalError(f"{peer} answered attach with {response.WhichOneof('kind')}")
        attached = response.attached
        fd, connection = await offer.taken(attached.nonce, peer)
    with processes.closed_on_error(connection):
        weights = WeightsArena.open(fd, slicing.count, slicing.total)
        if attached.weights_nonce != weights.nonce:
            raise SharingUnavailableError(f"the memory received over the socket does not belong to {peer}")
    return weights, connection


class _ReadSlice(NamedTuple):
    """Answered slice. version: of the weights that were read. is_ahead: it is newer than the version in the answer."""

    slice: int
    version: int
    is_ahead: bool
    staleness: int
    ignored: bool


class ShmConnection(CallConnection[PendingCall]):
    """Connection to one server, which is attached.

    owner: connections and memory of the handle.
    arena: the handle's memory that the server has mapped.
    weights: the server's memory.
    Other arguments as for ``CallConnection``.
    """

    def __init__(
        self,
        call: Any,
        route: Route,
        owner: ShmTransport,
        arena: GradientArena,
        weights: WeightsArena,
        slicing: Slicing,
        loss: ServerLoss,
    ) -> None:
        super().__init__(call, route, slicing, loss, has_payloads=False)
        self.weights = weights
        #: True if weights do not change until this worker's next push, so that they are read without a lock.
        self.stable = owner.is_stable
        self._owner = owner
        self._arena = arena

    def view(self, index: int) -> Flat:
        """Return the weights of a slice in place."""
        start, stop = self.slicing.bounds(index)
        return self.weights.weights[start:stop]

    # --- calls --------------------------------------------------------------------------------------------------------

    async def exchange(self, request: Request, route: Route, wait: Wait, loss: ServerLoss) -> None:
        assert isinstance(request, PushRequest | PullRequest), "initial values are sent over gRPC"
        if self._owner.is_view_stale:
            await self._owner.show()
        slices = request.progress.unanswered(route.slices)
        if isinstance(request, PullRequest):
            encoded = encode_pull(request, route, request.progress.number, slices)
        else:
            if not request.abstains:
                await self._stage(request, slices)  # Before asking the server to read it.
            encoded = self.encode_push(request, route, slices)
            encoded.push.header.codec = common_pb2.CODEC_RAW  # The arena holds decoded gradients.
            encoded.push.header.ClearField("difference")
        answers = await self._call_server(encoded, wait)
        wait.progress()
        read = await self._read(request, answers)
        if self._owner.is_replicated:
            await self._confirm(request, route, read, wait)
        for answer in read.values():
            request.progress.answer(answer.slice, answer.version, answer.staleness, answer.ignored)
        if not request.progress.pending.isdisjoint(slices):
            raise ServerUnreachableError(f"{self.peer} did not answer all slices")

    async def _stage(self, push: PushRequest, slices: Sequence[int]) -> None:
        """Write the gradient into the arena, unless it is there already."""
        lies_there = push.flat is not None and push.flat.__array_interface__["data"][0] == self._arena.address
        for index in slices:
            if push.encoded is not None:
                await push.encoded.ready(index)
            start, stop = self.slicing.bounds(index)
            part = self._arena.flat[start:stop]
            if not lies_there:
                push.write_decoded(index, part)
            push.traffic.sent += part.nbytes

    async def _call_server(self, request: server_pb2.ShareRequest, wait: Wait) -> server_pb2.SharedAnswers:
        """Send a request and return the answers that end its call. Raises the error that ended it."""
        call = self.start(request, PendingCall(wait))
        try:
            wait.sent()
            return (await call.result()).answers
        finally:
            self.finish(call)

    # --- weights ------------------------------------------------------------------------------------------------------

    async def _read(
        self, request: PushRequest | PullRequest, answers: server_pb2.SharedAnswers
    ) -> dict[int, _ReadSlice]:
        """Read the answered weights if the request wants them. Return the answered slices."""
        slices, versions, staleness = list(answers.slices), list(answers.versions), list(answers.staleness)
        count = len(slices)
        versions = versions if len(versions) != 1 else versions * count
        staleness = staleness or [0] * count
        if len(versions) != count or len(staleness) != count:
            raise InternalError(f"{self.peer} answered with {len(versions)} versions for {count} slices")
        ignored = set(answers.ignored)
        read: dict[int, _ReadSlice] = {}
        target = request.target
        for index, answered, behind in zip(slices, versions, staleness, strict=True):
            version = answered
            if index not in request.progress.pending or index in read:
                raise InternalError(f"{self.peer} answered slice {index}, which was not requested")
            if target is not None:
                request.traffic.received += self.slicing.size(index) * ITEM_BYTES[target.dtype]
                # The vector of all weights may show another server by now.
                if target.shared is None or not self.stable or not self._owner.shows(index, self.weights):
                    version = await self._copy(target, index, answered)
                    if self.slicing.slice_elements >= _LARGE_SLICE:
                        await asyncio.sleep(0)  # Let heartbeats run: all slices together may be gigabytes.
                if self.stable and int(self.weights.sequence[index]) != 2 * version:
                    # Written since the answer: this worker slept for longer than its lease.
                    raise NotMemberError(f"{self.peer} continued from version {version} without this worker")
            read[index] = _ReadSlice(index, version, version > answered, behind, index in ignored)
        return read

    async def _confirm(self, request: Request, route: Route, read: Mapping[int, _ReadSlice], wait: Wait) -> None:
        """Wait until all replicas have acknowledged the versions that were read. Until then a version newer than the
        answer may be lost with its server. Raises the error if that cannot be known."""
        ahead = [answer for answer in read.values() if answer.is_ahead]
        for version in sorted({answer.version for answer in ahead}):
            slices = sorted(answer.slice for answer in ahead if answer.version == version)
            await self._call_server(encode_pull(request, route, version, slices), wait)

    async def _copy(self, target: PullTarget, index: int, version: int) -> int:
        """Copy the weights of a slice into ``target``. Return their version."""
        part = target.part(index)
        if self.stable:
            part[...] = self.view(index)
        else:
            version = await self.copy_moving(index, part)
        if target.dtype != "float32":  # As if they had been sent.
            payload = np.empty(part.size, NUMPY_DTYPES[target.dtype])
            casts.interpret_first()
            casts.narrow(part, payload)
            casts.widen(payload, part)
        target.received.add(index)
        return version

    async def copy_moving(self, index: int, target: Flat) -> int:
        """Copy weights that the server may be writing. Return the version that all of them have. Raises the error that
        broke the stream."""
        sequence, source = self.weights.sequence, self.view(index)
        for _ in range(_WAITS_MAX):
            for _ in range(_SPINS):
                before = int(sequence[index])
                if before % 2 == 0:
                    target[...] = source
                    if int(sequence[index]) == before:
                        return before // 2
            if self.broken is not None:
                raise copy_error(self.broken)
            await asyncio.sleep(_SPIN_SECONDS)
        raise ServerUnreachableError(f"{self.peer} kept slice {index} locked for writing")


class ShmTransport(NegotiatedTransport[ShmConnection]):
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
        self.arena = OfferedArena(entry.total if member else 0, dtype)
        self.arena.join(self)
        #: Number of times that servers lost the arena, so that waiting callers notice.
        self._detachments = 0
        #: True if this handle has given servers the arena's file.
        self._is_offered = False
        #: Called before the pages at the address of ``gradients`` are replaced.
        self.before_replaced: Callable[[], None] = lambda: None
        self._weights = WeightsView()
        #: True if the vector of all weights may show a server that is no longer the primary of a shard.
        self.is_view_stale = False
        self._changes = 0
        self._showing = asyncio.Lock()
        #: True if other servers hold copies of a shard.
        self.is_replicated = False

    # --- attaching ----------------------------------------------------------------------------------------------------

    def _connections_changed(self) -> None:
        super()._connections_changed()
        self.is_replicated = any(len(shard.replicas) > 1 for shard in self._entry.shards)
        self.is_view_stale = True
        self._changes += 1

    async def show(self) -> None:
        """Update the vector of all weights to the current place of each shard."""
        async with self._showing:
            while self.is_view_stale:
                changes, entry, servers = self._changes, self._entry, self._view.cluster.servers
                live = {Replica(server.server_id, server.incarnation) for server in servers}
                if moves := self._weights.moves(entry, self._arena_of, live.__contains__):
                    elements = entry.total // len(entry.shards) * len(moves)
                    await off_loop(elements, partial(self._weights.show, entry, moves))
                self.is_view_stale = self._changes != changes

    def _arena_of(self, server: Replica) -> WeightsArena | None:
        connection = self.connection(server)
        return connection.weights if connection is not None else None

    async def _open_all(self, routes: Sequence[Route]) -> None:
        reason = "" if self.arena.is_detached else await self._make_arena()
        if self.arena.is_detached:  # Until the next gradients; another transport is used meanwhile.
            self._reasons.update((route.server_id, _DETACHED) for route in routes)
        elif reason:
            for route in routes:
                self._refuse(route, SharingUnavailableError(reason))
        else:
            await super()._open_all(routes)
        await self.show()

    async def _make_arena(self) -> str:
        """Create the arena. Return why that is impossible; empty on success."""
        if not self._stable and platform.machine() not in _ORDERED_MACHINES:
            return f"weights that change while they are read require an x86-64 processor, not {platform.machine()}"
        return await self.arena.prepare()

    async def _open(self, route: Route) -> None:
        if self.arena.is_detached:
            self._reasons[route.server_id] = _DETACHED
        else:
            self._is_offered = True
            await super()._open(route)

    def _offered(self) -> tuple[object, ...]:
        return (*super()._offered(), self._detachments, self.arena.releases)

    async def _connect(self, call: Any, epoch: int, route: Route) -> ShmConnection:
        slicing = self._entry.slicing
        loss = self._view.loss_of(route.server_id, route.incarnation)
        dtype = convert.dtype_to_proto(self.arena.dtype) if self.arena.elements else common_pb2.DTYPE_UNSPECIFIED
        attaching = server_pb2.Attach(identity=self._sender.identity(epoch), dtype=dtype)
        arena = self.arena.memory
        weights, connected = await attach(call, attaching, arena, slicing, route.peer)
        connection = ShmConnection(call, route, self, arena, weights, slicing, loss)
        await connection.open(connected)
        return connection

    # --- shared memory ------------------------------------------------------------------------------------------------

    @property
    def gradients(self) -> NDArray[Any] | None:
        """Whole gradient vector in the arena if there is one and it is float32."""
        return self.arena.gradients

    def on_detached(self) -> None:
        """See ``ArenaUser``."""
        self._detachments += 1
        self._is_offered = False
        for connection in self.connections.values():
            connection.close()

    async def share_gradients(self) -> None:
        """Share memory again that was withdrawn from servers. Nobody may write to ``gradients`` during the call."""
        if self.arena.is_detached:
            await self.arena.share()

    async def take_turns(self, other: ShmTransport | None) -> None:
        """Move this handle's gradients to the arena of ``other``, or to its own for None. No push may be in
        progress."""
        if other is not None:
            arena = other.arena
        else:
            arena = OfferedArena(self.arena.elements, self.arena.dtype) if self.arena.is_shared else self.arena
        if arena is not self.arena:
            await self.arena.leave(self)
            self.on_detached()
            self.arena = arena
            arena.join(self)

    @property
    def weights(self) -> Flat | None:
        """All weights in place, if they form one vector that does not change between this worker's pushes. It is always
        the same vector."""
        if self._view.cluster is not self._adopted:
            self.adopt_map()
        shards = self._entry.shards[: self._entry.slicing.count]
        if not self.is_stable or not shards or not all(self.connection(shard.primary) for shard in shards):
            return None
        return self._weights.vector(self._entry, self._arena_of)

    def shows(self, index: int, arena: WeightsArena) -> bool:
        """True if the vector of all weights shows a slice from ``arena``."""
        return self._weights.shows(index % len(self._entry.shards), arena)

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
            for connection in self.connections.values():
                connection.stable = self._stable

    async def release_memory(self, *, shared: bool) -> None:
        """Return the gradients' memory to the system until it is written again. No push may be in progress.

        shared: do this even if other handles use the same arena.
        """
        if shared or not self.arena.is_shared:
            await self.arena.release()

    async def withdraw(self) -> None:
        """Withdraw the gradient arena from the servers before returning, after a failed push."""
        self._settled = False
        if self._is_offered and self.arena.elements:
            await self.arena.detach()

    def rejoin(self, sender: RequestIdentity, entry: ParametersEntry) -> None:
        """See ``NegotiatedTransport.rejoin``. Call ``withdraw`` first."""
        self.arena.allow_file()
        super().rejoin(sender, entry)

    async def close(self) -> None:
        """Close the streams and the shared memory."""
        if any(connection.calls for connection in self.connections.values()):
            await self.withdraw()
        self.on_detached()
        await self.arena.leave(self)
        await super().close()
        self._weights.close()
