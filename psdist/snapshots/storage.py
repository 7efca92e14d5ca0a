"""Storage of a run's snapshots: the interface, and a local directory. ``bucket`` is a prefix in a bucket.

Invariants: A file finished by ``create`` or a writer is durable; ``create`` never replaces a file; no name leads out
of the storage. A storage knows nothing about snapshots.

``LocalStorage`` uses system calls instead of obstore, which neither syncs its writes nor stays within the directory if
there are symbolic links. Each part of a path is opened relative to the directory above, without following links. So
neither a name, nor anything placed below the root, leads out of it. The root itself may be a link.

Weights are private: files have mode 0600 and directories 0700. Those below a directory with the set-group-ID bit, the
sign of a directory that a group shares, also have that directory's permissions for the group.

All calls that may wait for the disk run in threads.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from psdist.errors import InvalidNameError, StorageError, UnknownSnapshotError
from psdist.types import check_directory

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class StoredFile:
    """File in a storage.

    size: bytes.
    modified: seconds since 1970.
    """

    path: str
    size: int
    modified: float


class Writer(Protocol):
    """File being written."""

    async def write(self, buffer: Buffer) -> None:
        """Append the bytes of a contiguous buffer, which may be changed as soon as this returns."""


class Storage(Protocol):
    """Files by name.

    A name consists of parts joined by "/". A part that ``psdist.types.check_directory`` rejects raises
    InvalidNameError. Every other failure is a StorageError that says what was tried, and why it failed. An operation
    that raised StorageError may have taken effect, and a cancelled one may still do so. A writer whose block ends with
    an exception leaves no file, then or later.
    """

    @property
    def url(self) -> str:
        """Absolute path of the directory, or the URL. ``open_storage`` of it returns the same storage."""

    async def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Return bytes of a file from ``start`` to its end, or at most ``length`` bytes.

        Raises UnknownSnapshotError if the file does not exist.
        """

    async def list(self, prefix: str = "") -> list[StoredFile]:
        """Return all files in and below the directory ``prefix``, by path; none if there is no such directory."""

    async def create(self, path: str, data: bytes) -> None:
        """Create a file atomically and durably.

        Raises FileExistsError if it exists; of several concurrent callers, one succeeds.
        """

    def writer(self, path: str) -> AbstractAsyncContextManager[Writer]:
        """Stream a new file: ``async with storage.writer(path) as file: await file.write(...)``.

        The file is durable when the block ends; if the block raises, no file remains. Raises StorageError if the file
        exists and the storage can tell.
        """

    async def delete(self, paths: Iterable[str]) -> None:
        """Remove files, in this order; missing ones are skipped."""

    async def check_writable(self, directory: str) -> None:
        """Create a file in ``directory``, which must be unused by others, and remove it if that is allowed.

        Raises StorageError, with a remedy, if it cannot be created.
        """


def check_path(path: str) -> str:
    """Return ``path`` if it can name a file or directory in a storage, else raise InvalidNameError."""
    for part in path.split("/"):
        check_directory(part)
    return path


# --- a local directory ------------------------------------------------------------------------------------------------


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_HINTS = {
    errno.ENOSPC: "; free some space, or keep fewer snapshots",
    errno.EDQUOT: "; free some space, or keep fewer snapshots",
    errno.EACCES: "; grant this user access, or use another --storage-path",
    errno.EPERM: "; grant this user access, or use another --storage-path",
    errno.EROFS: "; use another --storage-path",
    errno.ELOOP: "; symbolic links are not followed below the root of the storage",
    errno.ENOTDIR: "; a part of the path is not a directory, or is a symbolic link, which is not followed",
}
#: Errors of a file system without hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

#: Number of times that a directory is recreated while others remove it at the same moment.
_TRIES = 100
#: File that tests whether the storage is writable. It fills a block, since less may fit on a full disk.
_PROBE = "probe"
_PROBE_BYTES = 4096


class LocalStorage:
    """``Storage`` in the directory ``path``, which need not exist yet."""

    def __init__(self, path: str) -> None:
        self.url = os.path.realpath(path)

    async def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        return await asyncio.to_thread(self._read, check_path(path), start, length)

    async def list(self, prefix: str = "") -> list[StoredFile]:
        return [*await asyncio.to_thread(self._list, check_path(prefix) if prefix else "")]

    async def create(self, path: str, data: bytes) -> None:
        await asyncio.to_thread(self._create, check_path(path), data)

    @asynccontextmanager
    async def writer(self, path: str) -> AsyncIterator[LocalWriter]:
        file = LocalWriter(self, check_path(path))
        try:
            await asyncio.to_thread(file.open)
            yield file
            await asyncio.to_thread(file.finish)
        except BaseException:  # Includes cancellation.
            await asyncio.shield(asyncio.to_thread(file.abandon))
            raise

    async def delete(self, paths: Iterable[str]) -> None:
        await asyncio.to_thread(self._delete, tuple(check_path(path) for path in paths))

    async def check_writable(self, directory: str) -> None:
        await asyncio.to_thread(self._check_writable, check_path(directory))

    # --- in a thread --------------------------------------------------------------------------------------------------

    def _read(self, path: str, start: int, length: int | None) -> bytes:
        with self._errors("read", path), self._parent(path) as (parent, name), _descriptor(name, _READ, parent) as file:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise StorageError(f"cannot read {path} in {self.url}: it is not a regular file")
            end = status.st_size if length is None else min(status.st_size, start + length)
            return _read_range(file, start, end)

    def _list(self, prefix: str) -> Sequence[StoredFile]:
        found: list[StoredFile] = []
        with self._errors("list", prefix or "."):
            try:
                with self._opened(prefix.split("/") if prefix else []) as top:
                    _collect(top, f"{prefix}/" if prefix else "", found)
            except FileNotFoundError:
                return []
        return sorted(found, key=lambda stored: stored.path)

    def _create(self, path: str, data: bytes) -> None:
        with self._errors("create", path):
            _retry_if_removed(lambda: self._create_once(path, data))

    def _create_once(self, path: str, data: bytes) -> None:
        with self._parent(path, make=True) as (parent, name):
            draft = f"{name[:100]}.draft-{secrets.token_hex(8)}"
            _write_new(parent, draft, data)
            try:
                _link(parent, draft, name, data)
            finally:
                os.unlink(draft, dir_fd=parent)
            try:
                os.fsync(parent)
            except OSError:
                os.unlink(name, dir_fd=parent)
                raise

    def _delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            with self._errors("delete", path):
                try:
                    with self._parent(path) as (parent, name):
                        with suppress(FileNotFoundError):
                            os.unlink(name, dir_fd=parent)
                        os.fsync(parent)
                except FileNotFoundError:
                    continue
                self._remove_empty(path)

    def _remove_empty(self, path: str) -> None:
        """Remove the directories that are empty without ``path``, except those at the root."""
        parts = path.split("/")[:-1]
        while len(parts) > 1:
            name = parts.pop()
            try:
                with self._opened(parts) as parent:
                    os.rmdir(name, dir_fd=parent)
                    os.fsync(parent)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    return
                raise

    def _check_writable(self, directory: str) -> None:
        try:
            _retry_if_removed(lambda: self._probe(directory.split("/")))
        except _SyncError as error:
            raise StorageError(
                f"the storage {self.url} cannot make {error.kind} durable, as snapshots must be (fsync: "
                f"{os.strerror(error.errno or 0)}): use a directory of another file system, or a bucket",
                path=self.url,
            ) from None
        except OSError as error:
            raise StorageError(f"the storage {self.url} cannot be written: {_reason(error)}", path=self.url) from None

    def _probe(self, parts: Sequence[str]) -> None:
        missing = missing_directories(self.url)
        try:
            for path in reversed(missing):
                with suppress(FileExistsError):  # Another process made it. If it is no directory, the next call fails.
                    os.mkdir(path, 0o700)
                with _descriptor(os.path.dirname(path), _DIRECTORY) as above:
                    _check_sync(above, "directories")
            with self._opened([]) as root:
                _probe(root, parts)
        finally:
            for path in missing:
                with suppress(OSError):  # The directory stays if it is in use by now.
                    os.rmdir(path)

    # --- directories --------------------------------------------------------------------------------------------------

    @contextmanager
    def _parent(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Open the directory of ``path``. Yields its descriptor, and the file's name within it."""
        *parts, name = path.split("/")
        with self._opened(parts, make=make) as parent:
            yield parent, name

    @contextmanager
    def _opened(self, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
        """Open the directory ``parts`` below the root, for a ``with`` block. Yields its descriptor.

        make: create missing directories, durably.
        """
        if make:
            make_directories(self.url)
        directory = os.open(self.url, _DIRECTORY)
        try:
            for part in parts:
                if make:
                    _make(directory, part)
                below = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
                os.close(directory)
                directory = below
            yield directory
        finally:
            os.close(directory)

    @contextmanager
    def _errors(self, verb: str, path: str) -> Iterator[None]:
        """Convert errors of the system to psdist's."""
        try:
            yield
        except OSError as error:
            if isinstance(error, FileExistsError) and verb == "create":
                raise FileExistsError(errno.EEXIST, f"{path} exists already in {self.url}") from None
            if isinstance(error, FileNotFoundError) and verb == "read":
                raise UnknownSnapshotError(f"there is no {path} in {self.url}", path=path) from None
            raise StorageError(f"cannot {verb} {path} in {self.url}: {_reason(error)}", path=path) from None


def _reason(error: OSError) -> str:
    """Return the system's error text, with a remedy if one is known."""
    return (os.strerror(error.errno) if error.errno else str(error)) + _HINTS.get(error.errno or 0, "")


class LocalWriter:
    """File being written; see ``psdist.snapshots.storage.Writer``.

    ``open``, ``finish`` and ``abandon`` may wait for the disk, so they are called in a thread.
    """

    def __init__(self, storage: LocalStorage, path: str) -> None:
        self._storage = storage
        self._path = path
        self._file = -1
        self._made = False
        self._over = False
        #: Held by threads that use the file. A thread whose caller was cancelled may still write, or not have opened
        #: it yet.
        self._lock = threading.Lock()

    async def write(self, buffer: Buffer) -> None:
        """Append bytes to the file."""
        await asyncio.to_thread(self._write, buffer)

    def open(self) -> None:
        """Create the file."""
        with self._storage._errors("write", self._path):
            _retry_if_removed(self._open_once)

    def _open_once(self) -> None:
        with self._storage._parent(self._path, make=True) as (parent, name), self._lock:
            if not self._over:
                self._file = os.open(name, _NEW, _mode(parent) & 0o666, dir_fd=parent)
                self._made = True

    def _write(self, buffer: Buffer) -> None:
        with self._storage._errors("write", self._path), self._lock:
            _write_all(self._file, buffer)

    def finish(self) -> None:
        """Make the file durable."""
        storage = self._storage
        with storage._errors("write", self._path), self._lock:
            os.fsync(self._file)
            # Reading the file back then reads the disk, and not these pages.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
            self._close()
            with storage._parent(self._path) as (parent, _):
                os.fsync(parent)

    def abandon(self) -> None:
        """Remove the file, if possible."""
        with self._lock, suppress(OSError):
            self._over = True
            self._close()
            if self._made:
                with self._storage._parent(self._path) as (parent, name):
                    os.unlink(name, dir_fd=parent)
                self._storage._remove_empty(self._path)

    def _close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


@contextmanager
def _descriptor(name: str, flags: int, directory: int | None = None, mode: int = 0o600) -> Iterator[int]:
    """Open a file or directory, relative to an open directory if one is given."""
    descriptor = os.open(name, flags, mode, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _mode(parent: int) -> int:
    """Return the mode of a new directory in an open one; a file has its bits for reading and writing."""
    mode = os.fstat(parent).st_mode
    return 0o700 | (mode & 0o070 if mode & stat.S_ISGID else 0)


def _retry_if_removed(function: Callable[[], None]) -> None:
    """Call ``function``, which creates a file; again if its empty directory was removed at that moment."""
    for _ in range(_TRIES - 1):
        try:
            return function()
        except FileNotFoundError:
            continue
    return function()


def make_directories(path: str) -> None:
    """Create a directory and its parents where they are missing, durably."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(path)
    if above != path:
        make_directories(above)
    with _descriptor(above, _DIRECTORY) as directory:
        with suppress(FileExistsError):
            os.mkdir(path, _mode(directory))
        os.fsync(directory)


def _make(directory: int, name: str, *, durable: bool = True) -> bool:
    """Create a directory in an open one. Return True if it was missing."""
    try:
        os.mkdir(name, _mode(directory), dir_fd=directory)
    except FileExistsError:
        return False
    if durable:
        os.fsync(directory)
    return True


def missing_directories(path: str) -> list[str]:
    """Return ``path`` and its parents as far as they do not exist, the deepest first."""
    found = []
    while not os.path.lexists(path):
        found.append(path)
        path = os.path.dirname(path)
    return found


def _probe(directory: int, parts: Sequence[str]) -> None:
    """Create a durable file in the directory ``parts`` below an open one, then remove it and the directories created
    for it."""
    if parts:
        made = _make(directory, parts[0], durable=False)
        try:
            if made:
                _check_sync(directory, "directories")
            with _descriptor(parts[0], _DIRECTORY | os.O_NOFOLLOW, directory) as below:
                _probe(below, parts[1:])
        finally:
            if made:
                with suppress(OSError):
                    os.rmdir(parts[0], dir_fd=directory)
        return
    file = os.open(_PROBE, _NEW, 0o600, dir_fd=directory)
    try:
        try:
            _write_all(file, bytes(_PROBE_BYTES))
            _check_sync(file, "files")
        finally:
            os.close(file)
        _check_sync(directory, "directories")
    finally:
        os.unlink(_PROBE, dir_fd=directory)


class _SyncError(OSError):
    """Files or directories (``kind``) of this file system cannot be made durable."""

    def __init__(self, error: OSError, kind: str) -> None:
        super().__init__(error.errno, error.strerror)
        self.kind = kind


def _check_sync(descriptor: int, kind: str) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # Some file systems allocate space only now.
        raise _SyncError(error, kind) from None


def _read_range(file: int, start: int, end: int) -> bytes:
    parts = []
    while start < end and (part := os.pread(file, end - start, start)):
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _write_all(file: int, buffer: Buffer) -> None:
    view = memoryview(buffer)
    rest = view.cast("B") if view.nbytes else memoryview(b"")
    while rest:
        rest = rest[os.write(file, rest) :]


def _write_new(parent: int, name: str, data: bytes) -> None:
    """Write a new file whose content, but not yet its name, is durable. No file remains if that fails."""
    with _descriptor(name, _NEW, parent, _mode(parent) & 0o666) as file:
        try:
            _write_all(file, data)
            os.fsync(file)
        except BaseException:  # Includes cancellation: a partial file is useless.
            with suppress(OSError):
                os.unlink(name, dir_fd=parent)
            raise


def _link(parent: int, draft: str, name: str, data: bytes) -> None:
    """Give ``draft`` its name, unless that is taken.

    Without hard links the file is written under its final name. A crash at that moment leaves a torn file, which its
    digest reveals.
    """
    try:
        os.link(draft, name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _write_new(parent, name, data)


def _collect(directory: int, prefix: str, found: list[StoredFile]) -> None:
    """Collect the regular files in and below an open directory whose names are valid in a storage."""
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                check_directory(entry.name)
                status = os.stat(entry.name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found.append(StoredFile(prefix + entry.name, status.st_size, status.st_mtime))
                elif stat.S_ISDIR(status.st_mode):
                    with _descriptor(entry.name, _DIRECTORY | os.O_NOFOLLOW, directory) as below:
                        _collect(below, f"{prefix}{entry.name}/", found)
            except (InvalidNameError, FileNotFoundError):
                continue
