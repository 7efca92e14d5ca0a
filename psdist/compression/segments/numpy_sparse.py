"""Encoders of SPARSE segments by numpy, used until the compiled ones exist. Equal bytes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression import numpy_casts
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.compression.segments.numpy_integers import pack

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Positions = NDArray[np.int64]

#: Among 2-bit values, those above this multiple of the mean magnitude count as large while the scale is computed.
SPLIT: Final = 1.2

_MAGIC: Final = np.float32(1.5 * 2.0**23)
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_INFINITY: Final = 0x7F800000
_LARGEST: Final = np.finfo(np.float32).max
_BFLOAT16: Final = NUMPY_DTYPES["bfloat16"]


def _magnitudes(values: Floats) -> NDArray[np.uint32]:
    """Return the bits without the sign, which sort in the order of magnitudes."""
    return values.view(np.uint32) & _MAGNITUDE


def _sums(values: Floats, addend: Floats, factor: float, sums: Floats) -> Floats:
    with np.errstate(all="ignore"):
        np.add(values, addend * np.float32(factor), out=sums)
    return sums


def _not_finite() -> Positions:
    return np.full(1, -1, np.int64)


def select_chunks(values: Floats, chunk: int, kept: int) -> Positions:
    """Compute ``sparse.select_chunks``."""
    found = [np.empty(0, np.int64)]
    for begin in range(0, values.size, chunk):
        magnitudes = _magnitudes(values[begin : begin + chunk])
        if magnitudes.max() >= _INFINITY:
            return _not_finite()
        found.append(_largest(magnitudes, -(-kept * magnitudes.size // chunk)) + begin)
    return np.concatenate(found)


def add_and_select_chunks(
    values: Floats, addend: Floats, factor: float, chunk: int, kept: int, sums: Floats
) -> Positions:
    """Compute ``sparse.add_and_select_chunks``."""
    return select_chunks(_sums(values, addend, factor, sums), chunk, kept)


def select_largest(values: Floats, kept: int) -> Positions:
    """Compute ``sparse.select_largest``."""
    magnitudes = _magnitudes(values)
    return _not_finite() if magnitudes.max() >= _INFINITY else _largest(magnitudes, kept)


def add_and_select_largest(values: Floats, addend: Floats, factor: float, kept: int, sums: Floats) -> Positions:
    """Compute ``sparse.add_and_select_largest``."""
    return select_largest(_sums(values, addend, factor, sums), kept)


def _largest(magnitudes: NDArray[np.uint32], kept: int) -> Positions:
    """Return the positions of the ``kept`` largest. Ties keep the first; zeros are never kept."""
    threshold = max(int(np.partition(magnitudes, magnitudes.size - kept)[magnitudes.size - kept]), 1)
    chosen = magnitudes > threshold
    ties = np.flatnonzero(magnitudes == threshold)[: kept - np.count_nonzero(chosen)]
    chosen[ties] = True
    return np.flatnonzero(chosen)


def write(
    kept: Floats, where: Positions, start: int, stop: int, bits: int, chunk: int, out: Bytes, residual: Floats
) -> int:
    """Compute ``sparse.write_sparse``."""
    part = slice(*np.searchsorted(where, [start, stop]))
    inside, values = where[part], kept[part]
    if chunk:
        decoded, scales, packed = _scaled(kept, where, start, stop, bits, chunk, part)
    else:
        decoded, scales, packed = _plain(values, bits)
    gaps = gap_bytes(inside - start)
    if residual.size:
        residual[inside] = values - decoded
    size = 4 + scales.size + packed.size + gaps.size
    if bits == 32 and size > 4 * (stop - start):
        return -1
    body = np.concatenate([np.array([inside.size], "<u4").view(np.uint8), scales, packed, gaps])
    out[:size] = body
    return size


def gap_bytes(places: Positions) -> Bytes:
    """Encode the gaps between positions: a byte of 255 stands for 255 elements without a value."""
    gaps = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(gaps // 255 + 1) - 1
    written = np.full(ends[-1] + 1 if ends.size else 0, 255, np.uint8)
    written[ends] = gaps % 255
    return written


def _plain(kept: Floats, bits: int) -> tuple[Floats, Bytes, Bytes]:
    """Return decoded values, no scales, and the bytes of 32- or 16-bit values."""
    nothing = np.empty(0, np.uint8)
    if bits == 32:
        return kept, nothing, kept.view(np.uint8)
    brains = np.empty(kept.size, _BFLOAT16)
    numpy_casts.narrow(kept, brains)
    words = brains.view(np.uint16)
    words[(words & 0x7FFF) == 0x7F80] -= 1
    decoded = np.empty(kept.size, np.float32)
    numpy_casts.widen(brains, decoded)
    return decoded, nothing, words.view(np.uint8)


def _scaled(
    kept: Floats, where: Positions, start: int, stop: int, bits: int, chunk: int, part: slice
) -> tuple[Floats, Bytes, Bytes]:
    """Return the decoded values at the positions ``part``, the scales of chunks, and codes of 8 or 2 bits."""
    first = start // chunk
    borders = np.searchsorted(where, np.arange(first, -(-stop // chunk) + 1) * chunk)
    scale_of = _scale8 if bits == 8 else _scale2
    scales = np.array([scale_of(kept[a:b]) for a, b in pairwise(borders)], np.float32)
    kept, each = kept[part], scales[where[part] // chunk - first]
    with np.errstate(all="ignore"):
        if bits == 8:
            x = np.where(each > 0, kept / each, np.float32(0))
            codes = ((np.clip(x, -127, 127) + _MAGIC).view(np.uint32) & 255).astype(np.uint8).view(np.int8)
            decoded = codes.astype(np.float32) * each
        else:
            large = np.abs(kept) > np.float32(1.5) * each
            codes = ((kept < 0) * 2 + large).astype(np.int8)
            decoded = signed_sizes(codes) * each
    return decoded, scales.view(np.uint8), pack(codes, bits)


def signed_sizes(codes: NDArray[Any]) -> Floats:
    """Map the codes 0, 1, 2, 3 to 1, 2, -1, -2."""
    sizes: Floats = np.array([1, 2, -1, -2], np.float32)[codes]
    return sizes


def _scale8(kept: Floats) -> Any:
    most = np.abs(kept).max(initial=np.float32(0))
    return np.minimum(most / np.float32(127), _LARGEST / np.float32(128))


def _scale2(kept: Floats) -> Any:
    magnitudes = np.abs(kept.astype(np.float64))
    if not kept.size:
        return np.float32(0)
    split = np.cumsum(magnitudes)[-1] / kept.size * SPLIT
    factors = np.where(magnitudes > split, 2.0, 1.0)
    best = np.float32(np.cumsum(magnitudes * factors)[-1] / np.sum(factors * factors))
    return np.minimum(best, _LARGEST / np.float32(2))
