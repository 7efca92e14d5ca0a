"""Debugging of a worker: its breakpoints, the end of its debugger, and the time limits of all others.

A launcher gives the terminal to one worker (``psdist run --debug-worker``). While that one stands at a prompt the
others wait for it, however long, so the whole run is without time limits: the scheduler tells each member when it
registers, and the leases of workers have no end.

``BREAKPOINT_FUNCTION`` is what ``breakpoint()`` calls in a launched script. A script, or its user, may choose another
one by PYTHONBREAKPOINT.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, Final

from psdist.errors import ConfigurationError

BREAKPOINT_FUNCTION: Final = f"{__name__}.on_breakpoint"
#: Set for the worker that has the terminal.
HAS_TERMINAL_VARIABLE: Final = "PSDIST_HAS_TERMINAL"

_are_suspended = False


def suspend_time_limits(*, suspended: bool) -> None:
    """Suspend the time limits of this process's waits for other members, as the run that it has joined says."""
    global _are_suspended
    _are_suspended = suspended


def time_limit(seconds: float | None) -> float | None:
    """Return the time limit of a wait for other members; None if it has none, or limits are suspended."""
    return None if _are_suspended else seconds


def is_debugged() -> bool:
    """True in the worker that has the terminal."""
    return os.environ.get(HAS_TERMINAL_VARIABLE) == "1"


def on_breakpoint(*arguments: Any, **named: Any) -> None:
    """Stop in the caller, as ``pdb.set_trace``. Raises ConfigurationError in a worker without a terminal."""
    if not is_debugged():
        rank = os.environ.get("RANK", "0")
        raise ConfigurationError(
            f"breakpoint() in worker {rank}, which has no terminal: psdist run --debug-worker {rank} gives it one"
        )
    import pdb

    if threading.current_thread() is threading.main_thread():
        # Ctrl-C is the debugger's. That of asyncio.run would cancel the script later.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    pdb.Pdb(*arguments, **named).set_trace(sys._getframe(1))


def has_left_debugger(error: BaseException) -> bool:
    """True if the script was ended at the prompt of pdb: by ``quit``, or because nothing can be read from it."""
    bdb = sys.modules.get("bdb")
    return bdb is not None and isinstance(error, bdb.BdbQuit)
