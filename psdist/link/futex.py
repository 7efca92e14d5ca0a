"""Waits for a change of shared memory, between processes that map it. Linux only.

A waiter may map the memory read-only. The kernel compares the word and starts the wait in one step, so a change is
never missed.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Final

#: Number of the system call, on machines that perform loads and stores in program order: what was written before a
#: counter is seen by whoever has seen the counter.
_NUMBER: Final = {"x86_64": 202, "AMD64": 202}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_ALL: Final = 2**31 - 1

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_available() -> bool:
    """True if this machine has such waits."""
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
