"""Where a run's snapshots lie: a directory, or a prefix in a bucket, by one small interface.

Invariants: what ``create`` and a writer have finished is durable; ``create`` never replaces anything; a name cannot
lead out of the storage. Nothing here knows what a snapshot is. A local directory is ``psdist.snapshots.local``; buckets
and memory go through obstore (``psdist.snapshots.bucket``), which is loaded only where it is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

from psdist.errors import ConfigurationError
from psdist.types import check_directory

Buffer = bytes | bytearray | memoryview

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BUCKETS: Final = ("s3", "gs", "az", "memory")


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


def open_storage(path_or_url: str) -> Storage:
    """The storage in a local directory (a path, or ``file://``), or at an ``s3://``, ``gs://``, ``az://`` or
    ``memory://`` URL. Reads and writes nothing yet; a directory is made with the first write. Buckets take their
    settings from the environment (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``). ``memory://NAME`` lives in this process only.
    Raises ConfigurationError."""
    if not path_or_url or "\0" in path_or_url:
        raise ConfigurationError(f"the storage {path_or_url!r:.80} is neither a directory nor a URL")
    if not _SCHEME.match(path_or_url):
        return _local(path_or_url)
    parts = urlsplit(path_or_url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return _local(unquote(parts.path))
    if parts.scheme not in _BUCKETS:
        known = ", ".join(f"{scheme}://" for scheme in ("file", *_BUCKETS))
        raise ConfigurationError(
            f"the storage {path_or_url!r:.200} cannot be used: give a directory, or one of {known}"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigurationError(
            "a storage's URL holds a bucket and a path only: give credentials and options in the environment"
        )
    from psdist.snapshots.bucket import open_bucket

    return open_bucket(path_or_url.rstrip("/"))


def _local(path: str) -> Storage:
    from psdist.snapshots.local import LocalStorage

    return LocalStorage(os.path.expanduser(path))
