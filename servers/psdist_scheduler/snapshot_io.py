"""The scheduler's access to the snapshot storage: storage effects of the machine, and transfers of worker states.

Effects are carried out one after another, in a separate task, so that a slow storage delays nothing else. The result of
each returns to the machine as an event. A commit has this order: every shard's file is durable (the machine has waited
for that), then the manifest, then the commit record, which is created exclusively. Nothing is overwritten or renamed. A
snapshot that is deleted loses its record first.

Every file is read back before anything relies on it, since a storage may acknowledge a file and lose a part of it. So
an older snapshot is deleted only when the storage has been seen to have the newer one.

The storage's answer may be lost, so an error does not mean that nothing was done. If the storage has a record of the
number that this scheduler tried to create, the record is read. If it is this scheduler's, the snapshot exists. If not,
another scheduler has taken over, and this one saves no more.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

import xxhash

from psdist import __version__
from psdist.errors import (
    ConfigurationError,
    InvalidArgumentError,
    PsdistError,
    SnapshotCorruptError,
    StorageError,
    UnknownSnapshotError,
)
from psdist.snapshots import format as layout
from psdist.snapshots import reader
from psdist.snapshots.format import CommitRecord, WorkerState
from psdist.snapshots.storage import Storage
from psdist.v1 import scheduler_pb2 as pb
from psdist_scheduler.decide import snapshot_events as sn

logger = logging.getLogger("psdist.scheduler")

#: Size in bytes of a message with a part of a worker's state.
_PART_BYTES: Final = 1 << 20
#: Age in seconds from which files are garbage that no commit names and this scheduler did not make.
GARBAGE_SECONDS: Final = 3600.0


async def check_writable(storage: Storage) -> None:
    """Raise StorageError, with a remedy, if no snapshot could be written. Two schedulers may try at the same time.

    A crash leaves only a directory without a record, which is garbage.
    """
    await storage.check_writable(layout.directory_path(f"probe-{secrets.token_hex(8)}"))


async def read_history(storage: Storage, run_id: str = "", base: str = "", bad: tuple[str, ...] = ()) -> sn.History:
    """Read the content of the storage. Raises StorageError, and ConfigurationError if the storage is another run's.

    run_id: required run; empty for any.
    base: directory of a snapshot that is needed besides the newest.
    bad: directories to skip.
    """
    records = await reader.commits(storage)
    commits = tuple(record for record in records if isinstance(record, CommitRecord))
    for commit in commits:
        if run_id and commit.run_id != run_id:
            raise ConfigurationError(
                f"the storage {storage.url} has snapshots of run {commit.run_id!r}, not of {run_id!r}: pass --run-id "
                f"{commit.run_id}, or another --storage-path",
                run_id=commit.run_id,
            )
    for record in records:
        if not isinstance(record, CommitRecord) and not isinstance(record.error, SnapshotCorruptError):
            raise record.error  # Not readable now, or of a newer format: do not resume from an older snapshot.
    skipped = [f"{record.path}: {record.error}" for record in records if not isinstance(record, CommitRecord)]
    highest = max((layout.commit_sequence(r.path) or 0 for r in records), default=0)
    newest = base_found = None
    for commit in commits:
        if newest is None and commit.directory not in bad:
            newest = await _load(storage, commit, skipped)
        if base and commit.directory == base and base not in bad:
            base_found = await _load(storage, commit, skipped)
    return sn.History(commits, highest, newest, tuple(dict.fromkeys(skipped)), base_found)


async def _load(storage: Storage, commit: CommitRecord, skipped: list[str]) -> sn.CommitFound | None:
    """Return a snapshot if it can be read. Otherwise the reason is added to ``skipped``. Raises StorageError."""
    try:
        manifest = await reader.load_manifest(storage, commit)
        await reader.check_files(storage, manifest)
        return sn.CommitFound(commit, manifest)
    except (SnapshotCorruptError, UnknownSnapshotError) as error:
        skipped.append(f"{commit.directory}: {error}")
        return None


def check_fresh(history: sn.History, url: str) -> None:
    """Raise ConfigurationError if a run that must start afresh finds snapshots."""
    if not history.highest:
        return
    newest = history.commits[0] if history.commits else None
    steps = ", ".join(f"{name} at step {step}" for name, step in sorted(newest.steps.items())) if newest else ""
    what = f"the newest {newest.directory} ({steps})" if newest else "none of which can be read"
    raise ConfigurationError(
        f"--require-empty-storage, but {url} has {max(len(history.commits), 1)} snapshots, {what}: leave the flag out "
        "to resume from there, pass another --storage-path, or remove them with `psdist snapshot delete`"
    )


def check_readable(history: sn.History, url: str) -> None:
    """Raise ConfigurationError if a new run finds snapshots, and none that it can resume from."""
    if history.highest and history.newest is None:
        raise ConfigurationError(
            f"none of the snapshots in {url} can be read: {'; '.join(history.skipped)}: look at them with "
            "`psdist snapshot verify`, or start afresh under another --run-id or with another --storage-path"
        )


class SnapshotIo:
    """Carries out storage effects, and posts their results as events.

    salt: suffix of the directory names that this scheduler chose.
    post: passes an event to the machine.
    """

    def __init__(self, storage: Storage, run_id: str, salt: str, post: Callable[[sn.StorageEvent], None]) -> None:
        self.storage = storage
        self._salt = salt
        self._run_id = run_id
        self._post = post
        self._effects: deque[sn.StorageEffect] = deque()
        self._pending = asyncio.Event()
        self._idle = asyncio.Event()
        #: Records that were sent, and may or may not exist, by their number.
        self._unsure: dict[int, list[bytes]] = {}
        #: Directories that this scheduler gave up.
        self._given_up: dict[str, None] = {}

    def put(self, effect: sn.StorageEffect) -> None:
        """Carry out an effect after those before it."""
        self._effects.append(effect)
        self._idle.clear()
        self._pending.set()

    async def run(self) -> None:
        """Carry out effects, forever."""
        while True:
            await self._pending.wait()
            self._pending.clear()
            while self._effects:
                effect = self._effects.popleft()
                try:
                    await self._carry_out(effect)
                except Exception as error:  # Otherwise one defect would end all saving without a word.
                    logger.exception("a storage effect failed unexpectedly")
                    self._fail(effect, f"{type(error).__name__}: {error}")
            self._idle.set()

    async def idle(self) -> None:
        """Return when everything is carried out."""
        await self._idle.wait()

    async def _carry_out(self, effect: sn.StorageEffect) -> None:
        match effect:
            case sn.WriteCommit():
                self._post(await self._commit(effect))
            case sn.RemoveDirectory(directory):
                await self._abandon(directory)
            case sn.Prune():
                self._post(await self._prune(effect))
            case sn.ReadHistory(base, bad):
                self._post(await self._read(base, bad))

    def _fail(self, effect: sn.StorageEffect, text: str) -> None:
        """Report a defect to the machine, which would otherwise wait forever."""
        match effect:
            case sn.WriteCommit():
                self._post(sn.CommitFailed(effect.attempt, text, unsure=True))
            case sn.Prune():
                self._post(sn.Pruned((), text))
            case sn.ReadHistory():
                self._post(sn.HistoryRead(None, text))

    # --- committing ---------------------------------------------------------------------------------------------------

    async def _commit(self, effect: sn.WriteCommit) -> sn.StorageEvent:
        started = time.monotonic()
        manifest = replace(effect.manifest, time=time.time(), psdist_version=__version__)
        data = await asyncio.to_thread(manifest.to_bytes)  # It grows with the number of tensors.
        try:
            await self._create(layout.manifest_path(manifest.directory), data)
        except (PsdistError, FileExistsError) as error:
            await self._abandon(manifest.directory)
            return sn.CommitFailed(effect.attempt, f"the manifest cannot be written: {error}")
        commit = CommitRecord(
            sequence=effect.sequence,
            run_id=manifest.run_id,
            directory=manifest.directory,
            epoch=manifest.epoch,
            time=manifest.time,
            seconds=effect.seconds + time.monotonic() - started,
            reason=manifest.reason,
            manifest_length=len(data),
            manifest_digest=layout.digest_of(data),
            steps=manifest.steps,
            bytes=manifest.bytes,
        )
        try:
            commit = await self._record(commit)
        except FileExistsError:
            await self._abandon(commit.directory)
            return sn.CommitFailed(effect.attempt, f"{commit.path} is another scheduler's, which has taken over", True)
        except PsdistError as error:
            return sn.CommitFailed(effect.attempt, f"the commit record cannot be written: {error}", unsure=True)
        return sn.Committed(effect.attempt, commit, manifest)

    async def _record(self, commit: CommitRecord) -> CommitRecord:
        """Create the commit record. Raises FileExistsError if its number is another scheduler's, and StorageError.

        If the number belongs to a record of this scheduler whose answer never came, that snapshot exists, and the next
        number is tried.
        """
        while True:
            record = commit.to_bytes()
            try:
                await self._create(commit.path, record)
                return commit
            except FileExistsError:
                if await self.storage.read(commit.path) not in self._unsure.get(commit.sequence, ()):
                    raise
            except PsdistError:
                # It may exist nevertheless, now or later: do not remove its files.
                self._unsure.setdefault(commit.sequence, []).append(record)
                raise
            self._post(await self._read("", ()))
            commit = replace(commit, sequence=commit.sequence + 1)

    async def _create(self, path: str, data: bytes) -> None:
        """Create a file, and read it back. Succeeds if the file already has these bytes, because only the answer was
        lost.

        Raises FileExistsError if it has others, and StorageError if that is not known, or the storage has lost it.
        """
        try:
            await self.storage.create(path, data)
            await reader.confirm(self.storage, path, len(data), xxhash.xxh3_128_digest(data))
        except (StorageError, FileExistsError):
            try:
                there = await self.storage.read(path)
            except (UnknownSnapshotError, StorageError):
                there = None
            if there != data:
                raise

    # --- removing -----------------------------------------------------------------------------------------------------

    async def _abandon(self, directory: str) -> None:
        self._given_up[directory] = None
        await self._remove(directory)

    async def _remove(self, directory: str) -> None:
        """Remove the files of a directory that no record names. If the storage does not answer, they stay for now."""
        try:
            files = await self.storage.list(layout.directory_path(directory))
            await self.storage.delete(file.path for file in files)
        except PsdistError as error:
            logger.warning("the files of abandoned snapshot %s remain: %s", directory, error)

    async def _prune(self, effect: sn.Prune) -> sn.StorageEvent:
        done: list[int] = []
        try:
            for commit in effect.commits:
                await self.storage.delete([commit.path])
                if await reader.is_committed(self.storage, commit):
                    raise StorageError(
                        f"{self.storage.url} acknowledged the deletion of {commit.path}, and still has it"
                    )
                done.append(commit.sequence)
                await self._abandon(commit.directory)
            if effect.collect:
                await self._collect()
        except PsdistError as error:
            return sn.Pruned(tuple(done), str(error))
        return sn.Pruned(tuple(done))

    async def _collect(self) -> None:
        """Remove directories that no record names: those that this scheduler gave up, and old ones of others.

        Nothing is removed if a record cannot be read.
        """
        records = await reader.commits(self.storage)
        named = {record.directory for record in records if isinstance(record, CommitRecord)}
        if len(named) != len(records):
            return
        newest: dict[str, float] = {}
        for file in await self.storage.list(layout.SNAPSHOTS):
            directory = file.path.split("/")[1]
            newest[directory] = max(newest.get(directory, 0.0), file.modified)
        oldest = time.time() - GARBAGE_SECONDS
        for directory, modified in newest.items():
            mine = directory.endswith(f"-{self._salt}")
            garbage = directory in self._given_up if mine else modified < oldest
            if garbage and directory not in named:
                await self._remove(directory)

    async def _read(self, base: str, bad: tuple[str, ...]) -> sn.HistoryRead:
        try:
            return sn.HistoryRead(await read_history(self.storage, self._run_id, base, bad))
        except PsdistError as error:
            return sn.HistoryRead(None, str(error))


async def write_state(
    storage: Storage, place: sn.StatePlace, header: pb.HandInStateRequest.Header, parts: AsyncIterator[bytes]
) -> WorkerState:
    """Write the file of a worker's state durably, and read it back. At most one part of it is in memory.

    Raises StorageError, and InvalidArgumentError if length or digest differ from the header's. Then nothing of it
    remains.
    """
    state = WorkerState(
        header.parameters, place.rank, header.next, place.file, header.length, bytes(header.digest).hex()
    )
    digest, length = xxhash.xxh3_128(), 0
    path = layout.file_path(place.directory, place.file)
    async with storage.writer(path) as file:
        async for part in parts:
            length += len(part)
            if length > header.length:
                break
            digest.update(part)
            await file.write(part)
        if length != header.length or digest.hexdigest() != state.digest:
            raise InvalidArgumentError(
                f"the state of {header.parameters!r} that arrived is not the one that was announced"
            )
    try:
        await reader.confirm(storage, path, length, digest.digest())
    except BaseException:  # If the call broke, too: the worker hands the state in again, which creates the file.
        with suppress(StorageError):
            await storage.delete([path])
        raise
    return state


async def read_state(storage: Storage | None, source: sn.StateSource) -> AsyncIterator[pb.GetStateResponse]:
    """Yield the file of a worker's state in parts. Raises SnapshotCorruptError and StorageError."""
    state = source.state
    if storage is None or state is None or source.manifest is None:
        yield pb.GetStateResponse()
        return
    yield pb.GetStateResponse(length=state.length, digest=bytes.fromhex(state.digest), next=state.next)
    async for data in reader.read_state(storage, source.manifest, state):
        for start in range(0, len(data), _PART_BYTES):
            yield pb.GetStateResponse(part=data[start : start + _PART_BYTES])
