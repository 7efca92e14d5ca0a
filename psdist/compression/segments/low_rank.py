"""LOW_RANK segments: rows of a matrix as the product of two thin matrices, with a fixed order of operations.

Element (i, j) is ``P[i, 0] * Q[0, j] + P[i, 1] * Q[1, j] + ...``, added from left to right and rounded to float32
after each operation. Compiled by numba; the numpy version beside it gives the same bytes.
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
#: Larger products are neither sent nor accepted: their sums might not be finite.
PRODUCT_LARGEST: Final = 3.0e38


@part_of_kernel
def add_product(p: Any, q: Any, rank: Any, columns: Any, column: Any, out: Any) -> None:
    """Add elements of the product to ``out``, beginning at ``column`` of the first row.

    p: float32[rows * rank], row by row.
    q: float32[rank * columns], row by row.
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
    """Compute ``add_product`` with numpy."""
    rows, others = p.reshape(-1, rank), q.reshape(rank, columns)
    product = rows[:, :1] * others[:1]
    for k in range(1, rank):
        product += rows[:, k : k + 1] * others[k : k + 1]
    out += product.reshape(-1)[column : column + out.size]


@kernel(IN, IN, types.int64, types.int64, types.int64, OUT, interpreted=add_product_by_numpy)
def add_low_rank(p: Any, q: Any, rank: Any, columns: Any, column: Any, out: Any) -> None:
    """Compute ``add_product`` for encoders, which need the product that servers will add."""
    add_product(p, q, rank, columns, column, out)


def factors(matrix: Floats, rank: int, seed: int, start: int, state: Floats | None) -> tuple[Floats, Floats] | None:
    """Return P (rows, rank) and Q (rank, columns) with P Q near ``matrix``, after one step of power iteration.

    state: Q of the last push, where the iteration resumes; None for the first push.
    seed, start: seed of the initial Q, with the tensor's position in the flat vector.
    Returns None if an element of the product or of the residual could overflow float32.
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
    """Scale ``values`` to a largest magnitude of 1, so that nothing over- or underflows."""
    most = np.abs(values).max()
    return values / most if most > 0 and np.isfinite(np.float32(1) / most) else values


def is_product_finite(p: Floats, q: Floats, rank: int, difference: float = 0.0) -> bool:
    """True if the factors are finite and no element of the product can overflow.

    difference: largest magnitude from which the product is subtracted; the difference must not overflow either.
    """
    most_p, most_q = float(np.abs(p).max()), float(np.abs(q).max())
    return bool(most_p * most_q * rank + difference <= PRODUCT_LARGEST)  # False for NaN.


#: Kernels of this module.
KERNELS: Final = (add_low_rank,)
