"""How the C library keeps the memory of message buffers, set once per process, before data flows.

A slice crosses a process in buffers of up to 4 MiB (gRPC receives into one that grows, then copies). By default glibc
returns such memory to the system as soon as it is free, and the next message pays for clearing fresh pages. Measured
with 25 M parameters, two workers and two servers over gRPC: of each step's CPU time 310 ms are spent in the kernel by
default, and 243 ms with these settings (raw grpc.aio: 330 and 185).

The limits are those that glibc reaches by itself in a process that once freed an array of 32 MiB, its ceiling. Larger
arrays are still returned at once, and at most 64 MiB of free memory are kept. Setting them ends that adaptation.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from typing import Final

#: Larger blocks have memory of their own, which goes back when they are freed.
OWN_MEMORY_BYTES: Final = 32 << 20
#: So much free memory at the end of a heap is kept.
KEPT_BYTES: Final = 64 << 20

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def keep_buffers(*, one_heap: bool = False) -> bool:
    """Lets freed message buffers stay with the process; whether that was done. Not where ``PSDIST_MALLOC=default``, nor
    with another C library than glibc. Again does nothing new.

    one_heap: all threads share a heap: buffers leave holes, and every heap would have its own. For programs of psdist's
        own, before they start threads.
    """
    if os.environ.get("PSDIST_MALLOC") == "default":
        return False
    settings = {_M_MMAP_THRESHOLD: OWN_MEMORY_BYTES, _M_TRIM_THRESHOLD: KEPT_BYTES}
    if one_heap:
        settings[_M_ARENA_MAX] = 1
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        return 0 not in [mallopt(name, value) for name, value in settings.items()]
    return False
