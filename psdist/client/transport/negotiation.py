"""Transports that are negotiated with each server over gRPC: connections, calls on them, and reasons for missing ones.

Connections follow the cluster map. Before each call, connections are opened to servers that became primaries of this
parameter set. A server keeps its connection while its shards change. Connections to servers that are no longer
primaries are closed. A server that refused is asked again after a while, beside the calls, which use another transport
until it agrees: a firewall was opened, or a server was asked by too many.

Several calls may use a connection concurrently. They have ascending numbers. Each ends once, with its answers or with
an error.

Invariants: No result depends on such a transport, unless the user requires it. No call waits for a server that refused
before. A broken connection is reopened before the next call. When a connection ends, all calls on it end immediately. A
call that nobody waits for any more is cancelled at the server.

``shm`` and ``tcp`` implement the negotiation and carry the payloads: a new transport is one more subclass of
``NegotiatedTransport``. ``psdist.link.connecting`` is the connection and its gRPC stream.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

import grpc.aio

from psdist.client.core.push_sequence import PushOptions
from psdist.client.core.routing import Route
from psdist.client.session.membership import ClusterView
from psdist.client.session.waits import Wait, WaitTracker
from psdist.client.transport.grpc import GrpcTransport
from psdist.client.transport.transport import (
    PushRequest,
    Request,
    RequestIdentity,
    ServerLoss,
    Transport,
    attempt_error,
)
from psdist.errors import InternalError, PsdistError, ServerUnreachableError, StaleEpochError, copy_error
from psdist.link.connecting import Link, ending_with
from psdist.types import ClusterMap, ParametersEntry, Replica, Slicing
from psdist.v1 import server_pb2
from psdist.wire import status

logger = logging.getLogger("psdist")

_NEWER_MAP_SECONDS: Final = 1.0
_NOT_TRIED: Final = "not tried yet"


class PendingCall:
    """Unfinished call."""

    def __init__(self, wait: Wait) -> None:
        self.wait = wait
        self.call_id = 0
        #: Receives the message that ends the call, or the error.
        self.ended: asyncio.Future[server_pb2.ShareResponse | PsdistError] = asyncio.get_running_loop().create_future()

    def end(self, result: server_pb2.ShareResponse | PsdistError) -> None:
        """End the call, unless it has ended."""
        if not self.ended.done():
            self.ended.set_result(result)

    async def result(self) -> server_pb2.ShareResponse:
        """Wait for the message that ends the call. Raises the error that ended it."""
        result = await self.ended
        if isinstance(result, PsdistError):
            # A copy: its traceback refers to frames that refer to this object, whose error would close the circle and
            # keep the memory of the call.
            raise copy_error(result)
        return result


CallT = TypeVar("CallT", bound=PendingCall)


class CallConnection(Link[server_pb2.ShareResponse], Generic[CallT]):
    """Connection to the server of ``route``.

    call: the gRPC stream that authenticated it.
    loss: ends it.
    has_payloads: see ``FrameConnection``.
    """

    message_type = server_pb2.ShareResponse

    def __init__(self, call: Any, route: Route, slicing: Slicing, loss: ServerLoss, *, has_payloads: bool) -> None:
        super().__init__(call, route.peer, has_payloads=has_payloads)
        self.incarnation = route.incarnation
        #: Unfinished calls, by number.
        self.calls: dict[int, CallT] = {}
        self.slicing = slicing
        self._loss = loss
        self._last_id = 0
        #: Latest push: whether it asked for weights, its epoch and slices; its options, and its request. The next push
        #: usually differs only in numbers and reuses the message.
        self._pushed: tuple[tuple[bool, int, tuple[int, ...]], PushOptions, server_pb2.ShareRequest] | None = None
        loss.add_done_callback(self._on_loss)

    def send(self, request: server_pb2.ShareRequest) -> None:
        """Send a message. Does nothing after the end."""
        self.connection.send(request.SerializeToString())

    # --- calls --------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def exchange(self, request: Request, route: Route, wait: Wait, loss: ServerLoss) -> None:
        """See ``Connection.exchange``. The connection ends with its server, so ``loss`` ends the call."""

    def start(self, request: server_pb2.ShareRequest, call: CallT) -> CallT:
        """Send a request as a call, for which the caller calls ``finish`` in the end. Raises the reason if the
        connection has ended."""
        if self.broken is not None:
            raise copy_error(self.broken)
        self._last_id += 1
        request.call_id = call.call_id = self._last_id
        self.calls[call.call_id] = call
        self.send(request)
        return call

    def finish(self, call: CallT) -> None:
        """Cancel a call that has not ended: nobody waits for it any more."""
        if self.calls.pop(call.call_id, None) is not None:
            self.send(server_pb2.ShareRequest(call_id=call.call_id, cancel=server_pb2.SharedCancel()))

    def encode_push(self, push: PushRequest, route: Route, slices: tuple[int, ...]) -> server_pb2.ShareRequest:
        """Return the request of a push, without payloads."""
        wants_weights = push.target is not None
        kind = (wants_weights, route.epoch, slices)
        before, self._pushed = self._pushed, None
        if before is not None and before[0] == kind:
            _, options, request = before
            push.number_header(request.push.header, slices, options)
        else:
            header = push.header(route, slices)
            request = server_pb2.ShareRequest(
                push=server_pb2.SharedPush(header=header, wants_weights=wants_weights, slices=slices)
            )
        self._pushed = kind, push.progress.options, request
        bases = [push.versions[index] for index in slices]
        request.push.base_versions[:] = bases if min(bases) != max(bases) else bases[:1]
        return request

    def on_message(self, response: server_pb2.ShareResponse) -> None:
        """Process a message: progress of a call, or its end."""
        call = self.calls.get(response.call_id)
        if call is None:  # It was cancelled.
            return
        match response.WhichOneof("kind"):
            case "waiting_for":
                call.wait.update_reason(response.waiting_for)
            case "answers":
                self.calls.pop(call.call_id).end(response)
            case "error":
                self.calls.pop(call.call_id).end(attempt_error(status.from_detail(response.error)))
            case kind:
                self.calls.pop(call.call_id).end(InternalError(f"{self.peer} answered a call with {kind}"))

    # --- closing ------------------------------------------------------------------------------------------------------

    def error_of(self, failure: grpc.aio.AioRpcError) -> PsdistError:
        return attempt_error(super().error_of(failure))

    def _on_loss(self, loss: ServerLoss) -> None:
        self.break_off(loss.result())

    def break_off(self, error: PsdistError) -> None:
        """Close the connection and end the unfinished calls with ``error``."""
        super().break_off(error)
        self._loss.remove_done_callback(self._on_loss)
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.end(copy_error(error))


def encode_pull(pull: Request, route: Route, version: int, slices: Sequence[int]) -> server_pb2.ShareRequest:
    """Return the request for ``slices`` in ``version`` or newer."""
    identity = pull.sender.identity(route.epoch)
    return server_pb2.ShareRequest(pull=server_pb2.SharedPull(identity=identity, min_version=version, slices=slices))


async def ask(call: Any, request: bytes, peer: str, what: str, unavailable: type[PsdistError]) -> bytes:
    """Send the first request of a new stream and return the server's answer.

    what: feature that the request needs, for messages.
    Raises ``unavailable`` if the server lacks the feature, or the server's refusal.
    """
    try:
        await call.write(request)
        data = await call.read()
    except grpc.aio.AioRpcError as failure:
        if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise unavailable(f"{peer} runs a version without {what}") from None
        raise status.from_call(failure, peer) from None
    except asyncio.InvalidStateError:
        raise ServerUnreachableError(f"{peer} ended the stream while it was written to") from None
    if data is grpc.aio.EOF:
        raise ServerUnreachableError(f"{peer} ended the stream before it answered")
    answer: bytes = data
    return answer


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
    #: Pause before a server that refused is asked again; infinite if its incarnation will give the same answer.
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
        self.connections: dict[str, ConnectionT] = {}
        #: Reason for a missing connection, by server id.
        self._reasons: dict[str, str] = {}
        #: Servers that refused, and the loop time at which each may be asked again.
        self._refused: dict[Replica, float] = {}
        #: Negotiations with those that are asked again.
        self._asked_again: dict[Replica, asyncio.Task[ConnectionT]] = {}
        self._preparing = asyncio.Lock()

    # --- transport ----------------------------------------------------------------------------------------------------

    def connection(self, server: Route | Replica, /) -> ConnectionT | None:
        """Return the connection to a server, or to that of a route, by the newest map."""
        if self._view.cluster is not self._adopted:
            self.adopt_map()
        connection = self.connections.get(server.server_id)
        if connection is None or connection.incarnation != server.incarnation or connection.broken is not None:
            return None
        return connection

    def is_missing(self, route: Route) -> bool:
        """Return True if ``prepare`` should try to connect to the route's server. One that refused is asked again by
        this call, if it is time."""
        server = route.server
        if server not in self._refused:
            return True
        again = self._asked_again.get(server)
        if again is None and asyncio.get_running_loop().time() >= self._refused[server]:
            name = f"psdist asks {server.server_id} again"
            self._asked_again[server] = asyncio.create_task(self._negotiated(route), name=name)
        elif again is not None and again.done():
            if not again.cancelled() and again.exception() is None:
                return True
            del self._asked_again[server]
            self._note_refusal(server)
        return False

    async def prepare(self, routes: Sequence[Route]) -> None:
        """Open missing or broken connections to the servers of ``routes``.

        Raises ``unavailable`` if the transport is required and no connection is possible.
        """
        async with self._preparing:
            if missing := [route for route in routes if not self.connection(route) and self.is_missing(route)]:
                await self._open_all(missing)

    async def _open_all(self, routes: Sequence[Route]) -> None:
        outcomes = await asyncio.gather(*(self._open(route) for route in routes), return_exceptions=True)
        self._connections_changed()
        for error in filter(None, outcomes):
            raise error

    def why_closed(self, server_id: str) -> str:
        """Return why there is no connection to the server; empty if there is one."""
        connection = self.connections.get(server_id)
        if connection is not None and connection.broken is None:
            return ""
        broken = connection.broken.message if connection is not None and connection.broken is not None else _NOT_TRIED
        return self._reasons.get(server_id, broken)

    # --- opening ------------------------------------------------------------------------------------------------------

    def adopt_map(self) -> None:
        """Adopt the newest map."""
        self._adopted = self._view.cluster
        self._entry = self._adopted.entry(self._entry.spec.name) or self._entry
        self._connections_changed()

    def _connections_changed(self) -> None:
        """Close connections to servers that are not primaries any more. Called when the primaries or connections
        change."""
        primaries = {shard.primary for shard in self._entry.shards}
        for server_id, connection in list(self.connections.items()):
            if Replica(server_id, connection.incarnation) not in primaries:
                connection.close()
                del self.connections[server_id]
                self._reasons.pop(server_id, None)
        self._forget_refusals(self._refused.keys() - primaries)

    def _note_refusal(self, server: Replica) -> None:
        self._refused[server] = asyncio.get_running_loop().time() + self.retry_seconds

    def _forget_refusals(self, servers: Iterable[Replica]) -> None:
        """Forget the refusals of servers, with the negotiations with them and the connections that came of these."""
        for server in list(servers):
            del self._refused[server]
            again = self._asked_again.pop(server, None)
            if again is None:
                continue
            if not again.done():
                again.cancel()
            elif not again.cancelled() and again.exception() is None:
                again.result().close()

    @abstractmethod
    async def _connect(self, call: Any, epoch: int, route: Route) -> ConnectionT:
        """Negotiate a connection on ``call``, a new stream of ``method``, by the map of ``epoch``."""

    def _offered(self) -> tuple[object, ...]:
        """Return the objects that connections are negotiated for. If one changes, a negotiation is obsolete."""
        return (self._sender,)

    async def _open(self, route: Route) -> None:
        """Open a connection and add it to ``connections``, or record the reason for its absence."""
        offered, connection = self._offered(), None
        try:
            with self._waits.open(f"for a connection to {route.peer} by {self.name}"):
                self._refused.pop(route.server, None)
                connection = await (self._asked_again.pop(route.server, None) or self._negotiated(route))
        except self.unavailable as error:
            if self._offered() == offered:
                self._refuse(route, error)
        except PsdistError as error:  # The data path handles it, and connecting is tried again.
            self._reasons[route.server_id] = f"connecting failed: {error.message}"
        if self._offered() != offered:
            # A later call tries again. Another transport is used meanwhile.
            self._reasons[route.server_id] = self.obsolete
            if connection is not None:
                connection.close()
                await connection.ended()
        elif connection is not None:
            await self._opened(route, connection)

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

    async def _opened(self, route: Route, connection: ConnectionT) -> None:
        """Put a new connection into use."""
        old = self.connections.get(route.server_id)
        self.connections[route.server_id] = connection
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
        self._note_refusal(route.server)
        self._reasons[route.server_id] = error.message

    # --- closing ------------------------------------------------------------------------------------------------------

    def rejoin(self, sender: RequestIdentity, entry: ParametersEntry) -> None:
        """Close the connections after this worker rejoined as ``sender``. Servers are asked again."""
        for connection in self.connections.values():
            connection.close()
        self._sender, self._entry = sender, entry
        self._forget_refusals(self._refused)

    async def close(self) -> None:
        """Close the connections."""
        self._forget_refusals(self._refused)
        for connection in self.connections.values():
            connection.close()
        await asyncio.gather(*(connection.ended() for connection in self.connections.values()))
        self.connections.clear()
