"""Storages: their promises to the snapshots in them. No name leads out of a storage."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psdist.errors import ConfigurationError, InvalidNameError, StorageError, UnknownSnapshotError
from psdist.snapshots.opening import open_storage
from psdist.snapshots.storage import LocalStorage, LocalWriter, Storage

FILE = "snapshots/d/f.safetensors"


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Return an empty storage."""
    return open_storage(str(tmp_path / "a/b") if request.param == "local" else f"memory://{secrets.token_hex(4)}")


@pytest.fixture
def disk(tmp_path: Path) -> LocalStorage:
    """Return an empty local storage whose directory exists."""
    return LocalStorage(str(tmp_path))


async def write(storage: Storage, path: str, *parts: Any) -> None:
    async with storage.writer(path) as file:
        for part in parts:
            await file.write(part)


async def paths(storage: Storage, prefix: str = "") -> list[str]:
    return [stored.path for stored in await storage.list(prefix)]


# --- every storage ----------------------------------------------------------------------------------------------------


async def test_what_was_written_is_read(storage: Storage) -> None:
    buffer = bytearray(b"abc")
    async with storage.writer(FILE) as file:
        for _ in range(3):
            await file.write(buffer)
            buffer[:] = b"def"
        await file.write(memoryview(b""))
        await file.write(np.arange(2, dtype=np.float32).data)
    assert await storage.read(FILE) == b"abcdefdef" + np.arange(2, dtype=np.float32).tobytes()
    [stored] = await storage.list()
    assert (stored.path, stored.size) == (FILE, 17)
    assert stored.modified > 1.6e9


async def test_parts_are_read(storage: Storage) -> None:
    await storage.create("x", b"0123456789")
    assert await storage.read("x", 3, 4) == b"3456"
    assert await storage.read("x", 8) == b"89"
    assert await storage.read("x", 8, 5) == b"89"
    assert await storage.read("x", 10, 5) == await storage.read("x", 99, 1) == await storage.read("x", 2, 0) == b""
    await storage.create("empty", b"")
    assert await storage.read("empty") == await storage.read("empty", 0, 5) == b""


async def test_lists_are_of_directories(storage: Storage) -> None:
    for path in ("commits/1", "commits/2", "commits2/3", "snapshots/d/x", "snapshots/e/y"):
        await storage.create(path, b"1")
    assert await paths(storage) == ["commits/1", "commits/2", "commits2/3", "snapshots/d/x", "snapshots/e/y"]
    assert await paths(storage, "commits") == ["commits/1", "commits/2"]
    assert await paths(storage, "snapshots") == ["snapshots/d/x", "snapshots/e/y"]
    assert await paths(storage, "none") == await paths(storage, "snapshots/f") == []


async def test_of_several_that_create_a_file_one_succeeds(storage: Storage) -> None:
    results = await asyncio.gather(
        *(storage.create("commits/1", b"%d" % number) for number in range(20)), return_exceptions=True
    )
    lost = [result for result in results if result is not None]
    assert len(lost) == 19 and all(isinstance(result, FileExistsError) for result in lost)
    assert await storage.read("commits/1") == b"%d" % results.index(None)
    assert await paths(storage) == ["commits/1"], "and nobody leaves anything else"


async def test_a_writer_that_fails_leaves_nothing(storage: Storage) -> None:
    with pytest.raises(RuntimeError):
        async with storage.writer(FILE) as file:
            await file.write(b"x" * 100)
            raise RuntimeError
    assert await storage.list() == []
    await write(storage, FILE, b"again")
    assert await storage.read(FILE) == b"again"


async def test_a_writer_that_is_cancelled_leaves_nothing(storage: Storage) -> None:
    begun, never = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        async with storage.writer(FILE) as file:
            await file.write(b"x" * 100)
            begun.set()
            await never.wait()

    task = asyncio.create_task(hang())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await storage.list() == []


async def test_deleted_files_are_gone_and_missing_ones_passed_over(storage: Storage) -> None:
    for path in ("commits/1", "snapshots/d/x", "snapshots/d/y"):
        await storage.create(path, b"1")
    await storage.delete(["none", "snapshots/none/z", "snapshots/d/x", "commits/1"])
    assert await paths(storage) == ["snapshots/d/y"]
    await storage.delete([])


async def test_what_is_not_there_is_said(storage: Storage) -> None:
    for path, start in (("none", 0), ("snapshots/d/none", 5)):
        with pytest.raises(UnknownSnapshotError, match=path):
            await storage.read(path, start)
    assert await storage.list() == []


async def test_whether_it_can_be_written_is_seen_without_a_trace(storage: Storage) -> None:
    for name in ("x", "y"):  # Before and after the first file.
        before = await storage.list()
        await asyncio.gather(*(storage.check_writable(f"snapshots/probe-{number}") for number in range(8)))
        assert await storage.list() == before
        await storage.create(f"snapshots/d/{name}", b"1")


async def test_names_that_lead_elsewhere_are_refused(storage: Storage) -> None:
    for path in ["", "/", "/etc/passwd", "../x", "a/../x", "a//b", "./x", "a/.b", "a/", "x\0", "a\\b", "%2e%2e/x", "é"]:
        for attempt in (
            *(storage.read(path), storage.create(path, b""), storage.delete([path]), write(storage, path, b"")),
            storage.check_writable(path),
        ):
            with pytest.raises(InvalidNameError):
                await attempt
        if path:
            with pytest.raises(InvalidNameError):
                await storage.list(path)


async def test_the_url_opens_the_same_storage(storage: Storage) -> None:
    await storage.create("x", b"1")
    assert await open_storage(storage.url).read("x") == b"1"


# --- a directory ------------------------------------------------------------------------------------------------------


async def test_a_directory_is_made_with_the_first_write_only(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "a/b"))
    assert await storage.list() == []
    with pytest.raises(UnknownSnapshotError):
        await storage.read("x")
    await storage.delete(["x"])
    assert not (tmp_path / "a").exists()
    await storage.create("x", b"")
    assert storage.url == str(tmp_path / "a/b")


async def test_directories_go_with_their_last_file(disk: LocalStorage, tmp_path: Path) -> None:
    for path in ("commits/1", "snapshots/d/x", "snapshots/d/y"):
        await disk.create(path, b"1")
    await disk.delete(["snapshots/d/x"])
    assert (tmp_path / "snapshots/d").exists()
    await disk.delete(["snapshots/d/y", "commits/1"])
    assert sorted(os.listdir(tmp_path)) == ["commits", "snapshots"] and not os.listdir(tmp_path / "snapshots")
    with pytest.raises(RuntimeError):
        async with disk.writer("snapshots/e/x"):
            raise RuntimeError
    assert not (tmp_path / "snapshots/e").exists()


async def test_symbolic_links_are_not_followed(disk: LocalStorage, tmp_path: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots/d").symlink_to(outside)
    (tmp_path / "snapshots/link").symlink_to(outside / "secret")
    (tmp_path / "commits").symlink_to(outside)
    for path in ("snapshots/d/secret", "snapshots/link", "commits/secret"):
        with pytest.raises(StorageError, match="symbolic link"):
            await disk.read(path)
    for path in ("snapshots/d/new", "commits/new"):
        with pytest.raises(StorageError, match="symbolic link"):
            await disk.create(path, b"")
        with pytest.raises(StorageError, match="symbolic link"):
            await write(disk, path, b"")
        with pytest.raises(StorageError, match="symbolic link"):
            await disk.delete([path])
    with pytest.raises(StorageError):
        await disk.list("snapshots/d")
    with pytest.raises(FileExistsError):
        await disk.create("snapshots/link", b"")
    assert await disk.list() == []
    assert [path.name for path in outside.iterdir()] == ["secret"]
    await disk.delete(["snapshots/link"])
    assert (outside / "secret").read_bytes() == b"secret"


async def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    await open_storage(str(tmp_path / "link")).create("x", b"1")
    assert (tmp_path / "real/x").read_bytes() == b"1"


async def test_what_is_no_regular_file_is_not_read(disk: LocalStorage, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name in ("pipe", "directory"):
        with pytest.raises(StorageError, match=f"cannot read {name} in .*not a regular file"):
            await disk.read(name)
    assert await disk.list() == []


async def test_a_root_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    storage = open_storage(str(tmp_path / "file"))
    for attempt in (storage.list(), storage.read("x"), storage.create("x", b""), storage.delete(["x"])):
        with pytest.raises(StorageError, match="not a directory"):
            await attempt


async def test_names_that_others_left_there_are_not_listed(disk: LocalStorage, tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_bytes(b"")
    (tmp_path / "with blank").write_bytes(b"")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/x").write_bytes(b"")
    await disk.create("x", b"1")
    assert await paths(disk) == ["x"]


async def test_a_file_is_not_written_over(disk: LocalStorage) -> None:
    await write(disk, FILE, b"1")
    with pytest.raises(StorageError, match="File exists"):
        await write(disk, FILE, b"2")
    assert await disk.read(FILE) == b"1"


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.ENOSYS])
@pytest.mark.parametrize("kind", ["files", "directories"])
@pytest.mark.parametrize("root", [".", "a/b"])
async def test_a_disk_that_cannot_sync_is_told_before_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: str, root: str
) -> None:
    storage = LocalStorage(str(tmp_path / root))

    def is_kind(file: int) -> bool:
        return stat.S_ISDIR(os.fstat(file).st_mode) == (kind == "directories")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(os.fsync, number, is_kind))
        with pytest.raises(StorageError, match=f"cannot make {kind} durable.*fsync: {os.strerror(number)}.*bucket"):
            await storage.check_writable("snapshots/probe")
    assert os.listdir(tmp_path) == []
    await storage.check_writable("snapshots/probe")
    assert os.listdir(tmp_path) == []


def failing(real: Callable[..., Any], number: int, where: Callable[..., bool] = lambda *a, **k: True) -> Any:
    """Make a system call fail with this error number."""

    def call(*arguments: Any, **more: Any) -> Any:
        if where(*arguments, **more):
            raise OSError(number, os.strerror(number))
        return real(*arguments, **more)

    return call


@pytest.mark.parametrize("name", ["write", "fsync", "link", "open", "mkdir"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EROFS])
async def test_a_disk_that_refuses_is_told_and_nothing_stays(
    disk: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    def is_creating(*arguments: Any, **_: Any) -> bool:
        return name != "open" or bool(arguments[1] & os.O_CREAT)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing(getattr(os, name), number, is_creating))
        with pytest.raises(StorageError, match=f"cannot create commits/1 in {tmp_path}: {os.strerror(number)}"):
            await disk.create("commits/1", b"1")
        if name != "link":
            with pytest.raises(StorageError, match=f"cannot write {FILE} in .*{os.strerror(number)}"):
                await write(disk, FILE, b"1")
    assert await disk.list() == []
    await disk.create("commits/1", b"1")


@pytest.mark.parametrize("name", ["mkdir", "open", "write", "close"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
async def test_a_disk_that_would_refuse_is_told_before_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    root = tmp_path / "a/b"
    storage = LocalStorage(str(root))
    real = getattr(os, name)

    def refuse(*arguments: Any, **more: Any) -> Any:
        """Make closing fail for written files, after closing them."""
        if name == "open" and not arguments[1] & os.O_CREAT:
            return real(*arguments, **more)
        if name == "close":
            written = os.fstat(arguments[0]).st_size and os.path.isfile(f"/proc/self/fd/{arguments[0]}")
            real(*arguments, **more)
            if not written:
                return None
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, refuse)
        with pytest.raises(
            StorageError, match=f"the storage {root} cannot be written: {os.strerror(number)}; .*"
        ) as told:
            await storage.check_writable("snapshots/probe")
        assert "--storage-path" in str(told.value) or "free some space" in str(told.value)
    assert os.listdir(tmp_path) == []
    await storage.check_writable("snapshots/probe")
    assert os.listdir(tmp_path) == []


async def test_what_is_no_directory_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/snapshots").symlink_to(tmp_path)
    for root in ("file", "file/below", "linked"):
        with pytest.raises(StorageError, match=f"{root} cannot be written: .*not a directory"):
            await open_storage(str(tmp_path / root)).check_writable("snapshots/probe")
    assert sorted(os.listdir(tmp_path)) == ["file", "linked"]


async def test_a_directory_that_others_use_by_then_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, real = LocalStorage(str(tmp_path / "a")), os.write

    def write_and_more(file: int, data: Any) -> int:
        (tmp_path / "a/snapshots/other").touch()
        return real(file, data)

    monkeypatch.setattr(os, "write", write_and_more)
    await storage.check_writable("snapshots/probe")
    assert await paths(storage) == ["snapshots/other"]


async def test_a_full_disk_names_a_remedy(disk: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", failing(os.write, errno.ENOSPC))
    with pytest.raises(StorageError, match="No space left on device; free some space, or keep fewer snapshots"):
        await write(disk, FILE, b"1")


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
async def test_a_file_system_without_hard_links_will_do(
    disk: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", failing(os.link, number))
    await disk.create("commits/1", b"1")
    with pytest.raises(FileExistsError):
        await disk.create("commits/1", b"2")
    assert await disk.read("commits/1") == b"1"
    assert await paths(disk) == ["commits/1"]


async def test_files_are_made_while_others_remove_the_directory(disk: LocalStorage) -> None:
    async def come_and_go(number: int) -> None:
        for _ in range(10):
            await disk.create(f"snapshots/d/{number}", b"")
            await disk.delete([f"snapshots/d/{number}"])

    await asyncio.gather(*(come_and_go(number) for number in range(4)))
    assert await disk.list() == []


# --- which storage ----------------------------------------------------------------------------------------------------


def test_other_storages_are_refused() -> None:
    for url in [
        *("", "a\0b", "http://host/x", "https://host/x", "ftp://host/x", "S4://x", "file://host/x", "file://"),
        *("s3://", "s3://key:secret@bucket/x", "s3://bucket/x?versionId=1", "s3://bucket/x#y", "sqlite:///x"),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            open_storage(url)
        assert "secret" not in caught.value.message


def test_paths_and_file_urls_are_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_storage("runs/x").url == open_storage("~/runs/x/").url == str(tmp_path / "runs/x")
    assert open_storage(f"file://{tmp_path}/a%20b").url == str(tmp_path / "a b")


@pytest.mark.parametrize("url", ["s3://bucket/some/prefix", "gs://bucket/x", "s3://bucket"])
def test_buckets_are_opened_without_a_word_to_them(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    try:
        assert open_storage(f"{url}/").url == url
    except ConfigurationError as error:  # GCS asks for credentials immediately.
        assert url.startswith("gs:") and "cannot be opened" in error.message


async def test_a_bucket_that_does_not_answer_is_a_storage_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from psdist.snapshots import bucket

    monkeypatch.setattr(bucket, "RETRIES", 0)
    for name, value in {
        "ACCESS_KEY_ID": "a",
        "SECRET_ACCESS_KEY": "hidden",
        "REGION": "x",
        "ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    storage = open_storage("s3://bucket/x")
    for attempt in (
        storage.read("a"),
        storage.list(),
        storage.create("a", b""),
        storage.delete(["a"]),
        write(storage, "a", b"1"),
        storage.check_writable("a"),
    ):
        with pytest.raises(StorageError) as caught:
            await attempt
        assert "s3://bucket/x" in caught.value.message and "\n" not in caught.value.message
        assert "hidden" not in caught.value.message


async def test_missing_credentials_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from psdist.snapshots import bucket

    monkeypatch.setattr(bucket, "RETRIES", 0)
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    # Nothing listens at the address of the machine's credential service.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    storage = open_storage("s3://bucket/x")
    for attempt in (storage.list(), storage.check_writable("a")):
        with pytest.raises(StorageError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
            await attempt


def test_obstore_is_loaded_only_where_it_is_used() -> None:
    program = (
        "import sys, psdist.snapshots.reader, psdist.snapshots.opening as s; s.open_storage('x'); "
        "sys.exit('obstore' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


#: A thread that delivers a bucket's result is held until the interpreter exits, and released in the middle of that.
_LATE = """
import asyncio, builtins, os, threading, time
from psdist.snapshots.opening import open_storage

late, held, ending = [], threading.Event(), threading.Event()

class Loop(asyncio.SelectorEventLoop):
    def _write_to_self(self):
        super()._write_to_self()
        if threading.current_thread() is not threading.main_thread():
            late.append(threading.get_native_id())
            held.set()
            ending.wait()

class Last:
    def __del__(self, late=late, ending=ending, exists=os.path.exists, write=os.write, now=time.monotonic):
        ending.set()
        until = now() + 5  # From Python 3.14 on such a thread stays, and waits for ever.
        while exists(f"/proc/self/task/{late[0]}") and now() < until:
            pass
        write(1, b"gone")

async def main():
    await open_storage("memory://x").create("a", b"1")

builtins.last = Last()  # Attributes of builtins are deleted late.
with asyncio.Runner(loop_factory=Loop) as runner:
    runner.run(main())
held.wait()
"""


def test_a_process_ends_well_though_a_bucket_hands_its_last_result_over_late() -> None:
    ended = subprocess.run([sys.executable, "-c", _LATE], capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"gone", b"")


def test_a_file_that_is_given_up_before_it_is_open_is_not_opened_later(tmp_path: Path) -> None:
    """Its thread may not have opened it yet when its caller is cancelled."""
    file = LocalWriter(LocalStorage(str(tmp_path)), "snapshots/a/b")
    file.abandon()
    file.open()
    assert not [names for _, _, names in os.walk(tmp_path) if names]


async def test_files_are_private_unless_a_group_shares_the_directory(tmp_path: Path) -> None:
    def modes(root: Path) -> dict[str, str]:
        return {path.name: f"{stat.S_IMODE(path.stat().st_mode):o}" for path in (root, *root.rglob("*"))}

    umask = os.umask(0o022)
    try:
        for root, mode in (("new", None), ("shared", 0o2750), ("open", 0o755)):
            if mode is not None:
                (tmp_path / root).mkdir()
                (tmp_path / root).chmod(mode)
            storage = LocalStorage(str(tmp_path / root))
            await write(storage, FILE, b"weights")
            await storage.create("commits/1", b"record")
    finally:
        os.umask(umask)
    private = {"snapshots": "700", "d": "700", "f.safetensors": "600", "commits": "700", "1": "600"}
    assert modes(tmp_path / "new") == {"new": "700"} | private
    assert modes(tmp_path / "open") == {"open": "755"} | private
    of_group = {"snapshots": "2750", "d": "2750", "f.safetensors": "640", "commits": "2750", "1": "640"}
    assert modes(tmp_path / "shared") == {"shared": "2750"} | of_group
