"""Where a run's snapshots lie: a directory, or a prefix in a bucket, by one small interface.

Invariants: what ``create`` and a writer have finished is durable; ``create`` never replaces anything; a name cannot
lead out of the storage. Nothing here knows what a snapshot is.
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
        """Appends bytes; any contiguous buffer, which may be changed as soon as this returns."""


class Storage(Protocol):
    """Files by name. A name is parts joined by "/", each as ``psdist.types.check_directory`` allows, else
    InvalidNameError is raised. Everything else that goes wrong is a StorageError that says what was tried and why not;
    an operation that raised it may have been carried out nevertheless, and one that was cancelled may yet be. Only of a
    writer nothing is left, or comes later, once its block was left by an exception."""

    @property
    def url(self) -> str:
        """The directory's absolute path, or the URL; ``open_storage`` of it is the same storage."""

    async def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file from ``start`` on, up to its end or ``length`` of them: fewer where it ends before. Raises
        UnknownSnapshotError where there is no such file."""

    async def list(self, prefix: str = "") -> list[StoredFile]:
        """All files in and below the directory ``prefix``, by path; none where there is no such directory."""

    async def create(self, path: str, data: bytes) -> None:
        """Makes a file at once and durably. Raises FileExistsError where there is one; of several that do it at a
        time, one succeeds."""

    def writer(self, path: str) -> AbstractAsyncContextManager[Writer]:
        """Streams a new file: ``async with storage.writer(path) as file: await file.write(...)``. It is durable once
        the block was left; if by an exception, nothing of it stays. Raises StorageError where there is one, if the
        storage can tell."""

    async def delete(self, paths: Iterable[str]) -> None:
        """Removes files, in this order; those that are gone already are passed over."""

    async def check_writable(self, directory: str) -> None:
        """Makes a file in ``directory``, which nobody else must use, and removes it. Raises StorageError, with a
        remedy, where none can be made. Nothing of it stays, as far as it may be removed."""


def check_path(path: str) -> str:
    """Returns ``path`` if it can name a file or directory in a storage, else raises InvalidNameError."""
    for part in path.split("/"):
        check_directory(part)
    return path
