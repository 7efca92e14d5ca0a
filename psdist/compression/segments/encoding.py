"""Encoding of a flat vector's regions, slice by slice.

Each push prepares a region once, when all of its values are known: a threshold may depend on the whole tensor. Slices
can then be encoded in any order, by any thread, any number of times, with the same bytes. There is one class of
prepared regions per kind of segment: kernels write a body, ``finish`` its header.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psdist.compression.casts import INFINITY, narrow
from psdist.compression.dtypes import NUMPY_DTYPES, check_output, check_vector
from psdist.compression.kernel_runtime import FLOAT, IN, OUT, kernel, types
from psdist.compression.segments import random_numbers
from psdist.compression.segments.dense import add_low_rank, encode_integers, encode_signs, factors
from psdist.compression.segments.format import HEADER, HEADER_BYTES, Kind, padded, payload_limit, segment_limit
from psdist.compression.segments.random_numbers import halves, places, select_random
from psdist.compression.segments.sparse import (
    add_and_select_chunks,
    add_and_select_largest,
    select_chunks,
    select_largest,
    write_sparse,
)
from psdist.compression.specifications import (
    MIN_ELEMENTS,
    Cast,
    Chain,
    ChunkedTopK,
    Codec,
    Integers,
    OneBit,
    PowerSGD,
    RandomK,
    Region,
    TopK,
)
from psdist.errors import InvalidArgumentError, NonFiniteGradientError, UnknownCodecError
from psdist.types import DType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Places = NDArray[np.int64]
AnyArray = NDArray[Any]

_U = np.uint32
_FLOAT32: Final = np.dtype(np.float32)
_NONE: Final = np.empty(0, np.float32)


class PushNumber(NamedTuple):
    """Seeds of one push's random numbers, besides the codec's own: the worker's rank and the push's number."""

    rank: int
    ordinal: int


# --- the residual of earlier pushes -----------------------------------------------------------------------------------


def _add_by_numpy(gradient: Floats, residual: Floats, decay: float, out: Floats) -> bool:
    np.add(gradient, residual * np.float32(decay), out=out)
    return bool(np.isfinite(out).all())


@kernel(IN, IN, FLOAT, OUT, result=types.boolean, interpreted=_add_by_numpy)
def _add(gradient: Any, residual: Any, decay: Any, out: Any) -> Any:
    bad = _U(0)
    for i in range(out.size):
        value = np.float32(gradient[i] + np.float32(residual[i] * decay))
        out[i] = value
        bad |= _U(_U(value.view(np.uint32) & INFINITY) == INFINITY)
    return bad == 0


def add_decayed(gradient: Floats, residual: Floats, decay: float, out: Floats) -> bool:
    """Write ``gradient + decay * residual`` to ``out``. Return True if all of it is finite.

    All arrays are float32[n], contiguous. ``out`` may be one of the other two.
    """
    check_vector("gradient", gradient, _FLOAT32, out.size)
    check_vector("residual", residual, _FLOAT32, out.size)
    check_vector("out", out, _FLOAT32, out.size)
    check_output("out", out)
    return bool(_add(gradient, residual, decay, out))


# --- regions, ready to be written -------------------------------------------------------------------------------------


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
            raise non_finite(self.region, start, stop)
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
            raise non_finite(self.region, start, stop)
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
        if residual.size and residual.ctypes.data != self.values.ctypes.data:
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


@dataclass(frozen=True)
class PreparedSigns(PreparedRegion):
    """Tensor sent as signs, with the mean magnitude of each block."""

    block: int

    def write(self, start: int, stop: int, out: Bytes, residual: Floats) -> int:
        size = 4 * (-(-stop // self.block) - start // self.block) + -(-(stop - start) // 8)
        body = out[HEADER_BYTES : HEADER_BYTES + size]
        if not encode_signs(self.values, start, stop, self.block, body, residual):
            raise non_finite(self.region, start, stop)
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
            raise non_finite(self.region, start, stop)
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
            low, high = halves(np.uint64(self.key))
            where = places(low, high, self.period, start, start + residual.size) - start
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


# --- preparation ------------------------------------------------------------------------------------------------------


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
    return _prepare(region, values, number, state)


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
        return _prepare(region, sums, number, state) if is_finite else None
    for name, one in (("values", values), ("addend", addend), ("sums", sums)):
        check_vector(name, one, _FLOAT32, region.size)
    check_output("sums", sums)
    return selection.prepared(region, sums, selection.select_of_sum(values, addend, factor, sums))


class _Selection(NamedTuple):
    """Choice of the elements that are sent: the largest of the region, or of each chunk.

    kept: number of elements.
    period: elements per chunk; 0 for the whole region.
    bits, chunk: as in ``PreparedSparse``.
    """

    kept: int
    period: int
    bits: int
    chunk: int

    def select(self, values: Floats) -> Places:
        """Return the positions of the chosen elements, ascending; only -1 if a value is not finite."""
        if self.period:
            where: Places = select_chunks(values, self.period, self.kept)
        else:
            where = select_largest(values, self.kept)
        return where

    def select_of_sum(self, values: Floats, addend: Floats, factor: float, sums: Floats) -> Places:
        """Write ``values + factor * addend`` to ``sums``, and ``select`` from that."""
        if self.period:
            where: Places = add_and_select_chunks(values, addend, factor, self.period, self.kept, sums)
        else:
            where = add_and_select_largest(values, addend, factor, self.kept, sums)
        return where

    def prepared(self, region: Region, values: Floats, where: Places) -> PreparedSparse | None:
        """Return the region with the selected ``values``, or None if they are not finite."""
        if where.size and where[0] < 0:
            return None
        return PreparedSparse(region, values, where, values[where], self.bits, self.chunk if self.bits < 16 else 0)


def _selection(region: Region, number: PushNumber) -> _Selection | None:
    """Return a sparse codec's selection, or None for other codecs."""
    codec = region.codec
    sparse = codec.sparse if isinstance(codec, Chain) else codec
    if isinstance(sparse, TopK):
        kept = max(1, round(sparse.ratio_at(number.ordinal) * region.size))
        return _Selection(kept, 0, codec.bits, codec.chunk) if isinstance(codec, Chain) else _Selection(kept, 0, 32, 0)
    if isinstance(sparse, ChunkedTopK):
        bits = codec.bits if isinstance(codec, Chain) else sparse.bits
        return _Selection(sparse.k, sparse.chunk, bits, sparse.chunk)
    return None


def selects_places(codec: Codec) -> bool:
    """True if segments of ``codec`` hold the values of some positions and nothing else.

    The residual is then all other values, unchanged.
    """
    return isinstance(codec.sparse if isinstance(codec, Chain) else codec, TopK | ChunkedTopK)


def _prepare(region: Region, values: Floats, number: PushNumber, state: AnyArray | None) -> PreparedRegion:
    match codec := region.codec:
        case Cast():
            return PreparedCast(region, values, codec.dtype)
        case Integers():
            return PreparedIntegers(region, values, codec, key_of(codec.seed, region, number))
        case OneBit():
            return PreparedSigns(region, values, codec.block)
        case RandomK() | Chain(sparse=RandomK()):
            sparse, bits = (codec, 32) if isinstance(codec, RandomK) else (codec.sparse, codec.bits)
            assert isinstance(sparse, RandomK)
            factor = 1.0 if codec.feedback else float(sparse.period)
            return PreparedRandom(region, values, sparse.period, key_of(sparse.seed, region, number), bits, factor)
        case PowerSGD():
            return _prepare_low_rank(codec, region, values, state)
    raise UnknownCodecError(f"codec {codec!r:.60} cannot encode a single tensor")


def _prepare_low_rank(codec: PowerSGD, region: Region, values: Floats, state: AnyArray | None) -> PreparedRegion:
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


#: Kernels of this module.
KERNELS: Final = (_add,)
