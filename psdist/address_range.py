"""Address ranges for large vectors: mapped, filled and unmapped in chunks that do not block the process.

The kernel changes a process's mappings one at a time. Unmapping or populating 4 GiB takes it a second, during which
other threads cannot allocate memory, map files or start threads: the event loop would block even though another thread
does the work. So everything here works in chunks of ``CHUNK_BYTES``, without the interpreter lock.

Invariants: A range lives as long as any array that views it. Releasing a large range costs its last holder nothing: a
thread of this module unmaps it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

#: Size of one kernel call, which takes a few milliseconds on an idle processor.
CHUNK_BYTES: Final = 8 << 20
#: Larger ranges are unmapped by a thread.
LARGE_BYTES: Final = 32 << 20

_MADV_DONTNEED: Final = 4
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0)
_MREMAP_MAYMOVE, _MREMAP_FIXED = 0x1, 0x2
_ANONYMOUS: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)  # off_t
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
if hasattr(_libc, "mremap"):  # Linux only, like memory files.
    _libc.mremap.restype = ctypes.c_void_p
    _libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FAILED: Final = ctypes.c_void_p(-1).value


class AddressRange:
    """``size`` bytes of addresses, initially private zeros without memory."""

    def __init__(self, size: int, *, writable: bool = True) -> None:
        self.size = size
        self._protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.address = _checked(_libc.mmap(None, max(1, size), self._protection, _ANONYMOUS, -1, 0))
        memory = _Memory(self.address, size, writable)
        weakref.finalize(memory, _unmapper.unmap, self.address, max(1, size)).atexit = False
        if size > LARGE_BYTES:
            _unmapper.start()
        #: All bytes of the range. The range lives as long as this array, or a view of it.
        self.bytes: NDArray[np.uint8] = np.asarray(memory)

    def view(self, dtype: np.dtype[Any], offset: int, count: int) -> NDArray[Any]:
        """Return ``count`` elements, beginning at byte ``offset``."""
        return self.bytes[offset : offset + count * dtype.itemsize].view(dtype)

    def place(
        self,
        fd: int,
        *,
        at: int = 0,
        offset: int = 0,
        size: int | None = None,
        private: bool = False,
        prefault: bool = True,
    ) -> None:
        """Map ``size`` bytes of a file (default: the size of the range), beginning at byte ``at`` of the range.

        offset: position in the file.
        prefault: also enter the pages, which allocates memory for holes.
        Raises OSError.
        """
        size = self.size if size is None else size
        flags = (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED) | _MAP_FIXED
        for start, length in _chunks(size):
            address = self.address + at + start
            _checked(_libc.mmap(address, length, self._protection, flags, fd, offset + start))
            if prefault and not private:  # If the kernel cannot, pages are entered when they are first read.
                _libc.madvise(address, length, _MADV_POPULATE_READ)

    def clear(self, at: int) -> None:
        """Replace everything from byte ``at`` on by private zeros without memory. Raises OSError."""
        for start, length in _chunks(self.size - at):
            address = self.address + at + start
            _checked(_libc.mmap(address, length, self._protection, _ANONYMOUS | _MAP_FIXED, -1, 0))

    def make_private(self, at: int, size: int) -> None:
        """Replace ``size`` bytes by private memory with the same content. Raises OSError."""
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        for start, length in _chunks(size):
            address = self.address + at + start
            copy = _checked(_libc.mmap(None, length, writable, _ANONYMOUS, -1, 0))
            ctypes.memmove(copy, address, length)
            _checked(_libc.mremap(copy, length, length, _MREMAP_MAYMOVE | _MREMAP_FIXED, address))

    def populate(self, at: int, size: int) -> bool:
        """Allocate memory for private pages now, so that no write waits for it. Contents are kept.

        Returns False if the system cannot do that.
        """
        return self._advise(at, size, _MADV_POPULATE_WRITE)

    def give_back(self, at: int, size: int) -> None:
        """Return the memory of private pages to the system; they read as zeros afterwards."""
        self._advise(at, size, _MADV_DONTNEED)

    def advise(self, at: int, size: int, name: str) -> None:
        """Advise the kernel about pages.

        name: a constant of ``mmap``. Unknown advice is ignored.
        """
        if (advice := getattr(mmap, name, None)) is not None:
            _libc.madvise(self.address + at, size, advice)

    def _advise(self, at: int, size: int, advice: int) -> bool:
        return all(_libc.madvise(self.address + at + start, length, advice) == 0 for start, length in _chunks(size))


class _Memory:
    """Owner of a range's addresses. Arrays hold a reference to it."""

    def __init__(self, address: int, size: int, writable: bool) -> None:
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, not writable)}


class _Unmapper:
    """Unmapper of ranges: small ones immediately, large ones in a thread.

    The last holder of a large range may be an event loop.
    """

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._pid = 0

    def start(self) -> None:
        """Start the thread. A finalizer cannot do it: finalizers run anywhere, even during interpreter shutdown."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            threading.Thread(target=self._serve, name="unmapper", daemon=True).start()

    def unmap(self, address: int, size: int) -> None:
        """Unmap a range that nothing refers to any more."""
        if size > LARGE_BYTES and self._pid == os.getpid():
            self._ended.put((address, size))
        else:
            _libc.munmap(address, size)

    def _serve(self) -> None:
        while True:
            address, size = self._ended.get()
            for start, length in _chunks(size):
                _libc.munmap(address + start, length)


_unmapper: Final = _Unmapper()


def _chunks(size: int) -> Iterator[tuple[int, int]]:
    """Iterate over start and length of each chunk."""
    for start in range(0, size, CHUNK_BYTES):
        yield start, min(CHUNK_BYTES, size - start)


def _checked(address: int) -> int:
    """Return the address from the kernel. Raises OSError if the call failed."""
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address
