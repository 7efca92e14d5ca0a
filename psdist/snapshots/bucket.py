"""Storage in a bucket (S3, GCS, Azure), or in this process's memory, through obstore.

An object exists completely or not at all, and is durable once it exists; ``create`` is a conditional put.

Only obstore's synchronous functions are used, each call in a thread of this module. The asynchronous ones deliver
results from threads of obstore's Rust runtime by ``call_soon_threadsafe``, which releases the interpreter lock and
acquires it again. If the interpreter is exiting by then, CPython ends that thread by pthread_exit, which unwinds
through Rust frames, and the process aborts. The threads of this module have no Rust frame when they deliver a result.
Rust threads still release uploaded buffers, but that runs no Python code, and pyo3 parks the thread if the interpreter
is exiting.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import MemoryStore, from_url

from psdist.errors import ConfigurationError, StorageError, UnknownSnapshotError
from psdist.snapshots.storage import Buffer, StoredFile, check_path

T = TypeVar("T")

#: Number of retries of a failed request, and the time limit for all of them.
RETRIES: Final = 4
_RETRY_SECONDS: Final = 60
#: Bytes in one part of an upload, and the number of parts in flight.
PART_BYTES: Final = 10 << 20
_PARTS: Final = 2

_memories: dict[str, Any] = {}


def open_bucket(url: str) -> BucketStorage:
    """Return the storage at an ``s3://``, ``gs://``, ``az://`` or ``memory://`` URL. Raises ConfigurationError."""
    if url.startswith("memory:"):
        return BucketStorage(url, _memories.setdefault(url, MemoryStore()))
    retries = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)}
    try:
        store = from_url(url, retry_config=retries)  # type: ignore[call-overload]  # the URL shows the kind
        return BucketStorage(url, store)
    except (BaseError, ValueError) as error:
        raise ConfigurationError(f"the storage {url:.200} cannot be opened: {_reason(error)}") from None


class BucketStorage:
    """``Storage`` in a bucket, or in memory."""

    def __init__(self, url: str, store: Any) -> None:
        self.url = url
        self._store = store

    async def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        with self._errors("read", check_path(path)):
            return await _in_thread(partial(self._read, path, start, length))

    async def list(self, prefix: str = "") -> list[StoredFile]:
        with self._errors("list", check_path(prefix) if prefix else "."):
            return [*await _in_thread(partial(self._list, prefix))]

    async def create(self, path: str, data: bytes) -> None:
        with self._errors("create", check_path(path)):
            try:
                await _in_thread(partial(obstore.put, self._store, path, data, mode="create", use_multipart=False))
            except AlreadyExistsError:
                # A request whose answer was lost is repeated, and finds its own object.
                if await self.read(path) != data:
                    raise FileExistsError(f"{path} exists already in {self.url}") from None

    @asynccontextmanager
    async def writer(self, path: str) -> AsyncIterator[BucketWriter]:
        file = BucketWriter(self, check_path(path))
        try:
            yield file
            await file.finish()
        except BaseException:  # Includes cancellation.
            await asyncio.shield(file.abandon())
            raise

    async def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            with self._errors("delete", check_path(path)), suppress(FileNotFoundError):
                await _in_thread(partial(obstore.delete, self._store, path))

    async def check_writable(self, directory: str) -> None:
        path = f"{check_path(directory)}/probe"
        try:
            with suppress(AlreadyExistsError):  # As in ``create``.
                await _in_thread(partial(obstore.put, self._store, path, b"", mode="create", use_multipart=False))
        except (BaseError, OSError) as error:
            reason = f"{_reason(error)}{_hint(error)}"
            raise StorageError(f"the storage {self.url} cannot be written: {reason}", path=self.url) from None
        with suppress(StorageError):  # Saving snapshots does not need the right to delete.
            await self.delete([path])

    # --- in a thread --------------------------------------------------------------------------------------------------

    def _read(self, path: str, start: int, length: int | None) -> bytes:
        if start == 0 and length is None:
            return bytes(obstore.get(self._store, path).bytes())
        if length is None:
            length = self._size(path) - start
        if length <= 0:
            return b""
        try:
            return bytes(obstore.get_range(self._store, path, start=start, length=length))
        except BaseError:
            # Buckets reject a range that begins at or after the end of the file.
            if self._size(path) <= start:
                return b""
            raise

    def _size(self, path: str) -> int:
        return obstore.head(self._store, path)["size"]

    def _list(self, prefix: str) -> Sequence[StoredFile]:
        found = [
            StoredFile(meta["path"], meta["size"], meta["last_modified"].timestamp())
            for chunk in obstore.list(self._store, prefix=prefix or None)
            for meta in chunk
        ]
        return sorted(found, key=lambda stored: stored.path)

    # --- errors -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _errors(self, verb: str, path: str) -> Iterator[None]:
        """Convert errors of obstore to psdist's."""
        try:
            yield
        except FileExistsError:
            raise
        except (BaseError, OSError) as error:
            reason = _reason(error)
            if isinstance(error, FileNotFoundError) and verb == "read" and "NoSuchBucket" not in reason:
                raise UnknownSnapshotError(f"there is no {path} in {self.url}", path=path) from None
            raise StorageError(f"cannot {verb} {path} in {self.url}: {reason}{_hint(error)}", path=path) from None


class BucketWriter:
    """File being written; see ``psdist.snapshots.storage.Writer``."""

    def __init__(self, storage: BucketStorage, path: str) -> None:
        self._storage = storage
        self._path = path
        # Bytes are sent once they exceed one part, or the file is complete.
        self._upload = obstore.open_writer(storage._store, path, buffer_size=PART_BYTES, max_concurrency=_PARTS)

    async def write(self, buffer: Buffer) -> None:
        """Append bytes to the file."""
        # Copy: the upload continues after this returns.
        if data := bytes(memoryview(buffer)):
            with self._storage._errors("write", self._path):
                await _in_thread(partial(self._upload.write, data))

    async def finish(self) -> None:
        """Make the file durable."""
        with self._storage._errors("write", self._path):
            await _in_thread(self._upload.close)

    def abandon(self) -> asyncio.Future[None]:
        """Remove the file if possible, after the write that a cancelled caller had started."""
        return _in_thread(self._abandon)

    def _abandon(self) -> None:
        with suppress(BaseError, OSError):
            try:
                self._upload.__exit__(InterruptedError, InterruptedError(), None)
            except OSError:  # The upload was being finished, so the object may exist.
                obstore.delete(self._storage._store, self._path)


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Return ``work()``, run in a thread.

    If the caller is cancelled, ``work`` still runs to its end, within the time of obstore's retries.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def set_once(result: Callable[[], None]) -> None:
        if not future.done():
            result()

    def run() -> Callable[[], None]:
        try:
            value = work()
        except BaseException as raised:  # Delivered to the caller.
            error = raised
            return lambda: future.set_exception(error)
        return lambda: future.set_result(value)

    def deliver(result: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # The loop is closed: no caller is left.
            loop.call_soon_threadsafe(set_once, result)

    _threads.run(run, deliver)
    return future


class _Threads:
    """Pool of threads without a limit: one is added for each call that finds all others busy.

    Unlike an executor's threads they are daemons: a bucket that does not answer delays neither the end of a program
    nor Ctrl-C.
    """

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]]]] = []

    def run(self, work: Callable[[], T], deliver: Callable[[T], None]) -> None:
        """Run ``work``, and pass its result to ``deliver``, in one of the threads."""
        try:
            jobs = self._idle.pop()
        except IndexError:
            jobs = SimpleQueue()
            threading.Thread(target=self._serve, args=(jobs,), name="psdist-bucket", daemon=True).start()
        jobs.put((work, deliver))

    def _serve(self, jobs: SimpleQueue[tuple[Callable[[], T], Callable[[T], None]]]) -> None:
        while True:
            work, deliver = jobs.get()
            result = work()
            self._idle.append(jobs)  # First, because the result may trigger more work.
            deliver(result)
            del work, deliver, result


_threads = _Threads()


def _hint(error: BaseException) -> str:
    """Return a remedy if one is known, or an empty string."""
    # Without credentials, Amazon's client queries the instance metadata service.
    if "/latest/api/token" in str(error):
        return "; no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return "; check the credentials in the environment and their permissions, or use another --storage-path"
    return "; create the bucket, or use another --storage-path" if "NoSuchBucket" in str(error) else ""


def _reason(error: BaseException) -> str:
    """Return obstore's message in one line."""
    text = str(error).partition("Debug source")[0]
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())[:300]
