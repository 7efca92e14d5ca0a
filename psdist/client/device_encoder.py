"""The ``GradientEncoder`` of gradients on a device, with the same payloads and state.

Only the payloads are copied to the host.

All segments of one codec are encoded by one launch, or by a few that first select the elements to send. The sum of a
gradient with its velocity or residual may overflow float32. The region's flag is then set, and everything is encoded
again without that region's velocity or residual, as on the host.

The residual of gradients stays on the device, and so does the velocity of a codec with momentum. Both are read when a
snapshot needs them; the residual is also read for its norm.

Not here: kernels and bytes (``psdist.device``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psdist.client.core.encoder import EncodedSlices, Totals
from psdist.client.core.flat_vector import Flat, grad_norm
from psdist.client.session.worker_state import DeferredArray, SavedState, State
from psdist.compression import Codec
from psdist.compression.segments import PushNumber
from psdist.compression.segments.encoding import non_finite
from psdist.compression.segments.format import HEADER, HEADER_BYTES, padded
from psdist.compression.specifications import Region, regions
from psdist.device.coders import (
    Coder,
    PlacedSegments,
    PushWork,
    SegmentHeader,
    SegmentRange,
    Selected,
    coder_of,
    table,
    uncovered_parts,
)
from psdist.device.device import Device
from psdist.device.memory import DeviceVector, DoubleVector, GrowingBuffer, Launcher, PinnedPool
from psdist.types import Layout, Slicing

#: One number per region.
Words = NDArray[np.uint32]
#: Flags of a region, as in ``segments.cu``.
_RESIDUAL, _VELOCITY = 1, 2


class EncodedBatch(NamedTuple):
    """Result of ``DeviceEncoder.encode``.

    payloads: one per list of segments.
    overflows: numbers of the regions whose residual or velocity was discarded, one entry each time.
    """

    payloads: list[memoryview]
    overflows: list[int]


class DevicePush(NamedTuple):
    """One push.

    values: its gradient.
    residual, velocity: see ``PushWork``.
    forgotten: uint32[regions], flags of the discarded residuals and velocities. Updated by ``encode``.
    """

    values: DeviceVector
    residual: DoubleVector | None
    velocity: DoubleVector | None
    numbers: PushNumber
    forgotten: Words


def can_encode(regions: Iterable[Region]) -> bool:
    """True if all codecs of ``regions`` have kernels."""
    return all(coder_of(region.codec) is not None for region in regions)


class CodecBatch(NamedTuple):
    """Segments of one coder, by number.

    selected: the coder's choice of elements, if segment sizes depend on it.
    """

    coder: Coder
    numbers: list[int]
    selected: Selected | None


class LaunchedBatch(NamedTuple):
    """Segments that a device is encoding.

    ends: offset of each segment in the output at address ``out``, followed by the end of the last one.
    """

    work: PushWork
    headers: list[SegmentHeader]
    ends: list[int]
    out: int


class DeviceEncoder:
    """Encoder of the regions of one flat vector. Not thread-safe.

    The constructor and ``encode`` raise DeviceUnavailableError and DeviceLostError.
    """

    def __init__(self, device: Device, regions: Sequence[Region]) -> None:
        self._run = Launcher(device)
        self._regions = regions
        found = {region.codec: coder_of(region.codec) for region in regions}
        self._coders: dict[object, Coder] = {codec: coder for codec, coder in found.items() if coder is not None}
        self._out = GrowingBuffer(device)
        self._pinned = PinnedPool(device)

    @property
    def launcher(self) -> Launcher:
        """Launcher of this encoder; its stream orders work before or after encoding."""
        return self._run

    def coder(self, region: Region) -> Coder:
        """Return the coder of a region."""
        return self._coders[region.codec]

    def encode(self, push: DevicePush, slices: Sequence[Sequence[SegmentRange]], new: Sequence[int]) -> EncodedBatch:
        """Return one payload for each of ``slices``, given as the slice's segments in order.

        new: numbers of the regions that this push has not encoded yet; all of their values are checked.
        Raises NonFiniteGradientError if a value to be sent is not finite.
        """
        overflows: list[int] = []
        while True:
            payloads, flags = self._attempt(push, slices, new)
            flagged = np.flatnonzero(flags).tolist()
            if not flagged:
                return EncodedBatch(payloads, overflows)
            for number in flagged:
                region = self._regions[number]
                # Without the velocity, the sum with the residual may be finite.
                forgets = _VELOCITY if flags[number] & _VELOCITY else _RESIDUAL
                if not self.coder(region).feeds_back or push.forgotten[number] & forgets:
                    raise non_finite(region, 0, region.size)
                push.forgotten[number] |= forgets
                overflows.append(number)

    def encode_on_device(self, push: DevicePush, slices: Sequence[Sequence[SegmentRange]]) -> None:
        """Encode, but copy nothing except sizes to the host. For measurements."""
        self._launch(push, [segment for one in slices for segment in one])
        self._run.wait()

    def _attempt(
        self, push: DevicePush, slices: Sequence[Sequence[SegmentRange]], new: Sequence[int]
    ) -> tuple[list[memoryview], Words]:
        segments = [segment for one in slices for segment in one]
        batch = self._launch(push, segments)
        self._check_uncovered(batch.work, segments, new)
        flags, taken = np.empty(len(self._regions), np.uint32), self._pinned.take(batch.ends[-1])
        self._run.copy_out(flags, batch.work.flags)
        self._run.copy_out(taken, batch.out)
        self._run.wait()
        _write_headers(taken, segments, batch.headers, batch.ends)
        payloads, number = [], 0
        for one in slices:
            begin, number = number, number + len(one)
            payloads.append(taken[batch.ends[begin] : batch.ends[number]].data)
        return payloads, flags

    def _launch(self, push: DevicePush, segments: Sequence[SegmentRange]) -> LaunchedBatch:
        """Enqueue all work on ``segments``."""
        flags = self._run.scratch(4 * len(self._regions))
        self._run.clear(flags, 4 * len(self._regions))
        forgotten = self._run.upload(push.forgotten)
        work = PushWork(self._run, push.numbers, push.values, push.residual, push.velocity, flags, forgotten)
        batches = [batch for coder in self._coders.values() if (batch := self._select(work, coder, segments))]
        headers = self._headers(segments, batches)
        ends = np.cumsum([0, *(HEADER_BYTES + padded(header.size) for header in headers)]).tolist()
        out = self._out.address(ends[-1])
        self._run.clear(out, ends[-1])
        for batch in batches:
            outs = [out + ends[i] + HEADER_BYTES for i in batch.numbers]
            placed = PlacedSegments([segments[i] for i in batch.numbers], outs)
            batch.coder.launch(work, placed, batch.selected)
        return LaunchedBatch(work, headers, ends, out)

    def _select(self, push: PushWork, coder: Coder, segments: Sequence[SegmentRange]) -> CodecBatch | None:
        """Return the segments of one coder, with its choice of elements; None if it has none."""
        numbers = [i for i, segment in enumerate(segments) if self.coder(segment.region) is coder]
        if not numbers:
            return None
        mine = [segments[i] for i in numbers]
        if push.residual is not None and not coder.feeds_back:
            for segment in mine:
                start = segment.region.start
                self._run.clear_vector(push.residual.after, start + segment.start, start + segment.stop)
        return CodecBatch(coder, numbers, coder.select(push, mine))

    def _headers(self, segments: Sequence[SegmentRange], batches: Sequence[CodecBatch]) -> list[SegmentHeader]:
        """Return the headers of all segments. Waits for the sizes of sparse ones."""
        totals = np.zeros((len(segments), 2), np.uint32)
        found = [(batch, np.empty((len(batch.numbers), 2), np.uint32)) for batch in batches if batch.selected]
        for batch, mine in found:
            assert batch.selected is not None
            self._run.copy_out(mine, batch.selected.totals)
        if found:
            self._run.synchronize()
        for batch, mine in found:
            totals[batch.numbers] = mine
        return [self.coder(one.region).header(one, row) for one, row in zip(segments, totals.tolist(), strict=True)]

    def _check_uncovered(self, push: PushWork, segments: Sequence[SegmentRange], new: Sequence[int]) -> None:
        """Check the elements of new regions outside ``segments``: a residual is discarded for a region as a whole."""
        regions = {number: self._regions[number] for number in new if self.coder(self._regions[number]).feeds_back}
        for coder in self._coders.values():
            mine = {number: region for number, region in regions.items() if self.coder(region) is coder}
            if parts := uncovered_parts(segments, mine):
                coder.check(push, parts)


def _write_headers(
    out: NDArray[np.uint8], segments: Sequence[SegmentRange], headers: Sequence[SegmentHeader], ends: Sequence[int]
) -> None:
    for segment, header, end in zip(segments, headers, ends, strict=False):
        kind, bits, phase, size, parameter = header
        HEADER.pack_into(out.data, end, kind, bits, phase, segment.size, size, parameter)


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
