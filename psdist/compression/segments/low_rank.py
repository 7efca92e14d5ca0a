"""LOW_RANK segments: rows of a matrix as products of two thin ones, in a fixed order of operations.

Element (i, j) is ``P[i, 0] * Q[0, j] + P[i, 1] * Q[1, j] + ...``, added from left to right and rounded to float32 after
each operation. Compiled by numba, and beside it the same by numpy, byte for byte.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression.compiled import IN, OUT, kernel, part_of_kernel
from psdist.compression.deferred import types
from psdist.compression.segments import random_numbers

Floats = NDArray[np.float32]

_TILE: Final = 1024
#: Products beyond this are not sent, and not taken: sums might not be finite.
PRODUCT_LARGEST: Final = 3.0e38


@part_of_kernel
def add_product(p: Any, q: Any, rank: Any, columns: Any, column: Any, out: Any) -> None:
    """Adds elements of the product to ``out``, from ``column`` of the first row on.

    p: rows of ``rank`` numbers, q: ``rank`` rows of ``columns``, both flat.
    """
    tile = np.empty(_TILE, np.float32)
    done, row, j = 0, 0, column
    while done < out.size:
        size = min(columns - j, out.size - done, _TILE)
        part_tile = tile[:size]
        for k in range(rank):
            factor, others = p[row * rank + k], q[k * columns + j : k * columns + j + size]
            if k == 0:
                for i in range(size):
                    part_tile[i] = factor * others[i]
            else:
                for i in range(size):
                    part_tile[i] += factor * others[i]
        here = out[done : done + size]
        for i in range(size):
            here[i] += part_tile[i]
        done, j = done + size, j + size
        if j == columns:
            row, j = row + 1, 0


def add_product_by_numpy(p: Floats, q: Floats, rank: int, columns: int, column: int, out: Floats) -> None:
    """``add_product``."""
    rows, others = p.reshape(-1, rank), q.reshape(rank, columns)
    product = rows[:, :1] * others[:1]
    for k in range(1, rank):
        product += rows[:, k : k + 1] * others[k : k + 1]
    out += product.reshape(-1)[column : column + out.size]


@kernel(IN, IN, types.int64, types.int64, types.int64, OUT, interpreted=add_product_by_numpy)
def add_low_rank(p: Any, q: Any, rank: Any, columns: Any, column: Any, out: Any) -> None:
    """``add_product`` for encoders, which know the product that servers will add."""
    add_product(p, q, rank, columns, column, out)


def factors(matrix: Floats, rank: int, seed: int, start: int, state: Floats | None) -> tuple[Floats, Floats] | None:
    """Two thin matrices, (rows, rank) and (rank, columns), whose product is near ``matrix``: a step of power iteration.

    state: the second of the last push, from which the iteration goes on. start: the tensor's place in the flat vector,
    from which the first begins, with ``seed``. None where their product, or what it leaves out, could be too large for
    float32.
    """
    columns = matrix.shape[1]
    if state is None or state.shape != (rank, columns) or not state.any():
        numbers = np.arange(rank * columns, dtype=np.uint32)
        drawn = random_numbers.draw_all(random_numbers.key(seed, 0, 0, start), numbers)
        state = random_numbers.centred_all(drawn).reshape(rank, columns)
    with np.errstate(all="ignore"):
        p = matrix @ _scaled(state).T
        if not np.isfinite(p).all():
            return None
        p = np.ascontiguousarray(np.linalg.qr(_scaled(p))[0], dtype=np.float32)
        q = np.ascontiguousarray((matrix.T @ p).T, dtype=np.float32)
    most = max(float(matrix.max()), -float(matrix.min()))
    return (p, q) if is_product_finite(p, q, rank, most) else None


def _scaled(values: Floats) -> Floats:
    """``values`` with 1 as the largest magnitude, so that nothing over- or underflows."""
    most = np.abs(values).max()
    return values / most if most > 0 and np.isfinite(np.float32(1) / most) else values


def is_product_finite(p: Floats, q: Floats, rank: int, difference: float = 0.0) -> bool:
    """Whether all is finite, and no element of the product can be too large, nor its difference to an element of a
    magnitude of at most ``difference``."""
    most_p, most_q = float(np.abs(p).max()), float(np.abs(q).max())
    return bool(most_p * most_q * rank + difference <= PRODUCT_LARGEST)  # False for NaN.


#: All that is compiled here.
KERNELS: Final = (add_low_rank,)
