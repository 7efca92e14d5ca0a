"""Simulated storage of snapshots: a directory or an object store for servers and scheduler, on virtual time.

``Bucket`` holds the stored files; it outlives every process. ``SimStorage`` gives a process access to it, with the
interface of ``psdist.snapshots.storage.Storage``. Each call is one operation, numbered from 1; ``Bucket.fault`` chooses
its fault. A killed process leaves nothing of an operation in progress, unless a fault says otherwise.

Faults:

* An operation fails before its effect, or after it.
* The calling process dies before the effect, or after it.
* Written data is torn (a part of it stays), and the process dies or gets an error.
* The storage lies: it acknowledges an operation, and drops it, tears or repeats its data, flips a bit, or carries it
  out much later.
* An operation takes very long.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from psdist.errors import SnapshotCorruptError, StorageError, UnknownSnapshotError
from psdist.snapshots import format as layouts
from psdist.snapshots.format import CommitRecord, Manifest
from psdist.snapshots.storage import StoredFile
from tests.simulation.loop import Node, SimLoop

#: Faults of an operation. Reads are not torn.
FAULTS: Final = (
    "error before",
    "error after",
    "crash before",
    "crash after",
    "torn, error",
    "torn, crash",
    "torn, silently",
    "flipped, silently",
    "dropped, silently",
    "repeated, silently",
    "delayed, silently",
    "slow",
)
LIES: Final = tuple(fault for fault in FAULTS if fault.endswith("silently"))
#: Kinds of operations that change the stored files.
WRITING: Final = ("write", "close", "create", "delete")
SLOW_SECONDS: Final = 20.0
#: Times after which a storage carries out an acknowledged operation: before its callers lose patience, and after.
DELAYS: Final = (1.0, SLOW_SECONDS)
#: Damage to snapshots: a bit is flipped in each shard's file, in the manifest, or in the commit record; shards' files
#: are cut in half, or are missing; or no file is left.
DAMAGES: Final = ("flipped shards", "flipped manifest", "flipped record", "cut shards", "missing shards", "emptied")


@dataclass(frozen=True)
class Operation:
    """One call. kind: "read", "list", "open" (a writer), "write", "close", "create" or "delete"."""

    number: int
    kind: str
    path: str
    node: str
    time: float


@dataclass
class Bucket:
    """Stored files. seconds: least and most virtual time of an operation."""

    rng: random.Random
    seconds: tuple[float, float]
    files: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    #: Chooses the fault of an operation: one of FAULTS, or "".
    fault: Callable[[Operation], str] = lambda operation: ""
    #: Kills the process that runs an operation.
    crash: Callable[[Node], None] = lambda node: None
    #: Called immediately for each file that was created exclusively and whole.
    created: Callable[[str], None] = lambda path: None
    #: Paths that were written although they existed.
    overwritten: list[str] = field(default_factory=list)
    #: Called before and after each deletion, with True afterwards.
    deleting: Callable[[bool], None] = lambda is_done: None

    @property
    def directories(self) -> list[str]:
        """Directories of the committed snapshots, newest first."""
        return list(self._records())

    @property
    def is_loadable(self) -> bool:
        """True if a committed snapshot is intact."""
        return any(self._is_intact(record) for record in self._records().values())

    def _is_intact(self, path: str) -> bool:
        commit = CommitRecord.from_bytes(self.files[path][0], path)
        data = self._bytes(layouts.manifest_path(commit.directory))
        if layouts.digest_of(data) != commit.manifest_digest:
            return False
        files = Manifest.from_bytes(data, "").files
        paths = {layouts.file_path(commit.directory, file): digest for file, (_, digest) in files.items()}
        return all(layouts.digest_of(self._bytes(path)) == digest for path, digest in paths.items())

    def _bytes(self, path: str) -> bytes:
        return self.files[path][0] if path in self.files else b""

    def _records(self) -> dict[str, str]:
        """Return the paths of the readable commit records by directory, newest first."""
        paths = sorted((path for path in self.files if path.startswith("commits/")), reverse=True)
        found = {}
        for path in paths:
            with suppress(SnapshotCorruptError):
                found[CommitRecord.from_bytes(self.files[path][0], path).directory] = path
        return found

    def damage(self, how: str, newest: int, rng: random.Random) -> dict[str, str]:
        """Damage the ``newest`` latest snapshots by one of DAMAGES. Returns the paths of their records by directory."""
        records = dict(list(self._records().items())[: None if how == "emptied" else newest])
        if how == "emptied":
            self.files.clear()
        for directory, record in records.items():
            shards = [path for path in self.files if path.startswith(f"snapshots/{directory}/") and "-of-" in path]
            paths = {"manifest": [f"snapshots/{directory}/manifest.json"], "record": [record], "shards": shards}
            for path in paths.get(how.rpartition(" ")[2], ()):
                self._damage(path, how, rng)
        return records

    def _damage(self, path: str, how: str, rng: random.Random) -> None:
        data, modified = self.files.pop(path)
        if how.startswith("flipped"):
            self.files[path] = (flipped(data, rng), modified)
        elif how.startswith("cut"):
            self.files[path] = (data[: len(data) // 2], modified)

    @property
    def data(self) -> dict[str, bytes]:
        """Contents by path."""
        return {path: data for path, (data, _) in self.files.items()}


def spoilt(data: bytes, how: str, rng: random.Random) -> bytes:
    """Return the part or form of ``data`` that is stored. how: first word of a fault."""
    match how:
        case "torn":
            return data[: len(data) // 2]
        case "repeated":
            return data + data
        case "flipped":
            return flipped(data, rng)
    return data


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Return ``data`` with one random bit flipped."""
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


class SimStorage:
    """Access of one process to a ``Bucket``, on virtual time and with faults."""

    def __init__(self, loop: SimLoop, bucket: Bucket) -> None:
        self.url = "sim://bucket"
        self._loop = loop
        self._bucket = bucket

    async def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """See Storage."""
        async with self._operation("read", path):
            if path not in self._bucket.files:
                raise UnknownSnapshotError(f"{self.url}/{path} is missing", path=path)
            data = self._bucket.files[path][0]
            return data[start:] if length is None else data[start : start + length]

    async def list(self, prefix: str = "") -> list[StoredFile]:
        """See Storage."""
        async with self._operation("list", prefix):
            return [
                StoredFile(path, len(data), modified)
                for path, (data, modified) in sorted(self._bucket.files.items())
                if not prefix or path.startswith(f"{prefix}/")
            ]

    async def create(self, path: str, data: bytes) -> None:
        """See Storage."""
        async with self._operation("create", path) as spoil:
            if path in self._bucket.files:
                raise FileExistsError(path)
            self._put(path, bytes(data), spoil)

    @asynccontextmanager
    async def writer(self, path: str) -> AsyncIterator[_Writer]:
        """See Storage."""
        async with self._operation("open", path):
            writer = _Writer(self, path)
        yield writer
        async with self._operation("close", path) as spoil:
            if path in self._bucket.files and not writer.is_visible:
                self._bucket.overwritten.append(path)
            self._put(path, b"".join(writer.parts), spoil)

    async def delete(self, paths: Iterable[str]) -> None:
        """See Storage."""
        names = list(paths)
        async with self._operation("delete", " ".join(names)) as spoil:
            kept = {"torn": len(names) // 2, "dropped": 0}.get(spoil, len(names))
            self._later(spoil, lambda: self._remove(names[:kept]))

    def _remove(self, names: Iterable[str]) -> None:
        self._bucket.deleting(False)
        for path in names:
            self._bucket.files.pop(path, None)
        self._bucket.deleting(True)

    def _put(self, path: str, data: bytes, spoil: str) -> None:
        if spoil != "dropped":
            data = spoilt(data, spoil, self._bucket.rng)
            self._later(spoil, lambda: self._set(path, data, is_whole=spoil in ("", "delayed")))

    def _set(self, path: str, data: bytes, *, is_whole: bool) -> None:
        has_file = path in self._bucket.files
        if has_file and path.startswith("commits/"):
            return  # It came late, and its name was taken.
        self._bucket.files[path] = (data, self._loop.time())
        if is_whole:
            self._bucket.created(path)

    def _later(self, spoil: str, effect: Callable[[], None]) -> None:
        """Carry out an effect: much later if the storage lies about its time."""
        if spoil == "delayed":
            self._loop.call_later(self._bucket.rng.choice(DELAYS), effect, context=self._loop.world.context)
        else:
            effect()

    @asynccontextmanager
    async def _operation(self, kind: str, path: str) -> AsyncIterator[str]:
        """Context of an operation's effect, which itself takes no time. Yields the first word of a fault that spoils
        the effect, else ""."""
        bucket, loop, node = self._bucket, self._loop, self._loop.current()
        operation = Operation(len(bucket.operations) + 1, kind, path, node.name, loop.time())
        bucket.operations.append(operation)
        fault = bucket.fault(operation)
        loop.trace(f"storage {kind} {path} {fault}")
        await loop.after(SLOW_SECONDS if fault == "slow" else bucket.rng.uniform(*bucket.seconds))
        await self._fail(fault, "before", node, operation)
        yield fault.partition(",")[0] if "," in fault else ""
        await self._fail(fault, "after", node, operation)

    async def _fail(self, fault: str, when: str, node: Node, operation: Operation) -> None:
        if fault == f"error {when}" or (when == "after" and fault == "torn, error"):
            raise StorageError(f"{self.url}/{operation.path}: simulated failure of a {operation.kind}")
        if fault == f"crash {when}" or (when == "after" and fault == "torn, crash"):
            self._loop.world_soon(self._bucket.crash, node)
            await asyncio.Event().wait()

    async def write(self, writer: _Writer, data: bytes) -> None:
        """Add a part to a file that is being written. No part is visible before the end, unless it is torn."""
        async with self._operation("write", writer.path) as spoil:
            if spoil not in ("dropped", "delayed"):
                writer.parts.append(spoilt(data, spoil, self._bucket.rng))
            if spoil == "torn":
                writer.is_visible = True
                self._put(writer.path, b"".join(writer.parts), "")


class _Writer:
    """Writer of one file."""

    def __init__(self, storage: SimStorage, path: str) -> None:
        self.path = path
        self.parts: list[bytes] = []
        #: True if a torn write has shown its file early.
        self.is_visible = False
        self._storage = storage

    async def write(self, buffer: bytes | bytearray | memoryview) -> None:
        """Append to the file."""
        await self._storage.write(self, bytes(buffer))
