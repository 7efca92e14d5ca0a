"""Snapshots that a client asks for: with all that its worker has pushed, and, when it leaves, with what it keeps.

Not here: the scheduler's commands to this worker (``snapshot_participant``), reading snapshots (``psdist.snapshots``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

from psdist.client.session.membership import run_in_incarnation
from psdist.client.session.registration import Registration
from psdist.client.session.scheduler_session import WorkerSession
from psdist.errors import FencedError, NoStorageError, PsdistError, WaitTimeoutError
from psdist.v1 import scheduler_pb2

logger = logging.getLogger("psdist")

#: Leaving waits no longer for the snapshot that is taken before.
_LAST_SNAPSHOT_SECONDS: Final = 120.0
#: The same where its script has failed. Others may be busy for longer, and it should be started again.
_FAILED_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A committed snapshot.

    directory: its name below ``snapshots/`` in the run's storage.
    sequence: number of its commit record, ascending in a run.
    steps: by parameters, the step that it was cut before (BSP: updates 0 to step - 1 are in it), or the highest version
        of any slice (SSP, ASP).
    bytes: of all its files. time: when it was committed, in seconds since 1970. seconds: how long it took.
    reason: what it was taken for, such as "on demand".
    unchanged: nothing was trained since it was taken, so that no other was.
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
    def of(cls, response: scheduler_pb2.SaveSnapshotResponse) -> SnapshotInfo:
        """What the scheduler answered, with its last message."""
        info = response.committed
        return cls(
            info.directory, info.sequence, dict(info.steps), info.bytes, info.time, info.seconds, info.reason,
            response.unchanged,
        )  # fmt: skip


class SnapshotRequests:
    """The snapshots that one client asks for.

    quiesce: context managers, in each of which a part of this worker makes no push and has reported all that it made.
    """

    def __init__(
        self, session: WorkerSession, quiesce: Callable[[], Iterable[AbstractAsyncContextManager[None]]]
    ) -> None:
        self._session = session
        self._quiesce = quiesce
        self._closed = False
        #: Snapshots that nobody waits for.
        self.under_way: set[asyncio.Task[SnapshotInfo]] = set()

    async def take(self, timeout: float | None) -> SnapshotInfo:
        """See ``AsyncClient.snapshot``."""
        try:
            async with asyncio.timeout(timeout):
                taken = await run_in_incarnation(lambda: self._take("on demand"), _raise_not_taken)
        except TimeoutError:
            raise WaitTimeoutError(f"no snapshot was committed within {timeout:g} s") from None
        assert taken is not None
        return taken

    async def _take(self, reason: str, *, patient: bool = True) -> SnapshotInfo:
        """A snapshot that has all pushes of this worker, which makes none meanwhile."""
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
        """Has the snapshot taken that ``request`` asks for. Returns when it is committed.

        on_answer: called with each message of the scheduler. patient: waits for a scheduler that is away.
        Raises NoStorageError, SnapshotFailedError, StorageError, FencedError; SchedulerUnreachableError if not patient.
        """
        calls = self._session.calls

        async def handle(response: Any) -> SnapshotInfo | None:
            on_answer()
            return SnapshotInfo.of(response) if response.HasField("committed") else None

        with self._session.waits.open(f"for {calls.peer} to take a snapshot") as wait:
            return await calls.follow(calls.stub.SaveSnapshot, request, wait, handle, patient=patient)

    async def begin(self, timeout: float | None) -> None:
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
        """Whether this worker keeps something that the last snapshot may lack, and has not closed this."""
        session = self._session
        keeps = bool(session.snapshots.states.names) and session.is_heard and not session.stopping.together
        return keeps and not self._closed

    async def take_last(self, *, has_failed: bool = False) -> None:
        """Takes a snapshot before this worker leaves: a later one cannot have the state that it keeps.

        Where all workers end together, that was done. has_failed: the script ends by an error, and should soon.
        """
        if not self.needs_last:
            return
        try:
            async with asyncio.timeout(_FAILED_SECONDS if has_failed else _LAST_SNAPSHOT_SECONDS):
                await self._take("at the end", patient=False)
        except NoStorageError:
            return
        except (PsdistError, TimeoutError) as error:
            logger.warning("what this worker keeps is in no snapshot at the end: %s", error)

    def close(self) -> None:
        """Waits for no snapshot any more. Those that the scheduler knows of are taken all the same."""
        self._closed = True
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


async def _raise_not_taken(fenced: FencedError, _: int) -> bool:
    raise FencedError(f"no snapshot is known to be taken: {fenced.message}. Call it again") from None


async def _itself(mine: Registration) -> Registration:
    return mine
