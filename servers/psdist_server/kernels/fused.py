"""Fused updates: the mean of contributions and the optimizer's arithmetic in one pass over memory, for several slices.

There is one kernel per optimizer. It works block by block: contributions to a block are added in the first-level cache
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
gradient. It is compiled into the kernel for single elements. Until the kernel is compiled, numpy runs the same function
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
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_MEANS = types.Array(types.uintp, 1, "C")
_JOB = (_ADDRESSES, _INTEGERS, _ADDRESSES, _INTEGERS, _DIVISIONS, OUT, _BAD, _MEANS)


def _fused(element: Any, *, scalars: int) -> Callable[[Callable[..., Any]], Kernel]:
    """Return a decorator that turns a function into a kernel. element: its arithmetic, a ``part_of_kernel``."""
    job = (*_JOB, types.UniTuple(FLOAT, scalars))
    return lambda function: Kernel(function, job, interpreted=partial(interpreted.update, element.py_func))


@part_of_kernel
def _mean(segment: Any, at: Any, parts: Any, codes: Any, division: Any, memory: Any, bad: Any, mean: Any) -> Any:
    """Compute the mean of the contributions to the block at element ``at`` of a segment, into ``memory``, and also into
    address ``mean`` if that is not 0. Returns the block's size, or 0 if no contribution to it is finite, or the mean is
    not."""
    start = segment[1] + at
    size = _mean_in_cache(min(BLOCK, segment[0] - at), start, segment[2], parts, codes, division, memory, bad)
    if mean != np.uintp(0):
        out = _at(mean, start, min(BLOCK, segment[0] - at))
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
def _at(address: Any, start: Any, size: Any) -> Any:
    """Return ``size`` floats from element ``start``."""
    return carray(pointer(address + np.uintp(4 * start)), (size,), np.float32)


@part_of_kernel
def _two(addresses: Any, at: Any, size: Any) -> Any:
    return _at(addresses[0], at, size), _at(addresses[1], at, size)


@part_of_kernel
def _three(addresses: Any, at: Any, size: Any) -> Any:
    return _at(addresses[0], at, size), _at(addresses[1], at, size), _at(addresses[2], at, size)


def _select(condition: Any, one: Any, other: Any) -> Any:
    """Return ``one`` where the condition holds, else ``other``."""
    return np.where(condition, one, other)


def _select_compiled(condition: Any, one: Any, other: Any) -> Any:
    """Do the same for single elements, in a form that is vectorized; numba's own ``where`` is not."""

    def select(condition: Any, one: Any, other: Any) -> Any:
        if condition:
            return one
        return other

    return select


when_imported(lambda: import_module("numba.extending").overload(_select, inline="always")(_select_compiled))
carray = numba.carray

# --- optimizers -------------------------------------------------------------------------------------------------------
# Arguments: w (weights), then the state, then g (gradient), then the scalars. Weight decay 0 is not a special case,
# since the loops are bound by memory anyway.


@part_of_kernel
def _sgd(w: Any, g: Any, rate: Any, decay: Any) -> Any:
    return w - rate * (g + decay * w)


@_fused(_sgd, scalars=2)
def sgd(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Plain stochastic gradient descent."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w = _at(arrays[k, 0], at, size)
            for i in range(size):
                w[i] = _sgd(w[i], memory[i], *scalars)


@part_of_kernel
def _sgd_momentum(w: Any, buffer: Any, g: Any, rate: Any, decay: Any, keep: Any, take: Any) -> Any:
    gradient = g + decay * w
    velocity = keep * buffer + take * gradient
    return w - rate * velocity, velocity


@_fused(_sgd_momentum, scalars=4)
def sgd_momentum(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Heavy ball: buffer = keep * buffer + take * gradient."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, buffer = _two(arrays[k], at, size)
            for i in range(size):
                w[i], buffer[i] = _sgd_momentum(w[i], buffer[i], memory[i], *scalars)


@part_of_kernel
def _sgd_nesterov(w: Any, buffer: Any, g: Any, rate: Any, decay: Any, keep: Any, take: Any) -> Any:
    gradient = g + decay * w
    velocity = keep * buffer + take * gradient
    return w - rate * (gradient + keep * velocity), velocity


@_fused(_sgd_nesterov, scalars=4)
def sgd_nesterov(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Nesterov's momentum in torch's form."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, buffer = _two(arrays[k], at, size)
            for i in range(size):
                w[i], buffer[i] = _sgd_nesterov(w[i], buffer[i], memory[i], *scalars)


@part_of_kernel
def _adam(
    w: Any, m: Any, v: Any, g: Any, decay: Any, take1: Any, keep2: Any, take2: Any, size: Any, root: Any, eps: Any
) -> Any:
    gradient = g + decay * w
    mean = m + take1 * (gradient - m)
    square = keep2 * v + take2 * gradient * gradient
    return w - size * mean / (np.sqrt(square) * root + eps), mean, square


@_fused(_adam, scalars=7)
def adam(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Adam, with L2 weight decay."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, m, v = _three(arrays[k], at, size)
            for i in range(size):
                w[i], m[i], v[i] = _adam(w[i], m[i], v[i], memory[i], *scalars)


@part_of_kernel
def _adamw(
    w: Any, m: Any, v: Any, g: Any, shrink: Any, take1: Any, keep2: Any, take2: Any, size: Any, root: Any, eps: Any
) -> Any:
    mean = m + take1 * (g - m)
    square = keep2 * v + take2 * g * g
    return w * shrink - size * mean / (np.sqrt(square) * root + eps), mean, square


@_fused(_adamw, scalars=7)
def adamw(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Adam with decoupled weight decay: the weights shrink first."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, m, v = _three(arrays[k], at, size)
            for i in range(size):
                w[i], m[i], v[i] = _adamw(w[i], m[i], v[i], memory[i], *scalars)


@part_of_kernel
def _adagrad(w: Any, total: Any, g: Any, rate: Any, decay: Any, eps: Any) -> Any:
    gradient = g + decay * w
    square = total + gradient * gradient
    return w - rate * gradient / (np.sqrt(square) + eps), square


@_fused(_adagrad, scalars=3)
def adagrad(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Adagrad."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, total = _two(arrays[k], at, size)
            for i in range(size):
                w[i], total[i] = _adagrad(w[i], total[i], memory[i], *scalars)


@part_of_kernel
def _rmsprop(w: Any, v: Any, g: Any, rate: Any, decay: Any, keep: Any, take: Any, eps: Any) -> Any:
    gradient = g + decay * w
    square = keep * v + take * gradient * gradient
    return w - rate * gradient / (np.sqrt(square) + eps), square


@_fused(_rmsprop, scalars=5)
def rmsprop(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """RMSprop without momentum."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, v = _two(arrays[k], at, size)
            for i in range(size):
                w[i], v[i] = _rmsprop(w[i], v[i], memory[i], *scalars)


@part_of_kernel
def _rmsprop_momentum(
    w: Any, v: Any, buffer: Any, g: Any, rate: Any, decay: Any, keep: Any, take: Any, eps: Any, momentum: Any
) -> Any:
    gradient = g + decay * w
    square = keep * v + take * gradient * gradient
    velocity = momentum * buffer + gradient / (np.sqrt(square) + eps)
    return w - rate * velocity, square, velocity


@_fused(_rmsprop_momentum, scalars=6)
def rmsprop_momentum(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """RMSprop with momentum."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, v, buffer = _three(arrays[k], at, size)
            for i in range(size):
                w[i], v[i], buffer[i] = _rmsprop_momentum(w[i], v[i], buffer[i], memory[i], *scalars)


@part_of_kernel
def _rmsprop_centered(w: Any, v: Any, mean: Any, g: Any, rate: Any, decay: Any, keep: Any, take: Any, eps: Any) -> Any:
    gradient = g + decay * w
    square = keep * v + take * gradient * gradient
    average = mean + take * (gradient - mean)
    variance = square - average * average
    variance = _select(variance < _ZERO, _ZERO, variance)  # Rounding may make it negative.
    return w - rate * gradient / (np.sqrt(variance) + eps), square, average


@_fused(_rmsprop_centered, scalars=5)
def rmsprop_centered(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Centered RMSprop without momentum."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, v, mean = _three(arrays[k], at, size)
            for i in range(size):
                w[i], v[i], mean[i] = _rmsprop_centered(w[i], v[i], mean[i], memory[i], *scalars)


@part_of_kernel
def _rmsprop_centered_momentum(
    w: Any, v: Any, mean: Any, buffer: Any, g: Any, rate: Any, decay: Any, keep: Any, take: Any, eps: Any, momentum: Any
) -> Any:
    gradient = g + decay * w
    square = keep * v + take * gradient * gradient
    average = mean + take * (gradient - mean)
    variance = square - average * average
    variance = _select(variance < _ZERO, _ZERO, variance)  # Rounding may make it negative.
    velocity = momentum * buffer + gradient / (np.sqrt(variance) + eps)
    return w - rate * velocity, square, average, velocity


@_fused(_rmsprop_centered_momentum, scalars=6)
def rmsprop_centered_momentum(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Centered RMSprop with momentum."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, v, mean = _three(arrays[k], at, size)
            buffer = _at(arrays[k, 3], at, size)
            for i in range(size):
                w[i], v[i], mean[i], buffer[i] = _rmsprop_centered_momentum(
                    w[i], v[i], mean[i], buffer[i], memory[i], *scalars
                )


@part_of_kernel
def _lion(w: Any, m: Any, g: Any, rate: Any, decay: Any, keep1: Any, take1: Any, keep2: Any, take2: Any) -> Any:
    mixed = keep1 * m + take1 * g
    sign = _select(mixed > _ZERO, _ONE, _ZERO) - _select(mixed < _ZERO, _ONE, _ZERO)
    return w - rate * (sign + decay * w), keep2 * m + take2 * g


@_fused(_lion, scalars=6)
def lion(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Lion: the weights move by the sign of one interpolation, and the momentum follows another."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, m = _two(arrays[k], at, size)
            for i in range(size):
                w[i], m[i] = _lion(w[i], m[i], memory[i], *scalars)


@part_of_kernel
def _ftrl(w: Any, residual: Any, total: Any, g: Any, scale: Any, inverse: Any, beta: Any, l1: Any, l2: Any) -> Any:
    gradient = scale * g
    square = total + gradient * gradient
    curvature = (beta + np.sqrt(square)) * inverse + l2
    pull = residual + gradient
    dual = pull - curvature * w
    held = _select(dual > l1, l1, _select(dual < -l1, -l1, dual))
    moved = _select(held != dual, w - (pull - held) / curvature, _ZERO)
    # The curvature is 0 if beta is 0 and there was no gradient so far.
    return _select(curvature > _ZERO, moved, w), held, square


@_fused(_ftrl, scalars=5)
def ftrl(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """FTRL-Proximal in the form that ``optimizers`` derives: ``inverse`` is 1 / alpha, ``scale`` the gradient's."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, residual, total = _three(arrays[k], at, size)
            for i in range(size):
                w[i], residual[i], total[i] = _ftrl(w[i], residual[i], total[i], memory[i], *scalars)


@part_of_kernel
def _replace(w: Any, g: Any, rate: Any) -> Any:
    return rate * g


@_fused(_replace, scalars=1)
def mean(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Replace the weights by the mean itself."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w = _at(arrays[k, 0], at, size)
            for i in range(size):
                w[i] = _replace(w[i], memory[i], *scalars)
