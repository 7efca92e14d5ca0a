"""Checks of this machine's resources before a program starts anything: open files, address space, temporary space.

Without them the same shortage shows later, in one of several processes, as an error of whichever call came first.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path
from typing import Final

from psdist.errors import ConfigurationError
from psdist.interpreter import python

#: Open files of a launcher by itself, and for each process that it starts: its streams, its pidfd and its log.
_FILES_OF_LAUNCHER: Final = 24
_FILES_OF_CHILD: Final = 4
#: Open files of a scheduler or a server that has a few members.
_FILES_OF_SERVICE: Final = 64
#: A service maps more than this before it has any parameters: libraries, and the stacks of its threads.
_ADDRESSES: Final = 1 << 30
#: Room for a run's token, address and store.
_TEMPORARY_BYTES: Final = 1 << 20


def require_for_launcher(children: int) -> None:
    """Raise ConfigurationError if this process may not start ``children`` processes, or has no Python for them."""
    python()
    _require_files(_FILES_OF_LAUNCHER + children * _FILES_OF_CHILD, f"to start {children} processes")
    _require_addresses()


def require_working_directory() -> None:
    """Raise ConfigurationError if the working directory was deleted: relative paths have no meaning in it."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigurationError(
            f"the working directory does not exist any more ({error.strerror}): change to another, or back to one that "
            'was created again (cd "$PWD")'
        ) from None


def require_for_service() -> None:
    """Raise ConfigurationError if this process cannot be a scheduler or a server."""
    _require_files(_FILES_OF_SERVICE, "for the connections of a few members")
    _require_addresses()


def make_private_directory(prefix: str) -> Path:
    """Create a directory for this run's files that only this user may read. Raises ConfigurationError."""
    try:
        directory = Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        # tempfile looks for a writable directory; its message lists all that it tried.
        raise ConfigurationError(
            f"there is no room for this run's files: {error.strerror or error}. Free some space, or set TMPDIR to a "
            "directory on another disk"
        ) from None
    free = shutil.disk_usage(directory).free
    if free < _TEMPORARY_BYTES:
        directory.rmdir()
        raise ConfigurationError(
            f"the temporary directory {directory.parent} has {free} bytes free, and a run needs {_TEMPORARY_BYTES} for "
            "its files: free some space, or set TMPDIR to a directory on another disk"
        )
    return directory


def _require_files(needed: int, purpose: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _allows(soft, needed):
        return
    if _allows(hard, needed):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return
    raise ConfigurationError(
        f"this process may open {hard} files, and needs {needed} {purpose}: raise the limit, for example by "
        "'ulimit -n 4096', LimitNOFILE= of a systemd unit, or --ulimit nofile=4096 of a container"
    )


def _require_addresses() -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if not _allows(limit, _ADDRESSES):
        raise ConfigurationError(
            f"this process may map {limit // 1024} KiB of addresses, and needs at least {_ADDRESSES // 1024}: raise "
            "the limit, best by 'ulimit -v unlimited'. To bound memory use a cgroup, as MemoryMax= of a systemd unit"
        )


def _allows(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed
