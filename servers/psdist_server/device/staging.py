"""Transfers to and from a device: areas of pinned memory paired with areas on the device, each pair with a stream.

A kernel thread holds a ``Lane`` while it updates slices. A lane has two areas: the processor copies contributions into
one while the copies and the kernel of the other are running. All areas are allocated before the first slice is held,
and are never freed. An update allocates nothing, so it cannot run out of memory midway. All parameter sets of the
process share the areas.

Invariants: An area is reused only after all its operations are complete. A lane that is returned is idle, so nothing is
written to the caller's memory afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from psdist.device.device import Device, DeviceKernel
from psdist.errors import DeviceLostError
from psdist_server.device.source import update_source
from psdist_server.kernels.interpreted import BLOCK, CODES, SUM_LANES, AnyArray
from psdist_server.kernels.updates import UPDATES

#: Lanes for updates: the number of threads that can copy at the same time. One more lane is for reads.
LANES: Final = 4
AREAS: Final = 2
#: Bytes of contributions in an area, and elements of a kernel's output other than weights and state.
STAGED_BYTES: Final = 8 << 20
OUT_ELEMENTS: Final = 1 << 20
_ALIGNMENT: Final = 256


class StagingArea:
    """Memory for one launch: its inputs, its outputs, and the stream of both.

    out: address of float32[OUT_ELEMENTS] on the device.
    sums: address of float64[SUM_LANES] on the device.
    results: pinned memory for outputs.
    contributions, first_flag, count: the last staged contributions, as the kernels take them.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = device.stream()
        self._staged = device.allocate(STAGED_BYTES)
        self._pinned = device.pinned(STAGED_BYTES)
        self._out = device.allocate(4 * OUT_ELEMENTS)
        self.results = device.pinned(4 * OUT_ELEMENTS)
        self.out = self._out.address
        self._sums = device.allocate(8 * SUM_LANES)
        self.sums = self._sums.address
        self.contributions = self.first_flag = self.count = 0
        self._endings: list[Callable[[], None]] = []

    def stage(self, parts: Sequence[AnyArray], start: int, size: int) -> None:
        """Copy elements [start, start + size) of contributions to the device, as the kernels of ``update.cu`` read
        them."""
        self.count, self.first_flag = len(parts), 16 * len(parts)
        table = np.empty((len(parts), 2), np.uint64)
        end = _aligned(self.first_flag + self.count)
        for row, part in enumerate(parts):
            table[row] = end, CODES[part.dtype]
            end += _aligned(size * part.itemsize)
        self._grow(end)
        self._pinned[: self.first_flag] = table.reshape(-1).view(np.uint8)
        self._pinned[self.first_flag : self.first_flag + self.count] = 0
        for (at, _), part in zip(table.tolist(), parts, strict=True):
            values = part[start : start + size].view(np.uint8)
            self._pinned[at : at + values.size] = values
        self.contributions = self._staged.address
        self.device.copy_in(self.contributions, self._pinned[:end], self.stream)

    def _grow(self, size: int) -> None:
        """Make room for ``size`` bytes: one block of very many contributions may exceed the area."""
        if size > self._pinned.size:
            self._staged = self.device.allocate(size)
            self._pinned = self.device.pinned(size)

    def launch(self, kernel: DeviceKernel, elements: int, *arguments: np.generic, threads: int) -> None:
        """Run a kernel with one block of threads per BLOCK elements."""
        self.device.launch(kernel, max(1, -(-elements // BLOCK)), threads, arguments, self.stream)

    def flags(self, take: Callable[[NDArray[np.uint8]], None]) -> None:
        """Fetch the flags of the contributions, and pass them to ``take`` once the launch is complete."""
        part = self._pinned[self.first_flag : self.first_flag + self.count]
        self.device.copy_out(part, self.contributions + self.first_flag, self.stream)
        self._endings.append(lambda: take(part))

    def result(self, out: AnyArray, address: int) -> None:
        """Copy a kernel's output at ``address`` to ``out``, through pinned memory."""
        part = self.results[: out.nbytes].view(out.dtype)
        self.device.copy_out(part, address, self.stream)
        self._endings.append(lambda: np.copyto(out, part))

    def finish(self) -> None:
        """Wait until all operations are complete and the outputs are in place."""
        self.device.wait(self.stream)
        endings, self._endings = self._endings, []
        for end in endings:
            end()

    def abandon(self) -> None:
        """Discard all outputs and wait for the device."""
        self._endings.clear()
        with suppress(DeviceLostError):
            self.device.wait(self.stream)


class Lane:
    """The areas of one thread."""

    def __init__(self, device: Device, areas: int = AREAS) -> None:
        self._areas = [StagingArea(device) for _ in range(areas)]
        self._next = 0

    def next(self) -> StagingArea:
        """Return an idle area: the least recently used one."""
        area = self._areas[self._next]
        self._next = (self._next + 1) % len(self._areas)
        area.finish()
        return area

    def finish(self) -> None:
        """Wait until all areas are idle."""
        for area in self._areas:
            area.finish()

    def abandon(self) -> None:
        """Discard all outputs after an error."""
        for area in self._areas:
            area.abandon()


class Lanes:
    """The lanes of a process, and its device.

    lost: called, in any thread, with the error after which the device is unusable.
    """

    def __init__(self, device: Device, lost: Callable[[DeviceLostError], None] = lambda error: None) -> None:
        self.device = device
        self._lost = lost
        self._free: list[Lane] = []
        self._reading: Lane | None = None
        self._changed = threading.Condition()
        self._reads = threading.Lock()
        #: Returns a kernel of the device by name.
        self.kernels = device.kernels(update_source(*UPDATES))

    def prepare(self) -> None:
        """Allocate the lanes, unless this was done. Raises LimitExceededError if there is no room for all of them; none
        is kept then."""
        with self._changed, self.watched():
            if self._reading is None:
                lanes, reading = [Lane(self.device) for _ in range(LANES)], Lane(self.device, 1)
                self._free, self._reading = lanes, reading

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """Borrow a lane for updates, allocated by ``prepare``. Waits while all are in use."""
        with self._changed:
            while not self._free:
                self._changed.wait()
            lane = self._free.pop()
        try:
            with self.used(lane):
                yield lane
        finally:
            with self._changed:
                self._free.append(lane)
                self._changed.notify()

    @contextmanager
    def reading(self) -> Iterator[StagingArea]:
        """Borrow the area for reads. It is separate, so that the event loop does not wait for updates in kernel
        threads."""
        assert self._reading is not None, "prepare comes first"
        with self._reads, self.used(self._reading):
            yield self._reading.next()

    @contextmanager
    def used(self, lane: Lane) -> Iterator[None]:
        """Complete all work in a lane on exit; discard it on an error."""
        try:
            with self.watched():
                yield
                lane.finish()
        except BaseException:
            lane.abandon()
            raise

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Report a lost device."""
        try:
            yield
        except DeviceLostError as error:
            self._lost(error)
            raise


def piece_elements(parts: Sequence[AnyArray]) -> int:
    """Return how many elements of these contributions fit in one area: a multiple of BLOCK."""
    room = STAGED_BYTES - _aligned(17 * len(parts)) - _ALIGNMENT * len(parts)
    fitting: int = room // max(1, sum(part.itemsize for part in parts))
    return max(BLOCK, min(OUT_ELEMENTS, fitting) // BLOCK * BLOCK)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
