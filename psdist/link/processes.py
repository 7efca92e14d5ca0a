"""Other processes of this host: exchange of arena files, waits for changes of shared memory, and stopped processes.

A stopped process keeps its connections, and answers nothing. A wait (Linux's futex) may be on memory that is mapped
read-only: the kernel compares the word and starts the wait in one step, so a change is never missed.

They exchange files of arenas like this:

1. The worker listens on a socket with a random name in the host's shared-memory file system. Two processes or
   containers that can share memory have this file system in common.
2. It sends the name over gRPC. The server connects, receives the worker's file and sends its own. Each side checks that
   the other runs as the same user.
3. The nonces in the files are returned over gRPC. This proves that both peers are the ends of the gRPC stream.
4. The connection stays open for calls (``frame_connection``).

Invariants: The socket's file is removed when the exchange ends, successful or not. ``sweep`` removes the files of
processes that were killed in between: nobody listens on those.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import platform
import re
import secrets
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from psdist.errors import SharingUnavailableError

#: States in /proc that a process does not leave by itself: stopped, traced, dead.
_STOPPED: Final = frozenset("TtXxZ")
#: Number of the system call, on machines that perform loads and stores in program order: whoever has seen a counter
#: also sees the writes before it.
_NUMBER: Final = {"x86_64": 202, "AMD64": 202}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_ALL: Final = 2**31 - 1

_libc = ctypes.CDLL(None, use_errno=True)


@functools.cache
def own_scope() -> str:
    """Name the machine, and the processes among which this process has its id; empty if that is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def is_stopped(pid: int) -> bool:
    """True if a process of this scope was stopped, or has ended."""
    return _state(pid) in _STOPPED


def _state(pid: int) -> str:
    """Return the state of a process in /proc: X if it is gone, empty if it is unknown."""
    try:
        # The name of the program, in parentheses, may contain anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X" if Path("/proc/self/stat").exists() else ""
    except OSError:
        return ""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def has_waits() -> bool:
    """True if this machine can wait for changes of shared memory."""
    return _NUMBER is not None and hasattr(_libc, "syscall")


def wait(address: int, value: int, milliseconds: int) -> None:
    """Wait until the 32-bit word at ``address`` is not ``value``, for less than a second. May return early."""
    limit = _Timespec(0, milliseconds * 1_000_000)
    _call(address, _WAIT, value, ctypes.byref(limit))


def wake(address: int) -> None:
    """Wake all that wait for the word at ``address``."""
    _call(address, _WAKE, _ALL, None)


def _call(address: int, operation: int, value: int, limit: object) -> None:
    number = ctypes.c_long(_NUMBER or 0)
    _libc.syscall(number, ctypes.c_void_p(address), operation, ctypes.c_uint32(value), limit, None, 0)


# --- exchange of arena files ------------------------------------------------------------------------------------------


DIRECTORY: Final = Path("/dev/shm")
#: Longest time that the server waits for the worker's file.
HANDOVER_SECONDS: Final = 5.0

_NAME: Final = re.compile(r"psdist-[0-9a-f]{32}")
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


@contextmanager
def listening() -> Iterator[tuple[str, socket.socket]]:
    """Listen for one handover. Yields the socket's name and the socket. Raises SharingUnavailableError."""
    name = f"psdist-{secrets.token_hex(16)}"
    path = DIRECTORY / name
    with _connection() as listener:
        try:
            try:
                listener.bind(str(path))
                path.chmod(stat.S_IRUSR | stat.S_IWUSR)  # Nobody can connect before it listens.
                listener.listen(1)
            except OSError as error:
                raise SharingUnavailableError(
                    f"cannot listen on a socket in {DIRECTORY}: {error.strerror or error}"
                ) from None
            yield name, listener
        finally:
            with suppress(OSError):
                path.unlink()


async def swap_files(listener: socket.socket, fd: int) -> tuple[int, socket.socket]:
    """Send the file ``fd`` to the server, and return the descriptor of the server's file with the connection.

    Runs in the worker, and the caller closes both. Waits without a timeout: a server that cannot connect reports this
    over gRPC, and the caller cancels the wait. Raises SharingUnavailableError for a failed system call, or a peer of
    another user.
    """
    try:
        with closed_on_error(await accept_and_send(listener, fd)) as peer:
            return await _receive(peer), peer
    except OSError as error:
        raise SharingUnavailableError(
            f"the memory exchange with the server failed: {error.strerror or error}"
        ) from None


async def accept_and_send(listener: socket.socket, fd: int) -> socket.socket:
    """Send ``fd`` and return the connection, for a peer that has no file to send. See ``swap_files``."""
    try:
        await _readable(listener)  # The loop's own accept would lose the connection if cancelled.
        peer, _ = listener.accept()
        with closed_on_error(peer):
            peer.setblocking(False)
            _check_user(peer, "server")
            socket.send_fds(peer, [b"\0"], [fd])
            return peer
    except OSError as error:
        raise SharingUnavailableError(
            f"the memory exchange with the server failed: {error.strerror or error}"
        ) from None


async def receive_file(name: str) -> tuple[int, socket.socket]:
    """Connect to the worker's socket and receive its file. Runs in the server; the caller closes file and connection.

    Raises SharingUnavailableError.
    """
    if not _NAME.fullmatch(name):
        raise SharingUnavailableError(f"{name!r:.60} is not the name of a worker's socket")
    with closed_on_error(_connection()) as connection:
        try:
            async with asyncio.timeout(HANDOVER_SECONDS):
                connection.connect(str(DIRECTORY / name))
                _check_user(connection, "worker")
                return await _receive(connection), connection
        except FileNotFoundError:
            raise SharingUnavailableError(
                f"worker and server do not see the same {DIRECTORY}: they run on two hosts, or in containers that do "
                "not share an IPC namespace"
            ) from None
        except TimeoutError:
            raise SharingUnavailableError(f"the worker sent no file within {HANDOVER_SECONDS:.0f} s") from None
        except OSError as error:
            raise SharingUnavailableError(f"the worker sent no file: {error.strerror or error}") from None


def send_file(connection: socket.socket, fd: int) -> None:
    """Send the server's file to the worker. Raises SharingUnavailableError."""
    try:
        socket.send_fds(connection, [b"\0"], [fd])
    except OSError as error:
        raise SharingUnavailableError(f"the worker did not accept the server's file: {error.strerror}") from None


def sweep() -> int:
    """Remove sockets left behind by killed processes of this user. Return their number."""
    removed = 0
    with suppress(OSError), os.scandir(DIRECTORY) as entries:
        for entry in entries:
            with suppress(OSError):
                if _NAME.fullmatch(entry.name) and _is_stale(entry):
                    os.unlink(entry.path)
                    removed += 1
    return removed


def _is_stale(entry: os.DirEntry[str]) -> bool:
    status = entry.stat(follow_symlinks=False)
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        return False
    # Connecting with another socket type probes without disturbing a listener: it is refused if no process holds the
    # socket, and fails with a type mismatch otherwise.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(entry.path)
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
    return False


def _connection() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setblocking(False)
    return made


@contextmanager
def closed_on_error(connection: socket.socket) -> Iterator[socket.socket]:
    """Close the connection if the block fails."""
    try:
        yield connection
    except BaseException:
        connection.close()
        raise


def _check_user(peer: socket.socket, who: str) -> None:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid = _CREDENTIALS.unpack(credentials)[1]
    if uid != os.geteuid():
        raise SharingUnavailableError(
            f"the {who} runs as user {uid}, not {os.geteuid()}: sharing memory requires the same user"
        )


async def _receive(peer: socket.socket) -> int:
    """Receive the one file that the peer sends."""
    await _readable(peer)
    data, fds, _, _ = socket.recv_fds(peer, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if len(fds) != 1:
        raise SharingUnavailableError("the peer sent no file" if data else "the peer closed the connection")
    return fds[0]


async def _readable(peer: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(peer, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(peer)
