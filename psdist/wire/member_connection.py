"""A member's connection to the scheduler, for workers and servers alike: registering, the session's requests, leaving.

Not here: what the session's answers mean, and what follows from a refusal (``scheduler_session`` of each).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
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
from psdist.v1 import scheduler_pb2 as pb
from psdist.v1 import scheduler_pb2_grpc
from psdist.wire import auth, channels, limits, status
from psdist.wire.backoff import Backoff

logger = logging.getLogger("psdist")

#: What to do where no scheduler answers.
FIND_SCHEDULER: Final = (
    "Is it running, and is this its address? Start one with 'psdist run' or 'psdist-scheduler', or set "
    "PSDIST_SCHEDULER=HOST:PORT"
)
_LEAVE_SECONDS: Final = 1.0
#: The first attempt to register waits so long for an answer, and each further one as long again: a machine may be slow.
_REGISTER_SECONDS: Final = 5.0


class MemberConnection:
    """A channel to the scheduler at ``address``.

    source: where the address came from, for messages. rng: for pauses between attempts.
    """

    def __init__(self, address: str, source: str, token: str, rng: Random) -> None:
        self.address = address
        self.rng = rng
        self.metadata = auth.metadata(token)
        self.peer = f"the scheduler at {address}"
        self._source = source
        #: A peer that is silent for so long is pinged: the run's lease, once it is known.
        self.silence_seconds = limits.KEEPALIVE_SECONDS
        self._open()

    def _open(self) -> None:
        self._channel = channels.open_channel(self.address, limits.CONTROL_MESSAGE_BYTES, self.silence_seconds)
        self.stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)

    def error(self, failure: grpc.aio.AioRpcError) -> PsdistError:
        """The error that a failed call stands for; SchedulerUnreachableError where another attempt may go well."""
        error = status.from_call(failure, self.peer)
        if isinstance(error, ServerUnreachableError):
            return SchedulerUnreachableError(error.message, address=self.address)
        return error

    async def call(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        """One unary call. Raises what the scheduler refuses with, and SchedulerUnreachableError."""
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
        """Registers this process; tries again after an error of ``retried``, which ``on_failure`` is given.

        Raises SchedulerUnreachableError where nobody answered in ``timeout`` seconds, and what the scheduler refuses
        with.
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
                    await asyncio.sleep(backoff.next_seconds())
        except TimeoutError:
            if last is not None and not isinstance(last, ServerUnreachableError):
                raise last from None
            raise self.unreachable(timeout, attempts, last.message if last is not None else "no answer") from None

    async def register_once(
        self, request: pb.RegisterRequest, timeout: float = _REGISTER_SECONDS
    ) -> pb.RegisterResponse:
        """One attempt. Raises ServerUnreachableError, and SchedulerUnreachableError for what is no scheduler.

        Afterwards there is a new channel, which gives connections up by the run's lease.
        """
        await self._await_name(timeout)
        request.protocol_version, request.host, request.pid = limits.PROTOCOL_VERSION, socket.gethostname(), os.getpid()
        try:
            response: pb.RegisterResponse = await self.stub.Register(request, metadata=self.metadata, timeout=timeout)
        except grpc.aio.AioRpcError as failure:
            if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise SchedulerUnreachableError(
                    f"what answers at {self.address} (from {self._source}) is no psdist scheduler: "
                    f"{failure.details()}; check the address",
                    address=self.address,
                ) from None
            error = status.from_call(failure, self.peer)
            # A scheduler that is frozen, or behind a connection that is half open; or a connection that the scheduler
            # closed, because too many came at once. (The end of this client is no error of a call.)
            passing = isinstance(error, WaitTimeoutError | ClosedError)
            raise ServerUnreachableError(error.message) if passing else error from None
        if response.silence_seconds and response.silence_seconds != self.silence_seconds:
            before, self.silence_seconds = self._channel, response.silence_seconds
            self._open()
            await before.close()
        return response

    async def _await_name(self, timeout: float) -> None:
        """Return if the scheduler's name resolves. Raises ServerUnreachableError.

        gRPC would look it up itself, but after a failure it waits for up to two minutes before it looks again.
        """
        host = self.address.rpartition(":")[0]
        try:
            async with asyncio.timeout(timeout):
                await addresses.look_up(host)
        except OSError as error:  # TimeoutError is an OSError.
            reason = error.strerror or f"no answer of the resolver in {timeout:g} s"
            raise ServerUnreachableError(f"the scheduler's name {host} does not resolve: {reason}") from None

    def unreachable(self, timeout: float, attempts: int, last: str) -> SchedulerUnreachableError:
        """The error where no scheduler answered in ``timeout`` seconds. last: how the last attempt ended."""
        return SchedulerUnreachableError(
            f"no scheduler answered at {self.address} (from {self._source}) in {timeout:.3g} s and {attempts} attempts"
            f"; the last one: {last}. {FIND_SCHEDULER}",
            address=self.address,
            attempts=attempts,
        )

    async def leave(self, member_id: str, incarnation: int, reason: str) -> None:
        """Ends the membership. Raises PsdistError where the scheduler does not answer within a second."""
        request = pb.LeaveRequest(member_id=member_id, incarnation=incarnation, reason=reason)
        await self.call(self.stub.Leave, request, timeout=_LEAVE_SECONDS)

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()


def is_cancelled() -> bool:
    """Whether somebody cancels the running task. Otherwise a CancelledError is of a call: gRPC cancels a stream whose
    requests cannot be made."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class SessionRequests:
    """What a member sends on one Session stream: a hello, heartbeats, and reports between them.

    Reports are sent in order, and at once. Those of a stream that broke are lost.
    """

    def __init__(self) -> None:
        #: None ends the stream.
        self._reports: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self._is_closed = False

    def close(self) -> None:
        """Ends the requests. gRPC does not, where the scheduler has ended the stream."""
        self._is_closed = True
        self._reports.put_nowait(None)

    def send(self, report: pb.SessionRequest) -> None:
        """Sends a report as soon as the stream is open."""
        self._reports.put_nowait(report)

    async def stream(
        self,
        member_id: str,
        incarnation: int,
        heartbeat: Callable[[], pb.SessionRequest.Heartbeat],
        heartbeat_seconds: float,
        *,
        takes_differences: bool = False,
        epoch: int = 0,
        scheduler_id: str = "",
    ) -> AsyncIterator[pb.SessionRequest]:
        """The requests, until ``close``. heartbeat: makes the next one, every ``heartbeat_seconds``. takes_differences:
        whether maps after the first may come as differences. epoch, scheduler_id: of the newest map that it holds."""
        hello = pb.SessionRequest.Hello(
            member_id=member_id,
            incarnation=incarnation,
            takes_differences=takes_differences,
            epoch=epoch,
            scheduler_id=scheduler_id,
        )
        yield pb.SessionRequest(hello=hello)
        clock = asyncio.get_running_loop().time
        next_beat = clock()
        while True:
            if clock() >= next_beat:
                next_beat = clock() + heartbeat_seconds
                try:
                    beat = heartbeat()
                except Exception:  # gRPC would end the stream without a word of it.
                    logger.exception("a heartbeat could not be made")
                    raise
                yield pb.SessionRequest(heartbeat=beat)
            try:
                async with asyncio.timeout_at(next_beat):
                    report = await self._reports.get()
            except TimeoutError:
                continue
            except asyncio.CancelledError:
                # gRPC cancels the task in which it reads these requests, and logs a traceback of what they raise.
                if self._is_closed:
                    return
                raise
            if report is None:
                return
            yield report  # Not inside the timeout, which would cancel whoever writes it to the stream.
