"""Arenas: memory that a worker and a server on one host share, as sealed memory files without a name.

* ``GradientArena``: one page of header, then the flat vector of a handle's gradients in its wire dtype. The worker
  creates and writes it, the server maps it read-only.
* ``WeightsArena``: one page of header, a table of sequence numbers (uint64, one per slice of the vector, padded to a
  page), then the whole float32 vector, of which a server's own slices have memory (``allocate``) and the others are
  holes, so that slices come and go without a new file. The server creates and writes it, the worker gets a descriptor
  that can only be read by, and ``MappedVector`` shows it the slices of several servers as one vector. A hole that is
  read takes memory, too: a worker reads no slices but those that the server answered for.

A header is 16 bytes that name the kind and 16 random ones, the nonce: who can tell it, has the file. The bytes are
those of the host's processor; nothing of them travels.

Invariants: all memory that is written to was there before (of a gradient arena, from its beginning), so that writing
cannot fail. A file cannot shrink (seals), so a mapping of it can always be read, whatever the other process does. A
mapping lasts as long as any array that looks into it. No file has a name, so the end of all processes is the end of it.

Not here: how a file gets to the other process (``fd_passing``), who may read or write when
(``psdist.client.transport.shm.attachment``).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import psutil
from numpy.typing import NDArray

from psdist.address_range import AddressRange
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import SharingUnavailableError

#: Bytes of a header, and what the parts of a file are padded to.
PAGE: Final = 4096
NONCE_BYTES: Final = 16
_GRADIENTS: Final = b"psdist-gradients"
_WEIGHTS: Final = b"psdist-weights\0\0"

_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 0x1, 0x2, 0x4
#: Sealed against writing (F_SEAL_FUTURE_WRITE), a file could not give memory back either.
_SEALS: Final = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x1, 0x2

_STATUS_BLOCK_BYTES: Final = 512
#: More mappings in one vector would come near to what the kernel allows a process (65,530).
_STITCHES_MAX: Final = 16_384

_libc = ctypes.CDLL(None, use_errno=True)


class GradientArena:
    """A handle's gradients. Made by ``create`` in the worker and by ``open`` in the server."""

    def __init__(self, region: _Region, elements: int, dtype: str, fd: int) -> None:
        self._region = region
        #: The whole vector, in the arena's dtype.
        self.flat: NDArray[Any] = region.view(NUMPY_DTYPES[dtype], PAGE, elements)
        #: Address of its first element.
        self.address = region.address + PAGE
        #: Whether some of it may have no memory.
        self.has_holes = False
        self._take_over(fd)

    def _take_over(self, fd: int) -> None:
        """``fd`` belongs to this object now; -1 for none."""
        self.nonce = self._region.nonce()
        self._closing = weakref.finalize(self, os.close, fd) if fd >= 0 else None
        if self._closing is not None:
            self._closing.atexit = False  # Clients are closed at exit too, and need it.
        self.fd = fd  # Last: ``detach`` may be called in another thread.

    @staticmethod
    def size(elements: int, dtype: str) -> int:
        """Bytes of the file."""
        return PAGE + _padded(elements * NUMPY_DTYPES[dtype].itemsize)

    @classmethod
    def create(cls, elements: int, dtype: str) -> GradientArena:
        """A new one, all zeros. Raises OSError where there is no room."""
        size = cls.size(elements, dtype)
        fd, region = _create_region(_GRADIENTS, size, size)
        return cls(region, elements, dtype, fd)

    @classmethod
    def open(cls, fd: int, elements: int, dtype: str) -> GradientArena:
        """Another process's, read-only. Closes ``fd``, always. Raises SharingUnavailableError where it is not what it
        should be, or cannot be mapped."""
        try:
            size = cls.size(elements, dtype)
            region = _open_region(fd, size, _GRADIENTS, "gradient arena", sparse=False)
        finally:
            os.close(fd)
        return cls(region, elements, dtype, -1)

    @property
    def shareable(self) -> bool:
        """Whether another process can be given this memory."""
        return self.fd >= 0

    def part(self, start: int, stop: int) -> NDArray[Any]:
        """Elements [start, stop) of the vector, in place."""
        return self.flat[start:stop]

    def release(self) -> None:
        """Gives the memory of all elements back to the system, for everybody who has the file mapped. They are zeros
        then, and take memory again where they are written."""
        if self.flat.size and self.fd >= 0:
            self.has_holes = True
            _punch_hole(self.fd, PAGE, self._region.size - PAGE)
        elif self.flat.size:
            self._region.clear(PAGE)

    def fill(self) -> None:
        """Has memory for all elements again, as another process wants to see it. Raises OSError where there is no
        room."""
        if self.has_holes:
            _check_room(self._region.size)
            self.has_holes = False  # First: ``release`` may be called in another thread.
            try:
                os.posix_fallocate(self.fd, 0, self._region.size)
            except BaseException:
                self.has_holes = True
                raise

    def detach(self) -> None:
        """Leaves the file to whoever has it, with its bytes as they are. The memory keeps its content and its
        addresses, and is only this process's own from then on. It lasts as long as arrays look into it.

        Other threads may write to the memory meanwhile, and lose nothing.
        """
        if self._closing is not None:
            if self.fd >= 0:
                # Pages are copied when they are next written to.
                self._region.place(self.fd, private=True)
            self._closing()
        self.fd, self.has_holes = -1, False

    def share(self) -> None:
        """Has a new file, which others can be given, with the same content at the same addresses. Does nothing where
        there is a file. Nobody may write meanwhile. Raises OSError where there is no room, and changes nothing then."""
        if self.fd < 0:
            self._take_over(self._copy())

    def _copy(self) -> int:
        """Puts a new file with the same content in the place of what is there."""
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
    """A server's weights of a parameter set. Made by ``create`` in the server and by ``open`` in the worker.

    fd: a descriptor that can only be read by, for others to have.
    """

    def __init__(self, region: _Region, slices: int, elements: int, fd: int, own: int = -1) -> None:
        self.fd = fd
        self.size = self.size_of(slices, elements)
        self.nonce = region.nonce()
        #: Twice the version of each slice; odd while it is written.
        self.sequence: NDArray[np.uint64] = region.view(np.dtype(np.uint64), PAGE, slices)
        #: Bytes in the file before the weights.
        self.offset = PAGE + _padded(slices * 8)
        self.weights: NDArray[np.float32] = region.view(np.dtype(np.float32), self.offset, elements)
        self._own = own
        self._closing = weakref.finalize(self, _close, fd, own)

    @staticmethod
    def size_of(slices: int, elements: int) -> int:
        """Bytes of the file."""
        return PAGE + _padded(slices * 8) + _padded(elements * 4)

    @classmethod
    def create(cls, slices: int, elements: int) -> WeightsArena:
        """A new one, all zeros, whose weights have no memory yet. Raises OSError where there is no room."""
        own, region = _create_region(_WEIGHTS, cls.size_of(slices, elements), PAGE + _padded(slices * 8))
        try:
            fd = os.open(f"/proc/self/fd/{own}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(own)
            raise
        return cls(region, slices, elements, fd, own)

    @classmethod
    def open(cls, fd: int, slices: int, elements: int) -> WeightsArena:
        """Another process's, read-only. Takes ``fd`` over. Raises SharingUnavailableError where it is not what it
        should be, or cannot be mapped."""
        try:
            size = cls.size_of(slices, elements)
            region = _open_region(fd, size, _WEIGHTS, "weights arena", sparse=True)
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                raise SharingUnavailableError("the weights arena could be written by who should only read it")
        except BaseException:
            os.close(fd)
            raise
        return cls(region, slices, elements, fd)

    def allocate(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Gives ranges of elements memory; what has some keeps it. The server's. Raises OSError where there is no room
        for all of them, and then none has got any."""
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
        """Makes holes of the whole pages in elements [start, stop), for everybody who has them mapped. The server's."""
        begin = _padded(self.offset + start * 4)
        size = (self.offset + stop * 4) // PAGE * PAGE - begin
        if size > 0:
            _punch_hole(self._own, begin, size)

    def close(self) -> None:
        """Closes the file. The memory stays as long as arrays look into it."""
        self._closing()
        self.fd = self._own = -1  # The numbers may be other files' from now on.


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [``start``, ``start + size``) of a vector are those of ``arena``, or, where that is None, stay as they
    are, in memory of this process's own."""

    start: int
    arena: WeightsArena | None
    size: int


class MappedVector:
    """One read-only vector of ``total`` elements whose memory is that of arenas. It stays where it is when parts of it
    become those of other arenas, and who reads it meanwhile sees the one or the other."""

    def __init__(self, total: int) -> None:
        self._region = _Region(_padded(total * 4), writable=False)
        self.vector: NDArray[np.float32] = self._region.view(np.dtype(np.float32), 0, total)

    def show(self, pieces: Iterable[Piece]) -> bool:
        """Lets elements be those of arenas. Does nothing and returns False where a piece does not begin on a page, or
        where they are too many. Raises OSError, and then some of them may be shown.

        pieces: ascending; until all of the vector was shown once, what was not is zeros.
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
                # Pages come when they are read: nobody waits for all of them, and holes stay holes.
                self._region.place(run.arena.fd, at=at, offset=run.arena.offset + at, size=size, prefault=False)
        return True


def reason_of(error: OSError) -> str:
    """Why memory could not be shared, for whoever reads it."""
    match error.errno:
        case errno.EFBIG:
            return "no room in shared memory: it is more than the limit on file sizes (ulimit -f) allows"
        case errno.ENOSPC | errno.ENOMEM:
            return f"no room in shared memory: {error.strerror}"
    return f"shared memory cannot be had: {error.strerror or error}"


class _Region(AddressRange):
    """The addresses of an arena, whose first bytes are a header."""

    def write_header(self, kind: bytes) -> None:
        header = kind + secrets.token_bytes(NONCE_BYTES)
        self.bytes[: len(header)] = np.frombuffer(header, np.uint8)

    def kind(self) -> bytes:
        return self.bytes[: len(_WEIGHTS)].tobytes()

    def nonce(self) -> bytes:
        return self.bytes[len(_WEIGHTS) : len(_WEIGHTS) + NONCE_BYTES].tobytes()


def _create_region(kind: bytes, size: int, allocated: int) -> tuple[int, _Region]:
    """A sealed memory file of ``size`` bytes, of which the first ``allocated`` have memory, and a mapping of it."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memory files")
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
    """Takes the memory of whole pages away. Raises OSError."""
    mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
    if _libc.fallocate(fd, mode, ctypes.c_long(begin), ctypes.c_long(size)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _check_room(size: int) -> None:
    """Raises OSError where the machine has no ``size`` bytes: the kernel would sooner end a process than say no."""
    if size > (available := psutil.virtual_memory().available):
        raise OSError(errno.ENOMEM, f"{size:,} bytes are wanted, {available:,} are available")


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def _open_region(fd: int, size: int, kind: bytes, what: str, *, sparse: bool) -> _Region:
    """Maps a file that another process made, after checking that it cannot hurt."""
    try:
        present = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if present & _SEALS != _SEALS:
            raise SharingUnavailableError(f"the {what} has seals {present:#x}, and needs {_SEALS:#x}")
        status = os.fstat(fd)
        if status.st_size != size:
            raise SharingUnavailableError(f"the {what} has {status.st_size} bytes, and needs {size}")
        if not sparse and status.st_blocks * _STATUS_BLOCK_BYTES < size:  # reading a hole would take memory
            raise SharingUnavailableError(f"the {what} has holes")
        region = _Region(size, writable=False)
        region.place(fd, prefault=not sparse)
    except OSError as error:
        raise SharingUnavailableError(f"the {what} cannot be used: {error.strerror or error}") from None
    if region.kind() != kind:
        raise SharingUnavailableError(f"what was offered as {what} is none")
    return region


def _padded(size: int) -> int:
    return -(-size // PAGE) * PAGE
