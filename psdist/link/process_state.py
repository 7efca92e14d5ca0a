"""State of other processes of this machine: a stopped process keeps its connections, and answers nothing."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Final

#: States in /proc that a process does not leave by itself: stopped, traced, dead.
_STOPPED: Final = frozenset("TtXxZ")


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


def is_suspended(pid: int) -> bool:
    """True if a process of this scope exists, and was stopped by a signal: not by a debugger."""
    return _state(pid) == "T"


def _state(pid: int) -> str:
    """Return the state of a process in /proc: X if it is gone, empty if it is unknown."""
    try:
        # The name of the program, in parentheses, may contain anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X" if Path("/proc/self/stat").exists() else ""
    except OSError:
        return ""
