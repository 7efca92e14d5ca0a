"""Coders: sizes, headers and kernels of each codec's segments on a device, for gradients in its push.

The kernels are CUDA C: ``segments.cu`` is shared by all, ``dense.cu`` holds the codecs whose segments have a known
size, ``sparse.cu`` the others. They take tables of segments, so that one launch encodes all segments of a codec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.compression.segments import PushNumber, random_numbers
from psdist.compression.segments.format import Kind
from psdist.compression.specifications import Cast, ChunkedTopK, Codec, Compressor, Integers, OneBit, Region, TopK
from psdist.device.memory import DeviceVector, DoubleVector, Launcher
from psdist.types import DType

_U32, _U64, _F32 = np.uint32, np.uint64, np.float32
#: Magnitudes with at least these bits are not finite.
INFINITY_BITS: Final = 0x7F800000
#: Row of a table, as in ``segments.cu``.
ROW: Final = np.dtype([(name, "<u8") for name in ("base", "size", "start", "stop", "out", "region", "first", "key")])
#: Elements per tile, for segments without blocks.
TILE: Final = 4096
#: Bytes of Kept and Search in ``sparse.cu``, and of the histogram of a region.
_KEPT_BYTES: Final = 32
_SEARCH_BYTES: Final = 24
_BINS_BYTES: Final = 4 * 2048
#: Elements whose digits are counted together.
_HISTOGRAM_TILE: Final = 16384
#: Chunks of at most this size get one warp each, larger ones a block of 8 warps.
_SMALL_CHUNK: Final = 512
#: Digits of a threshold: lowest bit, and number of bits.
_DIGITS: Final = ((20, 11), (10, 10), (0, 10))


# --- tables of segments, with which one launch encodes many -----------------------------------------------------------


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


# --- segments whose size is known in advance --------------------------------------------------------------------------


class PushWork(NamedTuple):
    """Launcher of one push's kernels, the seeds of its random numbers, and the memory that they read and write.

    values: the gradient.
    residual: residual of earlier pushes, and of this one; None without error feedback.
    velocity: accumulated gradients with momentum; None without momentum.
    flags: address of a uint32 per region. Bit 0: the sum with the residual is not finite; bit 1: the sum with the
        velocity is not.
    forgotten: address of a uint32 per region, with the same bits: addends that the kernels leave out.
    """

    run: Launcher
    numbers: PushNumber
    values: DeviceVector
    residual: DoubleVector | None
    velocity: DoubleVector | None
    flags: int
    forgotten: int


class PlacedSegments(NamedTuple):
    """Segments of one codec, and the addresses of their bodies."""

    segments: Sequence[SegmentRange]
    outs: Sequence[int]


class SegmentHeader(NamedTuple):
    """Header fields of a segment, except its number of elements."""

    kind: Kind
    bits: int
    phase: int
    size: int
    parameter: int


class Selected(NamedTuple):
    """Elements that a codec chose to send.

    bitmaps, kept, totals: device addresses, as described in ``sparse.cu``.
    """

    bitmaps: int
    kept: int
    totals: int


#: Per segment, the number of values and the bytes of their gaps: uint32[segments, 2].
Totals = NDArray[np.uint32]


class Coder(ABC):
    """Encoder of one codec's segments."""

    def __init__(self, codec: Codec) -> None:
        #: True if the residual of a region is added to the next push.
        self.feeds_back = isinstance(codec, Compressor) and bool(codec.feedback)
        self.decay = codec.residual_decay if isinstance(codec, Compressor) else 1.0
        #: Factor of the velocity; 0 without momentum.
        self.momentum = codec.momentum if isinstance(codec, TopK) else 0.0

    def select(self, push: PushWork, segments: Sequence[SegmentRange]) -> Selected | None:
        """Choose the elements to send from ``segments``. Return None if segment sizes do not depend on that choice."""
        return None

    @abstractmethod
    def header(self, segment: SegmentRange, totals: Sequence[int]) -> SegmentHeader:
        """Return the header of a segment.

        totals: the segment's row of ``Totals``.
        """

    @abstractmethod
    def launch(self, push: PushWork, placed: PlacedSegments, selected: Selected | None) -> None:
        """Write the bodies of segments into zeroed push.

        selected: result of ``select`` for the same segments.
        """

    def check(self, push: PushWork, segments: Sequence[SegmentRange]) -> None:
        """Flag the regions of ``segments`` that have a non-finite sum."""
        found = table(segments, [segment.tiles for segment in segments])
        arguments = *self.source(push, found.rows), _U64(push.flags), _U64(push.forgotten)
        weights = _F32(self.decay), *self.velocity(push)[:2]
        push.run.launch("check_finite", found.tasks, 256, *arguments, *weights, _U32(INFINITY_BITS))

    def residual(self, push: PushWork) -> tuple[np.uint64, np.uint64]:
        """Return the addresses of the residual before and after this push; zeros without error feedback."""
        if not self.feeds_back or push.residual is None:
            return _U64(0), _U64(0)
        return _U64(push.residual.before.address), _U64(push.residual.after.address)

    def velocity(self, push: PushWork) -> tuple[np.uint64, np.float32, np.uint64]:
        """Return the velocity's address before, the momentum, and its address after the push.

        All are zero without momentum.
        """
        if not self.momentum or push.velocity is None:
            return _U64(0), _F32(0), _U64(0)
        return _U64(push.velocity.before.address), _F32(self.momentum), _U64(push.velocity.after.address)

    def source(self, push: PushWork, rows: np.ndarray) -> tuple[np.generic, ...]:
        residual, _ = self.residual(push)
        return _U64(push.values.address), residual, _U64(push.run.upload(rows)), _U64(len(rows))


class CastCoder(Coder):
    """Coder of RAW32, RAW16 and BRAIN16."""

    #: By dtype: its number in the kernel, and the kind of segment.
    KINDS: Final[dict[DType, tuple[int, Kind]]] = {
        "float32": (0, Kind.RAW32),
        "float16": (1, Kind.RAW16),
        "bfloat16": (2, Kind.BRAIN16),
    }

    def __init__(self, codec: Cast) -> None:
        super().__init__(codec)
        self._bytes = NUMPY_DTYPES[codec.dtype].itemsize
        self._number, self._kind = self.KINDS[codec.dtype]

    def header(self, segment: SegmentRange, totals: Sequence[int]) -> SegmentHeader:
        return SegmentHeader(self._kind, 8 * self._bytes, 0, self._bytes * segment.size, 0)

    def launch(self, push: PushWork, placed: PlacedSegments, selected: Selected | None) -> None:
        found = table(placed.segments, [segment.tiles for segment in placed.segments], placed.outs)
        rows = _U64(push.run.upload(found.rows)), _U64(len(found.rows))
        arguments = _U64(push.values.address), *rows, _U64(push.flags), _U32(self._number)
        push.run.launch("encode_casts", found.tasks, 256, *arguments)


class IntegerCoder(Coder):
    """Coder of INTEGER."""

    def __init__(self, codec: Integers) -> None:
        super().__init__(codec)
        self._codec = codec

    def header(self, segment: SegmentRange, totals: Sequence[int]) -> SegmentHeader:
        bits, block = self._codec.bits, self._codec.block
        size = 4 * segment.blocks(block) + -(-segment.size * bits // 8)
        return SegmentHeader(Kind.INTEGER, bits, segment.start % block, size, block)

    def launch(self, push: PushWork, placed: PlacedSegments, selected: Selected | None) -> None:
        codec = self._codec
        keys = [random_numbers.key(codec.seed, *push.numbers, segment.region.start) for segment in placed.segments]
        found = table(placed.segments, [one.blocks(codec.block) for one in placed.segments], placed.outs, keys)
        values, before, rows, count = self.source(push, found.rows)
        push.run.launch(
            *("encode_integers", -(-found.tasks // 4), 128, values, before, self.residual(push)[1], rows, count),
            *(_U64(found.tasks), _U64(push.flags), _U64(push.forgotten)),
            *(_F32(self.decay), _U32(codec.bits), _U32(codec.block), _U32(codec.stochastic)),
        )


class SignCoder(Coder):
    """Coder of ONE_BIT."""

    def __init__(self, codec: OneBit) -> None:
        super().__init__(codec)
        self._block = codec.block

    def header(self, segment: SegmentRange, totals: Sequence[int]) -> SegmentHeader:
        size = 4 * segment.blocks(self._block) + -(-segment.size // 8)
        return SegmentHeader(Kind.ONE_BIT, 1, segment.start % self._block, size, self._block)

    def launch(self, push: PushWork, placed: PlacedSegments, selected: Selected | None) -> None:
        found = table(placed.segments, [one.blocks(self._block) for one in placed.segments], placed.outs)
        values, before, rows, count = self.source(push, found.rows)
        push.run.launch(
            *("encode_signs", -(-found.tasks // 8), 128, values, before, self.residual(push)[1], rows, count),
            *(_U64(found.tasks), _U64(push.flags), _U64(push.forgotten), _F32(self.decay), _U32(self._block)),
        )


# --- SPARSE: sizes are known only after selection ---------------------------------------------------------------------


class SparseCoder(Coder):
    """Coder of SPARSE.

    bits: width of the values.
    chunk: elements per task; 0 for tiles.
    scaled: elements per scale, or 0.
    """

    def __init__(self, codec: Compressor, bits: int, chunk: int) -> None:
        super().__init__(codec)
        self.bits = bits
        self.chunk = chunk
        self.scaled = chunk if bits < 16 else 0

    @property
    def stride(self) -> int:
        """Words of a task's bitmap."""
        return -(-(self.chunk or TILE) // 32)

    def tasks_of(self, segments: Sequence[SegmentRange], outs: Sequence[int] = (), keys: Sequence[int] = ()) -> Table:
        """Return the table of ``segments``."""
        tasks = [one.blocks(self.chunk) if self.chunk else one.tiles for one in segments]
        return table(segments, tasks, outs, keys)

    @abstractmethod
    def choose(self, push: PushWork, segments: Sequence[SegmentRange]) -> tuple[int, int]:
        """Write the bitmaps of elements to send, and the residual. Return the addresses of the bitmaps and of Kept."""

    def select(self, push: PushWork, segments: Sequence[SegmentRange]) -> Selected:
        bitmaps, kept = self.choose(push, segments)
        found = self.tasks_of(segments)
        rows = _U64(push.run.upload(found.rows)), _U64(len(found.rows)), _U64(found.tasks)
        sizes = _U32(self.chunk), _U32(self.stride)
        push.run.launch(*("measure_kept", -(-found.tasks // 64), 64, *rows, _U64(bitmaps), _U64(kept)), *sizes)
        totals = push.run.scratch(8 * len(segments))
        push.run.launch("arrange_kept", -(-len(segments) // 32), 32, *rows, _U64(kept), _U64(totals))
        return Selected(bitmaps, kept, totals)

    def header(self, segment: SegmentRange, totals: Sequence[int]) -> SegmentHeader:
        count, gap_bytes = totals
        scales = segment.blocks(self.scaled) if self.scaled else 0
        size = 4 + 4 * scales + -(-count * self.bits // 8) + gap_bytes
        if self.bits == 32 and size > 4 * segment.size:  # Dense is shorter if most are kept.
            return SegmentHeader(Kind.RAW32, 32, 0, 4 * segment.size, 0)
        phase = segment.start % self.scaled if self.scaled else 0
        return SegmentHeader(Kind.SPARSE, self.bits, phase, size, self.scaled)

    def launch(self, push: PushWork, placed: PlacedSegments, selected: Selected | None) -> None:
        assert selected is not None
        found = self.tasks_of(placed.segments, placed.outs)
        values, before, rows, count = self.source(push, found.rows)
        push.run.launch(
            *("write_kept", -(-found.tasks // 64), 64, values, before, self.residual(push)[1], rows, count),
            *(_U64(found.tasks), _U64(push.forgotten), _U64(selected.bitmaps), _U64(selected.kept)),
            *(_U64(selected.totals), _F32(self.decay), *self.velocity(push)),
            *(_U32(self.bits), _U32(self.chunk), _U32(self.stride), _U32(self.scaled)),
        )


class ChunkedTopKCoder(SparseCoder):
    """Coder that keeps the largest elements of each chunk."""

    def __init__(self, codec: ChunkedTopK) -> None:
        super().__init__(codec, codec.bits, codec.chunk)
        self._kept = codec.k

    def choose(self, push: PushWork, segments: Sequence[SegmentRange]) -> tuple[int, int]:
        found = self.tasks_of(segments)
        bitmaps, kept = push.run.scratch(4 * self.stride * found.tasks), push.run.scratch(_KEPT_BYTES * found.tasks)
        values, before, rows, count = self.source(push, found.rows)
        push.run.launch(
            *(
                "select_chunks",
                found.tasks,
                32 if self.chunk <= _SMALL_CHUNK else 256,
                values,
                before,
                self.residual(push)[1],
                rows,
                count,
            ),
            *(_U64(push.flags), _U64(push.forgotten), _U64(bitmaps), _U64(kept), _F32(self.decay)),
            *(_U32(self.chunk), _U32(self._kept), _U32(self.bits)),
        )
        return bitmaps, kept


class TopKCoder(SparseCoder):
    """Coder that keeps the largest elements of each region."""

    def __init__(self, codec: TopK) -> None:
        super().__init__(codec, 32, 0)
        self._codec = codec

    def choose(self, push: PushWork, segments: Sequence[SegmentRange]) -> tuple[int, int]:
        regions = {segment.number: segment.region for segment in segments}
        whole = [SegmentRange(number, region, 0, region.size) for number, region in regions.items()]
        searches = self._search(push, whole)
        places = {number: at for at, number in enumerate(regions)}
        found = self.tasks_of(segments, keys=[places[segment.number] for segment in segments])
        bitmaps, kept = push.run.scratch(4 * self.stride * found.tasks), push.run.scratch(_KEPT_BYTES * found.tasks)
        values, before, rows, count = self.source(push, found.rows)
        push.run.launch(
            *("select_above", found.tasks, 256, values, before, self.residual(push)[1], rows, count),
            *(_U64(push.forgotten), _U64(searches), _U64(bitmaps), _F32(self.decay), *self.velocity(push)),
        )
        return bitmaps, kept

    def _search(self, push: PushWork, whole: Sequence[SegmentRange]) -> int:
        """Return the address of a Search per region: its threshold, and which ties are kept."""
        ratio = self._codec.ratio_at(push.numbers.ordinal)
        keys = [max(1, round(ratio * one.size)) for one in whole]
        found = table(whole, [-(-one.size // _HISTOGRAM_TILE) for one in whole], keys=keys)
        values, before, rows, count = self.source(push, found.rows)
        searches, bins = push.run.scratch(_SEARCH_BYTES * len(whole)), push.run.scratch(_BINS_BYTES * len(whole))
        push.run.clear(searches, _SEARCH_BYTES * len(whole))
        push.run.clear(bins, _BINS_BYTES * len(whole))
        flags, forgotten = _U64(push.flags), _U64(push.forgotten)
        weights = _F32(self.decay), *self.velocity(push)[:2]
        for shift, digit in _DIGITS:
            given = flags, forgotten, _U64(searches), _U64(bins), *weights, _U32(shift), _U32(digit)
            push.run.launch("count_digits", found.tasks, 256, values, before, rows, count, *given)
            ends = _U32(shift == _DIGITS[0][0]), _U32(shift == 0)
            push.run.launch("choose_digit", len(whole), 256, rows, _U64(searches), _U64(bins), _U32(digit), *ends)
        ties = _U64(push.run.scratch(4 * found.tasks))
        push.run.launch(
            *("count_ties", found.tasks, 256, values, before, rows, count, forgotten, _U64(searches), ties, *weights)
        )
        places = rows, forgotten, _U64(searches), ties
        push.run.launch("find_ties_stop", len(whole), 256, values, before, *places, *weights)
        return searches


def coder_of(codec: Codec) -> Coder | None:
    """Return the coder of a codec, or None if the codec is encoded on the host."""
    match codec:
        case Compressor() if codec.feedback == "ef21":
            return None
        case Cast():
            return CastCoder(codec)
        case Integers():
            return IntegerCoder(codec)
        case OneBit():
            return SignCoder(codec)
        case ChunkedTopK():
            return ChunkedTopKCoder(codec)
        case TopK():
            return TopKCoder(codec)
    return None
