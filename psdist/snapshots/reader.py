"""Discovery and reading of the committed snapshots in a storage.

Invariants: Nothing is returned that differs by one bit from what was committed; an error names the file. A commit
record has digests of itself and of the manifest. The manifest has a digest of each slice, and determines each header.
So all bytes are verified before use. A corrupt snapshot is skipped and reported. A snapshot that is unreadable for
another reason (no permission, no connection, a newer format) is an error: falling back to an older one would lose
steps needlessly.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import xxhash

from psdist.errors import PsdistError, SnapshotCorruptError, StorageError, UnknownSnapshotError
from psdist.snapshots import format as layouts
from psdist.snapshots.format import CommitRecord, Manifest, ParametersState, WorkerState, corrupt
from psdist.snapshots.storage import Storage
from psdist.wire.limits import COMMIT_BYTES_MAX

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

#: Called with the bytes read so far, and the total.
Progress = Callable[[int, int], None]

#: Commit records that are read concurrently.
_AT_A_TIME: Final = 8
#: Bytes of one read, unless a slice is longer.
BATCH_BYTES: Final = 8 << 20
#: Pauses in seconds before a new file with other bytes than were written is read again, for storages that show files
#: late.
_PATIENCE: Final = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Unreadable:
    """Commit record that cannot be used."""

    path: str
    error: PsdistError

    @property
    def sequence(self) -> int:
        """Number in the record's name."""
        return layouts.commit_sequence(self.path) or 0


@dataclass(frozen=True)
class CommittedSnapshot:
    """Usable snapshot.

    skipped: one sentence for each newer snapshot that is not usable.
    """

    commit: CommitRecord
    manifest: Manifest
    skipped: tuple[str, ...] = ()


# --- what is committed ------------------------------------------------------------------------------------------------


async def commits(storage: Storage) -> list[CommitRecord | Unreadable]:
    """Return all commit records, the newest first. Raises StorageError if they cannot be listed."""
    numbered = [
        (sequence, stored.path)
        for stored in await storage.list(layouts.COMMITS)
        if (sequence := layouts.commit_sequence(stored.path)) is not None
    ]
    gate = asyncio.Semaphore(_AT_A_TIME)

    async def read(path: str) -> CommitRecord | Unreadable | None:
        async with gate:
            return await _read_commit(storage, path)

    found = await asyncio.gather(*(read(path) for _, path in sorted(numbered, reverse=True)))
    return [record for record in found if record is not None]


async def _read_commit(storage: Storage, path: str) -> CommitRecord | Unreadable | None:
    """Read the record at ``path``. Returns None if it was deleted meanwhile."""
    try:
        data = await storage.read(path, 0, COMMIT_BYTES_MAX + 1)
        if len(data) > COMMIT_BYTES_MAX:
            raise corrupt(path, f"it is longer than {COMMIT_BYTES_MAX} bytes")
        commit = CommitRecord.from_bytes(data, path)
        if commit.path != path:
            raise corrupt(path, f"its number is {commit.sequence}")
        return commit
    except UnknownSnapshotError:
        return None
    except PsdistError as error:
        return Unreadable(path, error)


async def is_committed(storage: Storage, commit: CommitRecord) -> bool:
    """True if the record still exists. A snapshot that was deleted meanwhile is not damaged."""
    try:
        await storage.read(commit.path, 0, 1)
    except UnknownSnapshotError:
        return False
    return True


async def load_manifest(storage: Storage, commit: CommitRecord) -> Manifest:
    """Return the manifest that ``commit`` names. Raises SnapshotCorruptError if it is not the committed one."""
    path = layouts.manifest_path(commit.directory)
    data = await _read(storage, path, 0, commit.manifest_length + 1)
    if len(data) != commit.manifest_length:
        raise corrupt(path, f"it has {_length(data, commit.manifest_length)}, not {commit.manifest_length}")
    if layouts.digest_of(data) != commit.manifest_digest:
        raise corrupt(path, f"its digest is not that in {commit.path}")
    # In a thread: the time grows with the number of tensors, and the caller's event loop answers heartbeats.
    manifest = await asyncio.to_thread(Manifest.from_bytes, data, path)
    for name in ("run_id", "directory", "steps", "bytes"):
        mine, theirs = getattr(manifest, name), getattr(commit, name)
        if mine != theirs:
            raise corrupt(path, f"{name} is {mine!r:.80}, and in {commit.path} {theirs!r:.80}")
    return manifest


async def check_files(storage: Storage, manifest: Manifest, *, no_others: bool = False) -> None:
    """Check that all files exist with their lengths, without reading them. Raises SnapshotCorruptError.

    no_others: True to reject additional files.
    """
    directory = layouts.directory_path(manifest.directory)
    sizes = {stored.path: stored.size for stored in await storage.list(directory)}
    known = {layouts.file_path(manifest.directory, file): length for file, (length, _) in manifest.files.items()}
    for path, length in known.items():
        if path not in sizes:
            raise corrupt(path, "it is missing")
        if sizes[path] != length:
            raise corrupt(path, f"it has {sizes[path]} bytes, not {length}")
    for path in sizes if no_others else ():
        if path not in known and path != layouts.manifest_path(manifest.directory):
            raise corrupt(path, "no file of this name belongs to the snapshot")


async def usable(
    storage: Storage, without: Collection[str] = (), where: Callable[[CommitRecord], bool] = lambda commit: True
) -> AsyncIterator[CommittedSnapshot]:
    """Iterate over snapshots whose files all exist, the newest first, each with those skipped before it.

    without: directories known to be corrupt; they are skipped.
    where: returns True for wanted snapshots.
    Raises SnapshotCorruptError at the end if snapshots were skipped and none was usable, so that a run does not start
    from scratch by mistake. Raises StorageError.
    """
    skipped: list[str] = []
    found = False
    for record in await commits(storage):
        try:
            if isinstance(record, Unreadable):
                raise record.error
            if not where(record):
                continue
            if record.directory in without:
                raise corrupt(layouts.directory_path(record.directory), "it was found corrupt before")
            manifest = await load_manifest(storage, record)
            await check_files(storage, manifest)
        except SnapshotCorruptError as error:
            if isinstance(record, Unreadable) or await is_committed(storage, record):
                skipped.append(error.message)
            continue
        found = True
        yield CommittedSnapshot(record, manifest, tuple(skipped))
    if skipped and not found:
        raise SnapshotCorruptError(
            f"none of the {len(skipped)} snapshots in {storage.url} can be used: {'; '.join(skipped)[:2000]}. "
            "Restore the files, or start a new run with another --run-id or --storage-path"
        )


async def newest(storage: Storage, without: Collection[str] = ()) -> CommittedSnapshot | None:
    """Return the newest snapshot with a correct record, manifest and file lengths; None if none was ever committed.

    without: directories known to be corrupt; they are skipped.

    The content is verified when it is read. Raises SnapshotCorruptError if there are snapshots and none can be used,
    and StorageError.
    """
    async for found in usable(storage, without):
        return found
    return None


# --- new files --------------------------------------------------------------------------------------------------------


async def confirm(
    storage: Storage, path: str, length: int, digest: bytes, progress: Callable[[int], None] = lambda size: None
) -> None:
    """Read a new file back, to confirm that the storage has all of it.

    length: bytes of the file.
    digest: its xxh3_128.
    progress: called with the size of each part in bytes, when it was read for the first time.

    Raises StorageError that names the file if the storage still has something else after some seconds.
    """
    for pause in (*_PATIENCE, None):
        found = await _difference(storage, path, length, digest, progress)
        if not found:
            return
        if pause is not None:
            await asyncio.sleep(pause)
            progress = _ignore
    raise StorageError(
        f"{storage.url} acknowledged {path} with {length} bytes, and {found}: check the storage, or use another "
        "--storage-path",
        path=path,
    )


async def _difference(storage: Storage, path: str, length: int, digest: bytes, progress: Callable[[int], None]) -> str:
    """Return the difference between a stored file and the written one; empty if there is none."""
    whole, done, is_over = xxhash.xxh3_128(), 0, False
    while done <= length and not is_over:
        asked = min(BATCH_BYTES, length + 1 - done)  # One byte more than it should have.
        try:
            part = await storage.read(path, done, asked)
        except UnknownSnapshotError:
            return "does not have it"
        # In a thread, because the caller's event loop answers heartbeats.
        await asyncio.to_thread(whole.update, part)
        done += len(part)
        progress(len(part))
        is_over = len(part) < asked
    if done != length:
        return f"has {f'more than {length}' if done > length else done} bytes of it"
    return "" if whole.digest() == digest else "has other bytes"


def _ignore(size: int) -> None:
    pass


# --- content ----------------------------------------------------------------------------------------------------------


class SliceReader:
    """Reader of one snapshot's slices. Checks each file's header once."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage = storage
        self._manifest = manifest
        self._headers: dict[str, int] = {}

    async def slice(self, state: ParametersState, index: int) -> list[Floats]:
        """Return a slice's weights and the optimizer's arrays, read-only. Raises SnapshotCorruptError."""
        position, shard = divmod(index, len(state.shards))
        [(_, arrays)] = [found async for found in self._positions(state, shard, range(position, position + 1))]
        return arrays

    async def slices(self, state: ParametersState, shard: int) -> AsyncIterator[tuple[int, list[Floats]]]:
        """Iterate over all slices of a shard, ascending, with their numbers. Several are read together.

        Raises SnapshotCorruptError.
        """
        async for found in self._positions(state, shard, range(len(state.shards[shard].versions))):
            yield found

    async def header(self, state: ParametersState, shard: int) -> int:
        """Verify the header of a shard's file, and return its length. Raises SnapshotCorruptError."""
        file = state.shards[shard]
        if file.file not in self._headers:
            wanted, path = state.header(shard), self.path(state, shard)
            if file.length != len(wanted) + state.data_bytes(shard):
                raise corrupt(path, f"{file.length} bytes are not what its slices need")
            if await _read(self._storage, path, 0, len(wanted)) != wanted:
                raise corrupt(path, "its header is not that of its slices")
            self._headers[file.file] = len(wanted)
        return self._headers[file.file]

    def path(self, state: ParametersState, shard: int) -> str:
        """Return the path of a shard's file."""
        return layouts.file_path(self._manifest.directory, state.shards[shard].file)

    async def _positions(
        self, state: ParametersState, shard: int, positions: range
    ) -> AsyncIterator[tuple[int, list[Floats]]]:
        header = await self.header(state, shard)
        arrays = 1 + len(state.state_names)
        for batch in _batches(state, shard, positions):
            start = layouts.slice_offset(header, batch[0], state.spec.slice_elements, arrays - 1)
            sizes = [_slice_bytes(state, shard, position) for position in batch]
            data = await _read(self._storage, self.path(state, shard), start, sum(sizes))
            taken = 0
            for position, size in zip(batch, sizes, strict=True):
                index = position * len(state.shards) + shard
                part = memoryview(data)[taken : taken + size]
                self._check(state, shard, position, part, size)
                yield index, _split(part, arrays)
                taken += size

    def _check(self, state: ParametersState, shard: int, position: int, data: memoryview, size: int) -> None:
        index, path = position * len(state.shards) + shard, self.path(state, shard)
        if len(data) != size:
            raise corrupt(path, f"it ends in slice {index}")
        if layouts.digest_of(data) != state.shards[shard].digests[position]:
            raise corrupt(path, f"slice {index} has another digest than in the manifest")


async def verify(storage: Storage, manifest: Manifest, progress: Progress = lambda done, total: None) -> None:
    """Read every byte of every file except the manifest.

    Raises SnapshotCorruptError for the first file that is damaged, or does not belong to the snapshot.
    """
    await check_files(storage, manifest, no_others=True)
    reader, done = SliceReader(storage, manifest), 0
    for state in manifest.parameters:
        for shard, file in enumerate(state.shards):
            await reader.header(state, shard)
            whole = xxhash.xxh3_128(state.header(shard))
            done += file.length - state.data_bytes(shard)
            async for _, arrays in reader.slices(state, shard):
                for array in arrays:
                    whole.update(array.data)
                    done += array.nbytes
                progress(done, manifest.bytes)
            if whole.hexdigest() != file.digest:
                raise corrupt(reader.path(state, shard), "its digest is not that in the manifest")
    for mine in manifest.states:
        async for part in read_state(storage, manifest, mine):
            done += len(part)
            progress(done, manifest.bytes)


async def read_state(storage: Storage, manifest: Manifest, state: WorkerState) -> AsyncGenerator[bytes]:
    """Iterate over the bytes of a worker's state, in parts.

    Raises SnapshotCorruptError, possibly only after the last part, when the digest of the whole is known.
    """
    path, whole = layouts.file_path(manifest.directory, state.file), xxhash.xxh3_128()
    for start in range(0, state.length, BATCH_BYTES):
        length = min(BATCH_BYTES, state.length - start)
        part = await _read(storage, path, start, length)
        if len(part) != length:
            raise corrupt(path, f"it has {start + len(part)} bytes, not {state.length}")
        whole.update(part)
        yield part
    if whole.hexdigest() != state.digest:
        raise corrupt(path, "its digest is not that in the manifest")


async def read_state_tensors(storage: Storage, manifest: Manifest, state: WorkerState, prefix: str) -> dict[str, bytes]:
    """Return the bytes of tensors in a worker's state whose names begin with ``prefix``, by name without the prefix.

    Other tensors, such as residuals, pass through memory one part at a time; if no name matches, only the header is
    read. Raises SnapshotCorruptError.
    """
    path = layouts.file_path(manifest.directory, state.file)
    head, position = bytearray(), 0
    ranges: dict[str, tuple[int, int]] | None = None
    found: dict[str, bytearray] = {}
    async with aclosing(read_state(storage, manifest, state)) as parts:
        async for part in parts:
            if ranges is None:
                head += part
                ranges = _wanted_ranges(head, prefix, path, state.length)
                if ranges is None:
                    continue
                if not ranges:
                    return {}
                found, part = {name: bytearray() for name in ranges}, bytes(head)
            for name, (start, stop) in ranges.items():
                found[name] += part[max(0, start - position) : max(0, stop - position)]
            position += len(part)
    if ranges is None:
        raise corrupt(path, "it ends in its header")
    return {name.removeprefix(prefix): bytes(data) for name, data in found.items()}


def _wanted_ranges(head: bytearray, prefix: str, path: str, length: int) -> dict[str, tuple[int, int]] | None:
    """Return the byte ranges of the tensors whose names begin with ``prefix``, or None if ``head`` lacks part of the
    header. Raises SnapshotCorruptError for a malformed header, or tensors that cannot fit in the file.

    head: first bytes of the file.
    length: bytes of the file.
    """
    try:
        ranges = _ranges(head, prefix)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise corrupt(path, f"its header is malformed: {error}"[:300]) from None
    if ranges and sum(max(0, stop - start) for start, stop in ranges.values()) > length:
        raise corrupt(path, "its header has tensors that overlap")
    return ranges


def _ranges(head: bytearray, prefix: str) -> dict[str, tuple[int, int]] | None:
    """Return the byte ranges of tensors in a safetensors file, or None if ``head`` lacks part of the header."""
    start = 8 + int.from_bytes(head[:8], "little")
    if len(head) < max(8, start):
        return None
    entries = {name: entry for name, entry in json.loads(head[8:start]).items() if name.startswith(prefix)}
    places = {name: [int(offset) for offset in entry["data_offsets"]] for name, entry in entries.items()}
    return {name: (start + first, start + last) for name, (first, last) in places.items()}


async def _read(storage: Storage, path: str, start: int, length: int) -> bytes:
    try:
        return await storage.read(path, start, length)
    except UnknownSnapshotError:
        raise corrupt(path, "it is missing") from None


def _length(data: bytes, limit: int) -> str:
    return f"more than {limit} bytes" if len(data) > limit else f"{len(data)} bytes"


def _slice_bytes(state: ParametersState, shard: int, position: int) -> int:
    elements = state.slicing.size(position * len(state.shards) + shard)
    return elements * (1 + len(state.state_names)) * layouts.ELEMENT_BYTES


def _batches(state: ParametersState, shard: int, positions: range) -> Iterator[range]:
    """Divide ``positions`` into stretches of at most ``BATCH_BYTES``, or of one slice."""
    each = max(1, BATCH_BYTES // max(1, _slice_bytes(state, shard, 0)))
    for first in range(positions.start, positions.stop, each):
        yield range(first, min(first + each, positions.stop))


def _split(data: memoryview, arrays: int) -> list[Floats]:
    import numpy as np  # only here: a scheduler starts faster without it

    return list(np.frombuffer(data, np.dtype("<f4")).reshape(arrays, -1))
