"""Snapshots in a bucket, against moto's S3 server, a separate process that speaks HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import psdist
from psdist import AsyncClient, optim
from psdist.consistency import BSP
from psdist.errors import SnapshotCorruptError, SnapshotFailedError, StorageError, UnknownSnapshotError
from psdist.launcher.embedded import EmbeddedCluster
from psdist.snapshots import bucket, reader
from psdist.snapshots import format as layouts
from psdist.snapshots.format import CommitRecord, Manifest, ParametersState, ShardFile
from psdist.snapshots.opening import open_storage
from psdist.snapshots.policy import SavePolicy
from psdist.snapshots.storage import Storage
from psdist.types import Layout, ParametersSpec, TensorSpec
from tests.support.fake_bucket import FakeBucket


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Address of an S3 server with the empty bucket "runs"."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:  # It prints its address once it listens.
            if "Running on" in line:
                break
        threading.Thread(target=process.stderr.read, daemon=True).start()  # One line per request.
        url = f"http://127.0.0.1:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{url}/runs", method="PUT"), timeout=60).close()
        yield url
    finally:
        process.terminate()
        process.communicate(timeout=240)


def _settle(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Set S3's settings for this process and those that it starts."""
    settings = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "us-east-1", "ALLOW_HTTP": "true"}
    for name, value in (settings | {"ENDPOINT": endpoint}).items():
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.fixture
def storage(server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Storage:
    """An empty storage in the bucket."""
    _settle(monkeypatch, server)
    return open_storage(f"s3://runs/{request.node.name}")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBucket]:
    """Server with scripted answers; its bucket is "runs"."""
    with closing(FakeBucket()) as bucket:
        _settle(monkeypatch, bucket.url)
        yield bucket


async def write_snapshot(storage: Storage, step: int) -> tuple[CommitRecord, bytes]:
    """Commit a snapshot whose weights are ``step`` and up. Returns its record, and the path of its one file."""
    directory = layouts.directory_name(step, 1, step, "abcdef")
    spec = ParametersSpec("net", optim.SGD(), BSP(), slice_elements=1 << 16)
    values = (np.arange(100_000) + step).astype(np.float32)
    state = ParametersState(spec, Layout((TensorSpec("w", (100_000,)),)), 1, (), step, (), (_shard(values, step),))
    async with storage.writer(layouts.file_path(directory, state.shards[0].file)) as file:
        await file.write(state.header(0))
        await file.write(values.data)
    manifest = Manifest("run", directory, 1, 1.0, "test", {}, (state,))
    data = manifest.to_bytes()
    await storage.create(layouts.manifest_path(directory), data)
    digest = layouts.digest_of(data)
    commit = CommitRecord(
        step, "run", directory, 1, 1.0, 1.0, "test", len(data), digest, manifest.steps, manifest.bytes
    )
    await storage.create(commit.path, commit.to_bytes())
    return commit, layouts.file_path(directory, state.shards[0].file)


def _shard(values: np.ndarray, step: int) -> ShardFile:
    parts = [values[: 1 << 16].tobytes(), values[1 << 16 :].tobytes()]
    whole = layouts.shard_header([0, 1], [len(part) // 4 for part in parts], ()) + b"".join(parts)
    digests = tuple(layouts.digest_of(part) for part in parts)
    return ShardFile("f.safetensors", len(whole), layouts.digest_of(whole), (step, step), digests)


async def test_a_snapshot_is_written_found_verified_and_loaded(storage: Storage) -> None:
    await write_snapshot(storage, 1)
    commit, _ = await write_snapshot(storage, 2)
    found = await reader.newest(storage)
    assert found is not None and found.commit == commit
    await reader.verify(storage, found.manifest)
    snapshot = psdist.load_snapshot(storage.url)
    np.testing.assert_array_equal(snapshot["w"], np.arange(100_000, dtype=np.float32) + 2)
    assert psdist.load_snapshot(storage.url, step=1)["w"][0] == 1


async def test_damage_is_found_and_the_snapshot_before_taken(storage: Storage) -> None:
    await write_snapshot(storage, 1)
    commit, path = await write_snapshot(storage, 2)
    data = bytearray(await storage.read(path))
    await storage.delete([path])
    data[-1] ^= 1
    await storage.create(path, bytes(data))
    with pytest.raises(SnapshotCorruptError, match=r"f.safetensors is not what was written: slice 1"):
        await reader.verify(storage, await reader.load_manifest(storage, commit))
    with pytest.warns(RuntimeWarning, match="slice 1 has another digest"):
        assert psdist.load_snapshot(storage.url)["w"][0] == 1
    await storage.delete([path])
    found = await reader.newest(storage)
    assert found is not None and found.commit.sequence == 1 and "missing" in found.skipped[0]


async def test_of_several_schedulers_one_commits(storage: Storage) -> None:
    records = [b"%d" % number for number in range(8)]
    results = await asyncio.gather(*(storage.create("commits/1", data) for data in records), return_exceptions=True)
    assert [type(result) for result in results].count(FileExistsError) == 7
    winner = await storage.read("commits/1")
    assert records.index(winner) == results.index(None)
    await storage.create("commits/1", winner)  # The same again: as a request whose answer was lost.
    with pytest.raises(FileExistsError, match="commits/1 exists already in s3://runs/"):
        await storage.create("commits/1", b"another")


async def test_large_files_go_in_parts_and_what_was_begun_is_taken_back(
    storage: Storage, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "PART_BYTES", 5 << 20)
    piece = np.arange(1 << 18, dtype=np.float32)
    async with storage.writer("snapshots/d/large") as file:
        for _ in range(7):
            await file.write(piece.data)
            piece += 1
    assert (await storage.list())[0].size == 7 << 20
    for number in (0, 6):
        part = np.frombuffer(await storage.read("snapshots/d/large", number << 20, 1 << 20), np.float32)
        np.testing.assert_array_equal(part, np.arange(1 << 18, dtype=np.float32) + number)
    with pytest.raises(RuntimeError):
        async with storage.writer("snapshots/d/broken") as file:
            for _ in range(7):
                await file.write(piece.data)
            raise RuntimeError
    assert [stored.path for stored in await storage.list()] == ["snapshots/d/large"]
    assert b"<Upload>" not in await asyncio.to_thread(_uploads, server), "its parts would be paid for"


def _uploads(server: str) -> bytes:
    """Return the server's list of unfinished uploads."""
    with urllib.request.urlopen(f"{server}/runs?uploads", timeout=60) as answer:
        content: bytes = answer.read()
        return content


async def test_parts_lists_and_deletion(storage: Storage) -> None:
    await storage.create("commits/1", b"0123456789")
    await storage.create("snapshots/d/x", b"")
    assert await storage.read("commits/1", 8, 5) == b"89"
    assert await storage.read("commits/1", 10, 5) == await storage.read("commits/1", 12) == b""
    assert [stored.path for stored in await storage.list("snapshots")] == ["snapshots/d/x"]
    await storage.delete(["commits/1", "none"])
    assert [stored.path for stored in await storage.list()] == ["snapshots/d/x"]
    with pytest.raises(UnknownSnapshotError, match="there is no commits/1 in s3://runs/"):
        await storage.read("commits/1")


async def test_a_bucket_that_is_not_there_is_a_storage_error(storage: Storage) -> None:
    missing = open_storage("s3://nothing-here/x")
    for attempt in (missing.read("a"), missing.list(), missing.create("a", b"")):
        with pytest.raises(StorageError, match=r"in s3://nothing-here/x: .*NoSuchBucket.*; create the bucket"):
            await attempt
    with pytest.raises(StorageError, match=r"nothing-here/x cannot be written: .*NoSuchBucket.*; create the bucket"):
        await missing.check_writable("snapshots/probe")


async def test_whether_a_bucket_takes_files_is_seen_without_a_trace(storage: Storage) -> None:
    await asyncio.gather(*(storage.check_writable(f"snapshots/probe-{number}") for number in range(4)))
    assert await storage.list() == []


async def test_who_may_not_write_is_told_and_who_may_not_delete_can_save(fake: FakeBucket) -> None:
    storage = open_storage("s3://runs/x")
    fake.answer = lambda verb: 403 if verb == "PUT" else 0
    with pytest.raises(StorageError, match=r"s3://runs/x cannot be written: .*; check the credentials"):
        await storage.check_writable("snapshots/probe")
    assert await storage.list() == [] and not fake.objects
    fake.answer = lambda verb: 403 if verb == "DELETE" else 0
    await storage.check_writable("snapshots/probe")
    assert list(fake.objects) == ["/runs/x/snapshots/probe/probe"]


@pytest.mark.parametrize("when", ["PART", "COMPLETE"])
async def test_of_an_upload_that_is_cancelled_nothing_comes_later(fake: FakeBucket, when: str) -> None:
    asked, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def answer(verb: str) -> int:
        if verb == when:
            loop.call_soon_threadsafe(asked.set)
            go_on.wait()
        return 0

    fake.answer = answer

    async def upload() -> None:
        async with open_storage("s3://runs/x").writer("snapshots/d/large") as file:
            for _ in range(25):
                await file.write(bytes(1 << 20))

    task = asyncio.create_task(upload())
    await asked.wait()
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    # Uploads that the caller believes to be gone are gone, and nothing is left that would make them again.
    assert not fake.objects and not fake.uploads


async def test_a_bucket_that_loses_a_part_of_a_file_leaves_the_snapshot_before(fake: FakeBucket) -> None:
    policy, url, size = SavePolicy(0, 0.0, keep_last=1), "s3://runs/x", 100_000
    with closing(EmbeddedCluster(storage=url, run_id="lossy", policy=policy)) as cluster:
        async with AsyncClient(cluster.address, cluster.token) as client:
            net = await client.parameters("net", {"w": np.zeros(size, np.float32)}, optim.SGD(lr=1.0), BSP())
            await client.snapshot(timeout=60)
            fake.stored = lambda path, data: data[: len(data) // 2] if "-of-" in path else data
            await net.push_pull({"w": np.ones(size, np.float32)})
            with pytest.raises(SnapshotFailedError, match=r"acknowledged snapshots/.*safetensors with"):
                await client.snapshot(timeout=60)
            assert psdist.load_snapshot(url)["w"][-1] == 0, "the snapshot before is still there"
            fake.stored = lambda path, data: data
            assert (await client.snapshot(timeout=60)).steps == {"net": 1}
    assert psdist.load_snapshot(url)["w"][-1] == -1


async def test_a_bucket_that_does_not_answer_does_not_delay_the_end_of_a_server(fake: FakeBucket) -> None:
    asked, answers = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hang(path: str, data: bytes) -> bytes:
        if "-of-" in path:
            loop.call_soon_threadsafe(asked.set)
            answers.wait()
        return data

    fake.stored = hang
    with closing(EmbeddedCluster(storage="s3://runs/x", run_id="hangs")) as cluster:
        async with AsyncClient(cluster.address, cluster.token) as client:
            await client.parameters("net", {"w": np.zeros(100_000, np.float32)}, optim.SGD(lr=1.0), BSP())
            saving = asyncio.create_task(client.snapshot(timeout=60))
            await asked.wait()
            saving.cancel()
            server = cluster.processes[1]
            server.terminate()
            assert await asyncio.to_thread(server.wait, 30) == 0
    answers.set()


@pytest.mark.long
async def test_a_run_saves_to_a_bucket_and_goes_on_from_it(storage: Storage) -> None:
    spec = optim.Adam(lr=0.1)
    weights = []
    for life in range(2):
        with closing(EmbeddedCluster(servers=2 - life, storage=storage.url, run_id="bucket")) as cluster:
            async with AsyncClient(cluster.address, cluster.token) as client:
                net = await client.parameters("net", {"w": np.ones(70_000, np.float32)}, spec, BSP())
                assert net.step == life
                weights.append((await net.pull())["w"].copy())
                await net.push_pull({"w": np.arange(70_000, dtype=np.float32)})
                weights.append((await net.pull())["w"].copy())
                assert (await client.snapshot(timeout=60)).steps == {"net": life + 1}
    np.testing.assert_array_equal(weights[1], weights[2])
    np.testing.assert_array_equal(psdist.load_snapshot(storage.url)["w"], weights[3])
    found = await reader.newest(storage)
    assert found is not None
    await reader.verify(storage, found.manifest)


def test_an_interrupt_does_not_wait_for_a_bucket_that_does_not_answer(fake: FakeBucket) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def answer(verb: str) -> int:
        asked.set()
        go_on.wait()
        return 404

    fake.answer = answer
    process = subprocess.Popen(
        [*_SNAPSHOT, "list", "s3://runs/x"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert asked.wait(60)
        process.send_signal(signal.SIGINT)
        assert process.wait(25) == 130, "its requests take 30 s, and are made five times"
    finally:
        go_on.set()
        process.kill()
        process.wait()


_LOAD = "import psdist, sys; assert len(psdist.load_snapshot(sys.argv[1])) == 1"
_SNAPSHOT = (sys.executable, "-m", "psdist.cli.main", "snapshot")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["list", "show", "verify", "export", "delete", "load"])
async def test_processes_that_used_a_bucket_end_as_they_should(storage: Storage, what: str, tmp_path: Path) -> None:
    """Check processes that end right after their last operation, when a thread may still be about to deliver a
    result."""
    runs = 40
    for step in range(1, runs + 2):
        if what == "delete" or step <= 2:
            await write_snapshot(storage, step)

    def end(number: int) -> int:
        command = [*_SNAPSHOT, what, storage.url]
        if what == "export":
            command += ["--out", str(tmp_path / f"{number}.safetensors")]
        if what == "delete":
            command += ["--step", str(number + 1), "--yes"]
        if what == "load":
            command = [sys.executable, "-c", _LOAD, storage.url]
        return subprocess.run(command, stdout=subprocess.DEVNULL, env=dict(os.environ), check=False).returncode

    with ThreadPoolExecutor(3) as pool:
        statuses = await asyncio.to_thread(lambda: Counter(pool.map(end, range(runs))))
    assert statuses == {0: runs}
