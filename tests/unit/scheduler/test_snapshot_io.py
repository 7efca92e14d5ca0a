"""The scheduler's hand on the storage: the order of a commit, lost answers, other schedulers, and files of workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest
import xxhash

from psdist.consistency import BSP
from psdist.errors import (
    ConfigurationError,
    InvalidArgumentError,
    SnapshotCorruptError,
    StorageError,
)
from psdist.optim import SGD
from psdist.snapshots import reader
from psdist.snapshots.format import (
    Manifest,
    ParametersState,
    ShardFile,
    WorkerState,
    commit_path,
    digest_of,
    manifest_path,
)
from psdist.snapshots.opening import open_storage
from psdist.snapshots.storage import StoredFile
from psdist.types import Layout, ParametersSpec, TensorSpec
from psdist.v1 import scheduler_pb2 as pb
from psdist_scheduler import snapshot_io
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import snapshot_events as sn
from psdist_scheduler.decide.effects import Answer
from psdist_scheduler.decide.snapshot_events import StateOffered, StatePlace, StateSource, StateWritten
from psdist_scheduler.scheduler import OpenCalls, Scheduler
from psdist_scheduler.service import Service
from psdist_scheduler.snapshot_io import GARBAGE_SECONDS, SnapshotIo, check_fresh, check_writable, read_history
from tests.support.dict_storage import DictStorage

FILE = b"shard"


class Memory(DictStorage):
    """A storage whose operations do what ``faults`` has for them: "before" fails, "after" is carried out and fails;
    "lie" is acknowledged, and tears a file in half or deletes nothing; "defect" raises what no storage should.

    old: paths of files that are garbage by their age.
    log: operations with their paths.
    """

    def __init__(self) -> None:
        super().__init__()
        self.old: set[str] = set()
        self.faults: dict[str, str] = {}
        self.log: list[str] = []

    def _fault(self, operation: str, path: str, when: str) -> None:
        self.log += [f"{operation} {path}"] if when == "before" else []
        fault = self._found(operation, path)
        if fault == "defect":
            raise KeyError(path)
        if fault == when:
            raise StorageError(f"{operation} {path}: it does not answer")

    def _found(self, operation: str, path: str) -> str:
        return self.faults.get(f"{operation} {path}", self.faults.get(operation, ""))

    async def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        self._fault("read", path, "before")
        return await super().read(path, start, length)

    async def list(self, prefix: str = "") -> list[StoredFile]:
        self._fault("list", prefix, "before")
        now = time.time()
        return [
            replace(one, modified=now - (2 * GARBAGE_SECONDS if one.path in self.old else 0))
            for one in await super().list(prefix)
        ]

    async def create(self, path: str, data: bytes) -> None:
        self._fault("create", path, "before")
        await super().create(path, data[: len(data) // 2] if self._found("create", path) == "lie" else data)
        self._fault("create", path, "after")

    async def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._fault("delete", path, "before")
            if self._found("delete", path) != "lie":
                await super().delete([path])


def manifest(directory: str, run_id: str = "run", step: int = 5) -> Manifest:
    """Return the manifest of a snapshot with one slice."""
    layout = Layout((TensorSpec("w", (4,)),))
    spec = ParametersSpec("mlp", SGD(lr=0.1), BSP(), slice_elements=4)
    file = ShardFile("shard.safetensors", len(FILE), digest_of(FILE), (step,), (digest_of(FILE),))
    state = ParametersState(spec, layout, 1, (), step, (), (file,))
    return Manifest(run_id, directory, 3, 0.0, "on demand", {}, (state,))


def write(number: int, sequence: int = 1) -> sn.WriteCommit:
    """The commit of attempt ``number``."""
    return sn.WriteCommit(number, sequence, manifest(f"dir-{number}-salt"), 0.25)


@asynccontextmanager
async def running(storage: Memory, events: list[Any], salt: str = "salt") -> AsyncIterator[SnapshotIo]:
    """Run a scheduler's ``SnapshotIo``. events: receives the events that it posts."""
    io = SnapshotIo(storage, "run", salt, events.append)
    task = asyncio.create_task(io.run())
    yield io
    await io.idle()
    task.cancel()


def put(io: SnapshotIo, storage: Memory, effect: sn.StorageEffect) -> None:
    """Let an effect be carried out. The shard files of every commit exist."""
    if isinstance(effect, sn.WriteCommit):
        storage.files[f"snapshots/{effect.manifest.directory}/shard.safetensors"] = FILE
    io.put(effect)


def carry_out(storage: Memory, *effects: sn.StorageEffect) -> list[Any]:
    """Carry effects out and return the posted events."""
    events: list[Any] = []

    async def run() -> None:
        async with running(storage, events) as io:
            for effect in effects:
                put(io, storage, effect)

    asyncio.run(run())
    return events


def history(storage: Memory, **settings: Any) -> sn.History:
    """Return the content of the storage."""
    return asyncio.run(read_history(storage, **settings))


def test_a_defect_of_a_storage_does_not_end_all_saving(caplog: pytest.LogCaptureFixture) -> None:
    storage = Memory()
    storage.faults["create commits/000000000001.json"] = "defect"
    failed, committed = carry_out(storage, write(1), write(2, 2))
    assert isinstance(failed, sn.CommitFailed) and failed.attempt == 1 and "KeyError" in failed.text and failed.unsure
    assert isinstance(committed, sn.Committed) and "failed unexpectedly" in caplog.text


# --- committing -------------------------------------------------------------------------------------------------------


def test_the_record_comes_last() -> None:
    storage = Memory()
    (event,) = carry_out(storage, write(1))
    assert isinstance(event, sn.Committed) and event.commit.sequence == 1 and event.commit.seconds >= 0.25
    paths = manifest_path("dir-1-salt"), commit_path(1)
    assert storage.log == [f"{operation} {path}" for path in paths for operation in ("create", "read")]
    assert event.manifest.time > 1e9 and event.manifest.psdist_version
    found = history(storage).newest
    assert found == sn.CommitFound(event.commit, event.manifest)


@pytest.mark.parametrize("which", ["create snapshots/dir-1-salt/manifest.json", f"create {commit_path(1)}"])
def test_an_answer_that_was_lost_is_looked_up(which: str) -> None:
    storage = Memory()
    storage.faults[which] = "after"
    (event,) = carry_out(storage, write(1))
    assert isinstance(event, sn.Committed)


def test_a_manifest_that_cannot_be_written_leaves_nothing() -> None:
    storage = Memory()
    storage.faults["create"] = "before"
    (event,) = carry_out(storage, write(1))
    assert isinstance(event, sn.CommitFailed) and not event.replaced and "the manifest" in event.text
    assert not event.unsure
    assert storage.files == {}


def test_a_manifest_that_the_storage_tore_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_PATIENCE", ())
    storage, path = Memory(), manifest_path("dir-1-salt")
    storage.faults[f"create {path}"] = "lie"
    failed, committed = carry_out(storage, write(1), write(2))
    assert isinstance(failed, sn.CommitFailed) and f"acknowledged {path} with" in failed.text and not failed.unsure
    assert isinstance(committed, sn.Committed) and not any("dir-1" in path for path in storage.files)


def test_a_record_that_the_storage_tore_counts_as_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_PATIENCE", ())
    storage = Memory()
    storage.faults[f"create {commit_path(1)}"] = "lie"
    failed, read, committed = carry_out(storage, write(1), sn.ReadHistory(), write(2, 2))
    assert isinstance(failed, sn.CommitFailed) and failed.unsure and not failed.replaced
    assert f"acknowledged {commit_path(1)} with" in failed.text
    assert isinstance(read, sn.HistoryRead) and read.history is not None and read.history.highest == 1
    assert isinstance(committed, sn.Committed) and history(storage).newest is not None


def test_a_record_of_which_nobody_knows_keeps_its_files() -> None:
    """It may yet appear; the files that it names must then exist."""
    storage = Memory()
    storage.faults = {f"create {commit_path(1)}": "before", f"read {commit_path(1)}": "before"}
    (event,) = carry_out(storage, write(1))
    assert isinstance(event, sn.CommitFailed) and not event.replaced and event.unsure
    assert f"{manifest_path('dir-1-salt')}" in storage.files


async def test_a_record_that_appears_later_is_our_own() -> None:
    storage, events = Memory(), list[Any]()
    storage.faults = {f"create {commit_path(1)}": "after", f"read {commit_path(1)}": "before"}
    async with running(storage, events) as io:
        for number in (1, 2):
            put(io, storage, write(number))
            await io.idle()
            storage.faults = {}
    first, read, second = events
    assert isinstance(first, sn.CommitFailed) and not first.replaced
    assert isinstance(read, sn.HistoryRead) and read.history is not None and read.history.highest == 1
    assert isinstance(second, sn.Committed) and second.commit.sequence == 2
    assert [commit.sequence for commit in (await read_history(storage)).commits] == [2, 1]


def test_another_schedulers_record_ends_it() -> None:
    storage = Memory()
    carry_out(storage, write(7))
    before = dict(storage.files)
    (event,) = carry_out(storage, write(1))
    assert isinstance(event, sn.CommitFailed) and event.replaced and "has taken over" in event.text
    assert not event.unsure
    assert storage.files == before, "the other one's files are untouched, and this one's are gone"


async def test_two_schedulers_on_one_storage_commit_one_snapshot_of_a_number() -> None:
    storage, events = Memory(), list[Any]()
    async with running(storage, events, "one") as one, running(storage, events, "two") as two:
        for number, io in enumerate((one, two)):
            put(io, storage, write(number))
    assert sorted(type(event).__name__ for event in events) == ["CommitFailed", "Committed"]
    assert len((await read_history(storage)).commits) == 1


# --- reading ----------------------------------------------------------------------------------------------------------


def three() -> Memory:
    """Three snapshots."""
    storage = Memory()
    carry_out(storage, *(write(number, number) for number in (1, 2, 3)))
    return storage


def test_the_newest_that_can_be_read_counts() -> None:
    storage = three()
    storage.files[manifest_path("dir-3-salt")] += b" "
    found = history(storage, bad=("dir-2-salt",))
    assert found.newest is not None and found.newest.commit.sequence == 1 and found.highest == 3
    assert len(found.skipped) == 1 and "dir-3-salt" in found.skipped[0]


def test_a_record_that_cannot_be_read_counts_as_taken() -> None:
    storage = three()
    storage.files[commit_path(3)] = b"{}"
    found = history(storage)
    assert found.newest is not None and found.newest.commit.sequence == 2
    assert found.highest == 3 and commit_path(3) in found.skipped[0]


def test_the_base_is_found_besides_the_newest() -> None:
    found = history(three(), base="dir-1-salt")
    assert found.base is not None and found.base.commit.sequence == 1 and history(three(), base="gone").base is None


def test_another_runs_storage_is_refused() -> None:
    storage = three()
    assert history(storage, run_id="run").highest == 3
    with pytest.raises(ConfigurationError, match=r"run 'run', not of 'other': pass --run-id run, or another --storage"):
        history(storage, run_id="other")


def test_a_fresh_run_is_refused_where_there_are_snapshots() -> None:
    check_fresh(history(Memory()), "here")
    with pytest.raises(
        ConfigurationError, match=r"here has 3 snapshots, the newest dir-3-salt \(mlp at step 5\): leave the flag out"
    ):
        check_fresh(history(three()), "here")


def test_a_storage_that_does_not_answer_is_told() -> None:
    storage = three()
    storage.faults["list"] = "before"
    (event,) = carry_out(storage, sn.ReadHistory())
    assert event == sn.HistoryRead(None, event.error) and "it does not answer" in event.error


# --- removing ---------------------------------------------------------------------------------------------------------


def test_the_record_is_deleted_before_its_files() -> None:
    storage = three()
    commits = history(storage).commits
    storage.log.clear()
    (event,) = carry_out(storage, sn.Prune((commits[2], commits[1])))
    deleted = [entry.split()[1] for entry in storage.log if entry.startswith("delete")]
    assert event == sn.Pruned((1, 2)) and deleted[0] == commit_path(1)
    assert deleted.index(commit_path(2)) < deleted.index(manifest_path("dir-2-salt"))
    assert {path.split("/")[1] for path in storage.files if path.startswith("snapshots")} == {"dir-3-salt"}


def test_a_record_that_cannot_be_deleted_keeps_its_files() -> None:
    storage = three()
    commits = history(storage).commits
    storage.faults[f"delete {commit_path(1)}"] = "before"
    before = dict(storage.files)
    (event,) = carry_out(storage, sn.Prune((commits[2], commits[1])))
    assert event.sequences == () and "it does not answer" in event.error and storage.files == before


def test_a_record_that_the_storage_did_not_delete_keeps_its_files() -> None:
    storage = three()
    commits = history(storage).commits
    storage.faults["delete"] = "lie"
    before = dict(storage.files)
    (event,) = carry_out(storage, sn.Prune((commits[2], commits[1])))
    assert event.sequences == () and storage.files == before
    assert f"acknowledged the deletion of {commit_path(1)}, and still has it" in event.error


def test_what_was_given_up_is_removed() -> None:
    storage = three()
    storage.files["snapshots/dir-9-salt/shard.safetensors"] = FILE
    carry_out(storage, sn.RemoveDirectory("dir-9-salt"))
    assert not any("dir-9" in path for path in storage.files) and len(history(storage).commits) == 3


def garbage() -> Memory:
    """Files that no record names: of an attempt under way, of another life, new and old; of a scheduler that tries
    whether it can write, and of one that died of it."""
    storage = three()
    for name in ("under-way-salt", "new-other", "old-other"):
        storage.files[f"snapshots/{name}/shard.safetensors"] = FILE
    for name in ("probe-new", "probe-old"):
        storage.files[f"snapshots/{name}/probe"] = FILE
    storage.old = {"snapshots/old-other/shard.safetensors", "snapshots/under-way-salt/shard.safetensors"}
    storage.old.add("snapshots/probe-old/probe")
    storage.old |= {path for path in storage.files if "dir-" in path}
    return storage


def test_only_garbage_that_nobody_can_want_is_collected() -> None:
    storage = garbage()
    before = set(storage.files)
    carry_out(storage, sn.Prune((), collect=True))
    gone = {"snapshots/old-other/shard.safetensors", "snapshots/probe-old/probe"}
    assert before - set(storage.files) == gone


def test_nothing_is_collected_where_a_record_cannot_be_read() -> None:
    storage = garbage()
    storage.files[commit_path(2)] = b"{}"
    before = dict(storage.files)
    carry_out(storage, sn.Prune((), collect=True))
    assert storage.files == before


async def test_garbage_of_this_life_is_collected_later() -> None:
    """A server may write on for a moment after its attempt was given up."""
    storage, late = Memory(), "snapshots/dir-9-salt/shard.safetensors"
    async with running(storage, []) as io:
        io.put(sn.RemoveDirectory("dir-9-salt"))
        await io.idle()
        storage.files[late] = FILE
        io.put(sn.Prune((), collect=True))
    assert late not in storage.files


def test_what_a_trial_left_is_no_snapshot_and_two_schedulers_may_try_at_a_time() -> None:
    tried: list[str] = []

    class Tried(Memory):
        async def check_writable(self, directory: str) -> None:
            tried.append(directory)
            self.files[f"{directory}/probe"] = FILE

    storage = Tried()
    carry_out(storage, write(1))
    before = history(storage)
    for _ in range(2):
        asyncio.run(check_writable(storage))
    assert len(set(tried)) == 2 and all(directory.startswith("snapshots/probe-") for directory in tried)
    assert history(storage) == before


# --- files that workers hand in ---------------------------------------------------------------------------------------


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


async def test_a_file_whose_reading_back_is_cancelled_can_be_handed_in_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, reads, never = open_storage(str(tmp_path)), asyncio.Event(), asyncio.Event()

    async def read(path: str, start: int = 0, length: int | None = None) -> bytes:
        reads.set()
        await never.wait()
        return b""

    with monkeypatch.context() as patch:
        patch.setattr(storage, "read", read)
        broken = asyncio.create_task(snapshot_io.write_state(storage, PLACE, header_of(DATA), parts(DATA)))
        await reads.wait()
        broken.cancel()
        with pytest.raises(asyncio.CancelledError):
            await broken
    assert not files(tmp_path)
    await snapshot_io.write_state(storage, PLACE, header_of(DATA), parts(DATA))
    assert [path.read_bytes() for path in files(tmp_path)] == [DATA]


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
