"""Memory of a device that encoders reuse from push to push, pinned memory of the host, and launches on one stream."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.device.device import Allocation, Device, Stream, common_source

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_ITEM_BYTES: Final = 4
_FOLDER: Final = Path(__file__).parent
_FILES: Final = ("segments.cu", "dense.cu", "sparse.cu")


@dataclass(frozen=True)
class DeviceVector:
    """float32[size] in the memory of ``device``.

    owner: object that keeps the memory alive.
    """

    device: Device
    address: int
    size: int
    owner: object

    @classmethod
    def allocate(cls, device: Device, size: int, stream: Stream) -> DeviceVector:
        """Allocate a vector of zeros, valid after the stream's pending work. Raises DeviceLostError."""
        allocation = device.allocate(_ITEM_BYTES * size)
        device.clear(allocation.address, _ITEM_BYTES * size, stream)
        return cls(device, allocation.address, size, allocation)

    def at(self, start: int) -> int:
        """Return the address of element ``start``."""
        return self.address + _ITEM_BYTES * start

    def read(self, stream: Stream, out: Floats | None = None) -> Floats:
        """Copy the values to ``out`` or a new array, and wait for it."""
        values: Floats = np.empty(self.size, np.float32) if out is None else out
        if self.size:
            self.device.copy_out(values, self.address, stream)
        self.device.wait(stream)
        return values

    def write(self, values: Floats, stream: Stream) -> None:
        """Overwrite the vector with contiguous float32[size], and wait for it."""
        if self.size:
            self.device.copy_in(self.address, values, stream)
        self.device.wait(stream)


class DoubleVector:
    """Pair of vectors for state that each push changes.

    before: the state at the start of the push under way; unchanged until the push ends.
    after: the state after the push, in the slices encoded so far; undefined elsewhere.
    """

    def __init__(self, device: Device, size: int, stream: Stream) -> None:
        self.before = DeviceVector.allocate(device, size, stream)
        self.after = DeviceVector.allocate(device, size, stream)

    def swap(self) -> None:
        """End the push: its ``after`` is the next push's ``before``."""
        self.before, self.after = self.after, self.before


class GrowingBuffer:
    """Uninitialized device memory, reallocated when it is too small."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._allocation: Allocation | None = None

    def address(self, size: int) -> int:
        """Return the address of at least ``size`` bytes. Earlier addresses become invalid."""
        if self._allocation is None or self._allocation.size < size:
            self._allocation = None  # Free first, then ask for more.
            self._allocation = self._device.allocate(max(size + size // 4, 1 << 12))
        return self._allocation.address


class PinnedPool:
    """Pinned host memory. A piece is reused once nothing refers to it any more."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lent: list[tuple[Bytes, weakref.ref[NDArray[Any]]]] = []

    def take(self, size: int) -> Bytes:
        """Return ``size`` bytes for exclusive use. They are freed with the last array or memoryview of the result."""
        free = [(memory, user) for memory, user in self._lent if user() is None]
        self._lent = [entry for entry in self._lent if entry[1]() is not None]
        fitting = next((memory for memory, _ in free if memory.size >= size), None)
        memory = self._device.pinned(max(size + size // 4, 1 << 12)) if fitting is None else fitting
        # Go through a memoryview: views of an array's view refer to that array only.
        lent: Bytes = np.frombuffer(memory.data, np.uint8)
        self._lent.append((memory, weakref.ref(lent)))
        return lent[:size]


@cache
def codec_source() -> str:
    """Return the CUDA C source of all encoders."""
    return "\n".join([common_source(), *((_FOLDER / name).read_text(encoding="utf-8") for name in _FILES)])


class Launcher:
    """Stream of ``device``, with the kernels. Not thread-safe.

    Uploads and ``scratch`` memory stay valid until ``wait``.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = device.stream()
        self._find = device.kernels(codec_source())
        self._pieces: list[GrowingBuffer] = []
        self._used = 0
        self._held: list[NDArray[Any]] = []

    def upload(self, values: NDArray[Any]) -> int:
        """Copy contiguous ``values`` to the device. Return the address."""
        address = self.scratch(values.nbytes)
        self._held.append(values)
        self.device.copy_in(address, values, self.stream)
        return address

    def scratch(self, size: int) -> int:
        """Return the address of ``size`` uninitialized bytes."""
        if self._used == len(self._pieces):
            self._pieces.append(GrowingBuffer(self.device))
        self._used += 1
        return self._pieces[self._used - 1].address(size)

    def launch(self, name: str, grid: int, threads: int, *arguments: np.generic) -> None:
        """Run a kernel, unless the grid is empty."""
        if grid:
            self.device.launch(self._find(name), grid, threads, arguments, self.stream)

    def clear(self, address: int, size: int) -> None:
        """Write zeros."""
        if size:
            self.device.clear(address, size, self.stream)

    def copy_out(self, values: NDArray[Any], address: int) -> None:
        """Copy to the host."""
        if values.size:
            self.device.copy_out(values, address, self.stream)

    def synchronize(self) -> None:
        """Wait until everything launched so far is done."""
        self.device.wait(self.stream)

    def wait(self) -> None:
        """Wait as ``synchronize``, then release uploads and scratch memory for reuse."""
        self.synchronize()
        self._used = 0
        self._held.clear()

    def clear_vector(self, vector: DeviceVector, start: int, stop: int) -> None:
        """Write zeros to elements [start, stop)."""
        self.clear(vector.at(start), 4 * (stop - start))
