"""Connections to the scheduler: of a worker or server, which registers and leaves, and of programs outside its run.

Programs outside the run are commands, and processes started by a launcher.

The session of a member is one stream after another, for as long as it is a member. A member sends heartbeats, and
reports in between. The scheduler sends maps, news and commands. A stream that breaks is opened again, forever, with the
same incarnation; the data path continues meanwhile. ``worker_session`` and ``server_session`` of the two programs say
how a stream begins, make the heartbeats, and carry out commands.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any, ClassVar, Final

import grpc
import grpc.aio

from psdist import addresses, map_difference
from psdist.errors import (
    RUN_ENDING,
    ClosedError,
    FencedError,
    InternalError,
    PsdistError,
    SchedulerUnreachableError,
    ServerUnreachableError,
    UnauthenticatedError,
    WaitTimeoutError,
    WrongRunError,
)
from psdist.security import tls
from psdist.security.tls import Credentials
from psdist.security.tokens import Verifier
from psdist.types import ClusterMap
from psdist.v1 import scheduler_pb2 as pb
from psdist.v1 import scheduler_pb2_grpc
from psdist.wire import auth, channels, convert, limits, status
from psdist.wire.limits import Backoff

logger = logging.getLogger("psdist")

#: Advice for errors if no scheduler answers.
FIND_SCHEDULER: Final = (
    "Is it running, and is this its address? Start one with 'psdist run' or 'psdist-scheduler', or set "
    "PSDIST_SCHEDULER=HOST:PORT"
)
_LEAVE_SECONDS: Final = 1.0
#: Time for one of several places to answer a program outside the run.
_ANSWER_SECONDS: Final = 1.0
#: Shortest time for which one of several places is tried. Calls that fail together go to one next place.
_PLACE_SECONDS: Final = 0.02
#: Longest pause of a channel to one of several places: a standby may begin to listen at any moment.
_RECONNECT_SECONDS: Final = 0.2
#: Timeout of the first attempt to register. Each further attempt gets as much more, because a machine may be slow.
_REGISTER_SECONDS: Final = 5.0


class MemberConnection:
    """Channel to the scheduler, which is at one of ``places``: HOST:PORT, several divided by commas.

    After a call that nobody answered the next place is tried: a standby listens only once it leads.

    source: origin of the address, for messages.
    rng: randomness for pauses between attempts.

    Raises InsecureConnectError.
    """

    def __init__(self, places: str, source: str, credentials: Credentials, rng: Random) -> None:
        credentials.require_private_route(places)
        self._places = addresses.split_addresses(places)
        self._place = 0
        self._tried = -_PLACE_SECONDS
        self.rng = rng
        self.credentials = credentials
        self.metadata = auth.metadata(credentials.token)
        #: Checks callers of this process, by a key that comes with the registration.
        self.verifier: Verifier | None = None
        self._source = source
        #: Ping a peer after this much silence. Set to the run's lease once it is known.
        self.silence_seconds = limits.KEEPALIVE_SECONDS
        #: The same for the scheduler, which pings of a thousand workers would keep busy: not before the next heartbeat.
        self._scheduler_silence = limits.KEEPALIVE_SECONDS
        #: Methods of the scheduler. They call the one that is current then.
        self.stub: Any = _Methods(self._current_stub)
        #: Channel and stub of each place that has been tried.
        self._opened: dict[str, tuple[grpc.aio.Channel, Any]] = {}

    @property
    def address(self) -> str:
        """Address of the scheduler that is called now."""
        return self._places[self._place]

    @property
    def has_standby(self) -> bool:
        """True if another scheduler may lead when this one does not answer."""
        return len(self._places) > 1

    @property
    def peer(self) -> str:
        """The scheduler, for messages."""
        return f"the scheduler at {self.address}"

    def _current_stub(self) -> Any:
        if self.address not in self._opened:
            reconnect = _RECONNECT_SECONDS if self.has_standby else 1.0
            channel = channels.open_channel(
                self.address, self.credentials, limits.CONTROL_MESSAGE_BYTES, self._scheduler_silence, reconnect
            )
            self._opened[self.address] = channel, scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return self._opened[self.address][1]

    def _try_next(self) -> None:
        """Go to the next place, if this one has had its time: several calls may fail together."""
        now = asyncio.get_running_loop().time()
        if now - self._tried >= _PLACE_SECONDS:
            self._tried, self._place = now, (self._place + 1) % len(self._places)

    def error(self, failure: grpc.aio.AioRpcError) -> PsdistError:
        """Return the error for a failed call: SchedulerUnreachableError if another attempt may succeed."""
        error = status.from_call(failure, self.peer)
        if isinstance(error, ServerUnreachableError):
            unreachable = SchedulerUnreachableError(error.message, address=self.address)
            self._try_next()
            return unreachable
        return error

    async def call(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        """Make a unary call. Raises the scheduler's refusal, or SchedulerUnreachableError."""
        try:
            return await method(request, metadata=self.metadata, timeout=timeout)
        except grpc.aio.AioRpcError as failure:
            raise self.error(failure) from None

    async def register(
        self,
        request: pb.RegisterRequest,
        timeout: float,
        retried: tuple[type[PsdistError], ...],
        on_failure: Callable[[PsdistError], None],
    ) -> pb.RegisterResponse:
        """Register this process, retrying after errors of the types ``retried``, which are passed to ``on_failure``.

        Raises SchedulerUnreachableError if nobody answered in ``timeout`` seconds, TlsHandshakeError if certificates
        are the cause, or the scheduler's refusal.
        """
        attempts, last, backoff = 0, None, Backoff(self.rng)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    attempts += 1
                    try:
                        return await self.register_once(request, attempts * _REGISTER_SECONDS)
                    except retried as error:
                        last = error
                        on_failure(error)
                    if attempts == 1:
                        await tls.raise_cause(",".join(self._places), self.credentials)
                    await asyncio.sleep(backoff.next_seconds())
        except TimeoutError:
            if last is not None and not isinstance(last, ServerUnreachableError):
                raise last from None
            await tls.raise_cause(",".join(self._places), self.credentials)
            raise self.unreachable(timeout, attempts, last.message if last is not None else "no answer") from None

    async def register_once(
        self, request: pb.RegisterRequest, timeout: float = _REGISTER_SECONDS
    ) -> pb.RegisterResponse:
        """Make one attempt to register, then open a channel with the run's lease as its silence limit.

        Raises ServerUnreachableError, SchedulerUnreachableError if the address belongs to something else, or
        ConfigurationError if the run has no token and this process has one of a role.
        """
        try:
            return await self._register_here(request, timeout)
        except ServerUnreachableError:
            self._try_next()
            raise

    async def _register_here(self, request: pb.RegisterRequest, timeout: float) -> pb.RegisterResponse:
        await self._await_name(timeout)
        request.protocol_version, request.oldest_protocol = limits.PROTOCOL_VERSION, limits.OLDEST_PROTOCOL
        request.host, request.pid = socket.gethostname(), os.getpid()
        try:
            response: pb.RegisterResponse = await self.stub.Register(request, metadata=self.metadata, timeout=timeout)
        except grpc.aio.AioRpcError as failure:
            if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise SchedulerUnreachableError(
                    f"the service at {self.address} (from {self._source}) is not a psdist scheduler: "
                    f"{failure.details()}; check the address",
                    address=self.address,
                ) from None
            error = status.from_call(failure, self.peer)
            # The scheduler may be frozen or behind a half-open connection, or have closed the connection because too
            # many arrived at the same time. (Closing this client does not raise an error of a call.)
            passing = isinstance(error, WaitTimeoutError | ClosedError)
            raise ServerUnreachableError(error.message) if passing else error from None
        if self.verifier is not None:
            self.verifier.learn(response.peer_key)
        self.silence_seconds = response.silence_seconds or self.silence_seconds
        silence = max(self.silence_seconds, response.heartbeat_seconds)
        if silence != self._scheduler_silence:
            self._scheduler_silence = silence
            await self.close()  # The next call opens a channel with this limit.
        return response

    async def _await_name(self, timeout: float) -> None:
        """Return if the scheduler's name resolves. Raises ServerUnreachableError.

        gRPC would resolve the name itself, but it waits for up to two minutes after a failure before it tries again.
        """
        host = self.address.rpartition(":")[0]
        try:
            async with asyncio.timeout(timeout):
                await addresses.look_up(host)
        except OSError as error:  # TimeoutError is an OSError.
            reason = error.strerror or f"no answer from the resolver within {timeout:g} s"
            raise ServerUnreachableError(f"the scheduler's name {host} does not resolve: {reason}") from None

    def unreachable(self, timeout: float, attempts: int, last: str) -> SchedulerUnreachableError:
        """Return the error for no answer in ``timeout`` seconds. last: result of the last attempt."""
        return SchedulerUnreachableError(
            f"no scheduler answered at {', '.join(self._places)} (from {self._source}) in {timeout:.3g} s and "
            f"{attempts} attempts; the last one: {last}. {FIND_SCHEDULER}",
            address=self.address,
            attempts=attempts,
        )

    async def leave(self, member_id: str, incarnation: int, reason: str, totals: pb.WorkerTotals | None = None) -> None:
        """End the membership. Raises PsdistError if the scheduler does not answer within a second. totals: a worker's
        last counts."""
        request = pb.LeaveRequest(member_id=member_id, incarnation=incarnation, reason=reason, totals=totals)
        await self.call(self.stub.Leave, request, timeout=_LEAVE_SECONDS)

    async def close(self) -> None:
        """Close all channels."""
        opened, self._opened = self._opened, {}
        for channel, _ in opened.values():
            await channel.close()


class _Methods:
    """Methods of a stub that is looked up when they are called. stub: returns it."""

    def __init__(self, stub: Callable[[], Any]) -> None:
        self._stub = stub

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **options: getattr(self._stub(), name)(*args, **options)


# --- programs outside the run -----------------------------------------------------------------------------------------


@asynccontextmanager
async def scheduler_at(address: str, credentials: Credentials) -> AsyncIterator[Callable[..., Any]]:
    """Connect to the scheduler at ``address`` (HOST:PORT; of several the first that answers).

    Yield ``call(method, request, timeout=None, wait_for_ready=False)``, which starts a call with the token and
    returns an awaitable or a stream of answers. Both raise grpc.aio.AioRpcError. A call that waits connects until its
    timeout; otherwise the first failed attempt ends it."""
    metadata = auth.metadata(credentials.token)
    async with channels.open_channel(
        await _answering(address, credentials), credentials, limits.CONTROL_MESSAGE_BYTES
    ) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)

        def call(method: str, request: Any, timeout: float | None = None, wait_for_ready: bool = False) -> Any:
            start = getattr(stub, method)
            return start(request, metadata=metadata, timeout=timeout, wait_for_ready=wait_for_ready)

        yield call


async def _answering(address: str, credentials: Credentials) -> str:
    """Return the first of several places where a scheduler listens: a standby listens only once it leads. Without one,
    the last."""
    *others, last = addresses.split_addresses(address)
    for place in others:
        async with channels.open_channel(place, credentials, limits.CONTROL_MESSAGE_BYTES) as channel:
            with suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await channel.channel_ready()
                    return place
    return last


async def last_answer(stream: AsyncIterator[Any], on_answer: Callable[[Any], None]) -> Any:
    """Pass each answer of a stream to ``on_answer``. Return the last one, or None without any."""
    last = None
    async for last in stream:
        on_answer(last)
    return last


# --- sessions of members ----------------------------------------------------------------------------------------------


class SessionRequests:
    """Requests of a member on one Session stream: a hello, heartbeats, and reports in between.

    Reports are sent in order and without delay. Reports on a broken stream are lost.
    """

    def __init__(self) -> None:
        #: None ends the stream.
        self._reports: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self._is_closed = False

    def close(self) -> None:
        """End the requests. gRPC does not do this when the scheduler ends the stream."""
        self._is_closed = True
        self._reports.put_nowait(None)

    def send(self, report: pb.SessionRequest) -> None:
        """Send a report as soon as the stream is open."""
        self._reports.put_nowait(report)

    async def stream(
        self,
        hello: pb.SessionRequest.Hello,
        heartbeat: Callable[[], pb.SessionRequest.Heartbeat],
        heartbeat_seconds: float,
    ) -> AsyncGenerator[pb.SessionRequest, None]:
        """Yield the requests until ``close``. heartbeat: builds the next heartbeat, every ``heartbeat_seconds``."""
        yield pb.SessionRequest(hello=hello)
        clock = asyncio.get_running_loop().time
        next_beat = clock()
        while True:
            if clock() >= next_beat:
                next_beat = clock() + heartbeat_seconds
                try:
                    beat = heartbeat()
                except Exception:  # gRPC would end the stream silently.
                    logger.exception("could not build a heartbeat")
                    raise
                yield pb.SessionRequest(heartbeat=beat)
            try:
                async with asyncio.timeout_at(next_beat):
                    report = await self._reports.get()
            except TimeoutError:
                continue
            except asyncio.CancelledError:
                # gRPC cancels the task that reads these requests, and logs a traceback of any exception.
                if self._is_closed:
                    return
                raise
            if report is None:
                return
            yield report  # Outside the timeout, which would cancel gRPC's write.


class FollowedMap:
    """The newest map of one session. Ignores maps that arrive by other calls, because differences refer to this
    session's maps."""

    def __init__(self) -> None:
        self._cluster = ClusterMap("", 0)

    def apply(self, response: pb.SessionResponse) -> ClusterMap:
        """Apply ``response``, a whole map or a difference, and return the map. Raises StaleEpochError for a difference
        from another map than the last, and the errors of the conversions."""
        if response.HasField("map"):
            self._cluster = convert.map_from_proto(response.map)
        else:
            change = convert.difference_from_proto(response.map_difference)
            self._cluster = map_difference.apply(self._cluster, change)
        return self._cluster


class MemberSession(ABC):
    """The session of one member. connection: its connection to the scheduler."""

    #: Errors after which the scheduler never takes this incarnation back.
    final_errors: ClassVar[tuple[type[PsdistError], ...]] = (FencedError, WrongRunError, *RUN_ENDING)

    def __init__(self, connection: MemberConnection) -> None:
        self.connection = connection
        #: Requests of the newest stream.
        self.requests = SessionRequests()
        #: True from the end of a stream until the scheduler answers on another one.
        self.is_broken = False
        #: True once this member leaves: the scheduler then ends the stream.
        self.is_leaving = False

    @abstractmethod
    def begin_stream(self) -> ClusterMap:
        """Report again, on the new ``requests``, because those of a broken stream may be lost. Returns the newest map
        that this member holds."""

    @abstractmethod
    def heartbeat(self) -> pb.SessionRequest.Heartbeat:
        """Return the next heartbeat."""

    @abstractmethod
    async def adopt_map(self, cluster: ClusterMap) -> None:
        """Use a newer map, unless it is older than one that came by another call."""

    @abstractmethod
    async def on_command(self, response: pb.SessionResponse) -> PsdistError | None:
        """Carry out a command, or note news. Returns the error that ends this incarnation; None if it continues."""

    @abstractmethod
    def end_stream(self) -> None:
        """Drop the work that was for the scheduler at the other end of the stream."""

    def send(self, report: pb.SessionRequest) -> None:
        """Send a report on the newest stream."""
        self.requests.send(report)

    async def hold_session(self, member_id: str, incarnation: int, heartbeat_seconds: float) -> PsdistError | None:
        """Hold the session of an incarnation open. Returns the error that ends it; None once this member leaves."""
        connection = self.connection
        backoff = Backoff.for_session(connection.rng, heartbeat_seconds, has_standby=connection.has_standby)
        is_refused = False
        while True:
            peer = connection.peer  # After an error the next one may be another scheduler.
            error = await self._follow_stream(member_id, incarnation, heartbeat_seconds, backoff)
            if self.is_leaving:
                return None
            if isinstance(error, self.final_errors):
                return error
            was_refused, is_refused = is_refused, isinstance(error, UnauthenticatedError)
            # Logged once, not for each further attempt. A scheduler that is back with another token is news.
            if not self.is_broken or is_refused > was_refused:
                logger.warning(
                    "the session with %s broke (%s); reconnecting while training continues",
                    peer,
                    error,
                    extra={"peer": peer},
                )
            self.is_broken = True
            await asyncio.sleep(backoff.next_seconds())

    async def _follow_stream(
        self, member_id: str, incarnation: int, heartbeat_seconds: float, backoff: Backoff
    ) -> PsdistError:
        """Run one stream to its end. Returns why it ended."""
        requests = self.requests = SessionRequests()
        cluster, followed = self.begin_stream(), FollowedMap()
        hello = pb.SessionRequest.Hello(
            member_id=member_id,
            incarnation=incarnation,
            takes_differences=True,
            epoch=cluster.epoch,
            scheduler_id=cluster.scheduler_id,
        )
        sent = requests.stream(hello, self.heartbeat, heartbeat_seconds)
        call = self.connection.stub.Session(sent, metadata=self.connection.metadata)
        try:
            async for response in call:
                if response.WhichOneof("command") in ("map", "map_difference"):
                    try:
                        cluster = followed.apply(response)
                    except PsdistError as error:
                        return error
                    await self.adopt_map(cluster)
                elif (ended := await self.on_command(response)) is not None:
                    return ended
                self._answered(backoff)
            return SchedulerUnreachableError(f"{self.connection.peer} ended the session")
        except grpc.aio.AioRpcError as failure:
            return self.connection.error(failure)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return InternalError("a heartbeat could not be made")
        finally:
            call.cancel()
            requests.close()
            self.end_stream()

    def _answered(self, backoff: Backoff) -> None:
        backoff.reset()
        if self.is_broken:
            logger.info("%s is back", self.connection.peer, extra={"peer": self.connection.peer})
        self.is_broken = False


def is_cancelled() -> bool:
    """True if the running task is being cancelled. Otherwise a CancelledError belongs to a call: gRPC cancels a stream
    whose request iterator failed."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
