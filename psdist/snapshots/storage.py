"""Interface to the storage of a run's snapshots: a directory, or a prefix in a bucket.

Invariants: A file finished by ``create`` or a writer is durable; ``create`` never replaces a file; no name leads out
of the storage. A storage knows nothing about snapshots.
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
