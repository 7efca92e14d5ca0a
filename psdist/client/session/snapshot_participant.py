"""This worker's part in snapshots: it answers the scheduler's commands immediately, whatever the script is doing.

It joins the numbers of the next pushes (``SnapshotMarks``) and the worker-local states (``WorkerStates``), which it
hands to the scheduler as files (``StateUploads``), and fetches again.

Not here: asking for a snapshot (``snapshots``), the servers' part.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import xxhash

from psdist.client.core.push_sequence import MarkAnswer, SnapshotMarks
from psdist.client.session.membership import WorkerMembership, drop_when_fenced, run_in_incarnation
from psdist.client.session.scheduler_calls import SchedulerCalls
from psdist.client.session.waits import WaitTracker
from psdist.client.session.worker_state import State, WorkerStates
from psdist.errors import InternalError, PsdistError, SnapshotFailedError
from psdist.off_loop import in_thread
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import limits, status

logger = logging.getLogger("psdist")

_PART_BYTES: Final = 1 << 20


@dataclass
class LocalProgress:
    """Local steps that a worker has made, and how many of them the servers have."""

    made: int = 0
    contributed: int = 0


class SnapshotParticipant:
    """Snapshots of one client. send: puts a report on the session."""

    def __init__(
        self, calls: SchedulerCalls, membership: WorkerMembership, send: Callable[[pb.SessionRequest], None]
    ) -> None:
        #: Next pushes of all parameter sets of this incarnation.
        self.marks = SnapshotMarks()
        self._uploads = StateUploads(calls, membership, self._report_failed)
        self.states = WorkerStates(self._uploads.put, self._report_failed)
        self._send = send
        #: Progress of the models that this worker trains by local steps.
        self.local: list[LocalProgress] = []

    def start_incarnation(self) -> None:
        """Replace the marks: the snapshot attempts of the previous incarnation were abandoned."""
        self.marks = SnapshotMarks(self.marks.dropped)

    def session_began(self) -> None:
        """Report again, because the previous session may have lost it."""
        self.report_kept()
        if (pending_answer := self.marks.pending_answer) is not None:
            self._report_marked(*pending_answer)

    def on_command(self, command: pb.SnapshotCommand) -> None:
        """Carry out a command of the scheduler."""
        match command.WhichOneof("kind"):
            case "mark":
                lowest = partial(self.states.mark, command.attempt, self.marks.sequences, command.mark.steps)
                if (answer := self.marks.answer(command.attempt, lowest)) is not None:
                    self._report_marked(command.attempt, answer)
            case "end":
                self.marks.end(command.attempt)
                self.states.end(command.attempt)
                self._uploads.end(command.attempt)

    def report_kept(self) -> None:
        """Report the parameter sets for which this worker keeps a state."""
        if self.states.names:
            self._report(pb.SnapshotReport(keeps=pb.SnapshotReport.Keeps(parameters=self.states.names)))

    async def close(self) -> None:
        """Cancel the uploads under way."""
        await self._uploads.close()

    def _report_marked(self, attempt: int, answer: MarkAnswer) -> None:
        marked = pb.SnapshotReport.Marked(next=answer.next, keeps=answer.keeps)
        self._report(pb.SnapshotReport(attempt=attempt, marked=marked))

    def _report_failed(self, attempt: int, error: PsdistError) -> None:
        failed = pb.SnapshotReport.Failed(error=status.to_detail(error))
        self._report(pb.SnapshotReport(attempt=attempt, failed=failed))

    def _report(self, report: pb.SnapshotReport) -> None:
        self._send(pb.SessionRequest(snapshot=report))


# --- states in files --------------------------------------------------------------------------------------------------


class StateUploads:
    """Uploads of states to the scheduler. failed: called with the attempt and the error if one is refused."""

    def __init__(
        self, calls: SchedulerCalls, membership: WorkerMembership, failed: Callable[[int, PsdistError], None]
    ) -> None:
        self._calls = calls
        self._membership = membership
        self._failed = failed
        #: By parameters. A newer attempt's replaces an older's.
        self._tasks: dict[str, tuple[int, asyncio.Task[None]]] = {}

    def put(self, attempt: int, parameters: str, before: int, state: State) -> None:
        """Upload a state, in a task."""
        self.end(attempt - 1, parameters)
        task = asyncio.create_task(self._send(attempt, parameters, before, state), name="psdist state")
        self._tasks[parameters] = attempt, task

    def end(self, attempt: int, parameters: str | None = None) -> None:
        """Cancel the uploads of an attempt that is over."""
        for name, (number, task) in list(self._tasks.items()):
            if number <= attempt and parameters in (None, name):
                task.cancel()
                del self._tasks[name]

    async def close(self) -> None:
        """Cancel all uploads."""
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, attempt: int, parameters: str, before: int, state: State) -> None:
        try:  # The snapshot attempt ends with the incarnation.
            await run_in_incarnation(lambda: self._hand_in(attempt, parameters, before, state), drop_when_fenced)
        except PsdistError as error:
            logger.warning("the state of %r was refused for the snapshot: %s", parameters, error)
            self._failed(attempt, error)
        except Exception as error:  # The scheduler would wait for a state that does not come.
            logger.exception("the state of %r cannot be handed in for the snapshot", parameters)
            text = f"the state of {parameters!r} cannot be handed in: {type(error).__name__}: {error}"
            self._failed(attempt, SnapshotFailedError(text))

    async def _hand_in(self, attempt: int, parameters: str, before: int, state: State) -> None:
        data = await in_thread(lambda: _to_bytes(state))
        mine = self._membership.registration
        header = pb.HandInStateRequest.Header(
            **mine.caller(), attempt=attempt, parameters=parameters, next=before, length=len(data),
            digest=xxhash.xxh3_128_digest(data),
        )  # fmt: skip
        reason = f"for {self._calls.peer} to take the state of {parameters!r} for a snapshot"
        method = self._calls.stub.HandInState
        await self._calls.call_until_answered(method, lambda: _parts(header, data), reason, mine.incarnation)


async def fetch_state(
    calls: SchedulerCalls, membership: WorkerMembership, waits: WaitTracker, parameters: str
) -> State:
    """Return the state that the worker of this rank handed in for the snapshot from which the parameter set began;
    empty if there is none.

    Raises SnapshotCorruptError, StorageError, FencedError.
    """
    request = pb.GetStateRequest(**membership.registration.caller(), parameters=parameters)
    with waits.open(f"for {calls.peer} to give the state of {parameters!r} back") as wait:
        received = _Received()
        data = await calls.read_until_result(calls.stub.GetState, request, wait, received.on_part)
    return await asyncio.to_thread(_from_bytes, data) if data else {}


class _Received:
    """Parts of a file. The first message of a new stream discards those of a broken one."""

    def __init__(self) -> None:
        self._data, self._length, self._digest = bytearray(), 0, b""

    async def on_part(self, response: Any) -> bytes | None:
        """Add a part. Returns the whole file with its last part."""
        if response.digest:
            if response.length > limits.STATE_BYTES_MAX:
                raise InternalError(f"the scheduler has a state of {response.length} bytes")
            self._data, self._length, self._digest = bytearray(), response.length, response.digest
        self._data += response.part
        if len(self._data) < self._length:
            return None
        data = bytes(self._data)
        if data and (len(data) != self._length or xxhash.xxh3_128_digest(data) != self._digest):
            raise InternalError("the state that came is not the one that was handed in")
        return data


def _to_bytes(state: State) -> bytes:
    from safetensors.numpy import save

    return bytes(save({name: np.ascontiguousarray(array) for name, array in state.items()}))


def _from_bytes(data: bytes) -> State:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return dict(load(data))
    except SafetensorError as error:
        raise InternalError(f"the state that came cannot be read: {error}") from None


async def _parts(header: pb.HandInStateRequest.Header, data: bytes) -> AsyncIterator[pb.HandInStateRequest]:
    yield pb.HandInStateRequest(header=header, part=data[:_PART_BYTES])
    for start in range(_PART_BYTES, len(data), _PART_BYTES):
        yield pb.HandInStateRequest(part=data[start : start + _PART_BYTES])
