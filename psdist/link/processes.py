"""Other processes of this host: whether they are stopped, and waits for changes of memory that they share.

A stopped process keeps its connections, and answers nothing. A wait (Linux's futex) may be on memory that is mapped
read-only: the kernel compares the word and starts the wait in one step, so a change is never missed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path
from typing import Final

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
