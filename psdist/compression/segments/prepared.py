"""Regions of the flat vector that are ready to be written, one class per kind of segment.

A region is written slice by slice: kernels write a body, ``finish`` its header.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression.casts import narrow
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.compression.regions import Region
from psdist.compression.segments.format import HEADER, HEADER_BYTES, Kind, padded
from psdist.compression.segments.integers import encode_integers
from psdist.compression.segments.low_rank import add_low_rank
from psdist.compression.segments.random_places import places, select_random
from psdist.compression.segments.signs import encode_signs
from psdist.compression.segments.sparse import write_sparse
from psdist.compression.specifications import Integers
from psdist.errors import NonFiniteGradientError
from psdist.types import DType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
AnyArray = NDArray[Any]


@dataclass(frozen=True)
class PreparedRegion(ABC):
    """Region whose segments can be written.

    values: float32[n]. They must not change until all segments are written.
    """

    region: Region
    values: Floats

    @property
    def next_state(self) -> Floats | None:
        """State for ``prepare`` of this region in the next push, or None if it needs none."""
        return None

    @abstractmethod
    def write(self, start: int, stop: int, out: Bytes, residual: Floats) -> int:
        """Write the segment of elements [start, stop) of the region to ``out``. Return its size in bytes.

        residual: the region's residual, whose elements [start, stop) are overwritten; empty to skip that.
        Raises NonFiniteGradientError.
        """

    def non_finite(self, start: int, stop: int) -> NonFiniteGradientError:
        """Return the error for a NaN or Inf among elements [start, stop)."""
        return non_finite(self.region, start, stop)


@dataclass(frozen=True)
class PreparedCast(PreparedRegion):
    """Region sent in a dtype of the wire.

    name: the dtype.
    """

    name: DType

    def write(self, start: int, stop: int, out: Bytes, residual: Floats) -> int:
        values, name = self.values[start:stop], self.name
        dtype = NUMPY_DTYPES[name]
        size = values.size * dtype.itemsize
        sent = values
        if name != "float32":
            sent = np.empty(values.size, dtype)
            narrow(values, sent)
        if not np.isfinite(sent).all():
            raise self.non_finite(start, stop)
        out[HEADER_BYTES : HEADER_BYTES + size] = sent.view(np.uint8)
        if residual.size:
            residual[start:stop] = 0.0 if name == "float32" else values - sent.astype(np.float32)
        return finish(out, _CAST_KINDS[name], 8 * dtype.itemsize, 0, values.size, size, 0)


_CAST_KINDS: Final = {"float32": Kind.RAW32, "float16": Kind.RAW16, "bfloat16": Kind.BRAIN16}


@dataclass(frozen=True)
class PreparedIntegers(PreparedRegion):
    """Tensor sent as integer multiples of block scales."""

    codec: Integers
    key: int

    def write(self, start: int, stop: int, out: Bytes, residual: Floats) -> int:
        bits, block = self.codec.bits, self.codec.block
        blocks = -(-stop // block) - start // block
        size = 4 * blocks + -(-(stop - start) * bits // 8)
        body = out[HEADER_BYTES : HEADER_BYTES + size]
        stochastic = self.codec.stochastic
        if not encode_integers(self.values, start, stop, bits, block, stochastic, self.key, body, residual):
            raise self.non_finite(start, stop)
        return finish(out, Kind.INTEGER, bits, start % block, stop - start, size, block)


@dataclass(frozen=True)
class PreparedSparse(PreparedRegion):
    """Tensor that is sent in part.

    where, kept: positions of these elements, ascending, and their values.
    bits: width of a value on the wire.
    chunk: elements per scale, or 0 without scales.

    ``values`` may be the residual itself; then only its kept elements change.
    """

    where: NDArray[np.int64]
    kept: Floats
    bits: int
    chunk: int

    def write(self, start: int, stop: int, out: Bytes, residual: Floats) -> int:
        if residual.size and _address(residual) != _address(self.values):
            residual[start:stop] = self.values[start:stop]
        body = out[HEADER_BYTES:]
        size = write_sparse(self.kept, self.where, start, stop, self.bits, self.chunk, body, residual)
        if size < 0:
            return self._write_raw(start, stop, out)
        phase = start % self.chunk if self.chunk else 0
        return finish(out, Kind.SPARSE, self.bits, phase, stop - start, size, self.chunk)

    def _write_raw(self, start: int, stop: int, out: Bytes) -> int:
        """Write float32 values with zeros for elements that are not kept: shorter if most are kept."""
        part, size = self._part(start, stop), 4 * (stop - start)
        values = out[HEADER_BYTES : HEADER_BYTES + size].view(np.float32)
        values[:] = 0.0
        values[self.where[part] - start] = self.kept[part]
        return finish(out, Kind.RAW32, 32, 0, stop - start, size, 0)

    def sent(self, start: int, stop: int, residual: Floats) -> NDArray[np.int64]:
        """Return the positions in [start, stop) at which ``write`` changed ``residual``."""
        part = self._part(start, stop)
        places = self.where[part]
        changed: NDArray[np.int64] = places[residual[places] != self.kept[part]]
        return changed

    def _part(self, start: int, stop: int) -> slice:
        return slice(*np.searchsorted(self.where, [start, stop]))


def _address(array: Floats) -> int:
    return int(array.__array_interface__["data"][0])


@dataclass(frozen=True)
class PreparedSigns(PreparedRegion):
    """Tensor sent as signs, with the mean magnitude of each block."""

    block: int

    def write(self, start: int, stop: int, out: Bytes, residual: Floats) -> int:
        size = 4 * (-(-stop // self.block) - start // self.block) + -(-(stop - start) // 8)
        body = out[HEADER_BYTES : HEADER_BYTES + size]
        if not encode_signs(self.values, start, stop, self.block, body, residual):
            raise self.non_finite(start, stop)
        return finish(out, Kind.ONE_BIT, 1, start % self.block, stop - start, size, self.block)


@dataclass(frozen=True)
class PreparedRandom(PreparedRegion):
    """Tensor that sends one element per period, times ``factor``.

    bits: width of a value on the wire.
    """

    period: int
    key: int
    bits: int
    factor: float

    def write(self, start: int, stop: int, out: Bytes, residual: Floats) -> int:
        sent = np.empty((stop - start) // self.period + 2, np.float32)
        key, factor = np.uint64(self.key), np.float32(self.factor)
        count = select_random(self.values, start, stop, key, self.period, factor, sent, residual)
        if count < 0:
            raise self.non_finite(start, stop)
        sent, size = sent[:count], 16 + count * (self.bits // 8)
        body = out[HEADER_BYTES : HEADER_BYTES + size]
        body[:16] = np.array([self.key, start], np.uint64).view(np.uint8)
        if self.bits == 32:
            body[16:] = sent.view(np.uint8)
        else:
            self._write_brains(sent, start, body[16:], residual[start:stop])
        return finish(out, Kind.RANDOM, self.bits, 0, stop - start, size, self.period)

    def _write_brains(self, sent: Floats, start: int, out: Bytes, residual: Floats) -> None:
        """Write values as finite bfloat16, and store the rounding error in the residual of the segment's elements."""
        brains = np.empty(sent.size, NUMPY_DTYPES["bfloat16"])
        narrow(sent, brains)
        words = brains.view(np.uint16)
        words[(words & 0x7FFF) == 0x7F80] -= 1
        out[:] = words.view(np.uint8)
        if residual.size:
            where = places(self.key, self.period, start, start + residual.size) - start
            residual[where] = sent - brains.astype(np.float32)


@dataclass(frozen=True)
class PreparedLowRank(PreparedRegion):
    """Matrix sent as rows of the product of two factors: p (rows, rank) and q (rank, columns)."""

    p: Floats
    q: Floats

    @property
    def next_state(self) -> Floats | None:
        return self.q

    def write(self, start: int, stop: int, out: Bytes, residual: Floats) -> int:
        rank, columns = self.q.shape
        first, column = divmod(start, columns)
        p, q = self.p[first : -(-stop // columns)].reshape(-1), self.q.reshape(-1)
        size = 4 + 4 * (p.size + q.size)
        is_raw = size > 4 * (stop - start)
        decoded = np.zeros(stop - start if residual.size or is_raw else 0, np.float32)
        add_low_rank(p, q, rank, columns, column, decoded)
        if residual.size:
            np.subtract(self.values[start:stop], decoded, out=residual[start:stop])
        if is_raw:
            out[HEADER_BYTES : HEADER_BYTES + decoded.nbytes] = decoded.view(np.uint8)
            return finish(out, Kind.RAW32, 32, 0, stop - start, decoded.nbytes, 0)
        body = out[HEADER_BYTES : HEADER_BYTES + size]
        body[:4] = np.array([column], np.uint32).view(np.uint8)
        body[4 : 4 + p.nbytes] = p.view(np.uint8)
        body[4 + p.nbytes :] = q.view(np.uint8)
        return finish(out, Kind.LOW_RANK, rank, 0, stop - start, size, columns)


def non_finite(region: Region, start: int, stop: int) -> NonFiniteGradientError:
    """Return the error for a NaN or Inf among elements [start, stop) of a region."""
    at = region.start
    return NonFiniteGradientError(f"elements [{at + start}, {at + stop}) of the gradient have NaN or Inf")


def finish(out: Bytes, kind: Kind, bits: int, phase: int, elements: int, size: int, parameter: int) -> int:
    """Write the header and the padding around a body that is already in ``out``. Return the segment's size in bytes."""
    HEADER.pack_into(out.data, 0, kind, bits, phase, elements, size, parameter)
    end = HEADER_BYTES + padded(size)
    out[HEADER_BYTES + size : end] = 0
    return end
