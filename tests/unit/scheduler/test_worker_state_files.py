"""Files that workers hand in: only what was announced stays, and what comes back is that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest
import xxhash

from psdist.errors import InvalidArgumentError, SnapshotCorruptError
from psdist.snapshots.format import Manifest, WorkerState
from psdist.snapshots.opening import open_storage
from psdist.v1 import scheduler_pb2 as pb
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide.effects import Answer
from psdist_scheduler.decide.snapshot_events import StateOffered, StatePlace, StateSource, StateWritten
from psdist_scheduler.run import snapshot_io
from psdist_scheduler.run.open_calls import OpenCalls
from psdist_scheduler.run.scheduler import Scheduler
from psdist_scheduler.run.service import Service

pytestmark = pytest.mark.asyncio
DATA = bytes(range(256)) * 10_000
PLACE = StatePlace("000000000005-1-7-abcdef", "parameters-0000-worker-00001.safetensors", 1)


async def parts(*given: bytes) -> AsyncIterator[bytes]:
    for part in given:
        yield part


def files(path: Path) -> list[Path]:
    return [each for each in path.rglob("*") if each.is_file()]


def header_of(data: bytes) -> pb.HandInStateRequest.Header:
    digest = xxhash.xxh3_128_digest(data)
    return pb.HandInStateRequest.Header(parameters="p", next=5, length=len(data), digest=digest)


def source_of(state: WorkerState) -> StateSource:
    # Of the manifest the directory alone matters here.
    return StateSource(Manifest("run", PLACE.directory, 1, 1.0, "", {}, ()), state)


async def test_a_file_comes_back_as_it_was_handed_in(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    state = await snapshot_io.write_state(storage, PLACE, header_of(DATA), parts(DATA[:1000], b"", DATA[1000:]))
    assert state == WorkerState("p", 1, 5, PLACE.file, len(DATA), xxhash.xxh3_128_hexdigest(DATA))
    first, *others = [message async for message in snapshot_io.read_state(storage, source_of(state))]
    assert (first.length, first.next, first.digest.hex()) == (len(DATA), 5, state.digest)
    assert b"".join(message.part for message in others) == DATA and len(others) == 3
    assert [message async for message in snapshot_io.read_state(None, StateSource())] == [pb.GetStateResponse()]


async def test_nothing_stays_of_another_file(tmp_path: Path) -> None:
    for given in [DATA[:-1], DATA + b"x", b"x" + DATA[1:], b""]:
        with pytest.raises(
            InvalidArgumentError, match="the state of 'p' that arrived is not the one that was announced"
        ):
            await snapshot_io.write_state(open_storage(str(tmp_path)), PLACE, header_of(DATA), parts(given))
        assert not files(tmp_path)


@pytest.mark.parametrize("spoiled", [DATA[:-1], b"x" + DATA[1:], None])
async def test_a_spoiled_file_is_told_by_its_name(tmp_path: Path, spoiled: bytes | None) -> None:
    storage = open_storage(str(tmp_path))
    state = await snapshot_io.write_state(storage, PLACE, header_of(DATA), parts(DATA))
    [path] = files(tmp_path)
    if spoiled is None:
        path.unlink()
    else:
        path.write_bytes(spoiled)
    with pytest.raises(SnapshotCorruptError, match=PLACE.file):
        _ = [message async for message in snapshot_io.read_state(storage, source_of(state))]


class UploadScheduler:
    """Scheduler that wants one file, until it is written."""

    def __init__(self, path: Path) -> None:
        self.storage = open_storage(str(path))
        self.calls = OpenCalls(self.post)
        self.written: list[WorkerState] = []

    def post(self, event: ev.Event) -> None:
        match event:
            case StateOffered():
                file = "" if self.written else PLACE.file
                self.calls.carry_out(Answer(event.call, StatePlace(PLACE.directory, file, PLACE.rank)))
            case StateWritten():
                self.written.append(event.state)


class UploadContext:
    """Stream of a call that hands ``DATA`` in, the second half only after ``arrives`` is set."""

    def __init__(self) -> None:
        self.arrives = asyncio.Event()
        half = len(DATA) // 2
        self._messages = [
            pb.HandInStateRequest(header=header_of(DATA), part=DATA[:half]),
            pb.HandInStateRequest(part=DATA[half:]),
        ]

    async def read(self) -> Any:
        if len(self._messages) < 2:
            await self.arrives.wait()
        return self._messages.pop(0).SerializeToString() if self._messages else grpc.aio.EOF


async def test_a_call_that_repeats_one_in_progress_writes_nothing(tmp_path: Path) -> None:
    """The connection of a call may break while the scheduler still carries the call out."""
    scheduler = UploadScheduler(tmp_path)
    service = Service(cast(Scheduler, scheduler))
    contexts = [UploadContext(), UploadContext()]
    calls = [asyncio.create_task(service.HandInState(None, cast(Any, context))) for context in contexts]
    await asyncio.sleep(0)
    for context in reversed(contexts):
        context.arrives.set()
    await asyncio.gather(*calls)
    assert len(scheduler.written) == 1 and len(files(tmp_path)) == 1
