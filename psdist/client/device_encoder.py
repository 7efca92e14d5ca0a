"""The ``GradientEncoder`` of gradients on a device, with the same payloads and state.

The residual of gradients stays on the device, and so does the velocity of a codec with momentum. Both are read when a
snapshot needs them; the residual is also read for its norm.

Not here: kernels and bytes (``psdist.device``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from psdist.client.core.encoder import EncodedSlices, Totals
from psdist.client.core.flat_vector import Flat, grad_norm
from psdist.client.session.worker_state import DeferredArray, SavedState, State
from psdist.compression import Codec
from psdist.compression.segments import PushNumber
from psdist.compression.specifications import Region, regions
from psdist.device.coders import SegmentRange, table
from psdist.device.device import Device
from psdist.device.encoder import DeviceEncoder, DevicePush
from psdist.device.memory import DeviceVector, DoubleVector
from psdist.types import Layout, Slicing

_NOTHING: Final = np.empty(0)
_U64 = np.uint64


class DeviceGradientEncoder:
    """Encoder of one worker's pushes from a device. Its methods are those of ``GradientEncoder``.

    Raises DeviceUnavailableError and DeviceLostError, here and in its methods.
    """

    def __init__(self, codec: Codec, layout: Layout, slicing: Slicing, rank: int, device: Device) -> None:
        self.slicing = slicing
        self.device = device
        self._regions = regions(layout.tensors, codec)
        self._encoder = DeviceEncoder(device, self._regions)
        self._run = self._encoder.launcher
        self.rank = rank
        self._name = np.frombuffer(repr(codec).encode(), np.uint8)
        #: True if a residual of one push is added to the next.
        self.feeds_back = any(self._encoder.coder(region).feeds_back for region in self._regions)
        has_momentum = any(self._encoder.coder(region).momentum for region in self._regions)
        #: Residual, and the accumulated gradients of a codec with momentum.
        self._residual = DoubleVector(device, slicing.total, self._run.stream) if self.feeds_back else None
        self._velocity = DoubleVector(device, slicing.total, self._run.stream) if has_momentum else None
        self._run.wait()
        self._ordinal = 0
        self._push: EncodedSlices | None = None
        #: Regions with encoded parts in the push under way, and those whose residual it reset.
        self._begun: set[int] = set()
        self._forgotten = np.zeros(len(self._regions), np.uint32)
        self.totals = Totals()

    # --- a push -------------------------------------------------------------------------------------------------------

    def begin_push(self) -> EncodedSlices:
        """Return the push under way, or start the next one."""
        if self._push is None:
            self._push = EncodedSlices(self.slicing)
            self._begun = set()
            self._forgotten[:] = 0
        return self._push

    def encode(self, push: EncodedSlices, flat: DeviceVector | Flat, slices: Iterable[int]) -> bool:
        """Encode those of ``slices`` that are not encoded yet. Returns False if the push is over.

        flat: the gradient, complete and finite in all tensors that touch the slices; copied to the device if it is on
            the host.

        Raises NonFiniteGradientError for values that a codec cannot represent.
        """
        if push is not self._push:
            return False
        todo = [index for index in slices if index not in push.payloads]
        segments = [self._segments_of(index) for index in todo]
        new = sorted({segment.number for one in segments for segment in one} - self._begun)
        if not todo:
            return True
        if isinstance(flat, np.ndarray):
            there = DeviceVector.allocate(self.device, flat.size, self._run.stream)
            there.write(flat, self._run.stream)
            flat = there
        numbers = PushNumber(self.rank, self._ordinal)
        state = DevicePush(flat, self._residual, self._velocity, numbers, self._forgotten)
        forgotten = self._forgotten.copy()
        try:
            batch = self._encoder.encode(state, segments, new)
        except BaseException:  # Nothing was sent, and the next call may bring another gradient.
            self._forgotten[:] = forgotten
            raise
        self._begun.update(new)
        self.totals.overflows += len(batch.overflows)
        push.payloads.update(zip(todo, batch.payloads, strict=True))
        return True

    def _regions_of(self, start: int, stop: int) -> range:
        first = bisect_right(self._regions, start, key=_start) - 1
        return range(first, bisect_left(self._regions, stop, key=_start))

    def _segments_of(self, index: int) -> list[SegmentRange]:
        start, stop = self.slicing.bounds(index)
        found = []
        for number in self._regions_of(start, stop):
            region = self._regions[number]
            low, high = max(start, region.start), min(stop, region.stop)
            found.append(SegmentRange(number, region, low - region.start, high - region.start))
        return found

    def discard_push(self) -> None:
        """Discard the push under way. Nothing of it was sent."""
        self._push = None

    def end_push(self) -> bool:
        """Finish the push under way: its payloads count as sent. Returns True if there are any."""
        push, self._push = self._push, None
        if push is None or not push.payloads:
            return False
        self.totals.add(push)
        self._ordinal += 1
        missing = sorted(set(range(self.slicing.count)).difference(push.payloads))
        unchanged = [segment for index in missing for segment in self._segments_of(index)]
        for vector in (self._residual, self._velocity):
            if vector is not None:
                self._keep(vector, unchanged)
                vector.swap()
        return True

    def _keep(self, vector: DoubleVector, segments: list[SegmentRange]) -> None:
        """Copy ranges that were not sent to the next vector."""
        if not segments:
            return
        found = table(segments, [segment.tiles for segment in segments])
        rows = _U64(self._run.upload(found.rows)), _U64(len(found.rows))
        vectors = _U64(vector.before.address), _U64(vector.after.address)
        self._run.launch("copy_ranges", found.tasks, 256, *vectors, *rows)
        self._run.wait()

    # --- the state ----------------------------------------------------------------------------------------------------

    def state(self) -> SavedState:
        """Return the state before the next push. The arrays do not change until the push after that starts."""
        state: SavedState = {"ordinal": np.array([self._ordinal], np.int64), "codec": self._name}
        if self._residual is not None:
            state["residual"] = self._deferred(self._residual.before)
        if self._velocity is not None:
            state["velocity"] = self._deferred(self._velocity.before)
        return state

    def _deferred(self, vector: DeviceVector) -> DeferredArray:
        return DeferredArray(vector.size, lambda: vector.read(self.device.stream()))

    def restore(self, state: State) -> None:
        """Continue from a state, or from the beginning if it is empty. Discards a push under way."""
        self._push = None
        self._ordinal = int(state["ordinal"].sum()) if "ordinal" in state else 0
        if self._residual is not None:
            self._residual.before.write(self._fitting(state, "residual"), self._run.stream)
        if self._velocity is not None:
            self._velocity.before.write(self._fitting(state, "velocity"), self._run.stream)

    def _fitting(self, state: State, name: str) -> Flat:
        """Return a vector of a state, or zeros if its size differs."""
        values: NDArray[np.generic] = state.get(name, _NOTHING)
        fits = values.shape == (self.slicing.total,)
        return values.astype(np.float32) if fits else np.zeros(self.slicing.total, np.float32)

    # --- what there is to know ----------------------------------------------------------------------------------------

    @property
    def residual(self) -> Flat:
        """Residual of the pushes before the one under way, copied to the host."""
        return np.empty(0, np.float32) if self._residual is None else self._residual.before.read(self.device.stream())

    @property
    def residual_norm(self) -> float:
        """L2 norm of the residual."""
        return grad_norm(self.residual, self.slicing.slice_elements)


def _start(region: Region) -> int:
    return region.start
