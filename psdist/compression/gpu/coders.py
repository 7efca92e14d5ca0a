"""How the segments of a codec are encoded on a device: their sizes, their headers and their kernels.

Here are the codecs whose segments have sizes that are known before; ``sparse_coders`` has the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.compression.gpu.launcher import Launcher
from psdist.compression.gpu.memory import DeviceVector, DoubleVector
from psdist.compression.gpu.tables import SegmentRange, table
from psdist.compression.segments import random_numbers
from psdist.compression.segments.format import Kind
from psdist.compression.specifications import Cast, Codec, Compressor, Integers, OneBit, TopK
from psdist.types import DType

_U32, _U64, _F32 = np.uint32, np.uint64, np.float32
#: From these on a magnitude is not finite.
INFINITY_BITS: Final = 0x7F800000


class PushNumbers(NamedTuple):
    """What random numbers of a push follow from, beside the codec's seed: the worker's rank, and the push's number."""

    rank: int
    ordinal: int


class PushMemory(NamedTuple):
    """What the kernels of one push read and write.

    values: the gradient. rest: what was left out of the pushes before, and what this one leaves out; None without error
    feedback. velocity: sums of gradients with momentum; None without. flags, forgotten: addresses of a u32 for each
    region: whether a sum with the rest (bit 0) or with the velocity (bit 1) is not finite, and which of them are
    forgotten.
    """

    values: DeviceVector
    rest: DoubleVector | None
    velocity: DoubleVector | None
    flags: int
    forgotten: int


class PlacedSegments(NamedTuple):
    """Segments of one codec, and the addresses of their bodies."""

    segments: Sequence[SegmentRange]
    outs: Sequence[int]


class SegmentHeader(NamedTuple):
    """What the header of a segment says beside its elements."""

    kind: Kind
    bits: int
    phase: int
    size: int
    parameter: int


class Selected(NamedTuple):
    """What a codec has chosen to send. bitmaps, kept, totals: addresses of what ``sparse.cu`` says."""

    bitmaps: int
    kept: int
    totals: int


#: Values of each segment, and the bytes of their gaps: uint32[segments, 2].
Totals = NDArray[np.uint32]


class Coder(ABC):
    """The encoder of one codec's segments."""

    def __init__(self, codec: Codec) -> None:
        #: Whether what is left out of a region is added to the next push.
        self.feeds_back = isinstance(codec, Compressor) and bool(codec.feedback)
        self.decay = codec.residual_decay if isinstance(codec, Compressor) else 1.0
        #: Of the velocity; 0 for none.
        self.momentum = codec.momentum if isinstance(codec, TopK) else 0.0

    def select(
        self, run: Launcher, memory: PushMemory, segments: Sequence[SegmentRange], numbers: PushNumbers
    ) -> Selected | None:
        """Chooses what is sent of ``segments``, where their sizes follow from that; else None."""
        return None

    @abstractmethod
    def header(self, segment: SegmentRange, totals: Sequence[int]) -> SegmentHeader:
        """The header of a segment. totals: its row of ``Totals``."""

    @abstractmethod
    def launch(
        self,
        run: Launcher,
        memory: PushMemory,
        placed: PlacedSegments,
        numbers: PushNumbers,
        selected: Selected | None,
    ) -> None:
        """Writes the bodies of segments, whose memory is zeros before. selected: by ``select``, of the same ones."""

    def check(self, run: Launcher, memory: PushMemory, segments: Sequence[SegmentRange]) -> None:
        """Flags the regions of ``segments`` with a sum that is not finite."""
        found = table(segments, [segment.tiles for segment in segments])
        arguments = *self.source(run, memory, found.rows), _U64(memory.flags), _U64(memory.forgotten)
        weights = _F32(self.decay), *self.velocity(memory)[:2]
        run.launch("check_finite", found.tasks, 256, *arguments, *weights, _U32(INFINITY_BITS))

    def rest(self, memory: PushMemory) -> tuple[np.uint64, np.uint64]:
        """The addresses of what was left out before, and of what is left out now; zeros without error feedback."""
        if not self.feeds_back or memory.rest is None:
            return _U64(0), _U64(0)
        return _U64(memory.rest.before.address), _U64(memory.rest.after.address)

    def velocity(self, memory: PushMemory) -> tuple[np.uint64, np.float32, np.uint64]:
        """The address of the velocity before, the momentum, and the address of the velocity after; zeros without."""
        if not self.momentum or memory.velocity is None:
            return _U64(0), _F32(0), _U64(0)
        return _U64(memory.velocity.before.address), _F32(self.momentum), _U64(memory.velocity.after.address)

    def source(self, run: Launcher, memory: PushMemory, rows: np.ndarray) -> tuple[np.generic, ...]:
        rest, _ = self.rest(memory)
        return _U64(memory.values.address), rest, _U64(run.upload(rows)), _U64(len(rows))


@dataclass(frozen=True)
class _CastKind:
    number: int
    kind: Kind


class CastCoder(Coder):
    """RAW32, RAW16 and BRAIN16."""

    KINDS: Final[dict[DType, _CastKind]] = {
        "float32": _CastKind(0, Kind.RAW32),
        "float16": _CastKind(1, Kind.RAW16),
        "bfloat16": _CastKind(2, Kind.BRAIN16),
    }

    def __init__(self, codec: Cast) -> None:
        super().__init__(codec)
        self._bytes = NUMPY_DTYPES[codec.dtype].itemsize
        self._kind = self.KINDS[codec.dtype]

    def header(self, segment: SegmentRange, totals: Sequence[int]) -> SegmentHeader:
        return SegmentHeader(self._kind.kind, 8 * self._bytes, 0, self._bytes * segment.size, 0)

    def launch(
        self,
        run: Launcher,
        memory: PushMemory,
        placed: PlacedSegments,
        numbers: PushNumbers,
        selected: Selected | None,
    ) -> None:
        found = table(placed.segments, [segment.tiles for segment in placed.segments], placed.outs)
        rows = _U64(run.upload(found.rows)), _U64(len(found.rows))
        arguments = _U64(memory.values.address), *rows, _U64(memory.flags), _U32(self._kind.number)
        run.launch("encode_casts", found.tasks, 256, *arguments)


class IntegerCoder(Coder):
    """INTEGER."""

    def __init__(self, codec: Integers) -> None:
        super().__init__(codec)
        self._codec = codec

    def header(self, segment: SegmentRange, totals: Sequence[int]) -> SegmentHeader:
        bits, block = self._codec.bits, self._codec.block
        size = 4 * segment.blocks(block) + -(-segment.size * bits // 8)
        return SegmentHeader(Kind.INTEGER, bits, segment.start % block, size, block)

    def launch(
        self,
        run: Launcher,
        memory: PushMemory,
        placed: PlacedSegments,
        numbers: PushNumbers,
        selected: Selected | None,
    ) -> None:
        codec = self._codec
        seeds = codec.seed, numbers.rank, numbers.ordinal
        keys = [random_numbers.key(*seeds, segment.region.start) for segment in placed.segments]
        found = table(placed.segments, [one.blocks(codec.block) for one in placed.segments], placed.outs, keys)
        values, before, rows, count = self.source(run, memory, found.rows)
        run.launch(
            *("encode_integers", -(-found.tasks // 4), 128, values, before, self.rest(memory)[1], rows, count),
            *(_U64(found.tasks), _U64(memory.flags), _U64(memory.forgotten)),
            *(_F32(self.decay), _U32(codec.bits), _U32(codec.block), _U32(codec.stochastic)),
        )


class SignCoder(Coder):
    """ONE_BIT."""

    def __init__(self, codec: OneBit) -> None:
        super().__init__(codec)
        self._block = codec.block

    def header(self, segment: SegmentRange, totals: Sequence[int]) -> SegmentHeader:
        size = 4 * segment.blocks(self._block) + -(-segment.size // 8)
        return SegmentHeader(Kind.ONE_BIT, 1, segment.start % self._block, size, self._block)

    def launch(
        self,
        run: Launcher,
        memory: PushMemory,
        placed: PlacedSegments,
        numbers: PushNumbers,
        selected: Selected | None,
    ) -> None:
        found = table(placed.segments, [one.blocks(self._block) for one in placed.segments], placed.outs)
        values, before, rows, count = self.source(run, memory, found.rows)
        run.launch(
            *("encode_signs", -(-found.tasks // 8), 128, values, before, self.rest(memory)[1], rows, count),
            *(_U64(found.tasks), _U64(memory.flags), _U64(memory.forgotten), _F32(self.decay), _U32(self._block)),
        )
