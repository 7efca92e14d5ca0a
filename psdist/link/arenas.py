"""Arenas: memory shared by a worker and a server on one host, as sealed and nameless memory files.

* ``GradientArena``: one page of header, then the flat vector of a handle's gradients in its wire dtype. The worker
  creates and writes it, the server maps it read-only.
* ``WeightsArena``: one page of header, a table of sequence numbers (uint64, one per slice of the vector, padded to a
  page), then the whole float32 vector. Only a server's own slices have memory (``allocate``); the others are holes, so
  slices can move without a new file. The server creates and writes it. The worker receives a read-only descriptor, and
  ``MappedVector`` shows the slices of several servers as one vector. Reading a hole takes memory, too: a worker reads
  only slices that the server has answered.

A header is 16 bytes that name the kind and a random 16-byte nonce. Knowing the nonce proves possession of the file.
Numbers are in the host's byte order; the content never leaves the host.

``MemoryOffer`` and ``take_arena`` are the two ends of the hand-over of a gradient arena. Workers offer theirs to
servers and to each other, and primaries to replicas.

Invariants: Memory is allocated before it is written (in a gradient arena, at creation), so writing cannot fail. Seals
keep a file from shrinking, so a mapping stays readable even if the other process fails. A mapping lasts as long as
any array that refers to it. Files have no names and disappear with the last process that holds them.

``processes`` transfers files between processes; launchers import it, so it stays light. The users of an arena decide
who may read or write when.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import socket
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from psdist import machine
from psdist.address_range import AddressRange
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import SharingUnavailableError
from psdist.link import processes

#: Size of a header, and alignment of the parts of a file, in bytes.
PAGE: Final = 4096
NONCE_BYTES: Final = 16
_GRADIENTS: Final = b"psdist-gradients"
_WEIGHTS: Final = b"psdist-weights\0\0"

_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 0x1, 0x2, 0x4
#: F_SEAL_FUTURE_WRITE would also keep a file from returning memory.
_SEALS: Final = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x1, 0x2

_STATUS_BLOCK_BYTES: Final = 512
#: Mappings in one vector. The kernel allows a process 65,530.
_STITCHES_MAX: Final = 16_384

_libc = ctypes.CDLL(None, use_errno=True)


class GradientArena:
    """Gradients of a handle. The worker calls ``create``, the server ``open``."""

    def __init__(self, region: _Region, elements: int, dtype: str, fd: int) -> None:
        self._region = region
        #: The whole vector, in the arena's dtype.
        self.flat: NDArray[Any] = region.view(NUMPY_DTYPES[dtype], PAGE, elements)
        #: Address of its first element.
        self.address = region.address + PAGE
        #: True if parts may have no memory.
        self.has_holes = False
        self._take_over(fd)

    def _take_over(self, fd: int) -> None:
        """Take ownership of ``fd``; -1 for none."""
        self.nonce = self._region.nonce()
        self._closing = weakref.finalize(self, os.close, fd) if fd >= 0 else None
        if self._closing is not None:
            self._closing.atexit = False  # Clients are closed at exit too, and need it.
        self.fd = fd  # Last: ``detach`` may be called in another thread.

    @staticmethod
    def size(elements: int, dtype: str) -> int:
        """Return the size of the file, in bytes."""
        return PAGE + _padded(elements * NUMPY_DTYPES[dtype].itemsize)

    @classmethod
    def create(cls, elements: int, dtype: str) -> GradientArena:
        """Create an arena of zeros. Raises OSError if there is no room."""
        size = cls.size(elements, dtype)
        fd, region = _create_region(_GRADIENTS, size, size)
        return cls(region, elements, dtype, fd)

    @classmethod
    def open(cls, fd: int, elements: int, dtype: str, *, prefault: bool = True) -> GradientArena:
        """Map another process's arena read-only. Always closes ``fd``. Raises SharingUnavailableError if the file is
        not a valid arena or cannot be mapped.

        prefault: enter all pages now. Otherwise each is entered when it is first read.
        """
        try:
            size = cls.size(elements, dtype)
            region = _open_region(fd, size, _GRADIENTS, "gradient arena", sparse=False, prefault=prefault)
        finally:
            os.close(fd)
        return cls(region, elements, dtype, -1)

    @property
    def shareable(self) -> bool:
        """True if the memory can be shared with another process."""
        return self.fd >= 0

    def part(self, start: int, stop: int) -> NDArray[Any]:
        """Return elements [start, stop) of the vector, in place."""
        return self.flat[start:stop]

    def release(self) -> None:
        """Return the memory of all elements to the system, for every process that maps the file. They read as zeros,
        and take memory again when written."""
        if self.flat.size and self.fd >= 0:
            self.has_holes = True
            _punch_hole(self.fd, PAGE, self._region.size - PAGE)
        elif self.flat.size:
            self._region.clear(PAGE)

    def fill(self) -> None:
        """Allocate memory for all elements again, as other processes require. Raises OSError if there is no room."""
        if self.has_holes:
            _check_room(self._region.size)
            self.has_holes = False  # First: ``release`` may be called in another thread.
            try:
                os.posix_fallocate(self.fd, 0, self._region.size)
            except BaseException:
                self.has_holes = True
                raise

    def detach(self) -> None:
        """Leave the file, with its current bytes, to the processes that hold it. The memory keeps its content and
        addresses, and becomes private to this process. It lasts as long as arrays refer to it.

        Other threads may write to the memory during the call without losing data.
        """
        if self._closing is not None:
            if self.fd >= 0:
                # Pages are copied on the next write.
                self._region.place(self.fd, private=True)
            self._closing()
        self.fd, self.has_holes = -1, False

    def share(self) -> None:
        """Move the content to a new file that can be shared, at the same addresses. Does nothing if there is a file.
        Nobody may write during the call. Raises OSError if there is no room, and changes nothing then."""
        if self.fd < 0:
            self._take_over(self._copy())

    def _copy(self) -> int:
        """Map a new file with the same content at the same addresses."""
        copy = GradientArena.create(self.flat.size, self.flat.dtype.name)
        copy.flat[...] = self.flat
        fd = os.dup(copy.fd)
        try:
            self._region.place(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd


class WeightsArena:
    """Weights of a parameter set at one server. The server calls ``create``, the worker ``open``.

    fd: a read-only descriptor, for other processes.
    """

    def __init__(self, region: _Region, slices: int, elements: int, fd: int, own: int = -1) -> None:
        self.fd = fd
        self.size = self.size_of(slices, elements)
        self.nonce = region.nonce()
        #: Twice the version of each slice; odd during a write.
        self.sequence: NDArray[np.uint64] = region.view(np.dtype(np.uint64), PAGE, slices)
        #: Bytes in the file before the weights.
        self.offset = PAGE + _padded(slices * 8)
        self.weights: NDArray[np.float32] = region.view(np.dtype(np.float32), self.offset, elements)
        self._own = own
        self._closing = weakref.finalize(self, _close, fd, own)

    @staticmethod
    def size_of(slices: int, elements: int) -> int:
        """Return the size of the file, in bytes."""
        return PAGE + _padded(slices * 8) + _padded(elements * 4)

    @classmethod
    def create(cls, slices: int, elements: int) -> WeightsArena:
        """Create an arena of zeros whose weights have no memory yet. Raises OSError if there is no room."""
        own, region = _create_region(_WEIGHTS, cls.size_of(slices, elements), PAGE + _padded(slices * 8))
        try:
            fd = os.open(f"/proc/self/fd/{own}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(own)
            raise
        return cls(region, slices, elements, fd, own)

    @classmethod
    def open(cls, fd: int, slices: int, elements: int) -> WeightsArena:
        """Map another process's arena read-only. Takes ownership of ``fd``. Raises SharingUnavailableError if the file
        is not a valid arena or cannot be mapped."""
        try:
            size = cls.size_of(slices, elements)
            region = _open_region(fd, size, _WEIGHTS, "weights arena", sparse=True, prefault=False)
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                raise SharingUnavailableError("the descriptor of the weights arena is writable and must be read-only")
        except BaseException:
            os.close(fd)
            raise
        return cls(region, slices, elements, fd)

    def allocate(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Allocate memory for ranges of elements; allocated parts keep theirs. Server only. Raises OSError if there is
        no room for all ranges, and then allocates none."""
        _check_room(sum(stop - start for start, stop in ranges) * 4)
        done: list[tuple[int, int]] = []
        try:
            for start, stop in ranges:
                os.posix_fallocate(self._own, self.offset + start * 4, (stop - start) * 4)
                done.append((start, stop))
        except OSError:
            for start, stop in done:
                self.give_back(start, stop)
            raise

    def give_back(self, start: int, stop: int) -> None:
        """Punch holes into the whole pages of elements [start, stop), for every process that maps them. Server only."""
        begin = _padded(self.offset + start * 4)
        size = (self.offset + stop * 4) // PAGE * PAGE - begin
        if size > 0:
            _punch_hole(self._own, begin, size)

    def close(self) -> None:
        """Close the file. The memory lasts as long as arrays refer to it."""
        self._closing()
        self.fd = self._own = -1  # The numbers may be reused for other files.


class MemoryOffer:
    """Offer of an arena to one process of this host, for an ``async with`` block. The peer takes it by ``take_arena``.

    owner: "worker" or "server", for errors.
    swaps: True if the peer sends a file, too.

    ``name`` travels to the peer on an authenticated connection, and the answer has the nonce of the mapped arena.

    Raises SharingUnavailableError.
    """

    def __init__(self, arena: GradientArena, owner: str, *, swaps: bool = False) -> None:
        self.name = ""
        self._nonce = arena.nonce
        self._arena = arena
        self._owner = owner
        self._swaps = swaps
        self._opened = ExitStack()
        self._handing: asyncio.Task[tuple[int, socket.socket]] | None = None

    async def __aenter__(self) -> Self:
        with ExitStack() as opened:
            try:
                mine = os.dup(self._arena.fd)  # The arena may be detached and its descriptor number reused.
            except OSError as error:
                raise SharingUnavailableError(f"the memory is no longer shared: {error.strerror}") from None
            opened.callback(os.close, mine)
            self.name, listener = opened.enter_context(processes.listening())
            self._handing = asyncio.create_task(self._hand_over(listener, mine), name="psdist shared memory")
            self._opened = opened.pop_all()
        return self

    async def _hand_over(self, listener: socket.socket, fd: int) -> tuple[int, socket.socket]:
        if self._swaps:
            return await processes.swap_files(listener, fd)
        return -1, await processes.accept_and_send(listener, fd)

    async def taken(self, nonce: bytes, peer: str) -> tuple[int, socket.socket]:
        """Return the file of the peer, -1 for none, and the connection over which the files were exchanged, once the
        peer has answered. The caller closes both.

        nonce: that of the answer.

        Raises SharingUnavailableError.
        """
        assert self._handing is not None
        # The peer took and sent the files before its answer.
        await asyncio.wait({self._handing}, timeout=processes.HANDOVER_SECONDS)
        if self._swaps and not self._handing.done():
            raise SharingUnavailableError(f"{peer} reported that it sent its memory, which did not arrive")
        if not self._handing.done() or (self._handing.result() and nonce != self._nonce):
            raise SharingUnavailableError(
                f"{peer} did not map this {self._owner}'s memory: it answered with another nonce"
            )
        handing, self._handing = self._handing, None
        return handing.result()

    async def __aexit__(self, *_: object) -> None:
        handing = self._handing
        try:
            if handing is not None:
                handing.cancel()
                await asyncio.gather(handing, return_exceptions=True)
        finally:
            self._opened.close()
            if handing is not None and handing.done() and not handing.cancelled() and handing.exception() is None:
                fd, connection = handing.result()
                connection.close()
                _close(fd)


async def take_arena(
    name: str, elements: int, dtype: str, *, prefault: bool = True
) -> tuple[GradientArena, socket.socket]:
    """Connect to the worker's socket, and map the gradient arena that it sends. The caller closes the connection.

    prefault: see ``GradientArena.open``.

    Raises SharingUnavailableError.
    """
    fd, connection = await processes.receive_file(name)
    with processes.closed_on_error(connection):
        # In a thread, because mapping a large file takes longer than the heartbeat interval. Once started it closes
        # ``fd``.
        mapping = partial(GradientArena.open, fd, elements, dtype, prefault=prefault)
        opening = asyncio.get_running_loop().run_in_executor(None, mapping)
        return await asyncio.shield(opening), connection


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a vector: elements [``start``, ``start + size``) are those of ``arena``. If it is None, they keep their
    values in private memory."""

    start: int
    arena: WeightsArena | None
    size: int


class MappedVector:
    """Read-only vector of ``total`` elements mapped from arenas. Its address never changes. Parts can be remapped to
    other arenas; concurrent readers see either the old or the new arena."""

    def __init__(self, total: int) -> None:
        self._region = _Region(_padded(total * 4), writable=False)
        self.vector: NDArray[np.float32] = self._region.view(np.dtype(np.float32), 0, total)

    def show(self, pieces: Iterable[Piece]) -> bool:
        """Map pieces of the vector. Does nothing and returns False if a piece does not start on a page, or if there are
        too many. Raises OSError, possibly after mapping some of them.

        pieces: in ascending order; elements never shown are zeros.
        """
        runs: list[Piece] = []
        for piece in pieces:
            last = runs[-1] if runs else None
            if last is not None and last.arena is piece.arena and last.start + last.size == piece.start:
                runs[-1] = Piece(last.start, last.arena, last.size + piece.size)
            else:
                runs.append(piece)
        if len(runs) > _STITCHES_MAX or any(run.start * 4 % mmap.PAGESIZE for run in runs):
            return False
        for run in runs:
            at, size = run.start * 4, run.size * 4
            if run.arena is None:
                self._region.make_private(at, size)
            else:
                # Pages are mapped on first read: nobody waits for all of them, and holes stay holes.
                self._region.place(run.arena.fd, at=at, offset=run.arena.offset + at, size=size, prefault=False)
        return True


def reason_of(error: OSError) -> str:
    """Return why memory could not be shared, as text for people."""
    match error.errno:
        case errno.EFBIG:
            return "no room in shared memory: the limit on file sizes (ulimit -f) is too low"
        case errno.ENOSPC | errno.ENOMEM:
            return f"no room in shared memory: {error.strerror}"
    return f"shared memory is unavailable: {error.strerror or error}"


class _Region(AddressRange):
    """Address range of an arena, which starts with a header."""

    def write_header(self, kind: bytes) -> None:
        header = kind + secrets.token_bytes(NONCE_BYTES)
        self.bytes[: len(header)] = np.frombuffer(header, np.uint8)

    def kind(self) -> bytes:
        return self.bytes[: len(_WEIGHTS)].tobytes()

    def nonce(self) -> bytes:
        return self.bytes[len(_WEIGHTS) : len(_WEIGHTS) + NONCE_BYTES].tobytes()


def _create_region(kind: bytes, size: int, allocated: int) -> tuple[int, _Region]:
    """Create and map a sealed memory file of ``size`` bytes. Only the first ``allocated`` bytes have memory."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system does not support memory files")
    _check_room(allocated)
    fd = os.memfd_create(kind.rstrip(b"\0").decode(), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, allocated)
        region = _Region(size, writable=True)
        region.place(fd, prefault=allocated == size)
        region.write_header(kind)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd, region


def _punch_hole(fd: int, begin: int, size: int) -> None:
    """Release the memory of whole pages. Raises OSError."""
    mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
    if _libc.fallocate(fd, mode, ctypes.c_long(begin), ctypes.c_long(size)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _check_room(size: int) -> None:
    """Raise OSError if the machine lacks ``size`` free bytes: the kernel would sooner kill a process than refuse
    memory."""
    if size > (available := machine.available_memory()):
        raise OSError(errno.ENOMEM, f"{size:,} bytes are needed, {available:,} are available")


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def _open_region(fd: int, size: int, kind: bytes, what: str, *, sparse: bool, prefault: bool) -> _Region:
    """Map a file made by another process, after checking that it is safe."""
    try:
        present = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if present & _SEALS != _SEALS:
            raise SharingUnavailableError(f"the {what} has seals {present:#x}, but needs {_SEALS:#x}")
        status = os.fstat(fd)
        if status.st_size != size:
            raise SharingUnavailableError(f"the {what} has {status.st_size} bytes, but needs {size}")
        if not sparse and status.st_blocks * _STATUS_BLOCK_BYTES < size:  # reading a hole would take memory
            raise SharingUnavailableError(f"the {what} has holes")
        region = _Region(size, writable=False)
        region.place(fd, prefault=prefault)
    except OSError as error:
        raise SharingUnavailableError(f"the {what} cannot be used: {error.strerror or error}") from None
    if region.kind() != kind:
        raise SharingUnavailableError(f"the file offered as {what} is not one")
    return region


def _padded(size: int) -> int:
    return -(-size // PAGE) * PAGE
