"""Processes that ``multiprocessing`` started in a script: the script's training must not run in them.

A process started by "spawn" or "forkserver" imports the script's main module again. Without the guard
``if __name__ == "__main__":`` it would train as well: alone, or as a second worker of the same rank. Forked processes
are refused by ``loop``.
"""

from __future__ import annotations

import multiprocessing
from typing import Final

from psdist.errors import ConfigurationError, DuplicateMemberError

_GUARD: Final = 'if __name__ == "__main__":'


def check_guarded() -> None:
    """Raise ConfigurationError if ``multiprocessing`` is importing the script's main module in a new process."""
    # Set until the main module is imported. Only afterwards does the process know its parent.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigurationError(
            "psdist.init() is called in a process that multiprocessing started (a data loader's, for example), because "
            f"it imports the script's main module: put the script's statements into a function, and call it under "
            f"'{_GUARD}'"
        )


def explained(error: DuplicateMemberError) -> DuplicateMemberError:
    """Return the error of a registration, with the remedy if this process is not the worker itself."""
    if not is_spawned():
        return error
    return DuplicateMemberError(
        f"{error.message}. This process was started by multiprocessing and inherited the rank of the worker that "
        f"started it: call psdist.init() in one of them, under '{_GUARD}', and let the launcher start the workers "
        "(--nproc-per-node)",
        **error.details,
    )


def is_spawned() -> bool:
    """True if ``multiprocessing`` started this process."""
    return multiprocessing.parent_process() is not None
