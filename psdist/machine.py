"""This machine for psdist's processes: its cores and memory, psdist's own Python, directories, and the allocator.

**Cores** are those of the process's affinity, within the quotas of its cgroups (versions 1 and 2). A container with
``--cpus 2`` on a machine with 64 cores sees all of them, and is throttled if it uses more than two.

**The Python** of schedulers, servers, workers and compilers of kernels is ``sys.executable``, unless ``PSDIST_PYTHON``
names another. In a frozen application (PyInstaller, Nuitka, cx_Freeze) and in a program that embeds Python
``sys.executable`` is the application, which would start itself.

**The allocator** of glibc is set for message buffers, once per process, before data flows. A slice crosses a process in
buffers of up to 4 MiB (gRPC receives into a growing buffer, then copies). By default glibc returns such memory to the
system as soon as it is free, and the next message pays for clearing fresh pages. Measured with 25 M parameters, two
workers and two servers over gRPC: of each step's CPU time, 310 ms are spent in the kernel by default and 243 ms with
these settings (raw grpc.aio: 330 and 185).

The limits equal those that glibc's own adaptation reaches in a process that once freed an array of 32 MiB, its ceiling.
Larger arrays are still returned immediately, and at most 64 MiB of free memory are kept. Setting the limits ends the
adaptation.

glibc gives threads heaps of their own, up to eight for each core. gRPC receives in short-lived threads, and each new
one left some 6 MB of free buffers in a new heap: a worker's resident memory grew by 10 MB in 5,000 steps while its
allocations did not. With two heaps workers still grew by 2 MB in 19,000 steps; with one they shrank by 1 MB, and two
threads that allocate 256 KiB at a time were as fast. The setting is therefore one heap, unless ``MALLOC_ARENA_MAX``
says otherwise; small blocks are cached per thread in any case. Existing heaps stay with their threads, so apply the
settings before gRPC starts any thread.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from psdist.errors import ConfigurationError

#: The mounted hierarchies, and the path of this process in each.
ROOT: Path = Path("/sys/fs/cgroup")
MEMBERSHIP: Path = Path("/proc/self/cgroup")
MEMORY: Path = Path("/proc/meminfo")
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


def available_memory() -> int:
    """Return the bytes that new pages may take before the system swaps. psutil would cost each worker's start 8 ms."""
    (line,) = (line for line in _read(MEMORY).splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


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


# --- Python -----------------------------------------------------------------------------------------------------------

VARIABLE: Final = "PSDIST_PYTHON"
_REMEDY: Final = (
    f"set {VARIABLE} to a Python in which psdist is installed, or start scheduler and servers beside it "
    "(psdist-scheduler, psdist-server) and set PSDIST_SCHEDULER=HOST:PORT"
)


def python() -> str:
    """Return the Python that runs psdist's programs. Raises ConfigurationError if there is none."""
    if chosen := os.environ.get(VARIABLE, ""):
        if (found := shutil.which(chosen)) is None:
            raise ConfigurationError(f"{VARIABLE}={chosen!r:.200} is no program that can be run: {_REMEDY}")
        return found
    if reason := _unusable(sys.executable):
        raise ConfigurationError(f"psdist cannot start its programs: {reason}; {_REMEDY}")
    return sys.executable


def _unusable(executable: str | None) -> str:
    """Return why ``sys.executable`` is no Python; empty if it is one."""
    if not executable:
        return "this program embeds Python, and sys.executable is not set"
    if getattr(sys, "frozen", False) or hasattr(sys.modules.get("__main__"), "__compiled__"):
        return f"this is a frozen application, and sys.executable is the application itself ({executable:.200})"
    names = (os.path.basename(executable), os.path.basename(os.path.realpath(executable)))
    if not any("py" in name.lower() for name in names):
        return f"this program embeds Python, and sys.executable is the program itself ({executable:.200})"
    return ""


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Create a directory and its parents where they are missing. Raises OSError, which names the part of the path that
    is in the way: for a file, or a link to nothing, Python only says "File exists"."""
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        there = next(part for part in (path, *path.parents) if os.path.lexists(part))
        if there.is_dir():  # It was made, or replaced, at the same moment.
            raise
        what = f"is a link to {os.readlink(there)}, which does not exist" if there.is_symlink() else "is no directory"
        if there.is_symlink() and there.exists():
            what = f"is a link to {os.readlink(there)}, which is no directory"
        raise NotADirectoryError(errno.ENOTDIR, f"{there} {what}", str(path)) from None


# --- glibc's allocator ------------------------------------------------------------------------------------------------


#: Larger blocks are mapped separately and returned when freed.
OWN_MEMORY_BYTES: Final = 32 << 20
#: Free memory kept at the end of a heap.
KEPT_BYTES: Final = 64 << 20
#: Blocks of at least this size are mapped separately in a process that must stay small.
RETURNED_BYTES: Final = 1 << 20
#: Number of heaps. Threads that start later share them.
HEAPS: Final = 1

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def keep_buffers() -> bool:
    """Keep freed message buffers in the process. Return True if the settings were applied.

    They are not applied if ``PSDIST_MALLOC=default``, nor with another C library than glibc. Repeated calls are
    harmless.
    """
    settings = {_M_MMAP_THRESHOLD: OWN_MEMORY_BYTES, _M_TRIM_THRESHOLD: KEPT_BYTES}
    if "MALLOC_ARENA_MAX" not in os.environ:
        settings[_M_ARENA_MAX] = HEAPS
    return _set(settings)


def give_back_buffers() -> bool:
    """Return freed blocks of 1 MiB and more to the system immediately from now on, and blocks that are free already.
    Return True if the settings were applied.

    For a process that must stay small: clearing fresh pages costs less than free blocks stuck between used ones.
    """
    import ctypes

    is_done = _set({_M_MMAP_THRESHOLD: RETURNED_BYTES, _M_TRIM_THRESHOLD: RETURNED_BYTES})
    if is_done:
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)
    return is_done


def _set(settings: Mapping[int, int]) -> bool:
    if os.environ.get("PSDIST_MALLOC") == "default":
        return False
    import ctypes  # Commands do without it.

    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        return 0 not in [mallopt(name, value) for name, value in settings.items()]
    return False
