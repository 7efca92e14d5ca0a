"""Fused updates: the mean of contributions and the optimizer's arithmetic in one pass over memory, for several slices.

There is one kernel per optimizer, in ``descent_updates``, ``adam_updates`` and ``adaptive_updates``; this module has
their common parts. A kernel works block by block: contributions to a block are added in the first-level cache
(``kernels.mean_of_block``), and then the block's weights and state are updated from there. One call updates several
slices, because a thread needs the interpreter between calls, and the kernel has evicted the interpreter's memory
from the caches. The same arithmetic in plain numpy is in ``tests/support/reference.py``, and gives the same bytes.

A block in which contributions have NaN or Inf is updated by the mean of the others. A block whose mean is still not
finite (its sum overflows) is not updated. Each value of a contribution is read once before it is used, so memory that
is written meanwhile cannot introduce such a value.

Arguments of all kernels, for n segments (a segment is a range of one slice whose elements have the same scalars):

- arrays uintp[n, 1 to 4]: addresses of the segment's weights, then of its state in the optimizer's order;
- segments int64[n, 3]: its size in elements, its start in each contribution, the number of contributions;
- parts uintp[n, m], codes int64[n, m]: addresses and types (``kernels.CODES``) of the contributions to the slice;
- divisions float32[n, 2]: ``kernels.division_by``, or a divisor of 0 and any factor; for several contributions a
  factor of 1 keeps their sum, also if some of them are left out;
- memory float32[2 * BLOCK]: the thread's own;
- bad uint8[n, m]: set to 1 for contributions that were left out of a block;
- means uintp[n]: address of the memory for the slice's mean, float32, which is written while it is in the cache; 0 for
  none. A block that is not updated is NaN there, so that an update by this mean does not update it either;
- scalars: as ``optimizers`` computes them.

The arithmetic of each optimizer is one function, ``_adam`` for Adam: new weights and state from old ones and the
gradient. Its arguments are w (weights), the state, g (gradient) and the scalars; ``sign`` is -1 to maximize, else 1.
Weight decay 0 adds nothing to the gradient, not even for infinite weights, as in torch. Choices are ``select``, which
is vectorized. The function is compiled into the kernel for single elements. Until the kernel is compiled, numpy runs it
on whole arrays (``interpreted.update``), and gives the same bytes.

The kernels check nothing. Only ``arrays`` calls them. They are written out one by one, because numba caches compiled
code across runs only for functions that no factory made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from psdist.compression.compiled import FLOAT, OUT, Kernel, part_of_kernel
from psdist.compression.deferred import numba, types, when_imported
from psdist_server.kernels import interpreted
from psdist_server.kernels.interpreted import BLOCK
from psdist_server.kernels.kernels import add_to_block, mean_of_block, pointer

_ADDRESSES = types.Array(types.uintp, 2, "C")
_INTEGERS = types.Array(types.int64, 2, "C")
_DIVISIONS = types.Array(FLOAT, 2, "C")
_BAD = types.Array(types.uint8, 2, "C")
ZERO, ONE = np.float32(0.0), np.float32(1.0)
_MEANS = types.Array(types.uintp, 1, "C")
_JOB = (_ADDRESSES, _INTEGERS, _ADDRESSES, _INTEGERS, _DIVISIONS, OUT, _BAD, _MEANS)


def updates_by(element: Any, *, scalars: int) -> Callable[[Callable[..., Any]], Kernel]:
    """Return a decorator that turns a function into a kernel. element: its arithmetic, a ``part_of_kernel``."""
    job = (*_JOB, types.UniTuple(FLOAT, scalars))
    return lambda function: Kernel(function, job, interpreted=partial(interpreted.update, element.py_func))


@part_of_kernel
def block_mean(segment: Any, at: Any, parts: Any, codes: Any, division: Any, memory: Any, bad: Any, mean: Any) -> Any:
    """Compute the mean of the contributions to the block at element ``at`` of a segment, into ``memory``, and also into
    address ``mean`` if that is not 0. Returns the block's size, or 0 if no contribution to it is finite, or the mean is
    not."""
    start = segment[1] + at
    size = _mean_in_cache(min(BLOCK, segment[0] - at), start, segment[2], parts, codes, division, memory, bad)
    if mean != np.uintp(0):
        out = floats_at(mean, start, min(BLOCK, segment[0] - at))
        for i in range(size):
            out[i] = memory[i]
        for i in range(size, out.size):
            out[i] = np.float32(np.nan)
    return size


@part_of_kernel
def _mean_in_cache(
    size: Any, start: Any, count: Any, parts: Any, codes: Any, division: Any, memory: Any, bad: Any
) -> Any:
    divisor, factor = division[0], division[1]
    block = memory[:size]
    if mean_of_block(block, parts, codes, count, start, divisor, factor) == np.uint32(0):
        return size
    # Rare. Each contribution is copied before it is examined, as it may change.
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
        return 0
    finite = True
    by_factor = divisor == np.float32(0.0) and (good == count or factor == np.float32(1.0))
    for i in range(size):
        block[i] = block[i] * factor if by_factor else block[i] / np.float32(good)
        finite = finite and np.isfinite(block[i])
    return size if finite else 0


@part_of_kernel
def floats_at(address: Any, start: Any, size: Any) -> Any:
    """Return ``size`` floats from element ``start``."""
    return carray(pointer(address + np.uintp(4 * start)), (size,), np.float32)


@part_of_kernel
def two_at(addresses: Any, at: Any, size: Any) -> Any:
    """Return ``size`` floats from element ``at`` of two arrays."""
    return floats_at(addresses[0], at, size), floats_at(addresses[1], at, size)


@part_of_kernel
def three_at(addresses: Any, at: Any, size: Any) -> Any:
    """Return ``size`` floats from element ``at`` of three arrays."""
    return floats_at(addresses[0], at, size), floats_at(addresses[1], at, size), floats_at(addresses[2], at, size)


@part_of_kernel
def four_at(addresses: Any, at: Any, size: Any) -> Any:
    """Return ``size`` floats from element ``at`` of four arrays."""
    w, first, second = three_at(addresses, at, size)
    return w, first, second, floats_at(addresses[3], at, size)


def select(condition: Any, one: Any, other: Any) -> Any:
    """Return ``one`` where the condition holds, else ``other``."""
    return np.where(condition, one, other)


def _select_compiled(condition: Any, one: Any, other: Any) -> Any:
    """Do the same for single elements, in a form that is vectorized; numba's own ``where`` is not."""

    def choose(condition: Any, one: Any, other: Any) -> Any:
        if condition:
            return one
        return other

    return choose


when_imported(lambda: import_module("numba.extending").overload(select, inline="always")(_select_compiled))
carray = numba.carray
