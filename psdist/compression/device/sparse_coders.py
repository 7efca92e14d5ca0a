"""Coders of SPARSE segments, whose sizes are known only after selection; and the mapping from codecs to coders."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Final

import numpy as np

from psdist.compression.device.coders import (
    CastCoder,
    Coder,
    IntegerCoder,
    PlacedSegments,
    PushMemory,
    PushNumbers,
    SegmentHeader,
    Selected,
    SignCoder,
)
from psdist.compression.device.launcher import Launcher
from psdist.compression.device.tables import TILE, SegmentRange, Table, table
from psdist.compression.segments.format import Kind
from psdist.compression.specifications import Cast, ChunkedTopK, Codec, Compressor, Integers, OneBit, TopK

_U32, _U64, _F32 = np.uint32, np.uint64, np.float32
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
    def choose(
        self, run: Launcher, memory: PushMemory, segments: Sequence[SegmentRange], numbers: PushNumbers
    ) -> tuple[int, int]:
        """Write the bitmaps of elements to send, and the residual. Return the addresses of the bitmaps and of Kept."""

    def select(
        self, run: Launcher, memory: PushMemory, segments: Sequence[SegmentRange], numbers: PushNumbers
    ) -> Selected:
        bitmaps, kept = self.choose(run, memory, segments, numbers)
        found = self.tasks_of(segments)
        rows = _U64(run.upload(found.rows)), _U64(len(found.rows)), _U64(found.tasks)
        sizes = _U32(self.chunk), _U32(self.stride)
        run.launch(*("measure_kept", -(-found.tasks // 64), 64, *rows, _U64(bitmaps), _U64(kept)), *sizes)
        totals = run.scratch(8 * len(segments))
        run.launch("arrange_kept", -(-len(segments) // 32), 32, *rows, _U64(kept), _U64(totals))
        return Selected(bitmaps, kept, totals)

    def header(self, segment: SegmentRange, totals: Sequence[int]) -> SegmentHeader:
        count, gap_bytes = totals
        scales = segment.blocks(self.scaled) if self.scaled else 0
        size = 4 + 4 * scales + -(-count * self.bits // 8) + gap_bytes
        if self.bits == 32 and size > 4 * segment.size:  # Dense is shorter if most are kept.
            return SegmentHeader(Kind.RAW32, 32, 0, 4 * segment.size, 0)
        phase = segment.start % self.scaled if self.scaled else 0
        return SegmentHeader(Kind.SPARSE, self.bits, phase, size, self.scaled)

    def launch(
        self,
        run: Launcher,
        memory: PushMemory,
        placed: PlacedSegments,
        numbers: PushNumbers,
        selected: Selected | None,
    ) -> None:
        assert selected is not None
        found = self.tasks_of(placed.segments, placed.outs)
        values, before, rows, count = self.source(run, memory, found.rows)
        run.launch(
            *("write_kept", -(-found.tasks // 64), 64, values, before, self.residual(memory)[1], rows, count),
            *(_U64(found.tasks), _U64(memory.forgotten), _U64(selected.bitmaps), _U64(selected.kept)),
            *(_U64(selected.totals), _F32(self.decay), *self.velocity(memory)),
            *(_U32(self.bits), _U32(self.chunk), _U32(self.stride), _U32(self.scaled)),
        )


class ChunkedTopKCoder(SparseCoder):
    """Coder that keeps the largest elements of each chunk."""

    def __init__(self, codec: ChunkedTopK) -> None:
        super().__init__(codec, codec.bits, codec.chunk)
        self._kept = codec.k

    def choose(
        self, run: Launcher, memory: PushMemory, segments: Sequence[SegmentRange], numbers: PushNumbers
    ) -> tuple[int, int]:
        found = self.tasks_of(segments)
        bitmaps, kept = run.scratch(4 * self.stride * found.tasks), run.scratch(_KEPT_BYTES * found.tasks)
        values, before, rows, count = self.source(run, memory, found.rows)
        run.launch(
            *(
                "select_chunks",
                found.tasks,
                32 if self.chunk <= _SMALL_CHUNK else 256,
                values,
                before,
                self.residual(memory)[1],
                rows,
                count,
            ),
            *(_U64(memory.flags), _U64(memory.forgotten), _U64(bitmaps), _U64(kept), _F32(self.decay)),
            *(_U32(self.chunk), _U32(self._kept), _U32(self.bits)),
        )
        return bitmaps, kept


class TopKCoder(SparseCoder):
    """Coder that keeps the largest elements of each region."""

    def __init__(self, codec: TopK) -> None:
        super().__init__(codec, 32, 0)
        self._codec = codec

    def choose(
        self, run: Launcher, memory: PushMemory, segments: Sequence[SegmentRange], numbers: PushNumbers
    ) -> tuple[int, int]:
        regions = {segment.number: segment.region for segment in segments}
        whole = [SegmentRange(number, region, 0, region.size) for number, region in regions.items()]
        searches = self._search(run, memory, whole, numbers)
        places = {number: at for at, number in enumerate(regions)}
        found = self.tasks_of(segments, keys=[places[segment.number] for segment in segments])
        bitmaps, kept = run.scratch(4 * self.stride * found.tasks), run.scratch(_KEPT_BYTES * found.tasks)
        values, before, rows, count = self.source(run, memory, found.rows)
        run.launch(
            *("select_above", found.tasks, 256, values, before, self.residual(memory)[1], rows, count),
            *(_U64(memory.forgotten), _U64(searches), _U64(bitmaps), _F32(self.decay), *self.velocity(memory)),
        )
        return bitmaps, kept

    def _search(self, run: Launcher, memory: PushMemory, whole: Sequence[SegmentRange], numbers: PushNumbers) -> int:
        """Return the address of a Search per region: its threshold, and which ties are kept."""
        ratio = self._codec.ratio_at(numbers.ordinal)
        keys = [max(1, round(ratio * one.size)) for one in whole]
        found = table(whole, [-(-one.size // _HISTOGRAM_TILE) for one in whole], keys=keys)
        values, before, rows, count = self.source(run, memory, found.rows)
        searches, bins = run.scratch(_SEARCH_BYTES * len(whole)), run.scratch(_BINS_BYTES * len(whole))
        run.clear(searches, _SEARCH_BYTES * len(whole))
        run.clear(bins, _BINS_BYTES * len(whole))
        flags, forgotten = _U64(memory.flags), _U64(memory.forgotten)
        weights = _F32(self.decay), *self.velocity(memory)[:2]
        for shift, digit in _DIGITS:
            given = flags, forgotten, _U64(searches), _U64(bins), *weights, _U32(shift), _U32(digit)
            run.launch("count_digits", found.tasks, 256, values, before, rows, count, *given)
            ends = _U32(shift == _DIGITS[0][0]), _U32(shift == 0)
            run.launch("choose_digit", len(whole), 256, rows, _U64(searches), _U64(bins), _U32(digit), *ends)
        ties = _U64(run.scratch(4 * found.tasks))
        run.launch(
            *("count_ties", found.tasks, 256, values, before, rows, count, forgotten, _U64(searches), ties, *weights)
        )
        places = rows, forgotten, _U64(searches), ties
        run.launch("find_ties_stop", len(whole), 256, values, before, *places, *weights)
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
