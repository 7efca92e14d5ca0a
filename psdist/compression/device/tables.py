"""Tables of segments, with which one launch encodes many segments. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psdist.compression.regions import Region

#: Row of a table, as in ``segments.cu``.
ROW: Final = np.dtype([(name, "<u8") for name in ("base", "size", "start", "stop", "out", "region", "first", "key")])
#: Elements per tile, for segments without blocks.
TILE: Final = 4096


class SegmentRange(NamedTuple):
    """Elements [start, stop) of a region.

    number: the region's number.
    """

    number: int
    region: Region
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def tiles(self) -> int:
        """Number of tiles, counted from the segment's start."""
        return -(-self.size // TILE)

    def blocks(self, block: int) -> int:
        """Return the number of blocks that the segment touches. Blocks are counted from the region's start."""
        return -(-self.stop // block) - self.start // block


class Table(NamedTuple):
    """Rows of segments, and the total number of their tasks."""

    rows: NDArray[Any]
    tasks: int


def table(
    segments: Sequence[SegmentRange], tasks: Sequence[int], outs: Sequence[int] = (), keys: Sequence[int] = ()
) -> Table:
    """Return the table of ``segments``.

    tasks: number of tasks of each segment.
    outs, keys: values for each row; zeros if omitted.
    """
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


def uncovered_parts(segments: Iterable[SegmentRange], regions: dict[int, Region]) -> list[SegmentRange]:
    """Return the parts of the regions ``regions``, given by number, that ``segments`` do not cover."""
    found: list[SegmentRange] = []
    ends = dict.fromkeys(regions, 0)
    for segment in sorted(segments):
        if segment.number in ends:
            if segment.start > ends[segment.number]:
                found.append(SegmentRange(segment.number, segment.region, ends[segment.number], segment.start))
            ends[segment.number] = segment.stop
    for number, region in regions.items():
        if ends[number] < region.size:
            found.append(SegmentRange(number, region, ends[number], region.size))
    return found
