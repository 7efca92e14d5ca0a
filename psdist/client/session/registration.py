"""Registration: this process becomes a worker of a run, and again after it was expelled.

Not here: the session that keeps it a member (``worker_session``).
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from psdist.client.session.wait_tracker import WaitTracker
from psdist.errors import ClosedError, DuplicateMemberError, ServerUnreachableError
from psdist.link.peers import PeerListener
from psdist.security.tls import Credentials
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire.backoff import Backoff
from psdist.wire.scheduler_connection import MemberConnection


@dataclass(frozen=True, slots=True)
class SchedulerTarget:
    """Address of the scheduler, and the identity that the client asks for."""

    address: str
    #: Where the address came from, for messages.
    source: str
    credentials: Credentials
    run_id: str = ""
    worker_id: str = ""
    rank: int | None = None
    world_size: int = 0
    #: Name or address by which other workers reach this one; empty for its own address.
    host: str = ""


@dataclass(frozen=True, slots=True)
class Registration:
    """Identity of this client in the run."""

    run_id: str
    worker_id: str
    incarnation: int
    rank: int
    world_size: int
    lease_seconds: float
    heartbeat_seconds: float
    #: True if the scheduler takes heartbeats that lack unchanged counts.
    takes_changes: bool = False

    @classmethod
    def from_response(cls, response: pb.RegisterResponse) -> Registration:
        """Return the registration in the scheduler's answer."""
        return cls(
            response.run_id,
            response.member_id,
            response.incarnation,
            response.rank,
            response.world_size,
            response.lease_seconds,
            response.heartbeat_seconds or response.lease_seconds / 4,
            response.takes_changes,
        )

    def caller(self) -> dict[str, Any]:
        """Return the fields of a request that identify the caller."""
        return {"run_id": self.run_id, "worker_id": self.worker_id, "incarnation": self.incarnation}


class Registrar:
    """Registers one client."""

    def __init__(self, target: SchedulerTarget, version: str, connection: MemberConnection, waits: WaitTracker) -> None:
        self._target = target
        self._version = version
        self._connection = connection
        self._waits = waits
        #: Port for links of other workers.
        self.listener = PeerListener(target.credentials)
        connection.verifier = self.listener.verifier
        #: ``host:port`` of this worker's metrics; empty without.
        self.metrics_address = ""

    async def register(self, timeout: float) -> pb.RegisterResponse:
        """Register for the first time.

        Raises SchedulerUnreachableError after ``timeout`` seconds, and the scheduler's refusal.
        """
        target = self._target
        reason = f"for {self._connection.peer} (from {target.source}) to answer"
        with self._waits.open(reason) as wait:
            await self._listen(timeout)
            request = self._request(target.worker_id, target.rank)
            response = await self._connection.register(
                request, timeout, (ServerUnreachableError,),
                lambda error: wait.update_reason(f"{reason}; last: {error.message}"),
            )  # fmt: skip
        self.listener.registered()
        return response

    async def _listen(self, timeout: float) -> None:
        """Open the port for links of other workers, once the scheduler's name resolves. Registering reports a name that
        never does."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or self._target.world_size)
        backoff = Backoff(self._connection.rng)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while True:
                    with suppress(OSError):
                        await self.listener.open_towards(
                            self._target.address,
                            spans_hosts=here < self._target.world_size,
                            name=self._target.host,
                        )
                        return
                    await asyncio.sleep(backoff.next_seconds())

    def _request(self, worker_id: str, rank: int | None) -> pb.RegisterRequest:
        return pb.RegisterRequest(
            psdist_version=self._version,
            run_id=self._target.run_id,
            role=pb.ROLE_WORKER,
            member_id=worker_id,
            rank=rank,
            world_size=self._target.world_size,
            address=self.listener.address,
        )

    async def register_again(self, mine: Registration) -> pb.RegisterResponse:
        """Register under the same id, however long that takes. Raises the scheduler's refusal."""
        rank: int | None = mine.rank
        backoff = Backoff(self._connection.rng)
        reason = f"for {self._connection.peer} to take {mine.worker_id} back"
        with self._waits.open(reason) as wait:
            while True:
                try:
                    return await self._connection.register_once(self._request(mine.worker_id, rank))
                except (ServerUnreachableError, ClosedError) as error:
                    wait.update_reason(f"{reason}; last: {error.message}")
                except DuplicateMemberError as error:
                    holder = error.details
                    if holder.get("member_id") != mine.worker_id:
                        rank = None  # Another worker has it now.
                    elif (holder.get("host"), holder.get("pid")) != (socket.gethostname(), str(os.getpid())):
                        raise
                    # Otherwise it is this process: its answer was lost. That incarnation soon ends without a session.
                    wait.update_reason(f"{reason}; last: {error.message}")
                await asyncio.sleep(backoff.next_seconds())
