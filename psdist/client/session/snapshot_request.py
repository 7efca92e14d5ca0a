"""Asking the scheduler for a snapshot, and its answer.

Not here: what servers write (``psdist_server``), reading snapshots (``psdist.snapshots``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from psdist.client.session.scheduler_calls import SchedulerCalls
from psdist.client.session.wait_tracker import Wait
from psdist.v1 import scheduler_pb2 as pb


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


async def save(
    calls: SchedulerCalls,
    request: pb.SaveSnapshotRequest,
    wait: Wait,
    heard: Callable[[], None] = lambda: None,
    *,
    patient: bool = True,
) -> SnapshotInfo:
    """Has the snapshot taken that ``request`` asks for; returns when it is committed.

    heard: called with each word of the scheduler. patient: waits for a scheduler that is away.
    Raises NoStorageError, SnapshotFailedError, StorageError, FencedError, SchedulerUnreachableError if not patient.
    """

    async def handle(response: Any) -> SnapshotInfo | None:
        heard()
        return _info(response) if response.HasField("committed") else None

    take: Callable[[Any], Awaitable[SnapshotInfo | None]] = handle
    return await calls.follow(calls.stub.SaveSnapshot, request, wait, take, patient=patient)


def _info(response: pb.SaveSnapshotResponse) -> SnapshotInfo:
    info = response.committed
    return SnapshotInfo(
        info.directory,
        info.sequence,
        dict(info.steps),
        info.bytes,
        info.time,
        info.seconds,
        info.reason,
        response.unchanged,
    )
