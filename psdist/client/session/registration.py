"""Registration: this process becomes a worker of a run, and again after it was expelled.

Not here: the session that keeps it a member (``scheduler_session``).
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from psdist.client.session.wait_tracker import WaitTracker
from psdist.errors import (
    ClosedError,
    DuplicateMemberError,
    SchedulerUnreachableError,
    ServerUnreachableError,
)
from psdist.v1 import scheduler_pb2
from psdist.wire import limits, status
from psdist.wire.backoff import Backoff

_NOT_A_SCHEDULER: Final = (grpc.StatusCode.UNIMPLEMENTED,)


@dataclass(frozen=True, slots=True)
class SchedulerTarget:
    """Where the scheduler is and who wants to join."""

    address: str
    #: Where the address came from, for messages.
    source: str
    token: str
    run_id: str = ""
    worker_id: str = ""
    rank: int | None = None
    world_size: int = 0


@dataclass(frozen=True, slots=True)
class Registration:
    """Who this client is in the run."""

    run_id: str
    worker_id: str
    incarnation: int
    rank: int
    world_size: int
    lease_seconds: float
    heartbeat_seconds: float

    @classmethod
    def of(cls, response: scheduler_pb2.RegisterResponse) -> Registration:
        """What the scheduler answered."""
        return cls(
            response.run_id,
            response.member_id,
            response.incarnation,
            response.rank,
            response.world_size,
            response.lease_seconds,
            response.heartbeat_seconds or response.lease_seconds / 4,
        )

    def caller(self) -> dict[str, Any]:
        """The fields of a request that say who calls."""
        return {"run_id": self.run_id, "worker_id": self.worker_id, "incarnation": self.incarnation}


class Registrar:
    """Registers one client. stub: the scheduler's. metadata: of every call."""

    def __init__(
        self, target: SchedulerTarget, version: str, stub: Any, metadata: Any, waits: WaitTracker, rng: random.Random
    ) -> None:
        self._target = target
        self._version = version
        self._stub = stub
        self._metadata = metadata
        self._waits = waits
        self._rng = rng

    @property
    def _peer(self) -> str:
        return f"the scheduler at {self._target.address}"

    async def register(self, timeout: float) -> scheduler_pb2.RegisterResponse:
        """Registers for the first time.

        Raises SchedulerUnreachableError after ``timeout`` seconds, and what the scheduler refuses with.
        """
        attempts, last = 0, "no answer"
        backoff = Backoff(self._rng)
        with self._waits.open(f"for {self._peer} (from {self._target.source}) to answer") as wait:
            try:
                async with asyncio.timeout(timeout):
                    while True:
                        attempts += 1
                        try:
                            return await self._register_once(self._target.worker_id, self._target.rank)
                        except ServerUnreachableError as error:
                            last = error.message
                            wait.update_reason(f"for {self._peer} (from {self._target.source}) to answer; last: {last}")
                        await asyncio.sleep(backoff.next_seconds())
            except TimeoutError:
                raise self.unreachable(timeout, attempts, last) from None

    async def _register_once(self, worker_id: str, rank: int | None) -> scheduler_pb2.RegisterResponse:
        target = self._target
        request = scheduler_pb2.RegisterRequest(
            protocol_version=limits.PROTOCOL_VERSION,
            psdist_version=self._version,
            run_id=target.run_id,
            role=scheduler_pb2.ROLE_WORKER,
            member_id=worker_id,
            rank=rank,
            world_size=target.world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        try:
            response: scheduler_pb2.RegisterResponse = await self._stub.Register(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() in _NOT_A_SCHEDULER:
                raise SchedulerUnreachableError(
                    f"what answers at {target.address} (from {target.source}) is no psdist scheduler: "
                    f"{error.details()}; check the address",
                    address=target.address,
                ) from None
            raise status.from_call(error, self._peer) from None
        return response

    def unreachable(self, timeout: float, attempts: int, last: str) -> SchedulerUnreachableError:
        """The error where no scheduler answered in ``timeout`` seconds. last: how the last attempt ended."""
        target = self._target
        return SchedulerUnreachableError(
            f"no scheduler answered at {target.address} (from {target.source}) in {timeout:g} s and {attempts} "
            f"attempts; the last one: {last}. Is it running, and is this its address? Start one with 'psdist run' or "
            "'psdist-scheduler', or set PSDIST_SCHEDULER=HOST:PORT",
            address=target.address,
            attempts=attempts,
        )

    async def register_again(self, mine: Registration) -> scheduler_pb2.RegisterResponse:
        """Registers under the same id, however long that takes. Raises what the scheduler refuses with."""
        rank: int | None = mine.rank
        backoff = Backoff(self._rng)
        with self._waits.open(f"for {self._peer} to take {mine.worker_id} back") as wait:
            while True:
                try:
                    return await self._register_once(mine.worker_id, rank)
                except (ServerUnreachableError, ClosedError) as error:
                    wait.update_reason(f"for {self._peer} to take {mine.worker_id} back; last: {error.message}")
                except DuplicateMemberError as error:
                    holder = error.details
                    if holder.get("member_id") != mine.worker_id:
                        rank = None  # Another has it now.
                    elif (holder.get("host"), holder.get("pid")) != (socket.gethostname(), str(os.getpid())):
                        raise
                    # Else this very process, by an answer that was lost: that incarnation has no session and ends soon.
                    wait.update_reason(f"for {self._peer} to take {mine.worker_id} back; last: {error.message}")
                await asyncio.sleep(backoff.next_seconds())
