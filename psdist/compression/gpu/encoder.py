"""Encoding a gradient on a device: the payloads of ``psdist.compression.segments``, of which only the bytes are copied
to the host.

All segments of one codec are encoded by one launch. A sum of a gradient and what was left out of earlier ones may be
too large for float32: then the flag of its region is set, and everything is encoded once more without that region's
rest, as on the host.

Not here: pushes, and what is kept from one to the next (``psdist.client.device``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from psdist.compression.gpu.coders import Coder, PlacedSegments, PushMemory, PushNumbers, SegmentHeader, coder_of
from psdist.compression.gpu.launcher import Launcher
from psdist.compression.gpu.memory import DeviceVector, GrowingBuffer, PinnedPool
from psdist.compression.gpu.tables import SegmentRange, rest_of_regions
from psdist.compression.regions import Region
from psdist.compression.segments.format import HEADER, HEADER_BYTES, padded
from psdist.compression.segments.prepared import non_finite
from psdist.gpu.device import Device

_ALIGNMENT: Final = 256


class EncodedBatch(NamedTuple):
    """payloads: one for each list of segments. overflows: regions whose rest was forgotten."""

    payloads: list[memoryview]
    overflows: list[int]


class DevicePush(NamedTuple):
    """One push. values: its gradient. before, after: see ``PushMemory``. forgotten: by region, whether what was left
    out of it is forgotten: uint32[regions], which is updated."""

    values: DeviceVector
    before: DeviceVector | None
    after: DeviceVector | None
    numbers: PushNumbers
    forgotten: np.ndarray


def can_encode(regions: Iterable[Region]) -> bool:
    """Whether all codecs of ``regions`` have kernels."""
    return all(coder_of(region.codec) is not None for region in regions)


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
                if not self.coder(region).feeds_back or push.forgotten[number]:
                    raise non_finite(region, 0, region.size)
                push.forgotten[number] = 1
                overflows.append(number)

    def _attempt(
        self, push: DevicePush, slices: Sequence[Sequence[SegmentRange]], new: Sequence[int]
    ) -> tuple[list[memoryview], np.ndarray]:
        segments = [segment for one in slices for segment in one]
        headers = [self.coder(segment.region).header(segment) for segment in segments]
        ends = np.cumsum([0, *(HEADER_BYTES + padded(header.size) for header in headers)])
        flags_bytes = -(-4 * len(self._regions) // _ALIGNMENT) * _ALIGNMENT
        size = flags_bytes + int(ends[-1])
        out = self._out.address(size)
        self._run.clear(out, size)
        forgotten = self._run.upload(push.forgotten)
        memory = PushMemory(push.values, push.before, push.after, out, forgotten)
        outs = [out + flags_bytes + int(end) + HEADER_BYTES for end in ends[:-1]]
        self._launch(push, memory, PlacedSegments(segments, outs))
        self._check_rest(memory, segments, new)
        taken = self._pinned.take(size)
        self._run.copy_out(taken, out)
        self._run.wait()
        _write_headers(taken[flags_bytes:], segments, headers, ends)
        payloads, number = [], 0
        for one in slices:
            begin, number = number, number + len(one)
            payloads.append(taken[flags_bytes + ends[begin] : flags_bytes + ends[number]].data)
        return payloads, taken[: 4 * len(self._regions)].view(np.uint32)

    def _launch(self, push: DevicePush, memory: PushMemory, placed: PlacedSegments) -> None:
        segments, outs = placed
        for codec, coder in self._coders.items():
            mine = [i for i, segment in enumerate(segments) if segment.region.codec == codec]
            if not mine:
                continue
            those = PlacedSegments([segments[i] for i in mine], [outs[i] for i in mine])
            coder.launch(self._run, memory, those, push.numbers)
            if push.after is not None and not coder.feeds_back:
                for i in mine:
                    start = segments[i].region.start
                    self._run.clear_vector(push.after, start + segments[i].start, start + segments[i].stop)

    def _check_rest(self, memory: PushMemory, segments: Sequence[SegmentRange], new: Sequence[int]) -> None:
        """Looks at what ``segments`` leave out of new regions: whether a rest is forgotten holds for a whole region."""
        regions = {number: self._regions[number] for number in new if self.coder(self._regions[number]).feeds_back}
        for coder in self._coders.values():
            mine = {number: region for number, region in regions.items() if self.coder(region) is coder}
            if rest := rest_of_regions(segments, mine):
                coder.check(self._run, memory, rest)


def _write_headers(
    out: np.ndarray, segments: Sequence[SegmentRange], headers: Sequence[SegmentHeader], ends: np.ndarray
) -> None:
    for segment, header, end in zip(segments, headers, ends.tolist(), strict=False):
        kind, bits, phase, size, parameter = header
        HEADER.pack_into(out.data, end, kind, bits, phase, segment.size, size, parameter)
