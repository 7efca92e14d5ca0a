"""Launches of the encoders' kernels on one stream of one device."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression.device.memory import DeviceVector, GrowingBuffer
from psdist.device.compile import common_source
from psdist.device.device import Device

_FOLDER: Final = Path(__file__).parent
_FILES: Final = ("segments.cu", "dense.cu", "sparse.cu")


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
