"""One barrier of one client. Arrivals are numbered, so that none is lost and none counts twice.

A worker may never learn that it passed: the answer is lost, its time limit ends, or it is expelled while it waits. So
each arrival carries the number of rounds that the worker knows it has passed. A scheduler that has completed one more
lets it pass immediately. A worker that gives up withdraws its arrival before the call returns. Otherwise the other
workers could pass while it does not wait.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from psdist.client.session.membership import Registration, run_in_incarnation
from psdist.client.session.waits import Wait
from psdist.client.session.worker_session import WorkerSession
from psdist.errors import FencedError, PsdistError, WaitTimeoutError
from psdist.settings.debugging import time_limit
from psdist.v1 import scheduler_pb2 as pb

#: Longest wait for the scheduler to confirm a withdrawal.
WITHDRAW_SECONDS: Final = 5.0


class Barrier:
    """The barrier ``name``."""

    def __init__(self, session: WorkerSession, name: str) -> None:
        self._calls = session.calls
        self._membership = session.membership
        self._waits = session.waits
        self._activities = session.activities
        self._outlast_stop = session.outlast_stop
        self._name = name
        self._origin = session.membership.registration.incarnation
        self._passed = 0
        self._attempt = 0
        self._turn = asyncio.Lock()

    async def reach(self, timeout: float | None) -> None:
        """See ``AsyncClient.barrier``.

        The scheduler waits for no worker that has left: when all stop together, passing means nothing.
        """
        timeout = time_limit(timeout)
        try:
            await run_in_incarnation(lambda: self._reach(timeout), self._raise_not_reached)
        except WaitTimeoutError:
            await self._outlast_stop()
            raise
        await self._outlast_stop()

    async def _raise_not_reached(self, fenced: FencedError, _: int) -> bool:
        raise FencedError(f"barrier {self._name!r} was not reached: {fenced.message}") from None

    async def _reach(self, timeout: float | None) -> None:
        with self._waits.open(f"for the others at barrier {self._name!r}") as wait:
            arrives = False
            try:
                async with asyncio.timeout(timeout):
                    async with self._turn:
                        arrives = True
                        self._attempt += 1
                        await self._arrive(wait, limited=timeout is not None)
                        self._passed += 1
            except TimeoutError:
                sentence = f"barrier {self._name!r}: {wait.sentence}"
                if not arrives:  # Another call of this client has arrived: there is nothing to withdraw.
                    raise WaitTimeoutError(sentence) from None
                await self._give_up(sentence)

    async def _arrive(self, wait: Wait, *, limited: bool) -> None:
        async def released(mine: Registration) -> bool:
            with self._activities.waits(limited=limited, call=True) as waits:
                request = self._request(mine, activity=waits.activity)
                return await self._calls.read_until_result(self._calls.stub.Barrier, request, wait, handle)

        async def handle(response: Any) -> bool | None:
            return True if response.released else None

        await self._membership.retry_across_incarnations(released)

    def _request(self, mine: Registration, **more: Any) -> pb.BarrierRequest:
        return pb.BarrierRequest(
            **mine.caller(),
            name=self._name,
            origin=self._origin,
            passed=self._passed,
            attempt=self._attempt,
            **more,
        )

    async def _give_up(self, sentence: str) -> None:
        """Withdraw the arrival. Raises WaitTimeoutError unless the barrier had already opened."""

        async def withdrawn(mine: Registration) -> bool:
            request = self._request(mine, withdraw=True)
            return await self._calls.read_until_result(self._calls.stub.Barrier, request, wait, handle)

        async def handle(response: Any) -> bool | None:
            return bool(response.withdrawn) if response.withdrawn or response.released else None

        try:
            with self._waits.open(f"for {self._calls.peer} to take back the arrival at {self._name!r}") as wait:
                async with asyncio.timeout(WITHDRAW_SECONDS), self._turn:
                    does_not_count = await self._membership.retry_across_incarnations(withdrawn)
                    self._passed += not does_not_count
        except (TimeoutError, PsdistError) as error:
            reason = error.message if isinstance(error, PsdistError) else f"{self._calls.peer} does not answer"
            raise WaitTimeoutError(
                f"{sentence}. Whether the others have passed is not known ({reason}): the next call finds out"
            ) from None
        if does_not_count:
            raise WaitTimeoutError(sentence)
