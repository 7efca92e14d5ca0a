"""Sums of contributions before the update: of those that came encoded, and of those that have weights.

A gradient that came encoded is by definition what its segments (``psdist.compression.segments``) add to zeros: it is
decoded as it is added to a sum, straight from the bytes that came. So the contributions to a slice, encoded or not, are
added in their order to zeros in memory of the kernel thread, and the cost of each follows the bytes that it has. Its
sum then goes the way of an only contribution, and the bytes are those of the update by decoded ones: with an encoded
contribution among them no sum is -0.0.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from psdist.compression import segments
from psdist.compression.compiled import FLOAT, OUT, kernel
from psdist.compression.deferred import types
from psdist_server.kernels import interpreted, kernels
from psdist_server.kernels.interpreted import BLOCK, CODES, AnyArray, Floats
from psdist_server.kernels.kernels import add_to_block, address_of

_thread = threading.local()


def is_encoded(part: AnyArray) -> bool:
    """Whether a contribution is encoded: its bytes, not its elements."""
    return part.itemsize == 1


def total(parts: Sequence[AnyArray], size: int) -> Floats:
    """The sum of contributions to a slice of ``size`` elements, in their order. It lies in memory of this thread, which
    the next call uses again. Where a part holds NaN or Inf, or the sum overflows, it is not finite."""
    out = _memory(size)
    out.fill(0.0)
    for part in parts:
        _add(part, out)
    return out


def weighted_total(
    parts: Sequence[AnyArray], weights: Sequence[float], size: int
) -> tuple[Floats, float, tuple[int, ...]]:
    """The sum of contributions to a slice, each times its weight, in their order; the sum of the weights; and the
    positions of contributions that are left out of both, as they hold NaN or Inf.

    The sum is zeros, to which float32 products are added. It lies in memory of this thread, as that of ``total``. It is
    not finite where it overflows, and NaN where all are left out.
    """
    out = _memory(size)
    _add_all(parts, weights, out)
    if kernels.all_finite(out):
        return out, sum(weights), ()
    # Shared parts could change between the look and the sum, so these are copies. It is rare enough.
    copies = [_decoded(part, size) if is_encoded(part) else part.copy() for part in parts]
    good = [place for place, part in enumerate(copies) if kernels.all_finite(part)]
    _add_all([copies[place] for place in good], [weights[place] for place in good], out)
    if not good:
        out.fill(np.nan)
    return out, sum(weights[place] for place in good) or 1.0, tuple(sorted(set(range(len(parts))).difference(good)))


def _add_all(parts: Sequence[AnyArray], weights: Sequence[float], out: Floats) -> None:
    out.fill(0.0)
    for part, weight in zip(parts, weights, strict=True):
        values = _decoded(part, out.size) if is_encoded(part) else part
        _add_weighted(out, address_of(values), CODES[values.dtype], np.float32(weight))


def decoded(parts: Sequence[AnyArray], size: int) -> list[AnyArray]:
    """The contributions, with those that are encoded as float32 in memory of their own."""
    return [_decoded(part, size) if is_encoded(part) else part for part in parts]


def _decoded(part: AnyArray, size: int) -> Floats:
    out = np.zeros(size, np.float32)
    _add(part, out)
    return out


def _add(part: AnyArray, out: Floats) -> None:
    if is_encoded(part):
        segments.accumulate(part, out)
    else:
        _add_elements(out, address_of(part), CODES[part.dtype])


@kernel(OUT, types.uintp, types.int64, interpreted=interpreted.add_elements)
def _add_elements(out: Any, address: Any, code: Any) -> None:
    """Adds a contribution that is not encoded. It is read once."""
    for start in range(0, out.size, BLOCK):
        add_to_block(out[start : start + BLOCK], address, code, start, False)


@kernel(OUT, types.uintp, types.int64, FLOAT, interpreted=interpreted.add_weighted)
def _add_weighted(out: Any, address: Any, code: Any, weight: Any) -> None:
    """Adds a contribution that is not encoded, times its weight. It is read once."""
    block = np.empty(BLOCK, np.float32)
    for start in range(0, out.size, BLOCK):
        size = min(BLOCK, out.size - start)
        add_to_block(block[:size], address, code, start, True)
        for i in range(size):
            out[start + i] += weight * block[i]


def _memory(size: int) -> Floats:
    """float32[size] of this thread, for all parameter sets: the steady state allocates none."""
    memory: Floats | None = getattr(_thread, "memory", None)
    if memory is None or memory.size < size:
        memory = _thread.memory = np.empty(size, np.float32)
    return memory[:size]


#: What a server needs once a push came encoded, or with a weight.
KERNELS: Final = (*segments.DECODERS, _add_elements, _add_weighted)
