"""The client's session with the scheduler: registration, heartbeats, maps and calls.

The session runs in a task of its own. Heartbeats go up; maps and news of failures come down into ``cluster_view``. A
session that breaks is opened again, for ever, with the same incarnation. Pushes and pulls do not notice, because they
go to the servers. What a snapshot needs to know of this worker is answered here at once, whatever the script is doing.

A client that was expelled (it was silent for longer than its lease, or cut off), or whose run rolled back, registers
again under its id as a new incarnation. Calls of the earlier incarnation end with FencedError, mostly inside the
client: ``parameters`` rejoins and goes on.

Not here: the data path (``data_path``), what the calls mean (``async_client``, ``creation``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import grpc
import grpc.aio

from psdist.client.core.snapshot_marks import MarkAnswer, SnapshotMarks
from psdist.client.session.activity import Activities
from psdist.client.session.cluster_view import ClusterView, again
from psdist.client.session.registration import Registrar, Registration, SchedulerTarget
from psdist.client.session.stopping import Stopping
from psdist.client.session.wait_tracker import Wait, WaitTracker
from psdist.client.session.worker_state import StateUploads, WorkerStates
from psdist.errors import (
    ClosedError,
    FencedError,
    InternalError,
    ProtocolMismatchError,
    PsdistError,
    SchedulerUnreachableError,
    ServerUnreachableError,
    UnauthenticatedError,
    WrongRunError,
)
from psdist.types import ClusterMap
from psdist.v1 import scheduler_pb2, scheduler_pb2_grpc
from psdist.wire import auth, channels, convert, limits, status
from psdist.wire.backoff import Backoff

if TYPE_CHECKING:
    from psdist.client.core.push_sequence import PushSequence
    from psdist.client.transport.shm.attachment import SharedMemory

logger = logging.getLogger("psdist")
T = TypeVar("T")

_LEAVE_SECONDS: Final = 1.0
#: After one of these the scheduler will never take this member back.
_FINAL_ERRORS: Final = (FencedError, WrongRunError, UnauthenticatedError, ProtocolMismatchError)


@dataclass(frozen=True, slots=True)
class Expulsion:
    """Why an incarnation of this client ended. rolled_back: because the run went back to a snapshot."""

    reason: str
    rolled_back: bool


class WorkerSession:
    """One membership. ``connect`` once, ``close`` once; everything else in between.

    rejoins: whether it registers anew when it was expelled; else that is the end.
    """

    def __init__(self, target: SchedulerTarget, version: str, rng: random.Random, *, rejoins: bool = True) -> None:
        self.target = target
        self.waits = WaitTracker()
        self.rng = rng
        self.metadata = auth.metadata(target.token)
        self._channel = channels.open_channel(target.address, limits.CONTROL_MESSAGE_BYTES)
        self.stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._registrar = Registrar(target, version, self.stub, self.metadata, self.waits, rng)
        self._session: asyncio.Task[None] | None = None
        self._session_broken = False
        #: A session was accepted, or there will be none.
        self._accepted = asyncio.Event()
        self._leaving = False
        self._rejoins = rejoins
        #: How the incarnation before this one ended.
        self.expulsion = Expulsion("", rolled_back=False)
        #: Time of the last heartbeat, and the longest silence between two of this incarnation, in seconds.
        self._beaten = self._silence = 0.0
        #: What each open handle shares with servers; told in the heartbeats.
        self.shared_memories: list[SharedMemory] = []
        #: The next pushes of all of this worker's parameters.
        self.pushes = SnapshotMarks()
        #: Parameter sets that were ready when this incarnation began: a worker that takes part in them joins a training
        #: under way.
        self.ready_before: frozenset[str] = frozenset()
        self.hand_ins = StateUploads(self, self._tell_failed)
        self.states = WorkerStates(self.hand_ins.put, self._tell_failed)
        #: What goes up the session that is open, besides heartbeats.
        self._reports: asyncio.Queue[scheduler_pb2.SessionRequest] = asyncio.Queue()
        self.stopping = Stopping(self.pushes, self._report_stop, lambda: self.is_heard)
        self.activities = Activities(self.pushes)
        self._registration: Registration | None = None
        self._watch: ClusterView | None = None

    @property
    def peer(self) -> str:
        """The scheduler's name for messages."""
        return f"the scheduler at {self.target.address}"

    @property
    def registration(self) -> Registration:
        """Who this client is. Raises ClosedError before ``connect``."""
        if self._registration is None:
            raise ClosedError("the client is not connected: use it in a with block, or call connect() first")
        return self._registration

    @property
    def watch(self) -> ClusterView:
        """The cluster as last heard of. Raises ClosedError before ``connect``."""
        if self._watch is None:
            raise ClosedError("the client is not connected: use it in a with block, or call connect() first")
        return self._watch

    # --- registration ---

    async def connect(self, timeout: float) -> None:
        """Registers and opens the session: from then on this worker may be busy for as long as its lease.

        Raises SchedulerUnreachableError after ``timeout`` seconds, and what the scheduler refuses with:
        ProtocolMismatchError, WrongRunError, DuplicateMemberError, UnauthenticatedError, LimitExceededError.
        """
        until = asyncio.get_running_loop().time() + timeout
        self._watch = ClusterView(self._start_incarnation(await self._registrar.register(timeout)))
        self._session = asyncio.create_task(self._keep_session(), name="psdist session")
        self._session.add_done_callback(self._session_ended)
        with self.waits.open(f"for {self.peer} to accept the session"):
            try:
                async with asyncio.timeout_at(until):
                    await self._accepted.wait()
            except TimeoutError:
                raise self._registrar.unreachable(
                    timeout, 1, "it registered this worker, but accepted no session"
                ) from None
        self.raise_if_expelled()
        _tell_launcher()

    def _start_incarnation(self, response: scheduler_pb2.RegisterResponse) -> ClusterMap:
        """Takes a registration over; the map that came with it."""
        self._registration = Registration.of(response)
        self._beaten, self._silence = asyncio.get_running_loop().time(), 0.0
        self.pushes.start_incarnation()
        cluster = convert.map_from_proto(response.map) if response.HasField("map") else ClusterMap("", 0)
        self.ready_before = frozenset(entry.spec.name for entry in cluster.parameters if entry.ready)
        return cluster

    # --- a new incarnation ---

    async def _rejoin(self, fenced: FencedError) -> PsdistError | None:
        """Registers anew under the same id. Returns why that cannot be."""
        mine = self.registration
        logger.warning("%s does not count %s any more (%s): joining again", self.peer, mine.worker_id, fenced)
        rolled_back = "rolled_back" in fenced.details
        text = fenced.message.removesuffix("; register again").removesuffix(": register again")  # It does.
        reason = text if rolled_back else f"{text} ({self._silence_text})"
        self.expulsion = Expulsion(reason, rolled_back)
        self.watch.on_fenced(fenced)
        try:
            response = await self._registrar.register_again(mine)
        except PsdistError as error:
            return error
        self.watch.start_incarnation(self._start_incarnation(response))
        logger.warning("%s is in the run again, as its incarnation %d", mine.worker_id, response.incarnation)
        return None

    @property
    def _silence_text(self) -> str:
        """The longest time between two heartbeats of this client, for a message."""
        longest = max(self._silence, asyncio.get_running_loop().time() - self._beaten)
        return f"this process sent no sign of life for up to {longest:.1f} s"

    async def wait_until_rejoined(self, fenced: FencedError, incarnation: int) -> None:
        """After ``fenced`` ended something that this client did as ``incarnation``: returns when the next
        has begun. Raises what ends the membership for good."""
        if not self._rejoins:
            raise again(fenced)
        with self.waits.open(f"for {self.peer} to take {self.registration.worker_id} back"):
            while self.watch.fenced is not None or self.registration.incarnation == incarnation:
                self.raise_if_expelled()
                await self.watch.changed()

    async def confirm_membership(self, incarnation: int) -> None:
        """Asks the scheduler, however long that takes, whether ``incarnation`` has ended: FencedError then.
        For what may mean that, of a server that heard of it earlier than this client."""
        request = scheduler_pb2.GetClusterMapRequest(run_id=self.registration.run_id)
        mine, backoff = self.registration.worker_id, Backoff(self.rng)
        with self.waits.open(f"for {self.peer} to say whether {mine} is still a member"):
            while True:
                self.raise_if_expelled(incarnation)
                try:
                    response = await self.call(self.stub.GetClusterMap, request)
                    break
                except (SchedulerUnreachableError, ClosedError):
                    await asyncio.sleep(backoff.next_seconds())
        if not any((w.worker_id, w.incarnation) == (mine, incarnation) for w in response.map.workers):
            raise FencedError(f"incarnation {incarnation} of {mine} is not in the cluster map any more")

    async def retry_across_incarnations(self, work: Callable[[Registration], Awaitable[T]]) -> T:
        """Runs ``work``, and runs it again as the next incarnation if this one ended meanwhile."""
        while True:
            self.raise_if_expelled()
            mine = self.registration
            try:
                if self.watch.fenced is not None:
                    raise self.watch.fenced
                return await work(mine)
            except FencedError as error:
                await self.wait_until_rejoined(error, mine.incarnation)

    # --- session ---

    async def _keep_session(self) -> None:
        """Holds the session open until it is cancelled or the scheduler says that this member is out."""
        backoff = Backoff(self.rng)
        while True:
            error = await self._session_once(backoff)
            if self._leaving:  # the scheduler ends the session of one that left
                return
            final = isinstance(error, _FINAL_ERRORS)
            if isinstance(error, FencedError) and self._rejoins:
                refused = await self._rejoin(error)
                if refused is None:
                    backoff.reset()
                    continue
                error = refused
            if final:
                logger.error("%s ended the membership of %s: %s", self.peer, self.registration.worker_id, error)
                self.watch.on_fatal(error)
                return
            if not self._session_broken:
                logger.warning("the session with %s broke (%s): trying again; training goes on", self.peer, error)
            self._session_broken = True
            await asyncio.sleep(backoff.next_seconds())

    async def _session_once(self, backoff: Backoff) -> PsdistError:
        """One session stream, to its end. Returns why it ended."""
        mine = self.registration
        self._reports = asyncio.Queue()
        self.tell_kept()
        self.stopping.session_began()
        if (pending_answer := self.pushes.pending_answer) is not None:
            self._tell_marked(*pending_answer)
        call = self.stub.Session(metadata=self.metadata)
        hello = scheduler_pb2.SessionRequest.Hello(member_id=mine.worker_id, incarnation=mine.incarnation)
        beats = asyncio.create_task(self._beat(call, hello), name="psdist heartbeat")
        try:
            async for response in call:
                self._hear(response)
                backoff.reset()
                self._accepted.set()
                if self._session_broken:
                    logger.info("%s is back", self.peer)
                self._session_broken = False
            return SchedulerUnreachableError(f"{self.peer} ended the session")
        except grpc.aio.AioRpcError as failure:
            return status.from_call(failure, self.peer)
        except PsdistError as error:  # A map that cannot be read, or the end of this incarnation.
            return error
        finally:
            beats.cancel()
            call.cancel()

    def _session_ended(self, task: asyncio.Task[None]) -> None:
        """A session that ends by a defect must not let calls wait for news that will not come."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.watch.on_fatal(InternalError(f"the session with {self.peer} failed: {error!r}"))
        self._accepted.set()

    async def _beat(self, call: Any, hello: scheduler_pb2.SessionRequest.Hello) -> None:
        """Sends the hello, then heartbeats until the stream breaks. The reader reports the break."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(scheduler_pb2.SessionRequest(hello=hello))
            told: scheduler_pb2.Connections | None = None
            clock = asyncio.get_running_loop().time
            while True:
                now = clock()
                self._beaten, self._silence = now, max(self._silence, now - self._beaten)
                connections = self._connections()
                beat = scheduler_pb2.SessionRequest.Heartbeat(
                    epoch=self.watch.cluster.epoch,
                    waiting_for=self.waits.sentences(),
                    connections=connections if connections != told else None,
                    activity=self.activities.report(),
                )
                told = connections
                await call.write(scheduler_pb2.SessionRequest(heartbeat=beat))
                while (report := await self._next_report(now + self.registration.heartbeat_seconds)) is not None:
                    await call.write(report)

    async def _next_report(self, until: float) -> scheduler_pb2.SessionRequest | None:
        """What is to be told besides heartbeats; None if that is nothing until the loop's time ``until``."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                return await self._reports.get()
        return None

    def _connections(self) -> scheduler_pb2.Connections:
        """How the open handles reach servers."""
        connections = []
        for shared_memory in self.shared_memories:
            for server_id, transport in shared_memory.transports().items():
                kind, _, reason = transport.partition(": ")
                connections.append(
                    scheduler_pb2.Connection(
                        server_id=server_id, parameters=shared_memory.parameters, transport=kind, reason=reason
                    )
                )
        return scheduler_pb2.Connections(connections=connections)

    def _hear(self, response: scheduler_pb2.SessionResponse) -> None:
        match response.WhichOneof("command"):
            case "map":
                self.watch.on_map(convert.map_from_proto(response.map))
            case "member_lost" if response.member_lost.role == scheduler_pb2.ROLE_SERVER:
                lost = response.member_lost
                logger.warning("%s is lost: %s", lost.member_id, lost.reason)
                self.watch.on_server_lost(lost.member_id, lost.reason)
            case "shards_lost":
                self.watch.on_shards_lost(response.shards_lost.parameters, response.shards_lost.text)
            case "snapshot":
                self._obey(response.snapshot)
            case "stop":
                self.stopping.on_command(response.stop)
            case "mutual_wait":
                error = status.from_detail(response.mutual_wait.error)
                self.activities.on_mutual_wait(response.mutual_wait.sequence, error)
            case "rolled_back":
                raise _rolled_back(response.rolled_back, self.pushes.sessions)

    def _obey(self, command: scheduler_pb2.SnapshotCommand) -> None:
        match command.WhichOneof("kind"):
            case "mark":
                lowest = partial(self.states.mark, command.attempt, self.pushes.sessions, command.mark.steps)
                if (answer := self.pushes.answer(command.attempt, lowest)) is not None:
                    self._tell_marked(command.attempt, answer)
            case "end":
                self.pushes.end(command.attempt)
                self.states.end(command.attempt)
                self.hand_ins.end(command.attempt)

    def tell_kept(self) -> None:
        """Says which parameters this worker keeps a state of."""
        if self.states.names:
            keeps = scheduler_pb2.SnapshotReport.Keeps(parameters=self.states.names)
            self._report_snapshot(scheduler_pb2.SnapshotReport(keeps=keeps))

    def _tell_marked(self, attempt: int, answer: MarkAnswer) -> None:
        marked = scheduler_pb2.SnapshotReport.Marked(next=answer.next, keeps=answer.keeps)
        self._report_snapshot(scheduler_pb2.SnapshotReport(attempt=attempt, marked=marked))

    def _tell_failed(self, attempt: int, error: PsdistError) -> None:
        failed = scheduler_pb2.SnapshotReport.Failed(error=status.to_detail(error))
        self._report_snapshot(scheduler_pb2.SnapshotReport(attempt=attempt, failed=failed))

    def _report_snapshot(self, report: scheduler_pb2.SnapshotReport) -> None:
        self._reports.put_nowait(scheduler_pb2.SessionRequest(snapshot=report))

    def _report_stop(self, report: scheduler_pb2.StopReport) -> None:
        self._reports.put_nowait(scheduler_pb2.SessionRequest(stop=report))

    # --- calls ---

    @property
    def is_connected(self) -> bool:
        """Whether ``connect`` has returned."""
        return self._session is not None

    @property
    def is_heard(self) -> bool:
        """Whether this client is a member, as far as it knows, and the scheduler answers."""
        return not self._session_broken and self.watch.fatal is None and self.watch.fenced is None

    async def follow(
        self,
        method: Any,
        request: Any,
        wait: Wait,
        handle: Callable[[Any], Awaitable[T | None]],
        *,
        patient: bool = True,
    ) -> T:
        """Reads what ``method`` answers ``request`` with until ``handle`` returns something, and returns that.

        Where the scheduler cannot be reached it is asked again, until it is back, or SchedulerUnreachableError is
        raised if not ``patient``. Raises what it refuses with.
        """
        backoff = Backoff(self.rng)
        while True:
            call = method(request, metadata=self.metadata)
            try:
                async for response in call:
                    if reason := getattr(response, "waiting_for", ""):
                        wait.hear(reason)
                    if (result := await handle(response)) is not None:
                        return result
            except grpc.aio.AioRpcError as failure:
                error = status.from_call(failure, self.peer)
                if not isinstance(error, ServerUnreachableError | ClosedError):
                    raise error from None
                if not patient:
                    raise SchedulerUnreachableError(error.message, address=self.target.address) from None
                wait.hear(f"for {self.peer} to be back: {error.message}")
            finally:
                call.cancel()
            self.raise_if_expelled()
            await asyncio.sleep(backoff.next_seconds())

    async def call(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        """One unary call. Raises what the scheduler refuses with, and SchedulerUnreachableError."""
        try:
            return await method(request, metadata=self.metadata, timeout=timeout)
        except grpc.aio.AioRpcError as failure:
            self._raise_mapped(failure)

    def _raise_mapped(self, failure: grpc.aio.AioRpcError) -> NoReturn:
        error = status.from_call(failure, self.peer)
        if isinstance(error, ServerUnreachableError):
            raise SchedulerUnreachableError(error.message, address=self.target.address) from None
        raise error from None

    def raise_if_expelled(self, incarnation: int | None = None) -> None:
        """Raises why this client is no member, if it is none; FencedError if ``incarnation`` has ended."""
        if self.watch.fatal is not None:
            raise again(self.watch.fatal)
        if incarnation is None:
            return
        if self.watch.fenced is not None:
            raise again(self.watch.fenced)
        if incarnation != self.registration.incarnation:
            raise FencedError(f"incarnation {incarnation} of {self.registration.worker_id} does not count any more")

    async def close(self, reason: str = "closed") -> None:
        """Leaves politely, if the scheduler answers within a second, and closes the channel."""
        await self.hand_ins.close()
        if self._session is not None:
            self._leaving = True
            await self._settle()
            if self.watch.fatal is None:
                await self._leave(reason)
            self._session.cancel()
            with suppress(asyncio.CancelledError):
                await self._session
            self.watch.on_fatal(ClosedError("the client is closed"))
        await self._channel.close()

    async def _settle(self) -> None:
        """Returns when an incarnation that is about to begin has begun, so that the newest one leaves: one that
        registers and is not heard of again would be missed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                while self.watch.fenced is not None and self.watch.fatal is None:
                    await self.watch.changed()

    async def _leave(self, reason: str) -> None:
        mine = self.registration
        request = scheduler_pb2.LeaveRequest(member_id=mine.worker_id, incarnation=mine.incarnation, reason=reason)
        with suppress(grpc.aio.AioRpcError):
            await self.stub.Leave(request, metadata=self.metadata, timeout=_LEAVE_SECONDS)


def _rolled_back(news: scheduler_pb2.SessionResponse.RolledBack, sessions: Mapping[str, PushSequence]) -> FencedError:
    """The error that ends this incarnation after a rollback. The log says what is lost."""
    lost = [text for part in news.lost if (text := _lost_steps(part, sessions.get(part.parameters)))]
    logger.warning("%s. Lost: %s", news.text.rstrip("."), ", ".join(lost) or "nothing")
    return FencedError(f"the run went back to snapshot {news.directory}", rolled_back=news.directory)


def _lost_steps(part: scheduler_pb2.SessionResponse.RolledBack.Lost, session: PushSequence | None) -> str:
    """ "steps 12 to 19 of 'mlp'"; empty for none. This worker may know of later ones than the scheduler."""
    first, until = getattr(part, "from"), part.until
    if session is not None and session.synchronous:
        until = max(until, session.step)
    if until <= first:
        return ""
    return f"{f'step {first}' if until == first + 1 else f'steps {first} to {until - 1}'} of {part.parameters!r}"


def _tell_launcher() -> None:
    """Creates the file by which a launcher knows that this worker's script uses psdist."""
    if connected_file := os.environ.get("PSDIST_CONNECTED_FILE"):
        Path(connected_file).touch()
