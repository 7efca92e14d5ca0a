"""The client's session with the scheduler: registration, heartbeats, maps and commands.

The data path reports an attempt that broke to ``Reachability``. From then on the server is called again and again, on
the same channel as requests, until it answers or is gone. So a server counts as unreachable exactly as long as calls to
it fail, whatever requests wait for. Heartbeats report such servers, and the scheduler names them and decides what
follows; it also has other workers call the server (``check``).

The session runs in a task of its own. Heartbeats and reports are sent to the scheduler. Maps and news of failures are
passed to ``membership``, commands to ``worker_state`` and ``worker_alignment``. Pushes and pulls do not depend
on it, because they go to the servers.

A client that was expelled (it was silent for longer than its lease, or cut off), or whose run rolled back, registers
again under its id as a new incarnation. Calls of the earlier incarnation end with FencedError, mostly inside the
client: ``push_order`` rejoins and continues.

Not here: requests to servers (``delivery``), the consequences (the scheduler's ``losses``), other calls to the
scheduler (``scheduler_calls``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from psdist.client.core.push_sequence import PushSequence
from psdist.client.session.membership import ClusterView, WorkerMembership
from psdist.client.session.scheduler_calls import Registrar, SchedulerCalls, SchedulerTarget
from psdist.client.session.waits import Activities, WaitTracker
from psdist.client.session.worker_alignment import WorkerAlignment, WorkerShutdown
from psdist.client.session.worker_state import SnapshotParticipant
from psdist.errors import (
    ClosedError,
    FencedError,
    InternalError,
    PermissionDeniedError,
    ProtocolMismatchError,
    PsdistError,
    UnauthenticatedError,
)
from psdist.monitoring.stacks import prepare_dump
from psdist.monitoring.tracing import step_tracer
from psdist.monitoring.worker_reports import ChangedCounts
from psdist.settings.debugging import suspend_time_limits
from psdist.types import ClusterMap, Replica
from psdist.v1 import scheduler_pb2
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert, limits, status
from psdist.wire.scheduler_connection import MemberSession

#: Longest pause between two calls to a server that was not reached.
_PAUSE_SECONDS: Final = 1.0
#: Calls within a worker's lease, at the least: a single call that failed must not expel anybody.
_CALLS_IN_A_LEASE: Final = 4


async def _no_transport(address: str) -> None:
    raise InternalError(f"no transport can call {address} yet")


@dataclass(slots=True)
class _Unreachable:
    """A server that did not answer.

    since: time of the attempt that broke.
    reason: why the newest call failed; empty before the first one.
    """

    since: float
    reason: str = ""


class Reachability:
    """Servers that one client cannot reach. call: calls the server at an address; raises PsdistError if it does not
    answer."""

    def __init__(self, view: ClusterView) -> None:
        self.call: Callable[[str], Coroutine[Any, Any, None]] = _no_transport
        self._view = view
        self._pause_seconds = _PAUSE_SECONDS
        self._unreachable: dict[Replica, _Unreachable] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def set_lease(self, lease_seconds: float) -> None:
        """Derive the pause between calls from this worker's lease."""
        self._pause_seconds = min(_PAUSE_SECONDS, lease_seconds / _CALLS_IN_A_LEASE)

    def attempt_broke(self, server: Replica) -> None:
        """Find out whether a server can be reached after an attempt on it broke."""
        if server not in self._unreachable:
            self._unreachable[server] = _Unreachable(asyncio.get_running_loop().time())
            self._run(self._watch(server, self._unreachable[server]))

    def reason(self, server: Replica) -> str:
        """Return why the newest call to a server failed; empty if none has. It names the cause of failed TLS, which the
        error of an attempt does not."""
        unreachable = self._unreachable.get(server)
        return "" if unreachable is None else unreachable.reason

    def restart(self) -> None:
        """Restart the counts: a new incarnation must not be expelled for reports of the previous one."""
        now = asyncio.get_running_loop().time()
        for one in self._unreachable.values():
            one.since, one.reason = now, ""

    def reports(self) -> list[pb.UnreachableServer]:
        """The servers that did not answer the last call, for a heartbeat."""
        now = asyncio.get_running_loop().time()
        return [
            pb.UnreachableServer(server=convert.replica_to_proto(server), seconds=now - one.since, reason=one.reason)
            for server, one in self._unreachable.items()
            if one.reason
        ][: limits.UNREACHABLE_REPORTED_MAX]

    def check(self, server: Replica, answer: Callable[[bool], None]) -> None:
        """Call the server, and pass True to ``answer`` if it was reached."""

        async def run() -> None:
            answer(not await self.why_unreachable(server))

        self._run(run())

    async def why_unreachable(self, server: Replica) -> str:
        """Call a server. Returns why it was not reached; empty if it was, or if the newest map does not list it."""
        entry = self._view.cluster.server(server.server_id)
        if entry is None or entry.incarnation != server.incarnation:
            return ""
        try:
            await self.call(entry.address)
        except PsdistError as error:
            return error.message
        return ""

    async def close(self) -> None:
        """End all calls."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, server: Replica, unreachable: _Unreachable) -> None:
        try:
            while reason := await self.why_unreachable(server):
                unreachable.reason = reason
                await asyncio.sleep(self._pause_seconds)
        finally:
            del self._unreachable[server]


logger = logging.getLogger("psdist")

#: Longest wait, when leaving, for an incarnation that is being registered.
_SETTLE_SECONDS: Final = 1.0


class WorkerSession(MemberSession):
    """One membership and its parts. ``connect`` once, ``close`` once; everything else in between.

    connections: returns how the open handles reach servers, for heartbeats: server, parameter set, transport and why
        others are not used.
    rejoins: True if it registers again after it was expelled; else that is the end.
    """

    final_errors = (
        *MemberSession.final_errors,
        UnauthenticatedError,
        PermissionDeniedError,
        ProtocolMismatchError,
    )

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
        super().__init__(self.calls)
        self.snapshots = SnapshotParticipant(self.calls, self.membership, self.send)
        #: Program order of the script's pushes, and the pushes that are held back.
        self.alignment = WorkerAlignment(self.send, lambda: self.is_heard)
        self.shutdown = WorkerShutdown(lambda: self.snapshots.marks, self.send, lambda: self.is_heard, self.alignment)
        self.activities = Activities(lambda: self.snapshots.marks, self.waits.group_calls)
        #: Servers that this worker cannot reach.
        self.reachability = Reachability(self.membership.view)
        self.registrar = Registrar(target, version, self.calls, self.waits)
        self._connections = connections
        self._task: asyncio.Task[None] | None = None
        #: Set once a session was accepted, or none can be.
        self._accepted = asyncio.Event()
        #: Counts and connections that the scheduler has from this stream. Later heartbeats lack those unchanged.
        self._counts = ChangedCounts(enabled=False)
        self._reported: scheduler_pb2.Connections | None = None
        #: Time of the last heartbeat, and the longest silence between two of this incarnation, in seconds.
        self._beaten = self._silence = 0.0

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
        suspend_time_limits(suspended=response.time_limits_suspended)
        self.reachability.set_lease(response.lease_seconds)
        self.snapshots.start_incarnation()
        self.alignment.start_incarnation()
        self.membership.start_incarnation(response)
        prepare_dump(response.run_id, response.member_id)

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
        self.reachability.restart()
        logger.warning("%s rejoined as incarnation %d", mine.worker_id, response.incarnation)
        return None

    # --- session ------------------------------------------------------------------------------------------------------

    async def _keep_session(self) -> None:
        """Hold the session open until it is cancelled or the scheduler ends the membership."""
        while True:
            mine = self.membership.registration
            error = await self.hold_session(mine.worker_id, mine.incarnation, mine.heartbeat_seconds)
            if isinstance(error, FencedError) and self.membership.rejoins:
                error = await self._rejoin(error)
                if error is None:
                    continue
            if error is not None:
                peer = self.calls.peer
                logger.error("%s ended the membership of %s: %s", peer, mine.worker_id, error, extra={"peer": peer})
                self.membership.view.on_fatal(error)
            return

    def begin_stream(self) -> ClusterMap:
        self.snapshots.session_began()
        self.shutdown.session_began()
        self.alignment.session_began()
        self._counts = ChangedCounts(enabled=self.membership.registration.takes_changes)
        self._reported = None
        return self.membership.view.cluster

    def end_stream(self) -> None:
        self.waits.trace.session_ended()

    def _session_ended(self, task: asyncio.Task[None]) -> None:
        """End the membership if the session failed by a defect: calls must not wait for news that cannot arrive."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.membership.view.on_fatal(InternalError(f"the session with {self.calls.peer} failed: {error!r}"))
        self._accepted.set()

    def heartbeat(self) -> scheduler_pb2.SessionRequest.Heartbeat:
        now = asyncio.get_running_loop().time()
        self._beaten, self._silence = now, max(self._silence, now - self._beaten)
        connections = scheduler_pb2.Connections(connections=self._connections())
        changed = connections != self._reported
        self._reported = connections
        beat = scheduler_pb2.SessionRequest.Heartbeat(
            epoch=self.membership.view.cluster.epoch,
            waiting_for=self.waits.sentences(),
            connections=connections if changed else None,
            activity=self.activities.report(),
            totals=self.activities.totals(),
            unreachable=self.reachability.reports(),
            metrics_address=self.registrar.metrics_address,
            certificate_not_after=self.calls.credentials.certificate_not_after(),
        )
        self._counts.drop_unchanged(beat)
        return beat

    async def adopt_map(self, cluster: ClusterMap) -> None:
        self.membership.view.on_map(cluster)
        self._accepted.set()

    async def on_command(self, response: scheduler_pb2.SessionResponse) -> PsdistError | None:
        view = self.membership.view
        match response.WhichOneof("command"):
            case "member_lost" if response.member_lost.role == scheduler_pb2.ROLE_SERVER:
                lost = response.member_lost
                logger.warning("%s is lost: %s", lost.member_id, lost.reason, extra={"peer": lost.member_id})
                view.on_server_lost(lost.member_id, lost.reason)
            case "shards_lost":
                view.on_shards_lost(response.shards_lost.parameters, response.shards_lost.text)
            case "snapshot":
                self.snapshots.on_command(response.snapshot)
            case "stop":
                self.shutdown.on_command(response.stop)
            case "check_server":
                self._check_server(convert.replica_from_proto(response.check_server))
            case "trace":
                requests = self.requests
                self.waits.trace.on_command(
                    response.trace, lambda report: requests.send(scheduler_pb2.SessionRequest(trace=report))
                )
            case "notice":
                logger.warning("%s", response.notice.text)
            case "align":
                self.alignment.on_command(response.align)
            case "mutual_wait":
                error = status.from_detail(response.mutual_wait.error)
                self.activities.on_mutual_wait(response.mutual_wait.sequence, error)
            case "check_call":
                if self.activities.holds(response.check_call):
                    self.send(scheduler_pb2.SessionRequest(call_checked=response.check_call))
            case "rolled_back":
                return _rolled_back(response.rolled_back, self.snapshots.marks.sequences)
        return None

    def _check_server(self, server: Replica) -> None:
        """Answer the scheduler, on the session on which it asked, if this worker reaches a server."""
        requests, wired = self.requests, convert.replica_to_proto(server)

        def answer(reached: bool) -> None:
            checked = scheduler_pb2.ServerChecked(server=wired, reached=reached)
            requests.send(scheduler_pb2.SessionRequest(server_checked=checked))

        self.reachability.check(server, answer)

    # --- the end ------------------------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """True if ``connect`` has registered this client."""
        return self._task is not None

    @property
    def is_heard(self) -> bool:
        """True if this client is a member, as far as it knows, and the scheduler answers."""
        view = self.membership.view
        return not self.is_broken and view.fatal is None and view.fenced is None

    async def outlast_stop(self) -> None:
        """Return immediately, unless all workers stop together and this one starts no more pushes. Then return when its
        membership ends.

        Others may leave first, which is no loss that a script should see: its calls wait here until they are cancelled.
        """
        view = self.membership.view
        while self.shutdown.holding and view.fatal is None and view.fenced is None:
            await view.changed()

    async def close(self, reason: str = "closed") -> None:
        """Leave, if the scheduler answers within a second, and close the channel."""
        await self.snapshots.close()
        await self.reachability.close()
        if self._task is not None:
            self.is_leaving = True
            self.waits.trace.end()
            await self._settle()
            if self.membership.view.fatal is None:
                mine = self.membership.registration
                with suppress(PsdistError):
                    await self.calls.leave(mine.worker_id, mine.incarnation, reason, self.activities.totals())
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self.membership.view.on_fatal(
                ClosedError("the client is closed: call psdist.init() again, or make a new client")
            )
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
