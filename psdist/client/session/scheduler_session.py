"""The client's session with the scheduler: registration, heartbeats, maps and commands.

The session runs in a task of its own. Heartbeats and reports are sent to the scheduler. Maps and news of failures are
passed to ``cluster_view``, commands to ``snapshot_participant`` and ``stopping``. A broken session is opened again,
forever, with the same incarnation. Pushes and pulls are not affected, because they go to the servers.

A client that was expelled (it was silent for longer than its lease, or cut off), or whose run rolled back, registers
again under its id as a new incarnation. Calls of the earlier incarnation end with FencedError, mostly inside the
client: ``steps`` rejoins and continues.

Not here: requests to servers (``delivery``), other calls to the scheduler (``scheduler_calls``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from psdist.client.core.push_sequence import PushSequence
from psdist.client.reporting.changed_counts import ChangedCounts
from psdist.client.session.activity import Activities
from psdist.client.session.iterations import Iterations
from psdist.client.session.membership import WorkerMembership
from psdist.client.session.registration import Registrar, SchedulerTarget
from psdist.client.session.scheduler_calls import SchedulerCalls
from psdist.client.session.snapshot_participant import SnapshotParticipant
from psdist.client.session.stopping import Stopping
from psdist.client.session.wait_tracker import WaitTracker
from psdist.errors import (
    RUN_ENDING,
    ClosedError,
    FencedError,
    InternalError,
    PermissionDeniedError,
    ProtocolMismatchError,
    PsdistError,
    SchedulerUnreachableError,
    UnauthenticatedError,
    WrongRunError,
)
from psdist.tracing.otel import step_tracer
from psdist.types import Replica
from psdist.v1 import scheduler_pb2
from psdist.wire import convert, status
from psdist.wire.backoff import Backoff
from psdist.wire.followed_map import FollowedMap
from psdist.wire.member_connection import SessionRequests, is_cancelled

logger = logging.getLogger("psdist")

#: Longest wait, when leaving, for an incarnation that is being registered.
_SETTLE_SECONDS: Final = 1.0
#: Errors after which the scheduler never takes this member back.
_FINAL_ERRORS: Final = (
    *(FencedError, WrongRunError, UnauthenticatedError, PermissionDeniedError, ProtocolMismatchError),
    *RUN_ENDING,
)


class WorkerSession:
    """One membership and its parts. ``connect`` once, ``close`` once; everything else in between.

    connections: returns how the open handles reach servers, for heartbeats: server, parameter set, transport and why
        others are not used.
    rejoins: True if it registers again after it was expelled; else that is the end.
    """

    def __init__(
        self,
        target: SchedulerTarget,
        version: str,
        rng: random.Random,
        connections: Callable[[], Iterable[scheduler_pb2.Connection]],
        *,
        rejoins: bool = True,
    ) -> None:
        self.waits = WaitTracker()
        self.membership = WorkerMembership(f"the scheduler at {target.address}", self.waits, rejoins=rejoins)
        self.calls = SchedulerCalls(target, self.membership, self.waits, rng)
        self.snapshots = SnapshotParticipant(self.calls, self.membership, self._send)
        iterations = Iterations(self._report_progress, lambda: self.is_heard)
        self.stopping = Stopping(lambda: self.snapshots.marks, self._report_stop, lambda: self.is_heard, iterations)
        self.activities = Activities(lambda: self.snapshots.marks, self.membership.view, self.waits.group_calls)
        self.registrar = Registrar(target, version, self.calls, self.waits)
        self._connections = connections
        self._requests = SessionRequests()
        self._task: asyncio.Task[None] | None = None
        self._broken = False
        #: Set once a session was accepted, or none can be.
        self._accepted = asyncio.Event()
        self._leaving = False
        #: Time of the last heartbeat, and the longest silence between two of this incarnation, in seconds.
        self._beaten = self._silence = 0.0

    @property
    def iterations(self) -> Iterations:
        """Program order of the script's pushes, and the pushes that are held back."""
        return self.stopping.iterations

    # --- registration -------------------------------------------------------------------------------------------------

    async def connect(self, timeout: float) -> None:
        """Register and open the session. Returns once missing heartbeats are tolerated for the length of a lease.

        Raises SchedulerUnreachableError after ``timeout`` seconds, and the scheduler's refusal: ProtocolMismatchError,
        WrongRunError, DuplicateMemberError, UnauthenticatedError, PermissionDeniedError, LimitExceededError.
        """
        until = asyncio.get_running_loop().time() + timeout
        self._start_incarnation(await self.registrar.register(timeout))
        self._task = asyncio.create_task(self._keep_session(), name="psdist session")
        self._task.add_done_callback(self._session_ended)
        with self.waits.open(f"for {self.calls.peer} to accept the session"):
            try:
                async with asyncio.timeout_at(until):
                    await self._accepted.wait()
            except TimeoutError:
                raise self.calls.unreachable(timeout, 1, "it registered this worker, but accepted no session") from None
        self.membership.raise_if_expelled()
        mine = self.membership.registration
        if (tracer := step_tracer(mine.run_id, mine.worker_id)) is not None:
            self.waits.phases.add_sink(tracer)
        _tell_launcher()

    def _start_incarnation(self, response: scheduler_pb2.RegisterResponse) -> None:
        self._beaten, self._silence = asyncio.get_running_loop().time(), 0.0
        self.activities.reachability.set_lease(response.lease_seconds)
        self.snapshots.start_incarnation()
        self.iterations.start_incarnation()
        self.membership.start_incarnation(response)

    async def _rejoin(self, fenced: FencedError) -> PsdistError | None:
        """Register again under the same id. Returns the error if the scheduler refuses."""
        mine, peer = self.membership.registration, self.calls.peer
        logger.warning("%s expelled %s (%s); rejoining", peer, mine.worker_id, fenced)
        longest = max(self._silence, asyncio.get_running_loop().time() - self._beaten)
        self.membership.on_expelled(fenced, f"this process sent no sign of life for up to {longest:.1f} s")
        try:
            response = await self.registrar.register_again(mine)
        except PsdistError as error:
            return error
        self._start_incarnation(response)
        self.activities.reachability.restart()
        logger.warning("%s rejoined as incarnation %d", mine.worker_id, response.incarnation)
        return None

    # --- session ------------------------------------------------------------------------------------------------------

    async def _keep_session(self) -> None:
        """Hold the session open until it is cancelled or the scheduler ends the membership."""
        backoff = Backoff.for_session(
            self.calls.rng, self.membership.registration.heartbeat_seconds, has_standby=self.calls.has_standby
        )
        while True:
            peer = self.calls.peer  # After an error the next one may be another scheduler.
            error = await self._session_once(backoff)
            if self._leaving:  # The scheduler ends the session of a worker that left.
                return
            final = isinstance(error, _FINAL_ERRORS)
            if isinstance(error, FencedError) and self.membership.rejoins:
                refused = await self._rejoin(error)
                if refused is None:
                    backoff.reset()
                    continue
                error = refused
            if final:
                mine = self.membership.registration.worker_id
                logger.error(
                    "%s ended the membership of %s: %s", self.calls.peer, mine, error, extra={"peer": self.calls.peer}
                )
                self.membership.view.on_fatal(error)
                return
            if not self._broken:
                logger.warning(
                    "the session with %s broke (%s); reconnecting while training continues",
                    peer,
                    error,
                    extra={"peer": peer},
                )
            self._broken = True
            await asyncio.sleep(backoff.next_seconds())

    async def _session_once(self, backoff: Backoff) -> PsdistError:
        """Run one session stream to its end. Returns why it ended."""
        mine = self.membership.registration
        requests = self._requests = SessionRequests()
        self.snapshots.session_began()
        self.stopping.session_began()
        self.iterations.session_began()
        heartbeat = self._heartbeats()
        cluster = self.membership.view.cluster
        sent = requests.stream(
            mine.worker_id, mine.incarnation, heartbeat, mine.heartbeat_seconds, takes_differences=True,
            epoch=cluster.epoch, scheduler_id=cluster.scheduler_id,
        )  # fmt: skip
        followed = FollowedMap()
        call = self.calls.stub.Session(sent, metadata=self.calls.metadata)
        try:
            async for response in call:
                self._on_response(response, followed)
                backoff.reset()
                self._accepted.set()
                if self._broken:
                    logger.info("%s is back", self.calls.peer, extra={"peer": self.calls.peer})
                self._broken = False
            return SchedulerUnreachableError(f"{self.calls.peer} ended the session")
        except grpc.aio.AioRpcError as failure:
            return self.calls.error(failure)
        except PsdistError as error:  # A map that cannot be read, or the end of this incarnation.
            return error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return InternalError("a heartbeat could not be made")
        finally:
            call.cancel()
            requests.close()
            self.waits.trace.session_ended()

    def _session_ended(self, task: asyncio.Task[None]) -> None:
        """End the membership if the session failed by a defect: calls must not wait for news that cannot arrive."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.membership.view.on_fatal(InternalError(f"the session with {self.calls.peer} failed: {error!r}"))
        self._accepted.set()

    def _heartbeats(self) -> Callable[[], scheduler_pb2.SessionRequest.Heartbeat]:
        """Return a function that makes the heartbeats of one session. Later ones lack counts and connections that have
        not changed."""
        reported: scheduler_pb2.Connections | None = None
        counts = ChangedCounts(enabled=self.membership.registration.takes_changes)

        def heartbeat() -> scheduler_pb2.SessionRequest.Heartbeat:
            nonlocal reported
            now = asyncio.get_running_loop().time()
            self._beaten, self._silence = now, max(self._silence, now - self._beaten)
            connections = scheduler_pb2.Connections(connections=self._connections())
            changed = connections != reported
            reported = connections
            beat = scheduler_pb2.SessionRequest.Heartbeat(
                epoch=self.membership.view.cluster.epoch,
                waiting_for=self.waits.sentences(),
                connections=connections if changed else None,
                activity=self.activities.report(),
                rates=self.activities.throughput.rates(),
                totals=self.activities.totals(),
                unreachable=self.activities.reachability.reports(),
                metrics_address=self.registrar.metrics_address,
                certificate_not_after=self.calls.credentials.certificate_not_after(),
            )
            counts.drop_unchanged(beat)
            return beat

        return heartbeat

    def _on_response(self, response: scheduler_pb2.SessionResponse, followed: FollowedMap) -> None:
        view = self.membership.view
        match response.WhichOneof("command"):
            case "map" | "map_difference":
                view.on_map(followed.apply(response))
            case "member_lost" if response.member_lost.role == scheduler_pb2.ROLE_SERVER:
                lost = response.member_lost
                logger.warning("%s is lost: %s", lost.member_id, lost.reason, extra={"peer": lost.member_id})
                view.on_server_lost(lost.member_id, lost.reason)
            case "shards_lost":
                view.on_shards_lost(response.shards_lost.parameters, response.shards_lost.text)
            case "snapshot":
                self.snapshots.on_command(response.snapshot)
            case "stop":
                self.stopping.on_command(response.stop)
            case "check_server":
                self._check_server(convert.replica_from_proto(response.check_server))
            case "trace":
                requests = self._requests
                self.waits.trace.on_command(
                    response.trace, lambda report: requests.send(scheduler_pb2.SessionRequest(trace=report))
                )
            case "notice":
                logger.warning("%s", response.notice.text)
            case "align":
                self.iterations.on_command(response.align)
            case "mutual_wait":
                error = status.from_detail(response.mutual_wait.error)
                self.activities.on_mutual_wait(response.mutual_wait.sequence, error)
            case "check_call":
                if self.activities.holds(response.check_call):
                    self._send(scheduler_pb2.SessionRequest(call_checked=response.check_call))
            case "rolled_back":
                raise _rolled_back(response.rolled_back, self.snapshots.marks.sequences)

    def _check_server(self, server: Replica) -> None:
        """Answer the scheduler, on the session on which it asked, if this worker reaches a server."""
        requests, wired = self._requests, convert.replica_to_proto(server)

        def answer(reached: bool) -> None:
            checked = scheduler_pb2.ServerChecked(server=wired, reached=reached)
            requests.send(scheduler_pb2.SessionRequest(server_checked=checked))

        self.activities.reachability.check(server, answer)

    def _send(self, request: scheduler_pb2.SessionRequest) -> None:
        self._requests.send(request)

    def _report_stop(self, report: scheduler_pb2.StopReport) -> None:
        self._send(scheduler_pb2.SessionRequest(stop=report))

    def _report_progress(self, report: scheduler_pb2.AlignReport) -> None:
        self._send(scheduler_pb2.SessionRequest(align=report))

    # --- the end ------------------------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """True if ``connect`` has registered this client."""
        return self._task is not None

    @property
    def is_heard(self) -> bool:
        """True if this client is a member, as far as it knows, and the scheduler answers."""
        view = self.membership.view
        return not self._broken and view.fatal is None and view.fenced is None

    async def outlast_stop(self) -> None:
        """Return immediately, unless all workers stop together and this one starts no more pushes. Then return when its
        membership ends.

        Others may leave first, which is no loss that a script should see: its calls wait here until they are cancelled.
        """
        view = self.membership.view
        while self.stopping.holding and view.fatal is None and view.fenced is None:
            await view.changed()

    async def close(self, reason: str = "closed") -> None:
        """Leave, if the scheduler answers within a second, and close the channel."""
        await self.snapshots.close()
        await self.activities.reachability.close()
        if self._task is not None:
            self._leaving = True
            self.waits.trace.end()
            await self._settle()
            if self.membership.view.fatal is None:
                mine = self.membership.registration
                with suppress(PsdistError):
                    await self.calls.leave(mine.worker_id, mine.incarnation, reason)
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self.membership.view.on_fatal(ClosedError("the client is closed"))
        self.registrar.listener.close()
        await self.calls.close()

    async def _settle(self) -> None:
        """Wait for an incarnation that is being registered, so that the newest one leaves. Otherwise the scheduler
        would miss a registered worker that is never heard of again."""
        view = self.membership.view
        with suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_SECONDS):
                while view.fenced is not None and view.fatal is None:
                    await view.changed()


def _rolled_back(news: scheduler_pb2.SessionResponse.RolledBack, sessions: Mapping[str, PushSequence]) -> FencedError:
    """Return the error that ends this incarnation after a rollback. Log what is lost."""
    lost = [text for part in news.lost if (text := _lost_steps(part, sessions.get(part.parameters)))]
    logger.warning("%s. Lost: %s", news.text.rstrip("."), ", ".join(lost) or "nothing")
    return FencedError(f"the run went back to snapshot {news.directory}", rolled_back=news.directory)


def _lost_steps(part: scheduler_pb2.SessionResponse.RolledBack.Lost, session: PushSequence | None) -> str:
    """Return "steps 12 to 19 of 'mlp'"; empty for none. This worker may know of later ones than the scheduler."""
    first, until = getattr(part, "from"), part.until
    if session is not None and session.synchronous:
        until = max(until, session.step)
    if until <= first:
        return ""
    return f"{f'step {first}' if until == first + 1 else f'steps {first} to {until - 1}'} of {part.parameters!r}"


def _tell_launcher() -> None:
    """Create the file that tells the launcher that this worker's script uses psdist."""
    if connected_file := os.environ.get("PSDIST_CONNECTED_FILE"):
        Path(connected_file).touch()
