"""glibc allocator settings for message buffers. Set once per process, before data flows.

A slice crosses a process in buffers of up to 4 MiB (gRPC receives into a growing buffer, then copies). By default glibc
returns such memory to the system as soon as it is free, and the next message pays for clearing fresh pages. Measured
with 25 M parameters, two workers and two servers over gRPC: of each step's CPU time, 310 ms are spent in the kernel by
default and 243 ms with these settings (raw grpc.aio: 330 and 185).

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

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

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
    is_done = _set({_M_MMAP_THRESHOLD: RETURNED_BYTES, _M_TRIM_THRESHOLD: RETURNED_BYTES})
    if is_done:
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)
    return is_done


def _set(settings: Mapping[int, int]) -> bool:
    if os.environ.get("PSDIST_MALLOC") == "default":
        return False
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        return 0 not in [mallopt(name, value) for name, value in settings.items()]
    return False
