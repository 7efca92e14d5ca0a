"""Power loss after every system call of a local storage's save and deletion.

For any subset of unsynced data on disk, the snapshot before or the new one is found complete, and a finished one
survives. The calls are executed and traced; every possible disk content after each of them is computed and read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from psdist.errors import SnapshotCorruptError
from psdist.snapshots import reader
from psdist.snapshots.reader import SliceReader
from psdist.snapshots.storage import LocalStorage
from tests.support.dict_storage import DictStorage, state_of, table_of, write_snapshot

Files = dict[str, bytes]


@dataclass
class Inode:
    """Content of a file.

    synced: content that surely survives a power loss.
    """

    data: bytes = b""
    synced: bytes = b""


@dataclass
class Names:
    """Files and directories in a directory.

    synced: entries that surely survive a power loss.
    """

    now: dict[str, Inode | Names] = field(default_factory=dict)
    synced: dict[str, Inode | Names] = field(default_factory=dict)


class Disk:
    """Tracer of a storage's system calls that knows what may survive of their effects."""

    def __init__(self) -> None:
        self._root = Names()
        self._files: dict[int, Inode | Names] = {}
        #: After each call, all possible contents of the disk.
        self.states: list[list[Files]] = []

    @contextmanager
    def following(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Trace all calls within the block."""
        with monkeypatch.context() as patch:
            for name in ("open", "close", "write", "fsync", "link", "unlink", "mkdir", "rmdir"):
                patch.setattr(os, name, self._followed(getattr(os, name), getattr(self, f"on_{name}")))
            yield

    def _followed(self, real: Callable[..., Any], follow: Callable[..., None]) -> Callable[..., Any]:
        def call(*arguments: Any, **places: Any) -> Any:
            result = real(*arguments, **places)
            follow(result, *arguments, **places)
            self.states.append(list(self.left()))
            return result

        return call

    def _names(self, directory: int) -> Names:
        names = self._files[directory]
        assert isinstance(names, Names)
        return names

    def on_open(self, file: int, path: str, flags: int, mode: int = 0, *, dir_fd: int | None = None) -> None:
        if dir_fd is None:
            self._files[file] = self._root
        else:
            there = self._names(dir_fd).now
            self._files[file] = there.setdefault(path, Inode()) if flags & os.O_CREAT else there[path]

    def on_close(self, _: None, file: int) -> None:
        del self._files[file]

    def on_write(self, count: int, file: int, data: memoryview) -> None:
        inode = self._files[file]
        assert isinstance(inode, Inode)
        inode.data += bytes(data[:count])

    def on_fsync(self, _: None, file: int) -> None:
        match self._files[file]:
            case Inode() as inode:
                inode.synced = inode.data
            case names:
                names.synced = dict(names.now)

    def on_link(self, _: None, old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        self._names(dst_dir_fd).now[new] = self._names(src_dir_fd).now[old]

    def on_unlink(self, _: None, name: str, *, dir_fd: int) -> None:
        del self._names(dir_fd).now[name]

    def on_mkdir(self, _: None, name: str, mode: int, *, dir_fd: int) -> None:
        self._names(dir_fd).now[name] = Names()

    def on_rmdir(self, _: None, name: str, *, dir_fd: int) -> None:
        del self._names(dir_fd).now[name]

    def left(self) -> Iterator[Files]:
        """Return what may survive a power loss now.

        Names are as they are or as synced; contents are as they are, as synced, or in between.
        """
        contents: tuple[Callable[[Inode], bytes], ...] = (
            lambda inode: inode.data,
            lambda inode: inode.synced,
            lambda inode: inode.data[: (len(inode.synced) + len(inode.data)) // 2],
            lambda inode: inode.synced.ljust(len(inode.data), b"\0"),
        )
        for synced, content in product((False, True), contents):
            yield dict(_contents(self._root, synced, content))


def _contents(
    names: Names, synced: bool, content: Callable[[Inode], bytes], above: str = ""
) -> Iterator[tuple[str, bytes]]:
    for name, one in (names.synced if synced else names.now).items():
        if isinstance(one, Inode):
            yield above + name, content(one)
        else:
            yield from _contents(one, synced, content, f"{above}{name}/")


async def restored(files: Files) -> tuple[str, float]:
    """Return directory and first weight of the snapshot that a run would resume from, read to the last byte."""
    storage = DictStorage()
    storage.files = files
    without: set[str] = set()
    while True:
        found = await reader.newest(storage, without)
        [state] = found.manifest.parameters
        slices = SliceReader(storage, found.manifest)
        try:
            weights = [(await slices.slice(state, index))[0] for index in range(state.slicing.count)]
        except SnapshotCorruptError:
            without.add(found.manifest.directory)
            continue
        return found.manifest.directory, float(weights[0][0])


async def outcomes(states: list[list[Files]]) -> list[set[tuple[str, float]]]:
    """Return the possible restores after each call."""
    known: dict[tuple[tuple[str, bytes], ...], tuple[str, float]] = {}
    found = []
    for state in states:
        results = set()
        for files in state:
            key = tuple(sorted(files.items()))
            if key not in known:
                known[key] = await restored(files)
            results.add(known[key])
        found.append(results)
    return found


async def test_at_every_call_the_snapshot_before_or_the_new_one_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, disk = LocalStorage(str(tmp_path)), Disk()
    tables = {step: table_of(state_of(), step) for step in (7, 8)}
    with disk.following(monkeypatch):
        first, _ = await write_snapshot(storage, [state_of(step=7)], {"net": tables[7]})
        disk.states.clear()
        second, _ = await write_snapshot(storage, [state_of(step=8)], {"net": tables[8]}, sequence=2)
        saving, disk.states = disk.states, []
        old = {stored.path for stored in await storage.list() if first.directory in stored.path}
        disk.states.clear()
        await storage.delete([first.path])
        assert not any(first.path in files for files in disk.states[-1]), "its files go next"
        await storage.delete(sorted(old))
        deleting = disk.states
    before = first.directory, float(tables[7][0][0])
    after = second.directory, float(tables[8][0][0])

    results = await outcomes(saving)
    assert len(results) > 40
    assert set.union(*results) == {before, after}
    assert results[0] == {before}
    assert results[-1] == {after}, "it is durable when it is done"
    changes = [number for number, result in enumerate(results) if result != {before}]
    assert changes == list(range(changes[0], len(results))), "once it may be there nothing is worse"
    assert set.union(*await outcomes(deleting)) == {after}
    assert os.listdir(tmp_path / "snapshots") == [second.directory]


async def test_a_file_that_was_written_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, disk = LocalStorage(str(tmp_path)), Disk()
    with disk.following(monkeypatch):
        async with storage.writer("snapshots/d/f") as file:
            await file.write(b"some")
            await file.write(b"thing")
        assert all(files == {"snapshots/d/f": b"something"} for files in disk.states[-1])
        await storage.create("snapshots/d/g", b"more")
        assert all(files["snapshots/d/g"] == b"more" for files in disk.states[-1])
