"""Memory of a device that encoders use again from push to push, and of the host beside it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.gpu.device import Allocation, Device, Stream

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_ITEM_BYTES: Final = 4


@dataclass(frozen=True)
class DeviceVector:
    """float32[size] in the memory of ``device``. owner: what keeps the memory."""

    device: Device
    address: int
    size: int
    owner: object

    @classmethod
    def allocate(cls, device: Device, size: int, stream: Stream) -> DeviceVector:
        """A new vector of zeros, once the stream has come so far. Raises DeviceLostError."""
        allocation = device.allocate(_ITEM_BYTES * size)
        device.clear(allocation.address, _ITEM_BYTES * size, stream)
        return cls(device, allocation.address, size, allocation)

    def at(self, start: int) -> int:
        """The address of element ``start``."""
        return self.address + _ITEM_BYTES * start

    def read(self, stream: Stream, out: Floats | None = None) -> Floats:
        """Its values, in ``out`` or a new array."""
        values: Floats = np.empty(self.size, np.float32) if out is None else out
        if self.size:
            self.device.copy_out(values, self.address, stream)
        self.device.wait(stream)
        return values

    def write(self, values: Floats, stream: Stream) -> None:
        """Overwrites it by contiguous float32[size]."""
        if self.size:
            self.device.copy_in(self.address, values, stream)
        self.device.wait(stream)


class DoubleVector:
    """A vector that each push changes, twice. before: as it was when the push under way began, until that is over.
    after: as it is after it, in slices that are encoded; others may have anything. The end of the push swaps the two.
    """

    def __init__(self, device: Device, size: int, stream: Stream) -> None:
        self.before = DeviceVector.allocate(device, size, stream)
        self.after = DeviceVector.allocate(device, size, stream)

    def swap(self) -> None:
        """What was after the push is before the next one."""
        self.before, self.after = self.after, self.before


class GrowingBuffer:
    """Bytes of a device whose content is anything. It is made anew where it is too small."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._allocation: Allocation | None = None

    def address(self, size: int) -> int:
        """The address of at least ``size`` bytes. What was given out before is not to be used any more by then."""
        if self._allocation is None or self._allocation.size < size:
            self._allocation = None  # Given back before more is asked for.
            self._allocation = self._device.allocate(max(size + size // 4, 1 << 12))
        return self._allocation.address


class PinnedPool:
    """Pinned memory of the host, each piece used again once nobody refers to what was made of it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lent: list[tuple[Bytes, weakref.ref[NDArray[Any]]]] = []

    def take(self, size: int) -> Bytes:
        """``size`` bytes that nobody else has. They are free when no array or memoryview of the result is left."""
        free = [(memory, user) for memory, user in self._lent if user() is None]
        self._lent = [entry for entry in self._lent if entry[1]() is not None]
        fitting = next((memory for memory, _ in free if memory.size >= size), None)
        memory = self._device.pinned(max(size + size // 4, 1 << 12)) if fitting is None else fitting
        # Of a memoryview: views of a view of an array refer to that array alone.
        lent: Bytes = np.frombuffer(memory.data, np.uint8)
        self._lent.append((memory, weakref.ref(lent)))
        return lent[:size]
