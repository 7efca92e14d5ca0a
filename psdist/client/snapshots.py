"""Snapshots that a client asks for: with every push of its worker, and with its worker-local state when it leaves.

Not here: the scheduler's commands to this worker (``session.worker_state``), reading snapshots (``psdist.snapshots``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

from psdist.client.session.membership import Registration, run_in_incarnation
from psdist.client.session.worker_session import WorkerSession
from psdist.errors import FencedError, NoStorageError, PsdistError, WaitTimeoutError
from psdist.settings.debugging import time_limit
from psdist.v1 import scheduler_pb2

logger = logging.getLogger("psdist")

#: Longest wait for the last snapshot when leaving.
_LAST_SNAPSHOT_SECONDS: Final = 120.0
#: The same after the script failed: it should be restarted soon, and other workers may be busy for longer.
_FAILED_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A committed snapshot.

    directory: its name below ``snapshots/`` in the run's storage.
    sequence: number of its commit record, ascending in a run.
    steps: by parameters, the step that it was cut before (BSP: it contains updates 0 to step - 1), or the highest
        version of any slice (SSP, ASP).
    bytes: size of all its files.
    time: when it was committed, in seconds since 1970.
    seconds: how long it took.
    reason: why it was taken, such as "on demand".
    unchanged: True if nothing was trained since it was taken, so that no other was.
    """

    directory: str
    sequence: int
    steps: dict[str, int]
    bytes: int
    time: float
    seconds: float
    reason: str
    unchanged: bool = False

    @classmethod
    def from_response(cls, response: scheduler_pb2.SaveSnapshotResponse) -> SnapshotInfo:
        """Return the snapshot in the scheduler's last message."""
        info = response.committed
        return cls(
            info.directory, info.sequence, dict(info.steps), info.bytes, info.time, info.seconds, info.reason,
            response.unchanged,
        )  # fmt: skip


class SnapshotRequests:
    """Snapshots that one client asks for.

    quiesce: returns context managers. In each of them a part of this worker pushes nothing, and has reported all of its
        pushes.
    """

    def __init__(
        self, session: WorkerSession, quiesce: Callable[[], Iterable[AbstractAsyncContextManager[None]]]
    ) -> None:
        self._session = session
        self._quiesce = quiesce
        self._closed = False
        #: Snapshots that no caller waits for.
        self.under_way: set[asyncio.Task[SnapshotInfo]] = set()

    async def take(self, timeout: float | None) -> SnapshotInfo:
        """See ``AsyncClient.snapshot``."""
        timeout = time_limit(timeout)
        try:
            async with asyncio.timeout(timeout):
                taken = await run_in_incarnation(lambda: self._take("on demand"), _raise_not_taken)
        except TimeoutError:
            raise WaitTimeoutError(f"no snapshot was committed within {timeout:g} s") from None
        assert taken is not None
        return taken

    async def _take(self, reason: str, *, patient: bool = True) -> SnapshotInfo:
        """Take a snapshot with every push of this worker, which pushes nothing meanwhile."""
        session = self._session
        async with AsyncExitStack() as stack:
            for quiesced in self._quiesce():
                await stack.enter_async_context(quiesced)
            mine = await session.membership.retry_across_incarnations(_itself)
            marks = session.snapshots.marks
            request = scheduler_pb2.SaveSnapshotRequest(**mine.caller(), next=marks.next(), reason=reason)
            return await self._save(request, lambda: None, patient=patient)

    async def _save(
        self, request: scheduler_pb2.SaveSnapshotRequest, on_answer: Callable[[], None], *, patient: bool = True
    ) -> SnapshotInfo:
        """Request a snapshot by ``request``. Returns when it is committed.

        on_answer: called with each message of the scheduler.
        patient: wait while the scheduler is unreachable.

        Raises NoStorageError, SnapshotFailedError, StorageError, FencedError; SchedulerUnreachableError if not patient.
        """
        calls = self._session.calls

        async def handle(response: Any) -> SnapshotInfo | None:
            on_answer()
            return SnapshotInfo.from_response(response) if response.HasField("committed") else None

        with self._session.waits.open(f"for {calls.peer} to take a snapshot") as wait:
            return await calls.read_until_result(calls.stub.SaveSnapshot, request, wait, handle, patient=patient)

    async def request(self, timeout: float | None) -> None:
        """See ``AsyncClient.request_snapshot``."""
        session = self._session
        request = scheduler_pb2.SaveSnapshotRequest(run_id=session.membership.registration.run_id, reason="on demand")
        accepted = asyncio.Event()
        task = asyncio.create_task(self._save(request, accepted.set), name="psdist snapshot")
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

    @property
    def needs_last(self) -> bool:
        """True if this worker keeps state that the last snapshot may lack, and ``close`` was not called."""
        session = self._session
        keeps = bool(session.snapshots.states.names) and session.is_heard and not session.shutdown.together
        return keeps and not self._closed

    async def take_last(self, *, has_failed: bool = False) -> None:
        """Take a snapshot before this worker leaves, because later ones cannot contain its state.

        Does nothing in a coordinated shutdown, which has taken one. has_failed: the script ends by an error, and should
        end soon.
        """
        if not self.needs_last:
            return
        try:
            async with asyncio.timeout(_FAILED_SECONDS if has_failed else _LAST_SNAPSHOT_SECONDS):
                await self._take("at the end", patient=False)
        except NoStorageError:
            return
        except (PsdistError, TimeoutError) as error:
            logger.warning("the state of this worker is in no snapshot at the end: %s", error)

    def close(self) -> None:
        """Stop waiting for snapshots. Those that the scheduler knows of are still taken."""
        self._closed = True
        for task in self.under_way:
            task.cancel()


def _log_end(task: asyncio.Task[SnapshotInfo]) -> None:
    """Log how a snapshot ended that no caller waits for."""
    if task.cancelled():
        return
    if (error := task.exception()) is not None:
        logger.warning("no snapshot was taken: %s", error)
    else:
        logger.info("snapshot %s is committed", task.result().directory)


async def _raise_not_taken(fenced: FencedError, _: int) -> bool:
    raise FencedError(f"no snapshot is known to be taken: {fenced.message}. Call it again") from None


async def _itself(mine: Registration) -> Registration:
    return mine
