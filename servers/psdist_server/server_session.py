"""The server's session with the scheduler: registration, heartbeats, and commands.

The server sends heartbeats with counters. The scheduler sends maps, proposals and news, which are passed to the server
in order of arrival. The server ends when the scheduler no longer knows this incarnation, because its shards then belong
to other servers.
"""

from __future__ import annotations

import asyncio
from random import Random

import grpc.aio
import structlog

import psdist
from psdist.errors import DuplicateMemberError, PsdistError, SchedulerUnreachableError, ServerUnreachableError
from psdist.monitoring.stacks import prepare_dump
from psdist.security.tls import Credentials
from psdist.security.tokens import Verifier
from psdist.types import ClusterMap
from psdist.v1 import common_pb2
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert, limits, status
from psdist.wire.scheduler_connection import MemberConnection, MemberSession
from psdist_server.core.contributions import EqualReport
from psdist_server.server import ParameterServer, ServerRegistration
from psdist_server.snapshots import LoadReport, ShardLoaded, ShardLoadFailed
from psdist_server.store.replicator import ReplicaReport

#: Longest time for a standby scheduler to lead, and the pause between two attempts to reach it.
_TAKEOVER_SECONDS = 10.0
_RETRY_SECONDS = 0.1

logger = structlog.get_logger("psdist.server")


class ServerSession(MemberSession):
    """The membership of one server.

    address: address of the scheduler.
    advertise: host:port at which workers reach this server.
    rng: randomizes pauses between attempts.
    verifier: checks this server's callers. It receives its key from the scheduler.
    """

    #: Given to ``run``.
    _server: ParameterServer

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        advertise: str,
        server_id: str,
        run_id: str,
        rng: Random | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        super().__init__(MemberConnection(address, "--scheduler or PSDIST_SCHEDULER", credentials, rng or Random()))
        self.connection.verifier = verifier
        self._advertise = advertise
        self.registration = ServerRegistration(run_id, server_id)
        #: Set when the scheduler reports that no worker is left and the training result is saved.
        self.run_ended = asyncio.Event()
        #: True while the session is open and its first map has been adopted.
        self.in_session = False
        #: Set when ``in_session`` changes.
        self.session_changed = asyncio.Event()
        #: ``host:port`` of this server's metrics; empty without.
        self.metrics_address = ""
        #: Proposals of earlier sessions. Those that the first map does not confirm are withdrawn.
        self._stale: set[tuple[str, str]] = set()
        #: Reports sent in this session.
        self._reported: set[ReplicaReport | LoadReport | EqualReport] = set()

    async def register(self, timeout_seconds: float) -> ClusterMap:
        """Register this server. Returns the current cluster map. Retries while no scheduler answers.

        Raises SchedulerUnreachableError after ``timeout_seconds``, and any error with which the scheduler refuses.
        """
        request = pb.RegisterRequest(
            psdist_version=psdist.__version__,
            run_id=self.registration.run_id,
            role=pb.ROLE_SERVER,
            member_id=self.registration.server_id,
            address=self._advertise,
        )
        now = asyncio.get_running_loop().time
        logged_at = now()

        def on_failure(error: PsdistError) -> None:
            nonlocal logged_at
            if now() - logged_at > limits.REPORT_WAIT_SECONDS:
                logged_at = now()
                logger.warning("waiting for the scheduler", peer=self.connection.address, reason=error.message)

        # The scheduler may not have noticed yet that an earlier process with this id ended.
        retried = (ServerUnreachableError, DuplicateMemberError)
        answer = await self.connection.register(request, timeout_seconds, retried, on_failure)
        self.registration = ServerRegistration(
            answer.run_id,
            answer.member_id,
            answer.incarnation,
            answer.lease_seconds,
            answer.heartbeat_seconds,
            answer.storage,
        )
        prepare_dump(answer.run_id, answer.member_id)
        return convert.map_from_proto(answer.map)

    async def run(self, server: ParameterServer) -> None:
        """Maintain the session until it is cancelled or left. Raises FencedError or WrongRunError if the scheduler
        rejects this incarnation, and an error of RUN_ENDING if the run cannot continue."""
        self._server, mine = server, self.registration
        error = await self.hold_session(mine.server_id, mine.incarnation, mine.heartbeat_seconds)
        if error is not None:
            raise error

    def begin_stream(self) -> ClusterMap:
        server, requests = self._server, self.requests
        self._stale, self._reported = server.proposals, set()
        server.report_to(self._send_reports, lambda report: requests.send(pb.SessionRequest(snapshot=report)))
        return server.admission.map

    def end_stream(self) -> None:
        self.in_session = False
        self.session_changed.set()
        self._server.snapshot_writer.session_ended()
        self._server.trace.session_ended()

    def _send_reports(self) -> None:
        """Send the reports that are new in this session. The scheduler may have missed those of an earlier one."""
        reports = self._server.reports()
        self._reported.intersection_update(reports)
        for report in reports:
            if report not in self._reported:
                self._reported.add(report)
                self.send(_report_message(report))

    def heartbeat(self) -> pb.SessionRequest.Heartbeat:
        self._send_reports()
        server, credentials = self._server, self.connection.credentials
        statistics = server.statistics()
        return pb.SessionRequest.Heartbeat(
            epoch=server.admission.map.epoch,
            statistics=statistics,
            waiting_for=sorted({wait for part in statistics.parameters for wait in part.waiting_for}),
            snapshot=server.snapshot_progress(),
            metrics_address=self.metrics_address,
            certificate_not_after=0.0 if credentials.tls is None else credentials.certificate_not_after(),
            heard=[
                common_pb2.WorkerIncarnation(worker_id=worker_id, incarnation=incarnation, age_seconds=age)
                for worker_id, incarnation, age in server.admission.take_heard()
            ],
        )

    async def adopt_map(self, cluster: ClusterMap) -> None:
        await self._server.adopt_map(cluster)
        if not self.in_session:
            self.in_session = True
            self.session_changed.set()
            for parameters, worker_id in self._stale:
                self._server.withdraw(parameters, worker_id)

    async def on_command(self, response: pb.SessionResponse) -> PsdistError | None:
        server = self._server
        match response.WhichOneof("command"):
            case "join_proposal":
                proposal = response.join_proposal
                member = convert.member_from_proto(proposal.member)
                self._stale.discard((proposal.parameters, member.worker_id))
                accepted, version_max = server.propose(proposal.parameters, member)
                answer = pb.SessionRequest.JoinAnswer(
                    proposal_id=proposal.proposal_id, accepted=accepted, version_max=version_max
                )
                self.send(pb.SessionRequest(join_answer=answer))
            case "check_values":
                asked = response.check_values
                installed = server.installed_slices(asked.parameters)
                values_answer = pb.SessionRequest.ValuesAnswer(number=asked.number, installed=installed)
                self.send(pb.SessionRequest(values_answer=values_answer))
            case "join_withdrawn":
                server.withdraw(response.join_withdrawn.parameters, response.join_withdrawn.worker_id)
            case "member_lost":
                lost = response.member_lost
                logger.info("member lost", peer=lost.member_id, reason=lost.reason)
            case "shards_lost":
                logger.error("shards lost", text=response.shards_lost.text)
            case "snapshot":
                server.snapshot_writer.command(response.snapshot)
            case "trace":
                requests = self.requests
                server.trace.on_command(response.trace, lambda report: requests.send(pb.SessionRequest(trace=report)))
            case "rolled_back":
                logger.warning("rolled back", text=response.rolled_back.text)
            case "run_ended":
                logger.info("the run has ended")
                self.run_ended.set()
        return None

    async def drain(self, timeout_seconds: float) -> None:
        """Ask the scheduler to move all shards away from this server. Returns when it holds none, when none can be
        moved, or after ``timeout_seconds``. Does nothing if that is 0.

        If there are several schedulers, it asks until one leads: a server whose end they learn of only by its silence
        stops training for a lease.
        """
        if not timeout_seconds:
            return
        clock = asyncio.get_running_loop().time
        until = clock() + timeout_seconds
        asked_until = clock() + (min(timeout_seconds, _TAKEOVER_SECONDS) if self.connection.has_standby else 0.0)
        while (error := await self._drain_once(until - clock())) is not None:
            if not isinstance(error, SchedulerUnreachableError) or clock() >= asked_until:
                logger.warning("not drained", reason=error.message)
                return
            await asyncio.sleep(_RETRY_SECONDS)

    async def _drain_once(self, timeout_seconds: float) -> PsdistError | None:
        """Follow the draining of this server at one scheduler. Returns the error if that fails."""
        request = pb.DrainRequest(run_id=self.registration.run_id, server_id=self.registration.server_id)
        try:
            stub, metadata = self.connection.stub, self.connection.metadata
            async for progress in stub.Drain(request, metadata=metadata, timeout=timeout_seconds):
                if progress.drained:
                    return None
                logger.info("draining", shards_left=progress.shards_left, waiting_for=progress.waiting_for)
        except grpc.aio.AioRpcError as failure:
            return self.connection.error(failure)
        return None

    async def leave(self, reason: str) -> None:
        """End the membership. Waits at most a second for the scheduler's answer."""
        self.is_leaving = True
        try:
            await self.connection.leave(self.registration.server_id, self.registration.incarnation, reason)
        except PsdistError as error:
            logger.info("left; the scheduler did not answer", reason=str(error))

    async def close(self) -> None:
        """Close the channel."""
        await self.connection.close()


convert.register(common_pb2.ErrorDetail, status.to_detail, status.from_detail)


def _report_message(report: ReplicaReport | LoadReport | EqualReport) -> pb.SessionRequest:
    match report:
        case EqualReport():
            equal = convert.make_message(pb.SessionRequest.EqualContributions, report)
            return pb.SessionRequest(equal_contributions=equal)
        case ReplicaReport("filled"):
            return pb.SessionRequest(replica_filled=convert.make_message(pb.ReplicaFilled, report))
        case ReplicaReport():
            return pb.SessionRequest(replica_unreachable=convert.make_message(pb.ReplicaUnreachable, report))
        case ShardLoaded(shard=shard, term=term):
            loaded = convert.make_message(pb.SnapshotReport.Loaded, report, shards=[shard], terms=[term])
            return pb.SessionRequest(snapshot=pb.SnapshotReport(loaded=loaded))
        case ShardLoadFailed():
            failed = convert.make_message(pb.SnapshotReport.LoadFailed, report)
            return pb.SessionRequest(snapshot=pb.SnapshotReport(load_failed=failed))
