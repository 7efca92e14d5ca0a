"""Encoding the regions of a flat vector, slice by slice.

A region is prepared once for each push, when all of its values are known: a threshold may follow from the whole tensor.
Then slices can be encoded in any order, by any thread, each once or more often, with the same bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psdist.compression.casts import check_output, check_vector, narrow
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.compression.regions import Region
from psdist.compression.segments import random_numbers
from psdist.compression.segments.format import HEADER, HEADER_BYTES, Kind, padded, payload_limit
from psdist.compression.segments.integers import encode_integers
from psdist.compression.segments.sparse import largest, select_above, select_chunks, write_sparse
from psdist.compression.specifications import Cast, Chain, ChunkedTopK, Codec, Integers, TopK
from psdist.errors import InvalidArgumentError, NonFiniteGradientError, UnknownCodecError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
AnyArray = NDArray[Any]

_FLOAT32: Final = np.dtype(np.float32)
_NONE: Final = np.empty(0, np.float32)


class PushNumber(NamedTuple):
    """What random numbers of a push follow from, beside the codec's seed: the worker's rank, and the push's number."""

    rank: int
    ordinal: int


@dataclass(frozen=True)
class PreparedRegion:
    """A region whose segments can be written.

    values: of the region, float32[n]. They must not change until all is written.
    state: what ``prepare`` wants of this region for the next push; None where it wants nothing.
    """

    region: Region
    values: Floats
    state: ClassVar[AnyArray | None] = None

    def write(self, start: int, stop: int, out: Bytes, residual: Floats) -> int:
        """Writes the segment of elements [start, stop) of the region to ``out``; returns its bytes.

        residual: of the region, which gets what the segment leaves out of these elements; empty where it is not wanted.
        Raises NonFiniteGradientError.
        """
        raise NotImplementedError

    def refuse(self, start: int, stop: int) -> NonFiniteGradientError:
        """The error for a NaN or Inf among elements [start, stop)."""
        at = self.region.start
        return NonFiniteGradientError(f"elements [{at + start}, {at + stop}) of the gradient have NaN or Inf")


@dataclass(frozen=True)
class PreparedCast(PreparedRegion):
    """A region that is sent in a dtype of the wire."""

    def write(self, start: int, stop: int, out: Bytes, residual: Floats) -> int:
        values, name = self.values[start:stop], self.region.codec.dtype  # type: ignore[attr-defined]
        dtype = NUMPY_DTYPES[name]
        size = values.size * dtype.itemsize
        sent = values
        if name != "float32":
            sent = np.empty(values.size, dtype)
            narrow(values, sent)
        if not np.isfinite(sent).all():
            raise self.refuse(start, stop)
        out[HEADER_BYTES : HEADER_BYTES + size] = sent.view(np.uint8)
        if residual.size:
            residual[start:stop] = 0.0 if name == "float32" else values - sent.astype(np.float32)
        return finish(out, _CAST_KINDS[name], 8 * dtype.itemsize, 0, values.size, size, 0)


_CAST_KINDS: Final = {"float32": Kind.RAW32, "float16": Kind.RAW16, "bfloat16": Kind.BRAIN16}


@dataclass(frozen=True)
class PreparedIntegers(PreparedRegion):
    """A tensor that is sent in whole numbers of scales."""

    codec: Integers
    key: int

    def write(self, start: int, stop: int, out: Bytes, residual: Floats) -> int:
        bits, block = self.codec.bits, self.codec.block
        blocks = -(-stop // block) - start // block
        size = 4 * blocks + -(-(stop - start) * bits // 8)
        body = out[HEADER_BYTES : HEADER_BYTES + size]
        stochastic = self.codec.stochastic
        if not encode_integers(self.values, start, stop, bits, block, stochastic, self.key, body, residual):
            raise self.refuse(start, stop)
        return finish(out, Kind.INTEGER, bits, start % block, stop - start, size, block)


@dataclass(frozen=True)
class PreparedSparse(PreparedRegion):
    """A tensor of which some elements are sent.

    bits, chunk: of their values; chunk is 0 without scales.
    """

    bits: int
    chunk: int

    def select(self, first: int, last: int, where: NDArray[np.int64]) -> int:
        """Writes the places in [first, last) that are kept; returns how many. -1 where a value is not finite."""
        raise NotImplementedError

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """The range of the whole chunks that elements [start, stop) are in."""
        return whole_chunks(start, stop, self.chunk or 1, self.region.size)

    def write(self, start: int, stop: int, out: Bytes, residual: Floats) -> int:
        first, last = self.reach(start, stop)
        where = np.empty(last - first + 1, np.int64)
        count = self.select(first, last, where)
        if count < 0:
            raise self.refuse(start, stop)
        where, body = where[:count], out[HEADER_BYTES:]
        size = write_sparse(self.values, start, stop, self.bits, self.chunk, where, body, residual)
        if size < 0:
            return self._write_raw(start, stop, where, out)
        phase = start % self.chunk if self.chunk else 0
        return finish(out, Kind.SPARSE, self.bits, phase, stop - start, size, self.chunk)

    def _write_raw(self, start: int, stop: int, where: NDArray[np.int64], out: Bytes) -> int:
        """Writes zeros for what is not kept: fewer bytes where most are."""
        inside = where[np.searchsorted(where, start) : np.searchsorted(where, stop)]
        size = 4 * (stop - start)
        values = out[HEADER_BYTES : HEADER_BYTES + size].view(np.float32)
        values[:] = 0.0
        values[inside - start] = self.values[inside]
        return finish(out, Kind.RAW32, 32, 0, stop - start, size, 0)


@dataclass(frozen=True)
class PreparedTopK(PreparedSparse):
    """A tensor whose largest elements are sent. threshold, ties_stop: as ``sparse.largest`` returned them."""

    threshold: int
    ties_stop: int

    def select(self, first: int, last: int, where: NDArray[np.int64]) -> int:
        return int(select_above(self.values, first, last, self.threshold, self.ties_stop, where))


@dataclass(frozen=True)
class PreparedChunkedTopK(PreparedSparse):
    """A tensor of which the largest elements of each chunk are sent. period: elements of such a chunk."""

    kept: int
    period: int

    def select(self, first: int, last: int, where: NDArray[np.int64]) -> int:
        return int(select_chunks(self.values, first, last, self.period, self.kept, where))

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        return whole_chunks(start, stop, self.period, self.region.size)


def whole_chunks(start: int, stop: int, chunk: int, size: int) -> tuple[int, int]:
    """The range of the whole chunks that elements [start, stop) of a tensor of ``size`` elements are in."""
    return start // chunk * chunk, min(-(-stop // chunk) * chunk, size)


def finish(out: Bytes, kind: Kind, bits: int, phase: int, elements: int, size: int, parameter: int) -> int:
    """Writes the header and the padding of a segment whose body is there. Returns the bytes of it all."""
    HEADER.pack_into(out.data, 0, kind, bits, phase, elements, size, parameter)
    end = HEADER_BYTES + padded(size)
    out[HEADER_BYTES + size : end] = 0
    return end


def prepare(region: Region, values: Floats, number: PushNumber, state: AnyArray | None = None) -> PreparedRegion:
    """``region`` with its values, float32[region.size], ready to be written.

    values: contiguous, and kept. state: ``PreparedRegion.state`` of the region's last push; None for the first one.
    Raises NonFiniteGradientError where all values must be known to be finite, and DTypeMismatchError,
    ShapeMismatchError, UnknownCodecError.
    """
    check_vector("values", values, _FLOAT32, region.size)
    return _prepare(region.codec, region, values, number, state)


@singledispatch
def _prepare(
    codec: Codec, region: Region, values: Floats, number: PushNumber, state: AnyArray | None
) -> PreparedRegion:
    raise UnknownCodecError(f"codec {codec!r:.60} cannot be a tensor's")


@_prepare.register
def _(codec: Cast, region: Region, values: Floats, number: PushNumber, state: AnyArray | None) -> PreparedRegion:
    return PreparedCast(region, values)


@_prepare.register
def _(codec: Integers, region: Region, values: Floats, number: PushNumber, state: AnyArray | None) -> PreparedRegion:
    return PreparedIntegers(region, values, codec, key_of(codec.seed, region, number))


@_prepare.register
def _(codec: TopK, region: Region, values: Floats, number: PushNumber, state: AnyArray | None) -> PreparedRegion:
    return _prepare_top_k(codec, 32, 0, region, values, number)


@_prepare.register
def _(codec: ChunkedTopK, region: Region, values: Floats, number: PushNumber, state: AnyArray | None) -> PreparedRegion:
    return _prepare_chunked(codec, codec.bits, region, values)


@_prepare.register
def _(codec: Chain, region: Region, values: Floats, number: PushNumber, state: AnyArray | None) -> PreparedRegion:
    if isinstance(codec.sparse, TopK):
        return _prepare_top_k(codec.sparse, codec.bits, codec.chunk, region, values, number)
    return _prepare_chunked(codec.sparse, codec.bits, region, values)


def _prepare_top_k(
    codec: TopK, bits: int, chunk: int, region: Region, values: Floats, number: PushNumber
) -> PreparedRegion:
    kept = max(1, round(codec.ratio_at(number.ordinal) * values.size))
    threshold, ties_stop = largest(values, kept)
    if threshold < 0:
        raise PreparedRegion(region, values).refuse(0, values.size)
    return PreparedTopK(region, values, bits, chunk if bits < 16 else 0, threshold, ties_stop)


def _prepare_chunked(codec: ChunkedTopK, bits: int, region: Region, values: Floats) -> PreparedRegion:
    return PreparedChunkedTopK(region, values, bits, codec.chunk if bits < 16 else 0, codec.k, codec.chunk)


def key_of(seed: int, region: Region, number: PushNumber) -> int:
    """The key of a region's random numbers."""
    return random_numbers.key(seed, number.rank, number.ordinal, region.start)


def encode(
    prepared: Sequence[PreparedRegion], start: int, stop: int, out: Bytes, residual: Floats | None = None
) -> int:
    """Writes the payload of elements [start, stop) of the flat vector to ``out``; returns its bytes.

    prepared: all regions of the flat vector, in order, or those that have these elements.
    out: at least ``payload_limit(stop - start)`` bytes.
    residual: as long as the flat vector. Its elements [start, stop) get the values less what is decoded.
    Raises NonFiniteGradientError, with nothing sent and the residual of these elements partly written.
    """
    check_vector("out", out, np.dtype(np.uint8), out.size)
    check_output("out", out)
    if out.size < payload_limit(stop - start):
        raise InvalidArgumentError(f"out has {out.size} bytes: {payload_limit(stop - start)} may be needed")
    at, done = 0, start
    first = bisect_right(prepared, start, key=lambda one: one.region.start) - 1
    for one in prepared[max(first, 0) :]:
        region = one.region
        if done >= stop:
            break
        if not region.start <= done < region.stop:
            raise InvalidArgumentError(f"element {done} of the flat vector is in no prepared region")
        end = min(region.stop, stop)
        rest = _NONE if residual is None else residual[region.start : region.stop]
        at += one.write(done - region.start, end - region.start, out[at:], rest)
        done = end
    if done < stop:
        raise InvalidArgumentError(f"element {done} of the flat vector is in no prepared region")
    return at
