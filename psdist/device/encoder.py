"""Encoder of gradients on a device: the payloads of ``psdist.compression.segments``.

Only the payloads are copied to the host.

All segments of one codec are encoded by one launch, or by a few that first select the elements to send. The sum of a
gradient with its velocity or residual may overflow float32. The region's flag is then set, and everything is encoded
again without that region's velocity or residual, as on the host.

Pushes, and the state kept between them, are in ``psdist.client.device``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from psdist.compression.segments import PushNumber
from psdist.compression.segments.encoding import non_finite
from psdist.compression.segments.format import HEADER, HEADER_BYTES, padded
from psdist.compression.specifications import Region
from psdist.device.coders import (
    Coder,
    PlacedSegments,
    PushWork,
    SegmentHeader,
    SegmentRange,
    Selected,
    coder_of,
    uncovered_parts,
)
from psdist.device.device import Device
from psdist.device.memory import DeviceVector, DoubleVector, GrowingBuffer, Launcher, PinnedPool

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
