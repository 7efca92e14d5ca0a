"""Snapshots that a client asks for: with all that its worker has pushed, and, when it leaves, with what it keeps.

Not here: the scheduler's commands to this worker (``snapshot_participant``), reading snapshots (``psdist.snapshots``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Final

from psdist.client.session import snapshot_request
from psdist.client.session.registration import Registration
from psdist.client.session.scheduler_session import WorkerSession
from psdist.client.session.snapshot_request import SnapshotInfo
from psdist.errors import FencedError, NoStorageError, PsdistError, WaitTimeoutError
from psdist.v1 import scheduler_pb2

logger = logging.getLogger("psdist")

#: Leaving waits no longer for the snapshot that is taken before.
_LAST_SNAPSHOT_SECONDS: Final = 120.0


class SnapshotRequests:
    """The snapshots that one client asks for.

    quiesce: context managers, in each of which a part of this worker makes no push and has reported all that it made.
    """

    def __init__(
        self, session: WorkerSession, quiesce: Callable[[], Iterable[AbstractAsyncContextManager[None]]]
    ) -> None:
        self._session = session
        self._quiesce = quiesce
        #: Snapshots that nobody waits for.
        self.under_way: set[asyncio.Task[SnapshotInfo]] = set()

    async def take(self, timeout: float | None) -> SnapshotInfo:
        """See ``AsyncClient.snapshot``."""
        try:
            async with asyncio.timeout(timeout):
                return await self._take("on demand")
        except FencedError as error:
            raise FencedError(f"no snapshot is known to be taken: {error.message}. Call it again") from None
        except TimeoutError:
            raise WaitTimeoutError(f"no snapshot was committed within {timeout:g} s") from None

    async def _take(self, reason: str, *, patient: bool = True) -> SnapshotInfo:
        """A snapshot that has all pushes of this worker, which makes none meanwhile."""
        session = self._session
        async with AsyncExitStack() as stack:
            for quiesced in self._quiesce():
                await stack.enter_async_context(quiesced)
            mine = await session.membership.retry_across_incarnations(_itself)
            marks = session.snapshots.marks
            request = scheduler_pb2.SaveSnapshotRequest(**mine.caller(), next=marks.next(), reason=reason)
            with session.waits.open(f"for {session.calls.peer} to take a snapshot") as waiting:
                return await snapshot_request.save(session.calls, request, waiting, patient=patient)

    async def begin(self, timeout: float | None) -> None:
        """See ``AsyncClient.request_snapshot``."""
        session = self._session
        request = scheduler_pb2.SaveSnapshotRequest(run_id=session.membership.registration.run_id, reason="on demand")
        accepted = asyncio.Event()

        async def save() -> SnapshotInfo:
            with session.waits.open(f"for {session.calls.peer} to take a snapshot") as waiting:
                return await snapshot_request.save(session.calls, request, waiting, accepted.set)

        task = asyncio.create_task(save(), name="psdist snapshot")
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)
        accepting = asyncio.ensure_future(accepted.wait())
        try:
            await asyncio.wait({task, accepting}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            accepting.cancel()
        if accepted.is_set():
            task.add_done_callback(_log_end)
        elif task.done():
            task.result()
        else:
            task.cancel()
            raise WaitTimeoutError(f"{session.calls.peer} did not answer within {timeout:g} s")

    async def take_last(self) -> None:
        """Takes a snapshot before this worker leaves: a later one cannot have the state that it keeps.

        Where all workers end together, that was done.
        """
        session = self._session
        if not session.snapshots.states.names or not session.is_heard or session.stopping.together:
            return
        try:
            async with asyncio.timeout(_LAST_SNAPSHOT_SECONDS):
                await self._take("at the end", patient=False)
        except NoStorageError:
            return
        except (PsdistError, TimeoutError) as error:
            logger.warning("what this worker keeps is in no snapshot at the end: %s", error)

    def close(self) -> None:
        """Waits for no snapshot any more. Those that the scheduler knows of are taken all the same."""
        for task in self.under_way:
            task.cancel()


def _log_end(task: asyncio.Task[SnapshotInfo]) -> None:
    """Logs how a snapshot ended that nobody waits for."""
    if task.cancelled():
        return
    if (error := task.exception()) is not None:
        logger.warning("no snapshot was taken: %s", error)
    else:
        logger.info("snapshot %s is committed", task.result().directory)


async def _itself(mine: Registration) -> Registration:
    return mine
