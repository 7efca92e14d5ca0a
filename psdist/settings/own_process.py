"""A program's own process: the signals that end it, its standard error, and the limits that it needs.

**Signals.** Without handlers Python would print a traceback for Ctrl-C, and a signal would leave files behind, or end
the program with another status than its own. The first process of a container would ignore SIGTERM. So a program calls
``exit_on`` or ``end_on`` first. Its event loop's handlers replace these, and ``ignore`` replaces those.

**Standard error.** Lines of a server program that cannot be written are lost, and change nothing else. Python's own
stream keeps the lines that a full disk refused, tries again when the process ends, and changes its exit status to 120,
by which a launcher or a service manager would restart it. And an error message that fails would end the process with a
traceback's status instead of its own.

**Limits** on open files, addresses and temporary space are checked before anything is started. Otherwise the same
shortage shows later, in one of several processes, as an error of whichever call came first.
"""

from __future__ import annotations

import asyncio
import io
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final, TypeVar

from psdist.errors import ConfigurationError
from psdist.machine import python
from psdist.settings.exit_codes import OK, SIGNAL_BASE

T = TypeVar("T")

#: The signals that end the scheduler and the servers.
SERVICE_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def exit_on(signals: Iterable[int]) -> None:
    """Raise SystemExit on these signals, so that ``finally`` blocks run. Signals that are ignored stay so."""
    for number in signals:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit)


def end_on(signals: Iterable[int]) -> None:
    """End a service that starts, or waits to lead, on these signals: immediately, and with the status of one that
    serves. Signals that are ignored stay so."""
    for number in signals:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def handle(handler: Callable[[], object]) -> None:
    """Call ``handler`` on the running loop for the signals that end a service.

    A SIGTERM that was ignored when the program started stays so: engines signal all processes of a job together, but
    servers and scheduler have to outlive the workers. SIGINT is always handled, because shells ignore it for
    commands in the background.
    """
    loop = asyncio.get_running_loop()
    for number in SERVICE_SIGNALS:
        if number != signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, handler)


def ignore(signals: Iterable[int]) -> None:
    """Ignore these signals from now on, because the end of the program is decided. Called on its event loop."""
    loop, signals = asyncio.get_running_loop(), tuple(signals)
    # Block them meanwhile, because removing a handler restores Python's own.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    for number in signals:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def ignored_after(work: Coroutine[None, None, T]) -> T:
    """Return the result of a service's ``work``, and ignore the signals that come after it."""
    try:
        return await work
    finally:
        ignore(SERVICE_SIGNALS)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(SIGNAL_BASE + number)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(OK)


# --- standard error ---------------------------------------------------------------------------------------------------


class _Lossy(io.TextIOWrapper):
    def write(self, text: str, /) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def lose_unwritable_lines() -> None:
    """Write standard error without a buffer from now on, and ignore errors."""
    stream = sys.stderr
    # A test's stream has no descriptor; that of PYTHONUNBUFFERED is its own raw stream.
    if isinstance(stream, io.TextIOWrapper) and isinstance(stream.buffer, io.BufferedWriter | io.FileIO):
        raw = getattr(stream.buffer, "raw", stream.buffer)
        sys.stderr = _Lossy(raw, stream.encoding, stream.errors, write_through=True)


# --- limits -----------------------------------------------------------------------------------------------------------

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
