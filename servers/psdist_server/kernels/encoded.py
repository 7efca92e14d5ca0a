"""Sums of contributions, computed before the update if some are encoded or have weights.

An encoded gradient is defined as what its segments (``psdist.compression.segments``) add to zeros. It is decoded while
it is added to a sum, straight from the received bytes. So the contributions to a slice, encoded or not, are added in
order to zeros in the kernel thread's memory, and the cost of each is proportional to its bytes. The sum is then treated
as an only contribution. The result has the same bytes as the update by decoded contributions, because with an encoded
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
    """True if a contribution is encoded: bytes, not elements."""
    return part.itemsize == 1


def total(parts: Sequence[AnyArray], size: int) -> Floats:
    """Return the sum of contributions to a slice of ``size`` elements, added in order.

    The sum is in this thread's memory, which the next call reuses. It is not finite if a part holds NaN or Inf, or if
    it overflows.
    """
    out = _memory(size)
    out.fill(0.0)
    for part in parts:
        _add(part, out)
    return out


def weighted_total(
    parts: Sequence[AnyArray], weights: Sequence[float], size: int
) -> tuple[Floats, float, tuple[int, ...]]:
    """Return the weighted sum of contributions to a slice, the sum of the weights, and the positions left out.

    Contributions that hold NaN or Inf are left out of both sums. The sum starts at zeros, to which float32 products are
    added in order. It is in this thread's memory, like that of ``total``. It is not finite if it overflows, and NaN if
    all contributions are left out.
    """
    out = _memory(size)
    _add_all(parts, weights, out)
    if kernels.all_finite(out):
        return out, sum(weights), ()
    # Shared parts could change between check and sum, so copy them first. This path is rare.
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
    """Return the contributions, the encoded ones decoded to new float32 arrays."""
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
    """Add a contribution that is not encoded. It is read once."""
    for start in range(0, out.size, BLOCK):
        add_to_block(out[start : start + BLOCK], address, code, start, False)


@kernel(OUT, types.uintp, types.int64, FLOAT, interpreted=interpreted.add_weighted)
def _add_weighted(out: Any, address: Any, code: Any, weight: Any) -> None:
    """Add a contribution that is not encoded, multiplied by its weight. It is read once."""
    block = np.empty(BLOCK, np.float32)
    for start in range(0, out.size, BLOCK):
        size = min(BLOCK, out.size - start)
        add_to_block(block[:size], address, code, start, True)
        for i in range(size):
            out[start + i] += weight * block[i]


def _memory(size: int) -> Floats:
    """Return float32[size] of this thread, shared by all parameter sets: the steady state allocates nothing."""
    memory: Floats | None = getattr(_thread, "memory", None)
    if memory is None or memory.size < size:
        memory = _thread.memory = np.empty(size, np.float32)
    return memory[:size]


#: Kernels needed once a push is encoded or has a weight.
KERNELS: Final = (*segments.DECODERS, _add_elements, _add_weighted)
