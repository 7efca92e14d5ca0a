"""Open the storage that a path or URL names, and claim a directory for a run.

A local directory is ``psdist.snapshots.storage``. Buckets and memory use obstore (``psdist.snapshots.bucket``), which
is imported only for them.

By the claim on a directory a second run that would write there is noticed when it starts. It is a lock of the system on
the file ``IN_USE``, which names the run. The system ends it with the process, so a scheduler that was killed can be
restarted immediately. A file system without such locks is not protected, and neither are buckets.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from psdist.errors import ConfigurationError
from psdist.snapshots.storage import LocalStorage, Storage, make_directories, missing_directories

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BUCKETS: Final = ("s3", "gs", "az", "memory")


def open_storage(path_or_url: str) -> Storage:
    """Return the storage in a local directory, or at a URL.

    path_or_url: a path, ``file://``, ``s3://``, ``gs://``, ``az://`` or ``memory://``.

    Nothing is read or written yet; the first write creates a directory. Buckets take their settings from the
    environment (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``). ``memory://NAME`` exists only in this process. Raises
    ConfigurationError.
    """
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
            f"the storage {path_or_url!r:.200} cannot be used: name a directory, or one of {known}"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigurationError(
            "the URL of a storage has a bucket and a path only: set credentials and options in the environment"
        )
    from psdist.snapshots.bucket import open_bucket

    return open_bucket(path_or_url.rstrip("/"))


def _local(path: str) -> Storage:
    return LocalStorage(os.path.expanduser(path))


# --- the claim on a directory -----------------------------------------------------------------------------------------


IN_USE: Final = "in-use.json"
_FLAGS: Final = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a claim, as far as it is known."""

    run_id: str = "an unknown run"
    host: str = "an unknown host"
    pid: int = 0


class DirectoryClaim:
    """Claim of run ``run_id`` on the directory ``path``, which is created if it is missing."""

    def __init__(self, path: str, run_id: str) -> None:
        self._path = path
        self._run_id = run_id
        self._file = -1
        #: Directories made for the claim, the deepest first.
        self._made: list[str] = []

    def take(self) -> Holder | None:
        """Take the claim. Returns the holder if another process has it; None if it is taken, or not supported."""
        with suppress(OSError):
            self._made = missing_directories(self._path)
            make_directories(self._path)
            while not self._try():
                pass  # Its holder removed the file at this moment.
            if self._file < 0:
                return self._holder()
        return None

    def _try(self) -> bool:
        """Try once. Returns False if the file is not the one of this name any more."""
        name = os.path.join(self._path, IN_USE)
        file = _open(name)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_named(file, name):
                os.close(file)
                return False
            with open(name, "w", encoding="ascii") as content:
                json.dump(self._description(), content)
        except BlockingIOError:
            os.close(file)
            return True
        except OSError:  # There are no locks, so the file is of no use.
            os.close(file)
            os.unlink(name)
            raise
        self._file = file
        return True

    def _description(self) -> dict[str, Any]:
        return {"run_id": self._run_id, "host": socket.gethostname(), "pid": os.getpid()}

    def _holder(self) -> Holder:
        try:
            with open(os.path.join(self._path, IN_USE), "rb") as file:
                found = json.loads(file.read(_READ_BYTES))
            return Holder(str(found["run_id"]), str(found["host"]), int(found["pid"]))
        except (OSError, ValueError, KeyError, TypeError):
            return Holder()

    def release(self) -> None:
        """Release the claim, and remove the directories made for it that are empty."""
        if self._file < 0:
            return
        with suppress(OSError):
            os.unlink(os.path.join(self._path, IN_USE))
        os.close(self._file)
        self._file = -1
        for directory in self._made:
            with suppress(OSError):
                os.rmdir(directory)


def _open(name: str) -> int:
    """Open the file of a claim, for reading if that suffices: one that is open for writing keeps its file system from
    being remounted read-only. NFS locks only files that are open for writing."""
    file = os.open(name, os.O_RDONLY | _FLAGS, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EBADF:
            os.close(file)
            return os.open(name, os.O_RDWR | _FLAGS, 0o666)
    return file


def _is_named(file: int, name: str) -> bool:
    """Return True if the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(name, follow_symlinks=False))
    except FileNotFoundError:
        return False
