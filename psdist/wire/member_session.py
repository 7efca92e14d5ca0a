"""Session of a worker or server with the scheduler: one stream after another, for as long as it is a member.

A member sends heartbeats, and reports in between. The scheduler sends maps, news and commands. A stream that breaks is
opened again, forever, with the same incarnation; the data path continues meanwhile. ``worker_session`` and
``server_session`` of the two programs say how a stream begins, make the heartbeats, and carry out commands.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from typing import ClassVar

import grpc.aio

from psdist import map_difference
from psdist.errors import RUN_ENDING, FencedError, InternalError, PsdistError, SchedulerUnreachableError, WrongRunError
from psdist.types import ClusterMap
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert
from psdist.wire.backoff import Backoff
from psdist.wire.scheduler_connection import MemberConnection

logger = logging.getLogger("psdist")


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
        while True:
            peer = connection.peer  # After an error the next one may be another scheduler.
            error = await self._follow_stream(member_id, incarnation, heartbeat_seconds, backoff)
            if self.is_leaving:
                return None
            if isinstance(error, self.final_errors):
                return error
            if not self.is_broken:  # Logged once, not for each further attempt.
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
