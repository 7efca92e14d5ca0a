"""States of workers on their way into a snapshot and back: a file in parts, to and from the storage.

Invariants: a file is accepted only if its length and digest match its header. At most one part of it is held.

Not here: which state is wanted, and for which snapshot (``worker_states``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import xxhash

from psdist.errors import InvalidArgumentError
from psdist.snapshots import format as layout
from psdist.snapshots import reader
from psdist.snapshots.format import WorkerState
from psdist.snapshots.storage import Storage
from psdist.v1 import scheduler_pb2 as pb
from psdist_scheduler.events.snapshot_events import StatePlace, StateSource

#: Bytes of a message.
_PART_BYTES = 1 << 20


async def write(
    storage: Storage, place: StatePlace, header: pb.HandInStateRequest.Header, parts: AsyncIterator[bytes]
) -> WorkerState:
    """Writes a file, durably. Raises InvalidArgumentError, StorageError; then nothing of it stays."""
    state = WorkerState(
        header.parameters, place.rank, header.next, place.file, header.length, bytes(header.digest).hex()
    )
    digest, length = xxhash.xxh3_128(), 0
    async with storage.writer(layout.file_path(place.directory, place.file)) as file:
        async for part in parts:
            length += len(part)
            if length > header.length:
                break
            digest.update(part)
            await file.write(part)
        if length != header.length or digest.hexdigest() != state.digest:
            raise InvalidArgumentError(
                f"the state of {header.parameters!r} that came is not the one that was announced"
            )
    return state


async def read(storage: Storage | None, source: StateSource) -> AsyncIterator[pb.GetStateResponse]:
    """A file in parts. Raises SnapshotCorruptError, StorageError."""
    state = source.state
    if storage is None or state is None or source.manifest is None:
        yield pb.GetStateResponse()
        return
    yield pb.GetStateResponse(length=state.length, digest=bytes.fromhex(state.digest), next=state.next)
    async for data in reader.read_state(storage, source.manifest, state):
        for start in range(0, len(data), _PART_BYTES):
            yield pb.GetStateResponse(part=data[start : start + _PART_BYTES])
