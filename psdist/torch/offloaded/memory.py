"""Memory for the weights of layers. Only a few layers are loaded at a time.

A layer's weights have the same address whenever they are loaded, because autograd keeps views of them from the forward
to the backward pass. On Linux the pages behind these addresses move from a finished layer to the next one. The system
would have to clear fresh pages, twice per layer and step.

Invariants: Of the layers that are not loaded, at most one has pages, which the next layer takes. An access to the
addresses of a layer that is not loaded faults and reads nothing.

Content and time of loading are decided by ``layer``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cache
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from psdist.errors import LimitExceededError

_MREMAP_MAYMOVE: Final = 1
_MREMAP_FIXED: Final = 2
_MREMAP_DONTUNMAP: Final = 4
_PROT_NONE: Final = 0
_HUGE_PAGE_BYTES: Final = 2 << 20


class LayerMemory(Protocol):
    """Memory of one layer. storage: uint8, shared by its parameters."""

    storage: torch.UntypedStorage

    def acquire(self) -> None:
        """Allocate the memory. Its content is undefined."""

    def release(self) -> None:
        """Free the memory. Does nothing if there is none."""

    def close(self) -> None:
        """Free the memory, which no other layer needs."""

    def array(self) -> NDArray[np.uint8] | None:
        """Return the memory as a numpy array while it is allocated; None if numpy cannot access it."""


class ResizedStorage:
    """Storage of ``size`` bytes on ``device``, allocated by torch. It has memory at first."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.storage = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        self._size = size

    def acquire(self) -> None:
        """See ``LayerMemory``."""
        self.storage.resize_(self._size)

    def release(self) -> None:
        """See ``LayerMemory``."""
        self.storage.resize_(0)

    def close(self) -> None:
        """See ``LayerMemory``."""
        self.release()

    def array(self) -> NDArray[np.uint8] | None:
        """See ``LayerMemory``.

        Made from the address, because a storage that torch itself has exported to numpy cannot be resized any more.
        """
        if self.storage.device.type != "cpu":
            return None
        memory = (ctypes.c_uint8 * self._size).from_address(self.storage.data_ptr())
        memory.storage = self.storage  # type: ignore[attr-defined]  # keeps the storage alive
        return np.ctypeslib.as_array(memory)


class PagePool:
    """Pages that the layers of a model use in turn. Linux only: see ``is_supported``."""

    def __init__(self) -> None:
        #: Finished region that still has its pages.
        self._spare: MovedPages | None = None

    def take_over(self, region: MovedPages) -> None:
        """Move the spare pages to ``region``, as far as they suffice."""
        spare, self._spare = self._spare, None
        if spare is not None and spare is not region:
            spare.move_to(region)

    def leave(self, region: MovedPages) -> None:
        """Make the pages of ``region`` spare. Earlier spare pages are returned to the system."""
        self.drop()
        self._spare = region

    def drop(self) -> None:
        """Return the spare pages to the system."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.drop_pages()


class MovedPages:
    """Fixed addresses for ``size`` bytes, with pages of ``pool`` while they are allocated.

    ``acquire`` and ``release`` raise LimitExceededError if the system allows no more mappings.
    """

    def __init__(self, size: int, pool: PagePool) -> None:
        self._pool = pool
        self._is_here = False
        #: Size, rounded up to whole pages.
        self.bytes = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        # Whole huge pages of addresses: each moves by one entry of a page table.
        memory = mmap.mmap(-1, self.bytes + _HUGE_PAGE_BYTES, flags)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.address = -(-first // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self._array: NDArray[np.uint8] = np.frombuffer(memory, np.uint8, size, self.address - first)
        #: Keeps the addresses as long as any tensor refers to it.
        self.storage = torch.from_numpy(self._array).untyped_storage()
        huge = self.bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if huge:
            _library().madvise(self.address, huge, mmap.MADV_HUGEPAGE)
        self._protect(_PROT_NONE)

    def acquire(self) -> None:
        """See ``LayerMemory``."""
        if not self._is_here:
            self._pool.take_over(self)
            self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
            self._is_here = True

    def release(self) -> None:
        """See ``LayerMemory``."""
        if self._is_here:
            self._is_here = False
            self._protect(_PROT_NONE)
            self._pool.leave(self)

    def close(self) -> None:
        """See ``LayerMemory``."""
        self.release()
        self._pool.drop()

    def array(self) -> NDArray[np.uint8]:
        """See ``LayerMemory``."""
        return self._array

    def move_to(self, other: MovedPages) -> None:
        """Move the pages to the addresses of another region, and drop the pages that it had.

        Pages beyond the other region's size return to the system; all pages do if the system cannot move them.
        """
        how = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        size = min(self.bytes, other.bytes)
        _library().mremap(self.address, size, size, how, other.address)
        self.drop_pages()

    def drop_pages(self) -> None:
        """Return all pages to the system."""
        _library().madvise(self.address, self.bytes, mmap.MADV_DONTNEED)

    def _protect(self, protection: int) -> None:
        if _library().mprotect(self.address, self.bytes, protection):
            reason = os.strerror(ctypes.get_errno())
            raise LimitExceededError(
                f"the memory of a layer of {self.bytes} bytes cannot be mapped or unmapped: {reason}. Each layer needs "
                "up to three mappings of the process; vm.max_map_count limits them"
            )


def is_supported() -> bool:
    """True if the system can move pages."""
    return sys.platform == "linux" and hasattr(_library(), "mremap")


@cache
def _library() -> Any:
    """Load the C library's calls, with addresses as whole words."""
    library = ctypes.CDLL(None, use_errno=True)
    word = ctypes.c_size_t
    for name, arguments in (
        ("mprotect", [word, word, ctypes.c_int]),
        ("madvise", [word, word, ctypes.c_int]),
        ("mremap", [word, word, word, ctypes.c_int, word]),
    ):
        if hasattr(library, name):
            getattr(library, name).argtypes = arguments
            getattr(library, name).restype = word if name == "mremap" else ctypes.c_int
    return library
