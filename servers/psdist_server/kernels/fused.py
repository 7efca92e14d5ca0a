"""Fused updates: the mean of contributions and the optimizer's arithmetic in one pass over memory, for several slices.

There is one kernel for each optimizer. It goes block by block. Contributions to a block are added in the first-level
cache (``kernels.mean_of_block``), and from there the block's weights and state are updated. One call updates several
slices, because a thread needs the interpreter between calls, and the kernel has evicted the interpreter's memory from
the caches.

A block in which contributions have NaN or Inf is updated by the mean of the others. A block whose mean is still not
finite (its sum overflows) is not updated. The values of a contribution are read once before they count, so memory that
is written meanwhile cannot bring such a value in.

Arguments of all kernels, for n segments (a segment is a range of one slice whose elements have the same scalars):

- arrays uintp[n, 1 to 4]: addresses of the segment's weights, then of its state in the optimizer's order;
- sizes int64[n]: elements; starts int64[n]: where in each contribution the segment begins;
- parts uintp[n, m], codes int64[n, m], counts int64[n]: addresses and types of the contributions to the slice;
- divisors, factors float32[n]: ``kernels.division_by``, or a divisor of 0 and any factor;
- memory float32[2 * BLOCK]: the thread's own;
- bad uint8[n, m]: set to 1 for contributions that were left out of a block;
- scalars: as ``optimizers`` computes them.

The kernels check nothing. Only ``arrays`` calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import carray, types

from psdist.compression.compiled import FLOAT, OUT, Kernel
from psdist_server.kernels import kernels
from psdist_server.kernels.kernels import BLOCK, add_to_block, mean_of_block, part_of_kernel, pointer

_ADDRESSES = types.Array(types.uintp, 2, "C")
_INTEGERS = types.Array(types.int64, 1, "C")
_CODES = types.Array(types.int64, 2, "C")
_BAD = types.Array(types.uint8, 2, "C")
_JOB = (_ADDRESSES, _INTEGERS, _INTEGERS, _ADDRESSES, _CODES, _INTEGERS, OUT, OUT, OUT, _BAD)


def _fused(scalars: int) -> Callable[[Callable[..., Any]], Kernel]:
    return lambda function: Kernel(function, (*_JOB, types.UniTuple(FLOAT, scalars)))


@part_of_kernel
def _mean(
    memory: Any, size: Any, start: Any, parts: Any, codes: Any, count: Any, divisor: Any, factor: Any, bad: Any
) -> Any:
    """The mean of a block's contributions into ``memory[:size]``; False where none of them is finite, or it is not."""
    block = memory[:size]
    if mean_of_block(block, parts, codes, count, start, divisor, factor) == np.uint32(0):
        return True
    # Rare. Each contribution is copied before it is looked at, as it may change.
    spare = memory[BLOCK : BLOCK + size]
    good = 0
    for part in range(count):
        add_to_block(spare, parts[part], codes[part], start, True)
        finite = True
        for i in range(size):
            finite = finite and np.isfinite(spare[i])
        if not finite:
            bad[part] = 1
            continue
        for i in range(size):
            block[i] = spare[i] if good == 0 else block[i] + spare[i]
        good += 1
    if good == 0:
        return False
    finite = True
    for i in range(size):
        block[i] = block[i] * factor if divisor == np.float32(0.0) and good == count else block[i] / np.float32(good)
        finite = finite and np.isfinite(block[i])
    return finite


@part_of_kernel
def _at(address: Any, start: Any, size: Any) -> Any:
    """``size`` floats from element ``start`` on."""
    return carray(pointer(address + np.uintp(4 * start)), (size,), np.float32)


_sgd = part_of_kernel(kernels.sgd.function)
_sgd_momentum = part_of_kernel(kernels.sgd_momentum.function)
_sgd_nesterov = part_of_kernel(kernels.sgd_nesterov.function)
_adam = part_of_kernel(kernels.adam.function)
_adamw = part_of_kernel(kernels.adamw.function)
_adagrad = part_of_kernel(kernels.adagrad.function)
_rmsprop = part_of_kernel(kernels.rmsprop.function)
_rmsprop_momentum = part_of_kernel(kernels.rmsprop_momentum.function)
_rmsprop_centered = part_of_kernel(kernels.rmsprop_centered.function)
_rmsprop_centered_momentum = part_of_kernel(kernels.rmsprop_centered_momentum.function)
_lion = part_of_kernel(kernels.lion.function)
_ftrl = part_of_kernel(kernels.ftrl.function)


# Written out one by one, because numba keeps what it compiled from run to run only for functions that no factory made.


@_fused(2)
def sgd(
    arrays: Any, sizes: Any, starts: Any, parts: Any, codes: Any, counts: Any, divisors: Any, factors: Any,
    memory: Any, bad: Any, scalars: Any,
) -> None:  # fmt: skip
    """``kernels.sgd``."""
    for k in range(sizes.size):
        for at in range(0, sizes[k], BLOCK):
            size = min(BLOCK, sizes[k] - at)
            if _mean(memory, size, starts[k] + at, parts[k], codes[k], counts[k], divisors[k], factors[k], bad[k]):
                _sgd(_at(arrays[k, 0], at, size), memory[:size], *scalars)


@_fused(4)
def sgd_momentum(
    arrays: Any, sizes: Any, starts: Any, parts: Any, codes: Any, counts: Any, divisors: Any, factors: Any,
    memory: Any, bad: Any, scalars: Any,
) -> None:  # fmt: skip
    """``kernels.sgd_momentum``."""
    for k in range(sizes.size):
        for at in range(0, sizes[k], BLOCK):
            size = min(BLOCK, sizes[k] - at)
            if _mean(memory, size, starts[k] + at, parts[k], codes[k], counts[k], divisors[k], factors[k], bad[k]):
                _sgd_momentum(_at(arrays[k, 0], at, size), _at(arrays[k, 1], at, size), memory[:size], *scalars)


@_fused(4)
def sgd_nesterov(
    arrays: Any, sizes: Any, starts: Any, parts: Any, codes: Any, counts: Any, divisors: Any, factors: Any,
    memory: Any, bad: Any, scalars: Any,
) -> None:  # fmt: skip
    """``kernels.sgd_nesterov``."""
    for k in range(sizes.size):
        for at in range(0, sizes[k], BLOCK):
            size = min(BLOCK, sizes[k] - at)
            if _mean(memory, size, starts[k] + at, parts[k], codes[k], counts[k], divisors[k], factors[k], bad[k]):
                _sgd_nesterov(_at(arrays[k, 0], at, size), _at(arrays[k, 1], at, size), memory[:size], *scalars)


@_fused(7)
def adam(
    arrays: Any, sizes: Any, starts: Any, parts: Any, codes: Any, counts: Any, divisors: Any, factors: Any,
    memory: Any, bad: Any, scalars: Any,
) -> None:  # fmt: skip
    """``kernels.adam``."""
    for k in range(sizes.size):
        for at in range(0, sizes[k], BLOCK):
            size = min(BLOCK, sizes[k] - at)
            if _mean(memory, size, starts[k] + at, parts[k], codes[k], counts[k], divisors[k], factors[k], bad[k]):
                _adam(
                    _at(arrays[k, 0], at, size),
                    _at(arrays[k, 1], at, size),
                    _at(arrays[k, 2], at, size),
                    memory[:size],
                    *scalars,
                )


@_fused(7)
def adamw(
    arrays: Any, sizes: Any, starts: Any, parts: Any, codes: Any, counts: Any, divisors: Any, factors: Any,
    memory: Any, bad: Any, scalars: Any,
) -> None:  # fmt: skip
    """``kernels.adamw``."""
    for k in range(sizes.size):
        for at in range(0, sizes[k], BLOCK):
            size = min(BLOCK, sizes[k] - at)
            if _mean(memory, size, starts[k] + at, parts[k], codes[k], counts[k], divisors[k], factors[k], bad[k]):
                _adamw(
                    _at(arrays[k, 0], at, size),
                    _at(arrays[k, 1], at, size),
                    _at(arrays[k, 2], at, size),
                    memory[:size],
                    *scalars,
                )


@_fused(3)
def adagrad(
    arrays: Any, sizes: Any, starts: Any, parts: Any, codes: Any, counts: Any, divisors: Any, factors: Any,
    memory: Any, bad: Any, scalars: Any,
) -> None:  # fmt: skip
    """``kernels.adagrad``."""
    for k in range(sizes.size):
        for at in range(0, sizes[k], BLOCK):
            size = min(BLOCK, sizes[k] - at)
            if _mean(memory, size, starts[k] + at, parts[k], codes[k], counts[k], divisors[k], factors[k], bad[k]):
                _adagrad(_at(arrays[k, 0], at, size), _at(arrays[k, 1], at, size), memory[:size], *scalars)


@_fused(5)
def rmsprop(
    arrays: Any, sizes: Any, starts: Any, parts: Any, codes: Any, counts: Any, divisors: Any, factors: Any,
    memory: Any, bad: Any, scalars: Any,
) -> None:  # fmt: skip
    """``kernels.rmsprop``."""
    for k in range(sizes.size):
        for at in range(0, sizes[k], BLOCK):
            size = min(BLOCK, sizes[k] - at)
            if _mean(memory, size, starts[k] + at, parts[k], codes[k], counts[k], divisors[k], factors[k], bad[k]):
                _rmsprop(_at(arrays[k, 0], at, size), _at(arrays[k, 1], at, size), memory[:size], *scalars)


@_fused(6)
def rmsprop_momentum(
    arrays: Any, sizes: Any, starts: Any, parts: Any, codes: Any, counts: Any, divisors: Any, factors: Any,
    memory: Any, bad: Any, scalars: Any,
) -> None:  # fmt: skip
    """``kernels.rmsprop_momentum``."""
    for k in range(sizes.size):
        for at in range(0, sizes[k], BLOCK):
            size = min(BLOCK, sizes[k] - at)
            if _mean(memory, size, starts[k] + at, parts[k], codes[k], counts[k], divisors[k], factors[k], bad[k]):
                _rmsprop_momentum(
                    _at(arrays[k, 0], at, size),
                    _at(arrays[k, 1], at, size),
                    _at(arrays[k, 2], at, size),
                    memory[:size],
                    *scalars,
                )


@_fused(5)
def rmsprop_centered(
    arrays: Any, sizes: Any, starts: Any, parts: Any, codes: Any, counts: Any, divisors: Any, factors: Any,
    memory: Any, bad: Any, scalars: Any,
) -> None:  # fmt: skip
    """``kernels.rmsprop_centered``."""
    for k in range(sizes.size):
        for at in range(0, sizes[k], BLOCK):
            size = min(BLOCK, sizes[k] - at)
            if _mean(memory, size, starts[k] + at, parts[k], codes[k], counts[k], divisors[k], factors[k], bad[k]):
                _rmsprop_centered(
                    _at(arrays[k, 0], at, size),
                    _at(arrays[k, 1], at, size),
                    _at(arrays[k, 2], at, size),
                    memory[:size],
                    *scalars,
                )


@_fused(6)
def rmsprop_centered_momentum(
    arrays: Any, sizes: Any, starts: Any, parts: Any, codes: Any, counts: Any, divisors: Any, factors: Any,
    memory: Any, bad: Any, scalars: Any,
) -> None:  # fmt: skip
    """``kernels.rmsprop_centered_momentum``."""
    for k in range(sizes.size):
        for at in range(0, sizes[k], BLOCK):
            size = min(BLOCK, sizes[k] - at)
            if _mean(memory, size, starts[k] + at, parts[k], codes[k], counts[k], divisors[k], factors[k], bad[k]):
                _rmsprop_centered_momentum(
                    _at(arrays[k, 0], at, size),
                    _at(arrays[k, 1], at, size),
                    _at(arrays[k, 2], at, size),
                    _at(arrays[k, 3], at, size),
                    memory[:size],
                    *scalars,
                )


@_fused(6)
def lion(
    arrays: Any, sizes: Any, starts: Any, parts: Any, codes: Any, counts: Any, divisors: Any, factors: Any,
    memory: Any, bad: Any, scalars: Any,
) -> None:  # fmt: skip
    """``kernels.lion``."""
    for k in range(sizes.size):
        for at in range(0, sizes[k], BLOCK):
            size = min(BLOCK, sizes[k] - at)
            if _mean(memory, size, starts[k] + at, parts[k], codes[k], counts[k], divisors[k], factors[k], bad[k]):
                _lion(_at(arrays[k, 0], at, size), _at(arrays[k, 1], at, size), memory[:size], *scalars)


@_fused(5)
def ftrl(
    arrays: Any, sizes: Any, starts: Any, parts: Any, codes: Any, counts: Any, divisors: Any, factors: Any,
    memory: Any, bad: Any, scalars: Any,
) -> None:  # fmt: skip
    """``kernels.ftrl``."""
    for k in range(sizes.size):
        for at in range(0, sizes[k], BLOCK):
            size = min(BLOCK, sizes[k] - at)
            if _mean(memory, size, starts[k] + at, parts[k], codes[k], counts[k], divisors[k], factors[k], bad[k]):
                _ftrl(
                    _at(arrays[k, 0], at, size),
                    _at(arrays[k, 1], at, size),
                    _at(arrays[k, 2], at, size),
                    memory[:size],
                    *scalars,
                )


#: The fused kernel of each kernel that updates from a gradient in memory.
OF: Final[dict[Kernel, Kernel]] = {
    kernels.sgd: sgd,
    kernels.sgd_momentum: sgd_momentum,
    kernels.sgd_nesterov: sgd_nesterov,
    kernels.adam: adam,
    kernels.adamw: adamw,
    kernels.adagrad: adagrad,
    kernels.rmsprop: rmsprop,
    kernels.rmsprop_momentum: rmsprop_momentum,
    kernels.rmsprop_centered: rmsprop_centered,
    kernels.rmsprop_centered_momentum: rmsprop_centered_momentum,
    kernels.lion: lion,
    kernels.ftrl: ftrl,
}
