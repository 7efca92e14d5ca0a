"""Coders: sizes, headers and kernels of each codec's segments on a device.

Codecs whose segments have a size known in advance are here; ``sparse_coders`` has the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psdist.compression.device.launcher import Launcher
from psdist.compression.device.memory import DeviceVector, DoubleVector
from psdist.compression.device.tables import SegmentRange, table
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.compression.segments import random_numbers
from psdist.compression.segments.format import Kind
from psdist.compression.specifications import Cast, Codec, Compressor, Integers, OneBit, TopK
from psdist.types import DType

_U32, _U64, _F32 = np.uint32, np.uint64, np.float32
#: Magnitudes with at least these bits are not finite.
INFINITY_BITS: Final = 0x7F800000


class PushNumbers(NamedTuple):
    """Seeds of one push's random numbers, besides the codec's own: the worker's rank and the push's number."""

    rank: int
    ordinal: int


class PushMemory(NamedTuple):
    """Device memory that one push's kernels read and write.

    values: the gradient.
    residual: residual of earlier pushes, and of this one; None without error feedback.
    velocity: accumulated gradients with momentum; None without momentum.
    flags: address of a uint32 per region. Bit 0: the sum with the residual is not finite; bit 1: the sum with the
        velocity is not.
    forgotten: address of a uint32 per region, with the same bits: addends that the kernels leave out.
    """

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

    def select(
        self, run: Launcher, memory: PushMemory, segments: Sequence[SegmentRange], numbers: PushNumbers
    ) -> Selected | None:
        """Choose the elements to send from ``segments``. Return None if segment sizes do not depend on that choice."""
        return None

    @abstractmethod
    def header(self, segment: SegmentRange, totals: Sequence[int]) -> SegmentHeader:
        """Return the header of a segment.

        totals: the segment's row of ``Totals``.
        """

    @abstractmethod
    def launch(
        self,
        run: Launcher,
        memory: PushMemory,
        placed: PlacedSegments,
        numbers: PushNumbers,
        selected: Selected | None,
    ) -> None:
        """Write the bodies of segments into zeroed memory.

        selected: result of ``select`` for the same segments.
        """

    def check(self, run: Launcher, memory: PushMemory, segments: Sequence[SegmentRange]) -> None:
        """Flag the regions of ``segments`` that have a non-finite sum."""
        found = table(segments, [segment.tiles for segment in segments])
        arguments = *self.source(run, memory, found.rows), _U64(memory.flags), _U64(memory.forgotten)
        weights = _F32(self.decay), *self.velocity(memory)[:2]
        run.launch("check_finite", found.tasks, 256, *arguments, *weights, _U32(INFINITY_BITS))

    def residual(self, memory: PushMemory) -> tuple[np.uint64, np.uint64]:
        """Return the addresses of the residual before and after this push; zeros without error feedback."""
        if not self.feeds_back or memory.residual is None:
            return _U64(0), _U64(0)
        return _U64(memory.residual.before.address), _U64(memory.residual.after.address)

    def velocity(self, memory: PushMemory) -> tuple[np.uint64, np.float32, np.uint64]:
        """Return the velocity's address before, the momentum, and its address after the push.

        All are zero without momentum.
        """
        if not self.momentum or memory.velocity is None:
            return _U64(0), _F32(0), _U64(0)
        return _U64(memory.velocity.before.address), _F32(self.momentum), _U64(memory.velocity.after.address)

    def source(self, run: Launcher, memory: PushMemory, rows: np.ndarray) -> tuple[np.generic, ...]:
        residual, _ = self.residual(memory)
        return _U64(memory.values.address), residual, _U64(run.upload(rows)), _U64(len(rows))


@dataclass(frozen=True)
class _CastKind:
    number: int
    kind: Kind


class CastCoder(Coder):
    """Coder of RAW32, RAW16 and BRAIN16."""

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
    """Coder of INTEGER."""

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
            *("encode_integers", -(-found.tasks // 4), 128, values, before, self.residual(memory)[1], rows, count),
            *(_U64(found.tasks), _U64(memory.flags), _U64(memory.forgotten)),
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
            *("encode_signs", -(-found.tasks // 8), 128, values, before, self.residual(memory)[1], rows, count),
            *(_U64(found.tasks), _U64(memory.flags), _U64(memory.forgotten), _F32(self.decay), _U32(self._block)),
        )
