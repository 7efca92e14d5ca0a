"""Encoding of a flat vector's regions, slice by slice.

Each push prepares a region once, when all of its values are known: a threshold may depend on the whole tensor. Slices
can then be encoded in any order, by any thread, any number of times, with the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psdist.compression.casts import check_output, check_vector
from psdist.compression.regions import MIN_ELEMENTS, Region
from psdist.compression.segments import random_numbers
from psdist.compression.segments.format import payload_limit, segment_limit
from psdist.compression.segments.low_rank import factors
from psdist.compression.segments.prepared import (
    PreparedCast,
    PreparedIntegers,
    PreparedLowRank,
    PreparedRandom,
    PreparedRegion,
    PreparedSigns,
    PreparedSparse,
    non_finite,
)
from psdist.compression.segments.residuals import add_decayed
from psdist.compression.segments.sparse import (
    add_and_select_chunks,
    add_and_select_largest,
    select_chunks,
    select_largest,
)
from psdist.compression.specifications import (
    Cast,
    Chain,
    ChunkedTopK,
    Codec,
    Integers,
    OneBit,
    PowerSGD,
    RandomK,
    TopK,
)
from psdist.errors import InvalidArgumentError, UnknownCodecError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Places = NDArray[np.int64]
AnyArray = NDArray[Any]

_FLOAT32: Final = np.dtype(np.float32)
_NONE: Final = np.empty(0, np.float32)


class PushNumber(NamedTuple):
    """Seeds of one push's random numbers, besides the codec's own: the worker's rank and the push's number."""

    rank: int
    ordinal: int


def prepare(region: Region, values: Floats, number: PushNumber, state: AnyArray | None = None) -> PreparedRegion:
    """Return ``region`` with its values, ready for ``encode``.

    values: float32[region.size], contiguous. Not copied.
    state: ``next_state`` of the region from the last push, or None for the first push.
    Raises NonFiniteGradientError if the codec needs all values to be finite, and DTypeMismatchError,
    ShapeMismatchError, UnknownCodecError.
    """
    check_vector("values", values, _FLOAT32, region.size)
    if (selection := _selection(region, number)) is not None:
        prepared = selection.prepared(region, values, selection.select(values))
        if prepared is None:
            raise non_finite(region, 0, values.size)
        return prepared
    return _prepare(region.codec, region, values, number, state)


def prepare_sum(
    region: Region,
    values: Floats,
    addend: Floats,
    factor: float,
    sums: Floats,
    number: PushNumber,
    state: AnyArray | None = None,
) -> PreparedRegion | None:
    """Compute ``sums = values + factor * addend``, and return ``region`` prepared with these sums.

    All arrays are float32[region.size], contiguous. ``sums`` is not copied, and may be one of the other two. Returns
    None, with ``sums`` undefined, if a sum is not finite. Other arguments and errors are those of ``prepare``.
    """
    selection = _selection(region, number)
    if selection is None:
        is_finite = add_decayed(values, addend, factor, sums)
        return _prepare(region.codec, region, sums, number, state) if is_finite else None
    for name, one in (("values", values), ("addend", addend), ("sums", sums)):
        check_vector(name, one, _FLOAT32, region.size)
    check_output("sums", sums)
    return selection.prepared(region, sums, selection.select_of_sum(values, addend, factor, sums))


@dataclass(frozen=True)
class _Selection(ABC):
    """Choice of the elements that are sent.

    kept: number of elements.
    bits, chunk: as in ``PreparedSparse``.
    """

    kept: int
    bits: int
    chunk: int

    @abstractmethod
    def select(self, values: Floats) -> Places:
        """Return the positions of the chosen elements, ascending; only -1 if a value is not finite."""

    @abstractmethod
    def select_of_sum(self, values: Floats, addend: Floats, factor: float, sums: Floats) -> Places:
        """Write ``values + factor * addend`` to ``sums``, and ``select`` from that."""

    def prepared(self, region: Region, values: Floats, where: Places) -> PreparedSparse | None:
        """Return the region with the selected ``values``, or None if they are not finite."""
        if where.size and where[0] < 0:
            return None
        return PreparedSparse(region, values, where, values[where], self.bits, self.chunk if self.bits < 16 else 0)


class _Largest(_Selection):
    """The largest elements of the whole region."""

    def select(self, values: Floats) -> Places:
        where: Places = select_largest(values, self.kept)
        return where

    def select_of_sum(self, values: Floats, addend: Floats, factor: float, sums: Floats) -> Places:
        where: Places = add_and_select_largest(values, addend, factor, self.kept, sums)
        return where


@dataclass(frozen=True)
class _LargestOfChunks(_Selection):
    """The largest elements of each chunk.

    period: elements per chunk.
    """

    period: int

    def select(self, values: Floats) -> Places:
        where: Places = select_chunks(values, self.period, self.kept)
        return where

    def select_of_sum(self, values: Floats, addend: Floats, factor: float, sums: Floats) -> Places:
        where: Places = add_and_select_chunks(values, addend, factor, self.period, self.kept, sums)
        return where


def _selection(region: Region, number: PushNumber) -> _Selection | None:
    """Return a sparse codec's selection, or None for other codecs."""
    codec = region.codec
    sparse = codec.sparse if isinstance(codec, Chain) else codec
    if isinstance(sparse, TopK):
        kept = max(1, round(sparse.ratio_at(number.ordinal) * region.size))
        return _Largest(kept, codec.bits, codec.chunk) if isinstance(codec, Chain) else _Largest(kept, 32, 0)
    if isinstance(sparse, ChunkedTopK):
        bits = codec.bits if isinstance(codec, Chain) else sparse.bits
        return _LargestOfChunks(sparse.k, bits, sparse.chunk, sparse.chunk)
    return None


def selects_places(codec: Codec) -> bool:
    """True if segments of ``codec`` hold the values of some positions and nothing else.

    The residual is then all other values, unchanged.
    """
    return isinstance(codec.sparse if isinstance(codec, Chain) else codec, TopK | ChunkedTopK)


@singledispatch
def _prepare(
    codec: Codec, region: Region, values: Floats, number: PushNumber, state: AnyArray | None
) -> PreparedRegion:
    raise UnknownCodecError(f"codec {codec!r:.60} cannot encode a single tensor")


@_prepare.register
def _(codec: Cast, region: Region, values: Floats, number: PushNumber, state: AnyArray | None) -> PreparedRegion:
    return PreparedCast(region, values, codec.dtype)


@_prepare.register
def _(codec: Integers, region: Region, values: Floats, number: PushNumber, state: AnyArray | None) -> PreparedRegion:
    return PreparedIntegers(region, values, codec, key_of(codec.seed, region, number))


@_prepare.register
def _(codec: OneBit, region: Region, values: Floats, number: PushNumber, state: AnyArray | None) -> PreparedRegion:
    return PreparedSigns(region, values, codec.block)


@_prepare.register
def _(codec: RandomK, region: Region, values: Floats, number: PushNumber, state: AnyArray | None) -> PreparedRegion:
    return _prepare_random(codec, 32, bool(codec.feedback), region, values, number)


@_prepare.register
def _(codec: PowerSGD, region: Region, values: Floats, number: PushNumber, state: AnyArray | None) -> PreparedRegion:
    if not np.isfinite(values).all():
        raise non_finite(region, 0, values.size)
    matrix = values.reshape(region.shape[0] if region.shape else 1, -1)
    rank = min(codec.rank, *matrix.shape)
    found = None
    if rank * sum(matrix.shape) < values.size:
        found = factors(matrix, rank, codec.seed, region.start, state)
    if found is None:
        return PreparedCast(region, values, "float32")
    return PreparedLowRank(region, values, *found)


@_prepare.register
def _(codec: Chain, region: Region, values: Floats, number: PushNumber, state: AnyArray | None) -> PreparedRegion:
    assert isinstance(codec.sparse, RandomK), "the others select places"
    return _prepare_random(codec.sparse, codec.bits, bool(codec.feedback), region, values, number)


def _prepare_random(
    codec: RandomK, bits: int, feedback: bool, region: Region, values: Floats, number: PushNumber
) -> PreparedRegion:
    factor = 1.0 if feedback else float(codec.period)
    return PreparedRandom(region, values, codec.period, key_of(codec.seed, region, number), bits, factor)


def key_of(seed: int, region: Region, number: PushNumber) -> int:
    """Return the key of a region's random numbers."""
    return random_numbers.key(seed, number.rank, number.ordinal, region.start)


def encode(
    prepared: Sequence[PreparedRegion], start: int, stop: int, out: Bytes, residual: Floats | None = None
) -> int:
    """Write the payload of elements [start, stop) of the flat vector to ``out``. Return its size in bytes.

    prepared: all regions of the flat vector in order, or at least those that contain these elements.
    out: at least ``payload_limit(stop - start)`` bytes.
    residual: as long as the flat vector. Its elements [start, stop) receive the values minus the decoded values.
    Raises NonFiniteGradientError. The residual of these elements is then partly written.
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
        if out.size - at < segment_limit(end - done):
            raise InvalidArgumentError(f"regions of fewer than {MIN_ELEMENTS} elements cannot be compressed")
        unsent = _NONE if residual is None else residual[region.start : region.stop]
        at += one.write(done - region.start, end - region.start, out[at:], unsent)
        done = end
    if done < stop:
        raise InvalidArgumentError(f"element {done} of the flat vector is in no prepared region")
    return at
