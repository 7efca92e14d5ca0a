"""Calls to the scheduler, with its errors, and retries while it is unreachable.

Not here: the session that keeps this worker a member (``worker_session``), the meaning of the calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, TypeVar

import grpc.aio

from psdist.client.session.membership import WorkerMembership
from psdist.client.session.registration import SchedulerTarget
from psdist.client.session.wait_tracker import Wait, WaitTracker
from psdist.errors import ClosedError, FencedError, SchedulerUnreachableError
from psdist.v1 import scheduler_pb2
from psdist.wire.backoff import Backoff
from psdist.wire.scheduler_connection import MemberConnection

T = TypeVar("T")


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
