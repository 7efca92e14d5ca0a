"""Encoding the regions of a flat vector, slice by slice.

A region is prepared once for each push, when all of its values are known: a threshold may follow from the whole tensor.
Then slices can be encoded in any order, by any thread, each once or more often, with the same bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
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
    PreparedChunkedTopK,
    PreparedIntegers,
    PreparedLowRank,
    PreparedRandom,
    PreparedRegion,
    PreparedSigns,
    PreparedTopK,
    non_finite,
)
from psdist.compression.segments.sparse import largest
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
AnyArray = NDArray[Any]

_FLOAT32: Final = np.dtype(np.float32)
_NONE: Final = np.empty(0, np.float32)


class PushNumber(NamedTuple):
    """What random numbers of a push follow from, beside the codec's seed: the worker's rank, and the push's number."""

    rank: int
    ordinal: int


def prepare(region: Region, values: Floats, number: PushNumber, state: AnyArray | None = None) -> PreparedRegion:
    """``region`` with its values, float32[region.size], ready to be written.

    values: contiguous, and kept. state: ``next_state`` of the region's last push; None for the first one.
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
    return PreparedCast(region, values, codec.dtype)


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
    if isinstance(codec.sparse, TopK):
        return _prepare_top_k(codec.sparse, codec.bits, codec.chunk, region, values, number)
    if isinstance(codec.sparse, RandomK):
        return _prepare_random(codec.sparse, codec.bits, bool(codec.feedback), region, values, number)
    return _prepare_chunked(codec.sparse, codec.bits, region, values)


def _prepare_top_k(
    codec: TopK, bits: int, chunk: int, region: Region, values: Floats, number: PushNumber
) -> PreparedRegion:
    kept = max(1, round(codec.ratio_at(number.ordinal) * values.size))
    threshold, ties_stop = largest(values, kept)
    if threshold < 0:
        raise non_finite(region, 0, values.size)
    return PreparedTopK(region, values, bits, chunk if bits < 16 else 0, threshold, ties_stop)


def _prepare_random(
    codec: RandomK, bits: int, feedback: bool, region: Region, values: Floats, number: PushNumber
) -> PreparedRegion:
    factor = 1.0 if feedback else float(codec.period)
    return PreparedRandom(region, values, codec.period, key_of(codec.seed, region, number), bits, factor)


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
        if out.size - at < segment_limit(end - done):
            raise InvalidArgumentError(f"regions of fewer than {MIN_ELEMENTS} elements cannot be compressed")
        rest = _NONE if residual is None else residual[region.start : region.stop]
        at += one.write(done - region.start, end - region.start, out[at:], rest)
        done = end
    if done < stop:
        raise InvalidArgumentError(f"element {done} of the flat vector is in no prepared region")
    return at
