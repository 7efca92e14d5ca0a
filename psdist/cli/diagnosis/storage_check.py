"""Check of a storage of snapshots for ``psdist doctor``: it is written, synced, renamed, read and deleted."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from contextlib import suppress
from typing import Final

from psdist.cli.diagnosis.finding import Finding, fail, ok, warn
from psdist.errors import PsdistError
from psdist.snapshots.format import SNAPSHOTS, directory_path
from psdist.snapshots.local import missing_directories
from psdist.snapshots.opening import open_storage

_SIZE: Final = 8 << 20
_SLOW_BYTES_PER_SECOND: Final = 20e6


async def check_storage(path_or_url: str, timeout_seconds: float) -> Finding:
    """Write a file as a snapshot's, read it back, and delete it. Nothing remains of it."""
    remedy = "correct the path, its owner or mode, the mount (ro?), free space, or the bucket's credentials"
    try:
        async with asyncio.timeout(timeout_seconds):
            written, read = await _use(path_or_url)
    except TimeoutError:
        return fail("storage", f"{path_or_url} does not answer within {timeout_seconds:g} s", remedy)
    except PsdistError as error:
        return fail("storage", error.message, remedy)
    text = f"{path_or_url}: written and synced at {written / 1e6:,.0f} MB/s, read at {read / 1e6:,.0f} MB/s"
    if written < _SLOW_BYTES_PER_SECOND:
        return warn("storage", text, "snapshots will take long: use a faster disk or bucket, or save less often")
    return ok("storage", text)


async def _use(path_or_url: str) -> tuple[float, float]:
    """Return the speed of writing and reading, in bytes per second. Raises PsdistError."""
    storage, directory, content = (
        open_storage(path_or_url),
        directory_path(f"probe-{secrets.token_hex(8)}"),
        secrets.token_bytes(_SIZE),
    )
    missing = [] if "://" in storage.url else missing_directories(os.path.join(storage.url, SNAPSHOTS))
    await storage.check_writable(directory)
    path = f"{directory}/doctor"
    began = time.perf_counter()
    try:
        async with storage.writer(path) as file:
            await file.write(content)
        written = time.perf_counter()
        same = await storage.read(path) == content
        ended = time.perf_counter()
    finally:
        await storage.delete([path])
        for made in missing:
            with suppress(OSError):  # A run that started meanwhile uses it.
                os.rmdir(made)
    if not same:
        raise PsdistError(f"{path_or_url} returns other bytes than were written")
    return _SIZE / (written - began), _SIZE / (ended - written)
