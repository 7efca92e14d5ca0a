"""Cores that this process may use: its affinity, and the quotas of its cgroups (versions 1 and 2).

A container with ``--cpus 2`` on a machine with 64 cores sees all of them, and is throttled if it uses more than two.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: The mounted hierarchies, and the path of this process in each.
ROOT: Path = Path("/sys/fs/cgroup")
MEMBERSHIP: Path = Path("/proc/self/cgroup")
_QUOTA: Final = "cpu.cfs_quota_us"
_PERIOD: Final = "cpu.cfs_period_us"


def usable_cores() -> int:
    """Return the number of cores that this process may keep busy, at least one."""
    cores, limit = len(os.sched_getaffinity(0)), cpu_limit()
    return cores if limit is None else max(1, min(cores, int(limit)))


def cpu_limit() -> float | None:
    """Return the processor time per second that the cgroups allow; None if they do not limit it."""
    own = next((line[4:] for line in _read(MEMBERSHIP).splitlines() if line.startswith("0::/")), "")
    pairs = [_read(directory / "cpu.max").split() for directory in _with_parents(ROOT, own)]
    pairs += [[_read(one / _QUOTA).strip(), _read(one / _PERIOD).strip()] for one in _cpu_directories()]
    # "max" and -1 are no limits.
    limits = [int(pair[0]) / int(pair[1]) for pair in pairs if len(pair) == 2 and all(map(_is_positive, pair))]
    return min(limits, default=None)


def _read(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _cpu_directories() -> Iterator[Path]:
    """Yield the directories of version 1, whose controllers have hierarchies of their own."""
    for line in _read(MEMBERSHIP).splitlines():
        _, controllers, own = line.split(":", 2)
        if "cpu" in controllers.split(","):
            for mounted in dict.fromkeys((controllers, "cpu")):
                yield from _with_parents(ROOT / mounted, own.lstrip("/"))


def _with_parents(root: Path, own: str) -> list[Path]:
    """Return the directories of a cgroup and of all above it, which limit it, too."""
    # In a container the path may be the host's, which does not exist here. Its own directory is the root then.
    directory = root / own
    return [path for path in (directory, *directory.parents) if path.is_relative_to(root)]


def _is_positive(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0
