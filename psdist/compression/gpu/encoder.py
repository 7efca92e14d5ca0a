"""Encoding a gradient on a device: the payloads of ``psdist.compression.segments``, of which only the bytes are copied
to the host.

All segments of one codec are encoded by one launch, or by some that first select what is sent. A sum of a gradient and
its velocity, or what was left out of earlier ones, may be too large for float32: then the flag of its region is set,
and everything is encoded once more without that region's velocity or rest, as on the host.

Not here: pushes, and what is kept from one to the next (``psdist.client.device``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from psdist.compression.gpu.coders import Coder, PlacedSegments, PushMemory, PushNumbers, SegmentHeader, Selected
from psdist.compression.gpu.launcher import Launcher
from psdist.compression.gpu.memory import DeviceVector, DoubleVector, GrowingBuffer, PinnedPool
from psdist.compression.gpu.sparse_coders import coder_of
from psdist.compression.gpu.tables import SegmentRange, rest_of_regions
from psdist.compression.regions import Region
from psdist.compression.segments.format import HEADER, HEADER_BYTES, padded
from psdist.compression.segments.prepared import non_finite
from psdist.gpu.device import Device

#: A number for each region.
Words = NDArray[np.uint32]
#: Of the flags of a region, as in ``segments.cu``.
_REST, _VELOCITY = 1, 2


class EncodedBatch(NamedTuple):
    """payloads: one for each list of segments. overflows: regions whose rest or velocity was forgotten, once each."""

    payloads: list[memoryview]
    overflows: list[int]


class DevicePush(NamedTuple):
    """One push. values: its gradient. rest, velocity: see ``PushMemory``. forgotten: which of them are forgotten, by
    region: uint32[regions], which is updated."""

    values: DeviceVector
    rest: DoubleVector | None
    velocity: DoubleVector | None
    numbers: PushNumbers
    forgotten: Words


def can_encode(regions: Iterable[Region]) -> bool:
    """Whether all codecs of ``regions`` have kernels."""
    return all(coder_of(region.codec) is not None for region in regions)


class CodecBatch(NamedTuple):
    """The segments of one coder, by their numbers. selected: what it has chosen of them, where their sizes follow from
    that."""

    coder: Coder
    numbers: list[int]
    selected: Selected | None


class LaunchedBatch(NamedTuple):
    """Segments that a device encodes. ends: where each begins in the output, at the address ``out``, and its end."""

    memory: PushMemory
    headers: list[SegmentHeader]
    ends: list[int]
    out: int


class DeviceEncoder:
    """The encoder of the regions of one flat vector. One thread at a time uses it.

    Raises DeviceUnavailableError and DeviceLostError, here and when it encodes.
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
        """Its stream, for what is to be done before or after it."""
        return self._run

    def coder(self, region: Region) -> Coder:
        """The coder of a region."""
        return self._coders[region.codec]

    def encode(self, push: DevicePush, slices: Sequence[Sequence[SegmentRange]], new: Sequence[int]) -> EncodedBatch:
        """The payloads of ``slices``, each of which is given by its segments in order.

        new: the regions that nothing was encoded of before in this push: all of their values are looked at.
        Raises NonFiniteGradientError where a value that is sent is not finite.
        """
        overflows: list[int] = []
        while True:
            payloads, flags = self._attempt(push, slices, new)
            flagged = np.flatnonzero(flags).tolist()
            if not flagged:
                return EncodedBatch(payloads, overflows)
            for number in flagged:
                region = self._regions[number]
                # Without the velocity the sum with the rest may be finite.
                forgets = _VELOCITY if flags[number] & _VELOCITY else _REST
                if not self.coder(region).feeds_back or push.forgotten[number] & forgets:
                    raise non_finite(region, 0, region.size)
                push.forgotten[number] |= forgets
                overflows.append(number)

    def encode_there(self, push: DevicePush, slices: Sequence[Sequence[SegmentRange]]) -> None:
        """Encodes without copying anything but sizes to the host: for measurements."""
        self._launch(push, [segment for one in slices for segment in one])
        self._run.wait()

    def _attempt(
        self, push: DevicePush, slices: Sequence[Sequence[SegmentRange]], new: Sequence[int]
    ) -> tuple[list[memoryview], Words]:
        segments = [segment for one in slices for segment in one]
        batch = self._launch(push, segments)
        self._check_rest(batch.memory, segments, new)
        flags, taken = np.empty(len(self._regions), np.uint32), self._pinned.take(batch.ends[-1])
        self._run.copy_out(flags, batch.memory.flags)
        self._run.copy_out(taken, batch.out)
        self._run.wait()
        _write_headers(taken, segments, batch.headers, batch.ends)
        payloads, number = [], 0
        for one in slices:
            begin, number = number, number + len(one)
            payloads.append(taken[batch.ends[begin] : batch.ends[number]].data)
        return payloads, flags

    def _launch(self, push: DevicePush, segments: Sequence[SegmentRange]) -> LaunchedBatch:
        """Gives all work on ``segments`` to the device."""
        flags = self._run.scratch(4 * len(self._regions))
        self._run.clear(flags, 4 * len(self._regions))
        forgotten = self._run.upload(push.forgotten)
        memory = PushMemory(push.values, push.rest, push.velocity, flags, forgotten)
        batches = [batch for coder in self._coders.values() if (batch := self._select(push, memory, coder, segments))]
        headers = self._headers(segments, batches)
        ends = np.cumsum([0, *(HEADER_BYTES + padded(header.size) for header in headers)]).tolist()
        out = self._out.address(ends[-1])
        self._run.clear(out, ends[-1])
        for batch in batches:
            outs = [out + ends[i] + HEADER_BYTES for i in batch.numbers]
            placed = PlacedSegments([segments[i] for i in batch.numbers], outs)
            batch.coder.launch(self._run, memory, placed, push.numbers, batch.selected)
        return LaunchedBatch(memory, headers, ends, out)

    def _select(
        self, push: DevicePush, memory: PushMemory, coder: Coder, segments: Sequence[SegmentRange]
    ) -> CodecBatch | None:
        """The segments of one coder, with what it selects of them."""
        numbers = [i for i, segment in enumerate(segments) if self.coder(segment.region) is coder]
        if not numbers:
            return None
        mine = [segments[i] for i in numbers]
        if push.rest is not None and not coder.feeds_back:
            for segment in mine:
                start = segment.region.start
                self._run.clear_vector(push.rest.after, start + segment.start, start + segment.stop)
        return CodecBatch(coder, numbers, coder.select(self._run, memory, mine, push.numbers))

    def _headers(self, segments: Sequence[SegmentRange], batches: Sequence[CodecBatch]) -> list[SegmentHeader]:
        """The headers of all segments. Waits for the sizes of those that were selected."""
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

    def _check_rest(self, memory: PushMemory, segments: Sequence[SegmentRange], new: Sequence[int]) -> None:
        """Looks at what ``segments`` leave out of new regions: whether a rest is forgotten holds for a whole region."""
        regions = {number: self._regions[number] for number in new if self.coder(self._regions[number]).feeds_back}
        for coder in self._coders.values():
            mine = {number: region for number, region in regions.items() if self.coder(region) is coder}
            if rest := rest_of_regions(segments, mine):
                coder.check(self._run, memory, rest)


def _write_headers(
    out: NDArray[np.uint8], segments: Sequence[SegmentRange], headers: Sequence[SegmentHeader], ends: Sequence[int]
) -> None:
    for segment, header, end in zip(segments, headers, ends, strict=False):
        kind, bits, phase, size, parameter = header
        HEADER.pack_into(out.data, end, kind, bits, phase, segment.size, size, parameter)
