"""Snapshots in a bucket: against moto's S3 server, a process of its own that speaks HTTP."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

import psdist
from psdist import AsyncClient, optim
from psdist.consistency import BSP
from psdist.errors import SnapshotCorruptError, StorageError, UnknownSnapshotError
from psdist.launch.embedded import EmbeddedCluster
from psdist.snapshots import bucket, reader
from psdist.snapshots import format as layouts
from psdist.snapshots.format import Commit, Manifest, ParametersState, ShardFile
from psdist.snapshots.storage import Storage, open_storage
from psdist.types import Layout, ParametersSpec, TensorSpec


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3 server with the empty bucket "runs"."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:  # It says where it listens once it does.
            if "Running on" in line:
                break
        threading.Thread(target=process.stderr.read, daemon=True).start()  # A line for each request.
        url = f"http://127.0.0.1:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{url}/runs", method="PUT"), timeout=60).close()
        yield url
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture
def storage(server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Storage:
    """An empty storage in the bucket."""
    settings = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "us-east-1", "ALLOW_HTTP": "true"}
    for name, value in (settings | {"ENDPOINT": server}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return open_storage(f"s3://runs/{request.node.name}")


async def write_snapshot(storage: Storage, step: int) -> tuple[Commit, bytes]:
    """A committed snapshot whose weights are ``step`` and up, and the path of its one file."""
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
    commit = Commit(step, "run", directory, 1, 1.0, 1.0, "test", len(data), digest, manifest.steps, manifest.bytes)
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
    monkeypatch.setattr(bucket, "_PART_BYTES", 5 << 20)
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
    """What the server says of uploads that are under way."""
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
        with pytest.raises(StorageError, match=r"in s3://nothing-here/x: .*NoSuchBucket"):
            await attempt


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
