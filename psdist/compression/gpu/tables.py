"""Tables of segments, by which one launch encodes many. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psdist.compression.regions import Region

#: A row of ``segments.cu``.
ROW: Final = np.dtype([(name, "<u8") for name in ("base", "size", "start", "stop", "out", "region", "first", "key")])
#: Elements of a tile, where a segment has no blocks.
TILE: Final = 4096


class SegmentRange(NamedTuple):
    """Elements [start, stop) of a region. number: the region's."""

    number: int
    region: Region
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def tiles(self) -> int:
        """The number of tiles, which are counted from its begin."""
        return -(-self.size // TILE)

    def blocks(self, block: int) -> int:
        """The number of blocks that it touches, which are counted from the region's begin."""
        return -(-self.stop // block) - self.start // block


class Table(NamedTuple):
    """Rows of segments, and the number of their tasks."""

    rows: NDArray[Any]
    tasks: int


def table(
    segments: Sequence[SegmentRange], tasks: Sequence[int], outs: Sequence[int] = (), keys: Sequence[int] = ()
) -> Table:
    """The rows of ``segments``, which have so many ``tasks``. outs, keys: of each; zeros where they are left out."""
    rows = np.zeros(len(segments), ROW)
    rows["base"] = [segment.region.start for segment in segments]
    rows["size"] = [segment.region.size for segment in segments]
    rows["start"] = [segment.start for segment in segments]
    rows["stop"] = [segment.stop for segment in segments]
    rows["region"] = [segment.number for segment in segments]
    ends = np.cumsum(np.array(tasks, np.uint64))
    rows["first"] = ends - np.array(tasks, np.uint64)
    if outs:
        rows["out"] = np.array(outs, np.uint64)
    if keys:
        rows["key"] = np.array(keys, np.uint64)
    return Table(rows, int(ends[-1]) if len(segments) else 0)


def rest_of_regions(segments: Iterable[SegmentRange], size_of: dict[int, Region]) -> list[SegmentRange]:
    """What ``segments`` leave out of the regions of these numbers."""
    found: list[SegmentRange] = []
    ends = dict.fromkeys(size_of, 0)
    for segment in sorted(segments):
        if segment.number in ends:
            if segment.start > ends[segment.number]:
                found.append(SegmentRange(segment.number, segment.region, ends[segment.number], segment.start))
            ends[segment.number] = segment.stop
    for number, region in size_of.items():
        if ends[number] < region.size:
            found.append(SegmentRange(number, region, ends[number], region.size))
    return found
