"""How the C library keeps the memory of message buffers, set once per process, before data flows.

A slice crosses a process in buffers of up to 4 MiB (gRPC receives into one that grows, then copies). By default glibc
returns such memory to the system as soon as it is free, and the next message pays for clearing fresh pages. Measured
with 25 M parameters, two workers and two servers over gRPC: of each step's CPU time 310 ms are spent in the kernel by
default, and 243 ms with these settings (raw grpc.aio: 330 and 185).

The limits are those that glibc reaches by itself in a process that once freed an array of 32 MiB, its ceiling. Larger
arrays are still returned at once, and at most 64 MiB of free memory are kept. Setting them ends that adaptation.

glibc gives threads heaps of their own, up to eight for each core. gRPC receives in threads that come and go, and each
new one left some 6 MB of free buffers in a new heap: the resident memory of a worker grew by 10 MB in 5,000 steps,
while what it had allocated did not. With two heaps workers still grew by 2 MB in 19,000 steps, with one they shrank by
1 MB, and two threads that allocate 256 KiB at a time were as fast. So there is one, unless ``MALLOC_ARENA_MAX`` says
otherwise; small blocks are cached by thread in any case. Threads that have a heap already keep it, so this comes before
gRPC starts any.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

#: Larger blocks have memory of their own, which goes back when they are freed.
OWN_MEMORY_BYTES: Final = 32 << 20
#: So much free memory at the end of a heap is kept.
KEPT_BYTES: Final = 64 << 20
#: Blocks from this size on have memory of their own in a process that is to hold little.
RETURNED_BYTES: Final = 1 << 20
#: Threads that start later make no heap when there are so many.
HEAPS: Final = 1

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def keep_buffers() -> bool:
    """Lets freed message buffers stay with the process; whether that was done. Not where ``PSDIST_MALLOC=default``, nor
    with another C library than glibc. Again does nothing new."""
    settings = {_M_MMAP_THRESHOLD: OWN_MEMORY_BYTES, _M_TRIM_THRESHOLD: KEPT_BYTES}
    if "MALLOC_ARENA_MAX" not in os.environ:
        settings[_M_ARENA_MAX] = HEAPS
    return _set(settings)


def give_back_buffers() -> bool:
    """Lets freed blocks of 1 MiB and more go back to the system at once, from now on; whether that was done. For a
    process that is to hold little, where clearing fresh pages costs less than the blocks that lie between used ones.
    What is free already goes back now."""
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
