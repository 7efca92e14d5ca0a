"""The reaper: a small process that kills the remaining processes of a run when the launcher ends.

The launcher writes ``+PGID`` and ``-PGID`` lines to its standard input. When that pipe ends, for whatever reason, the
reaper kills the process groups that are still listed. So even a launcher killed by SIGKILL leaves no process behind,
including those that a worker's script had started. It runs as a file with the standard library only: ``python -I -S
reaper.py``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def remaining_groups(lines: Iterable[bytes]) -> set[int]:
    """Return the process groups that were added and not removed when ``lines`` end."""
    groups: set[int] = set()
    for line in lines:
        sign, number = line[:1], line[1:].strip()
        if not number.isdigit() or int(number) <= 1:
            continue
        if sign == b"+":
            groups.add(int(number))
        elif sign == b"-":
            groups.discard(int(number))
    return groups


def main() -> None:
    """Wait for the launcher's end, and kill the remaining process groups."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    for group in remaining_groups(sys.stdin.buffer):
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
