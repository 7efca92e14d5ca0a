"""A storage in a bucket (S3, GCS, Azure), or in this process's memory, through obstore.

An object is there as a whole or not at all, and durable when it is there; ``create`` is a conditional put.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import MemoryStore, from_url

from psdist.errors import ConfigurationError, StorageError, UnknownSnapshotError
from psdist.snapshots.storage import Buffer, Stored, check_path

if TYPE_CHECKING:
    from obstore import AsyncWritableFile

#: An attempt to reach a bucket that fails is made again so often, and for no longer than that.
_RETRIES: Final = 4
_RETRY_SECONDS: Final = 60
#: Bytes of one part of an upload, and how many are under way at a time.
_PART_BYTES: Final = 10 << 20
_PARTS: Final = 2

_memories: dict[str, Any] = {}


def open_bucket(url: str) -> BucketStorage:
    """The storage at an ``s3://``, ``gs://``, ``az://`` or ``memory://`` URL. Raises ConfigurationError."""
    if url.startswith("memory:"):
        return BucketStorage(url, _memories.setdefault(url, MemoryStore()))
    retries = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)}
    try:
        # Overloaded by the kinds of stores, of which only the URL says which it is.
        return BucketStorage(url, from_url(url, retry_config=retries))  # type: ignore[call-overload]
    except (BaseError, ValueError) as error:
        raise ConfigurationError(f"the storage {url:.200} cannot be used: {_reason(error)}") from None


class BucketStorage:
    """See ``psdist.snapshots.storage.Storage``."""

    def __init__(self, url: str, store: Any) -> None:
        self.url = url
        self._store = store

    async def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        with self._errors("read", check_path(path)):
            if start == 0 and length is None:
                return bytes(await (await obstore.get_async(self._store, path)).bytes_async())
            if length is None:
                length = (await obstore.head_async(self._store, path))["size"] - start
            return await self._read_range(path, start, length) if length > 0 else b""

    async def _read_range(self, path: str, start: int, length: int) -> bytes:
        try:
            return bytes(await obstore.get_range_async(self._store, path, start=start, length=length))
        except BaseError:
            # A bucket refuses a range that begins at the file's end or after it.
            if (await obstore.head_async(self._store, path))["size"] <= start:
                return b""
            raise

    async def list(self, prefix: str = "") -> list[Stored]:
        found = []
        with self._errors("list", check_path(prefix) if prefix else "."):
            async for chunk in obstore.list(self._store, prefix=prefix or None):
                for meta in chunk:
                    found.append(Stored(meta["path"], meta["size"], meta["last_modified"].timestamp()))
        return sorted(found, key=lambda stored: stored.path)

    async def create(self, path: str, data: bytes) -> None:
        with self._errors("create", check_path(path)):
            try:
                await obstore.put_async(self._store, path, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                # A request whose answer was lost is sent again, and finds what it made.
                if await self.read(path) != data:
                    raise FileExistsError(f"{path} exists already in {self.url}") from None

    def writer(self, path: str) -> AbstractAsyncContextManager[BucketWriter]:
        return self._writer(check_path(path))

    async def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            with self._errors("delete", check_path(path)):
                try:
                    await obstore.delete_async(self._store, path)
                except FileNotFoundError:
                    continue

    @asynccontextmanager
    async def _writer(self, path: str) -> AsyncIterator[BucketWriter]:
        with self._errors("write", path):
            upload = obstore.open_writer_async(self._store, path, buffer_size=_PART_BYTES, max_concurrency=_PARTS)
            async with upload:
                yield BucketWriter(self, path, upload)

    @contextmanager
    def _errors(self, verb: str, path: str) -> Iterator[None]:
        """Says in psdist's words what the bucket refused."""
        try:
            yield
        except FileExistsError:
            raise
        except (BaseError, OSError) as error:
            reason = _reason(error)
            if isinstance(error, FileNotFoundError) and verb == "read" and "NoSuchBucket" not in reason:
                raise UnknownSnapshotError(f"there is no {path} in {self.url}", path=path) from None
            raise StorageError(f"cannot {verb} {path} in {self.url}: {reason}", path=path) from None


class BucketWriter:
    """A file that is being written; see ``psdist.snapshots.storage.Writer``."""

    def __init__(self, storage: BucketStorage, path: str, upload: AsyncWritableFile) -> None:
        self._storage = storage
        self._path = path
        self._upload = upload

    async def write(self, buffer: Buffer) -> None:
        """Appends bytes."""
        view = memoryview(buffer)
        if view.nbytes:
            with self._storage._errors("write", self._path):
                # A copy: the upload goes on after this returns.
                await self._upload.write(bytes(view))


def _reason(error: BaseException) -> str:
    """One line of what obstore says in many."""
    text = str(error).partition("Debug source")[0]
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())[:300]
