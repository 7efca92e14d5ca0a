"""Memory for the weights of layers, few of which are here at a time.

A layer's weights lie at the same address whenever they are here, because autograd keeps views of them from the forward
to the backward pass. On Linux the pages behind those addresses move from a layer that is done with to the one that
comes next. Fresh pages would have to be cleared by the system, twice for each layer in a step.

Invariants: of layers that are not here, at most one has pages, those that the next one takes. Whoever touches the
addresses of a layer that is not here ends by a fault, and reads nothing.

Not here: what is written to the memory, and when it comes and goes (``layer``).
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
    """The memory of one layer. storage: uint8, in which its parameters lie."""

    storage: torch.UntypedStorage

    def acquire(self) -> None:
        """Has memory from now on. What it holds is not defined."""

    def release(self) -> None:
        """Has no memory from now on. Does nothing where it has none."""

    def close(self) -> None:
        """Has no memory from now on, and nobody else needs what it had."""

    def array(self) -> NDArray[np.uint8] | None:
        """The memory as numpy has it, while it is there; None where numpy cannot."""


class ResizedStorage:
    """A storage of ``size`` bytes on ``device`` that torch's own allocator gives memory to. It has some at first."""

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
        """See ``LayerMemory``. By its address, because a storage that torch itself has shown to numpy cannot be resized
        any more."""
        if self.storage.device.type != "cpu":
            return None
        memory = (ctypes.c_uint8 * self._size).from_address(self.storage.data_ptr())
        memory.storage = self.storage  # type: ignore[attr-defined]  # lives as long as anybody may write to it
        return np.ctypeslib.as_array(memory)


class PagePool:
    """The pages that the layers of a model have by turns. Linux only: see ``is_supported``."""

    def __init__(self) -> None:
        #: The region that is done with, and still has its pages.
        self._spare: MovedPages | None = None

    def take_over(self, region: MovedPages) -> None:
        """Gives ``region`` the pages that are left over, as far as they go."""
        spare, self._spare = self._spare, None
        if spare is not None and spare is not region:
            spare.move_to(region)

    def leave(self, region: MovedPages) -> None:
        """The pages of ``region`` are for the next one. Those that were left before go back to the system."""
        self.drop()
        self._spare = region

    def drop(self) -> None:
        """Gives the pages that are left over back to the system."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.drop_pages()


class MovedPages:
    """Addresses of their own for ``size`` bytes, with pages of ``pool`` while they are here. ``acquire`` and
    ``release`` raise LimitExceededError where the system allows no more mappings."""

    def __init__(self, size: int, pool: PagePool) -> None:
        self._pool = pool
        self._is_here = False
        #: Whole pages.
        self.bytes = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        # Its own addresses, whole huge pages of them: those move by one entry of a table each.
        memory = mmap.mmap(-1, self.bytes + _HUGE_PAGE_BYTES, flags)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.address = -(-first // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self._array: NDArray[np.uint8] = np.frombuffer(memory, np.uint8, size, self.address - first)
        #: As long as any tensor refers to it the addresses are kept.
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
        """Moves the pages to the addresses of another region, whose own are dropped. What that has no room for goes
        back to the system; so do all of them where the system cannot move them."""
        how = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        size = min(self.bytes, other.bytes)
        _library().mremap(self.address, size, size, how, other.address)
        self.drop_pages()

    def drop_pages(self) -> None:
        """Gives all pages back to the system."""
        _library().madvise(self.address, self.bytes, mmap.MADV_DONTNEED)

    def _protect(self, protection: int) -> None:
        if _library().mprotect(self.address, self.bytes, protection):
            reason = os.strerror(ctypes.get_errno())
            raise LimitExceededError(
                f"the memory of a layer of {self.bytes} bytes cannot come or go: {reason}. Each layer needs "
                "up to three mappings of the process; vm.max_map_count limits them"
            )


def is_supported() -> bool:
    """Whether pages can be moved."""
    return sys.platform == "linux" and hasattr(_library(), "mremap")


@cache
def _library() -> Any:
    """The C library's calls, with addresses as whole words."""
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
