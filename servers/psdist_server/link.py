"""The server's link to the scheduler: registration, the session, and what comes down it.

Heartbeats with counters go up; maps, proposals and news come down and are handed to the host in the order in which they
came. When the session breaks it is opened again with the same incarnation; the data path does not notice. A
scheduler that no longer knows this incarnation ends the server: what it held belongs to nobody any more.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import AsyncIterator
from typing import Final

import grpc
import grpc.aio
import structlog

import psdist
from psdist.errors import FencedError, PsdistError, SchedulerUnreachableError, WrongRunError
from psdist.types import ClusterMap
from psdist.v1 import scheduler_pb2 as pb
from psdist.v1 import scheduler_pb2_grpc
from psdist.wire import auth, channels, convert, limits, status
from psdist_server.host import Host

_log = structlog.get_logger("psdist.server")

_RETRY_MIN_SECONDS: Final = 0.05
_RETRY_MAX_SECONDS: Final = 1.0
_HEARTBEATS_PER_LEASE: Final = 4
_LEAVE_SECONDS: Final = 1.0


class SchedulerLink:
    """One membership of a server.

    address: of the scheduler. advertise: host:port where workers reach this server.
    """

    def __init__(self, address: str, token: str, advertise: str, server_id: str, run_id: str) -> None:
        self._address = address
        self._metadata = auth.metadata(token)
        self._channel = channels.open_channel(address, limits.CONTROL_MESSAGE_BYTES)
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._advertise = advertise
        self.server_id = server_id
        self.run_id = run_id
        self.incarnation = 0
        self._lease_seconds = 2.0
        self._in_session = False
        self._leaving = False
        #: Proposals of earlier sessions: what the first map does not confirm, nobody is left to confirm or withdraw.
        self._stale: set[tuple[str, str]] = set()
        self._up: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()

    async def register(self, timeout_seconds: float) -> ClusterMap:
        """Becomes a member; the cluster map as it is. Retries while nobody answers.

        Raises SchedulerUnreachableError after ``timeout_seconds``, and whatever the scheduler refuses with.
        """
        request = pb.RegisterRequest(
            protocol_version=limits.PROTOCOL_VERSION,
            psdist_version=psdist.__version__,
            run_id=self.run_id,
            role=pb.ROLE_SERVER,
            member_id=self.server_id,
            address=self._advertise,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        answer = await self._register(request, timeout_seconds)
        self.run_id, self.server_id = answer.run_id, answer.member_id
        self.incarnation, self._lease_seconds = answer.incarnation, answer.lease_seconds
        return convert.map_from_proto(answer.map)

    async def _register(self, request: pb.RegisterRequest, timeout_seconds: float) -> pb.RegisterResponse:
        deadline, said = time.monotonic() + timeout_seconds, time.monotonic()
        while True:
            try:
                answer: pb.RegisterResponse = await self._stub.Register(request, metadata=self._metadata, timeout=5)
                return answer
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise status.from_call(error, f"scheduler {self._address}") from None
                reason = error.details()
            if time.monotonic() > deadline:
                raise SchedulerUnreachableError(
                    f"no scheduler answers at {self._address} after {timeout_seconds:.0f} s ({reason}): is "
                    "psdist-scheduler "
                    "running there, and the address (--scheduler or PSDIST_SCHEDULER) right?",
                    address=self._address,
                )
            if time.monotonic() - said > limits.REPORT_WAIT_SECONDS:
                said = time.monotonic()
                _log.warning("waiting for the scheduler", address=self._address, reason=reason)
            await asyncio.sleep(_RETRY_MIN_SECONDS * 2)

    async def run(self, host: Host) -> None:
        """Keeps the session until it is cancelled or left. Raises FencedError or WrongRunError where the scheduler
        does not want this incarnation any more."""
        delay, reason = _RETRY_MIN_SECONDS, ""
        while True:
            self._in_session = False
            try:
                await self._session(host)
            except grpc.aio.AioRpcError as error:
                known = status.from_call(error, f"scheduler {self._address}")
                if isinstance(known, FencedError | WrongRunError):
                    raise known from None
                reason = str(known)
            if self._leaving:
                return
            if self._in_session:  # It stood until now; what follows are attempts, and one line is enough for them.
                delay = _RETRY_MIN_SECONDS
                _log.warning("session broken, trying again", scheduler=self._address, reason=reason)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(_RETRY_MAX_SECONDS, delay * 2)

    async def _session(self, host: Host) -> None:
        self._up, self._stale = asyncio.Queue(), host.proposals
        call = self._stub.Session(self._requests(host), metadata=self._metadata)
        async for response in call:
            await self._handle(response, host)

    async def _requests(self, host: Host) -> AsyncIterator[pb.SessionRequest]:
        hello = pb.SessionRequest.Hello(member_id=self.server_id, incarnation=self.incarnation)
        yield pb.SessionRequest(hello=hello)
        while True:
            statistics = host.statistics()
            waits = sorted({wait for part in statistics.parameters for wait in part.waiting_for})
            beat = pb.SessionRequest.Heartbeat(epoch=host.map.epoch, statistics=statistics, waiting_for=waits)
            yield pb.SessionRequest(heartbeat=beat)
            try:
                async with asyncio.timeout(self._lease_seconds / _HEARTBEATS_PER_LEASE):
                    request = await self._up.get()
            except TimeoutError:
                continue
            yield request  # Not inside the timeout, which would cancel whoever writes it to the stream.

    async def _handle(self, response: pb.SessionResponse, host: Host) -> None:
        match response.WhichOneof("command"):
            case "map":
                await host.follow(convert.map_from_proto(response.map))
                if not self._in_session:
                    self._in_session = True
                    for parameters, worker_id in self._stale:
                        host.withdraw(parameters, worker_id)
            case "join_proposal":
                proposal = response.join_proposal
                member = convert.member_from_proto(proposal.member)
                self._stale.discard((proposal.parameters, member.worker_id))
                accepted, version_max = host.propose(proposal.parameters, member)
                answer = pb.SessionRequest.JoinAnswer(
                    proposal_id=proposal.proposal_id, accepted=accepted, version_max=version_max
                )
                self._up.put_nowait(pb.SessionRequest(join_answer=answer))
            case "join_withdrawn":
                host.withdraw(response.join_withdrawn.parameters, response.join_withdrawn.worker_id)
            case "member_lost":
                lost = response.member_lost
                _log.info("member lost", member=lost.member_id, reason=lost.reason)

    async def leave(self, reason: str) -> None:
        """Ends the membership politely, if the scheduler answers soon."""
        self._leaving = True
        request = pb.LeaveRequest(member_id=self.server_id, incarnation=self.incarnation, reason=reason)
        try:
            await self._stub.Leave(request, metadata=self._metadata, timeout=_LEAVE_SECONDS)
        except (grpc.aio.AioRpcError, PsdistError) as error:
            _log.info("left without a word", reason=str(error))

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()
