"""The interface to the storage of a run's snapshots: a directory, or a prefix in a bucket.

Invariants: a file that ``create`` or a writer has finished is durable; ``create`` never replaces a file; a name cannot
lead out of the storage. A storage does not know what a snapshot is.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from psdist.types import check_directory

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in a storage. size: bytes. modified: seconds since 1970."""

    path: str
    size: int
    modified: float


class Writer(Protocol):
    """A file that is being written."""

    async def write(self, buffer: Buffer) -> None:
        """Appends the bytes of a contiguous buffer, which may be changed as soon as this returns."""


class Storage(Protocol):
    """Files by name.

    A name is parts joined by "/". InvalidNameError is raised for a part that ``psdist.types.check_directory`` refuses.
    Every other failure is a StorageError that says what was tried, and why it failed. An operation that raised it may
    have taken effect, and one that was cancelled may still do so. A writer whose block was left by an exception leaves
    no file, then or later.
    """

    @property
    def url(self) -> str:
        """The directory's absolute path, or the URL; ``open_storage`` of it is the same storage."""

    async def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file from ``start`` on, up to its end or to ``length`` of them. Raises UnknownSnapshotError if the
        file does not exist."""

    async def list(self, prefix: str = "") -> list[StoredFile]:
        """All files in and below the directory ``prefix``, by path; none if there is no such directory."""

    async def create(self, path: str, data: bytes) -> None:
        """Creates a file atomically and durably. Raises FileExistsError if it exists; of several callers at the same
        time, one succeeds."""

    def writer(self, path: str) -> AbstractAsyncContextManager[Writer]:
        """Streams a new file: ``async with storage.writer(path) as file: await file.write(...)``. It is durable when
        the block is left; if by an exception, no file stays. Raises StorageError if the file exists and the storage can
        tell."""

    async def delete(self, paths: Iterable[str]) -> None:
        """Removes files, in this order; missing ones are skipped."""

    async def check_writable(self, directory: str) -> None:
        """Creates a file in ``directory``, which nobody else may use, and removes it if that is allowed. Raises
        StorageError, with a remedy, if it cannot be created."""


def check_path(path: str) -> str:
    """Returns ``path`` if it can name a file or directory in a storage, else raises InvalidNameError."""
    for part in path.split("/"):
        check_directory(part)
    return path
