"""The encoders of SPARSE segments by numpy, for the time until they are compiled. The bytes are the same."""

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

#: Of 2-bit values: those above so many times the mean are large, before the scale is known.
SPLIT: Final = 1.2

_MAGIC: Final = np.float32(1.5 * 2.0**23)
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_INFINITY: Final = 0x7F800000
_LARGEST: Final = np.finfo(np.float32).max
_BFLOAT16: Final = NUMPY_DTYPES["bfloat16"]


def _magnitudes(values: Floats) -> NDArray[np.uint32]:
    """The bits without the sign, which are ordered as magnitudes are."""
    return values.view(np.uint32) & _MAGNITUDE


def select_chunks(values: Floats, first: int, last: int, chunk: int, kept: int, where: Positions) -> int:
    """``sparse.select_chunks``."""
    count = 0
    for begin in range(first, last, chunk):
        magnitudes = _magnitudes(values[begin : min(begin + chunk, last)])
        if magnitudes.max() >= _INFINITY:
            return -1
        share = -(-kept * magnitudes.size // chunk)
        threshold = max(int(np.partition(magnitudes, magnitudes.size - share)[magnitudes.size - share]), 1)
        above = magnitudes > threshold
        ties = np.flatnonzero(magnitudes == threshold)[: share - np.count_nonzero(above)]
        above[ties] = True
        chosen = np.flatnonzero(above) + begin
        where[count : count + chosen.size] = chosen
        count += chosen.size
    return count


def largest(values: Floats, kept: int) -> tuple[int, int]:
    """``sparse.largest``."""
    magnitudes = _magnitudes(values)
    if magnitudes.max() >= _INFINITY:
        return -1, 0
    threshold = int(np.partition(magnitudes, values.size - kept)[values.size - kept])
    if not threshold:
        return 1, values.size
    ties = np.flatnonzero(magnitudes == threshold)
    left = kept - int(np.count_nonzero(magnitudes > threshold))
    return threshold, int(ties[left]) if left < ties.size else values.size


def select_above(values: Floats, first: int, last: int, threshold: int, ties_stop: int, where: Positions) -> int:
    """``sparse.select_above``."""
    magnitudes = _magnitudes(values[first:last])
    places = np.arange(first, last)
    chosen = places[(magnitudes > threshold) | ((magnitudes == threshold) & (places < ties_stop))]
    where[: chosen.size] = chosen
    return int(chosen.size)


def write(
    values: Floats, start: int, stop: int, bits: int, chunk: int, where: Positions, out: Bytes, residual: Floats
) -> int:
    """``sparse.write_sparse``."""
    inside = where[np.searchsorted(where, start) : np.searchsorted(where, stop)]
    if chunk:
        decoded, scales, packed = _scaled(values, start, stop, bits, chunk, where, inside)
    else:
        decoded, scales, packed = _plain(values, bits, inside)
    gaps = gap_bytes(inside - start)
    if residual.size:
        residual[start:stop] = values[start:stop]
        residual[inside] = values[inside] - decoded
    size = 4 + scales.size + packed.size + gaps.size
    if bits == 32 and size > 4 * (stop - start):
        return -1
    body = np.concatenate([np.array([inside.size], "<u4").view(np.uint8), scales, packed, gaps])
    out[:size] = body
    return size


def gap_bytes(places: Positions) -> Bytes:
    """The gaps between places: 255 is that much without a value."""
    gaps = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(gaps // 255 + 1) - 1
    written = np.full(ends[-1] + 1 if ends.size else 0, 255, np.uint8)
    written[ends] = gaps % 255
    return written


def _plain(values: Floats, bits: int, inside: Positions) -> tuple[Floats, Bytes, Bytes]:
    """What is decoded, no scales, and the values of 32 or 16 bits."""
    nothing = np.empty(0, np.uint8)
    kept = values[inside]
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
    values: Floats, start: int, stop: int, bits: int, chunk: int, where: Positions, inside: Positions
) -> tuple[Floats, Bytes, Bytes]:
    """What is decoded, the scales of chunks, and codes of 8 or 2 bits."""
    first = start // chunk
    borders = np.searchsorted(where, np.arange(first, -(-stop // chunk) + 1) * chunk)
    scale_of = _scale8 if bits == 8 else _scale2
    scales = np.array([scale_of(values[where[a:b]]) for a, b in pairwise(borders)], np.float32)
    kept, each = values[inside], scales[inside // chunk - first]
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
    """1, 2, -1, -2 for the codes 0, 1, 2, 3."""
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
