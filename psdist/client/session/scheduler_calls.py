"""Calls to the scheduler: where it is, registration, and calls with retries while it is unreachable.

The scheduler's address and the client's identity come from arguments, the environment, or a file that is waited for.
This process registers as a worker of the run, and again after it was expelled.

Not here: the session that keeps this worker a member (``worker_session``), the meaning of the calls.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final, Literal, TypeVar

import grpc.aio

from psdist.client.session.membership import Registration, WorkerMembership
from psdist.client.session.waits import Wait, WaitTracker
from psdist.errors import (
    ClosedError,
    ConfigurationError,
    DuplicateMemberError,
    FencedError,
    InvalidArgumentError,
    SchedulerUnreachableError,
    ServerUnreachableError,
)
from psdist.link.peer_links import PeerListener
from psdist.security.tls import Credentials, TlsFiles
from psdist.settings.config import ClientSettings, TransportName, client_settings, read_address
from psdist.types import check_name
from psdist.v1 import scheduler_pb2
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire.limits import Backoff
from psdist.wire.scheduler_connection import MemberConnection

T = TypeVar("T")

_POLL_SECONDS: Final = 0.02


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


async def find_target(
    scheduler: str | None,
    token: str | None,
    tls: TlsFiles | Literal[False] | None,
    run_id: str | None,
    worker_id: str | None,
    rank: int | None,
    transport: TransportName | None,
    timeout: float,
) -> tuple[SchedulerTarget, ClientSettings]:
    """Return the scheduler's address with the identity, and the other settings. Arguments are those of ``AsyncClient``.

    timeout: seconds for which to wait for the file.

    Raises InvalidArgumentError, InvalidNameError, ConfigurationError, SchedulerUnreachableError.
    """
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 0):
        raise InvalidArgumentError(f"rank={rank!r} is out of range: use a whole number of 0 or more")
    if worker_id is not None:
        check_name(worker_id, "worker_id")
    # The file is waited for here, where the wait can be cancelled, not by client_settings.
    environ = {name: value for name, value in os.environ.items() if name != "PSDIST_SCHEDULER_FILE"}
    settings = client_settings(environ, scheduler=scheduler, token=token, tls=tls, run_id=run_id, transport=transport)
    address, source = settings.scheduler, "the argument" if scheduler else "PSDIST_SCHEDULER"
    if not address and (file := os.environ.get("PSDIST_SCHEDULER_FILE")):
        address, source = await _await_address(Path(file), timeout), f"the file {file} of PSDIST_SCHEDULER_FILE"
    if not address:
        raise ConfigurationError(
            "no scheduler is named: run the script with 'psdist run script.py', or set PSDIST_SCHEDULER=HOST:PORT, "
            "or pass psdist.Client('HOST:PORT'); psdist.init() starts a cluster of its own where there is none"
        )
    target = SchedulerTarget(
        address,
        source,
        settings.credentials,
        settings.run_id,
        worker_id or settings.worker_id or "",
        settings.rank if rank is None else rank,
        settings.world_size if settings.world_size > 1 or "WORLD_SIZE" in environ else 0,
        settings.host,
    )
    return target, settings


async def _await_address(file: Path, timeout: float) -> str:
    try:
        async with asyncio.timeout(timeout):
            while not (address := read_address(file)):  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise SchedulerUnreachableError(
            f"no scheduler left its address in {file} (PSDIST_SCHEDULER_FILE) within {timeout:g} s: is it running, "
            "with this --address-file?"
        ) from None
    return address


class SchedulerCalls(MemberConnection):
    """Calls of one client. target: the scheduler, and the identity that this client asks for."""

    def __init__(self, target: SchedulerTarget, membership: WorkerMembership, waits: WaitTracker, rng: Random) -> None:
        super().__init__(target.address, target.source, target.credentials, rng)
        self._membership = membership
        self._waits = waits

    async def call_until_answered(
        self, method: Any, make_request: Callable[[], Any], reason: str, incarnation: int | None = None
    ) -> Any:
        """Call ``method``, again while the scheduler cannot be reached.

        make_request: makes the request of each attempt.
        reason: reason of the wait.

        Raises the scheduler's refusal; FencedError if ``incarnation`` has ended, ClosedError.
        """
        backoff = Backoff(self.rng)
        with self._waits.open(reason) as wait:
            while True:
                self._membership.raise_if_expelled(incarnation)
                try:
                    return await self.call(method, make_request())
                except (SchedulerUnreachableError, ClosedError) as error:
                    wait.update_reason(f"for {self.peer} to be back: {error.message}")
                await asyncio.sleep(backoff.next_seconds())

    async def read_until_result(
        self,
        method: Any,
        request: Any,
        wait: Wait,
        handle: Callable[[Any], Awaitable[T | None]],
        *,
        patient: bool = True,
    ) -> T:
        """Read the answers of ``method`` until ``handle`` returns a result, and return that.

        patient: True repeats the request while the scheduler cannot be reached; False raises SchedulerUnreachableError.

        Raises the scheduler's refusal.
        """
        backoff = Backoff(self.rng)
        while True:
            call = method(request, metadata=self.metadata)
            try:
                async for response in call:
                    if reason := getattr(response, "waiting_for", ""):
                        wait.update_reason(reason)
                    if (result := await handle(response)) is not None:
                        return result
            except grpc.aio.AioRpcError as failure:
                error = self.error(failure)
                if not isinstance(error, SchedulerUnreachableError | ClosedError):
                    raise error from None
                if not patient:
                    raise SchedulerUnreachableError(error.message, address=self.address) from None
                wait.update_reason(f"for {self.peer} to be back: {error.message}")
            finally:
                call.cancel()
            self._membership.raise_if_expelled()
            await asyncio.sleep(backoff.next_seconds())

    async def confirm_membership(self, incarnation: int) -> None:
        """Ask the scheduler, however long that takes, if ``incarnation`` has ended. Raises FencedError then.

        A server may learn of that before this client does.
        """
        mine = self._membership.registration
        request = scheduler_pb2.GetClusterMapRequest(run_id=mine.run_id)
        reason = f"for {self.peer} to say whether {mine.worker_id} is still a member"
        response = await self.call_until_answered(self.stub.GetClusterMap, lambda: request, reason, incarnation)
        if not any((w.worker_id, w.incarnation) == (mine.worker_id, incarnation) for w in response.map.workers):
            raise FencedError(f"incarnation {incarnation} of {mine.worker_id} is not in the cluster map any more")


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
