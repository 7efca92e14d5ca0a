"""Connections to the scheduler: of a worker or server, which registers and leaves, and of programs outside its run.

Programs outside the run are commands, and processes started by a launcher. The session of a member is in
``member_session``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any, Final

import grpc
import grpc.aio

from psdist import addresses
from psdist.errors import (
    ClosedError,
    PsdistError,
    SchedulerUnreachableError,
    ServerUnreachableError,
    WaitTimeoutError,
)
from psdist.security import handshake
from psdist.security.tls import Credentials
from psdist.security.tokens import Verifier
from psdist.v1 import scheduler_pb2 as pb
from psdist.v1 import scheduler_pb2_grpc
from psdist.wire import auth, channels, limits, status
from psdist.wire.backoff import Backoff

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
                        await handshake.raise_cause(",".join(self._places), self.credentials)
                    await asyncio.sleep(backoff.next_seconds())
        except TimeoutError:
            if last is not None and not isinstance(last, ServerUnreachableError):
                raise last from None
            await handshake.raise_cause(",".join(self._places), self.credentials)
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
