"""Fused updates: the mean of contributions and the optimizer's arithmetic in one pass over memory, for several slices.

There is one kernel for each optimizer. It goes block by block. Contributions to a block are added in the first-level
cache (``kernels.mean_of_block``), and from there the block's weights and state are updated. One call updates several
slices, because a thread needs the interpreter between calls, and the kernel has evicted the interpreter's memory from
the caches. The same arithmetic in plain numpy is in ``tests/support/reference.py``, and the bytes are the same.

A block in which contributions have NaN or Inf is updated by the mean of the others. A block whose mean is still not
finite (its sum overflows) is not updated. The values of a contribution are read once before they count, so memory that
is written meanwhile cannot bring such a value in.

Arguments of all kernels, for n segments (a segment is a range of one slice whose elements have the same scalars):

- arrays uintp[n, 1 to 4]: addresses of the segment's weights, then of its state in the optimizer's order;
- segments int64[n, 3]: its size in elements, where in each contribution it begins, how many contributions there are;
- parts uintp[n, m], codes int64[n, m]: addresses and types (``kernels.CODES``) of the contributions to the slice;
- divisions float32[n, 2]: ``kernels.division_by``, or a divisor of 0 and any factor;
- memory float32[2 * BLOCK]: the thread's own;
- bad uint8[n, m]: set to 1 for contributions that were left out of a block;
- scalars: as ``optimizers`` computes them.

The kernels check nothing. Only ``arrays`` calls them. They are written out one by one, because numba keeps what it
compiled from run to run only for functions that no factory made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, types

from psdist.compression.compiled import FLOAT, OUT, Kernel
from psdist_server.kernels.kernels import BLOCK, add_to_block, mean_of_block, part_of_kernel, pointer

_ADDRESSES = types.Array(types.uintp, 2, "C")
_INTEGERS = types.Array(types.int64, 2, "C")
_DIVISIONS = types.Array(FLOAT, 2, "C")
_BAD = types.Array(types.uint8, 2, "C")
_JOB = (_ADDRESSES, _INTEGERS, _ADDRESSES, _INTEGERS, _DIVISIONS, OUT, _BAD)


def _fused(*, scalars: int) -> Callable[[Callable[..., Any]], Kernel]:
    return lambda function: Kernel(function, (*_JOB, types.UniTuple(FLOAT, scalars)))


@part_of_kernel
def _mean(segment: Any, at: Any, parts: Any, codes: Any, division: Any, memory: Any, bad: Any) -> Any:
    """The mean of the contributions to the block at element ``at`` of a segment, into ``memory``. Returns the block's
    size; 0 where no contribution to it is finite, or the mean is not."""
    size, start, count = min(BLOCK, segment[0] - at), segment[1] + at, segment[2]
    divisor, factor = division[0], division[1]
    block = memory[:size]
    if mean_of_block(block, parts, codes, count, start, divisor, factor) == np.uint32(0):
        return size
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
        return 0
    finite = True
    for i in range(size):
        block[i] = block[i] * factor if divisor == np.float32(0.0) and good == count else block[i] / np.float32(good)
        finite = finite and np.isfinite(block[i])
    return size if finite else 0


@part_of_kernel
def _at(address: Any, start: Any, size: Any) -> Any:
    """``size`` floats from element ``start`` on."""
    return carray(pointer(address + np.uintp(4 * start)), (size,), np.float32)


@part_of_kernel
def _two(addresses: Any, at: Any, size: Any) -> Any:
    return _at(addresses[0], at, size), _at(addresses[1], at, size)


@part_of_kernel
def _three(addresses: Any, at: Any, size: Any) -> Any:
    return _at(addresses[0], at, size), _at(addresses[1], at, size), _at(addresses[2], at, size)


# --- optimizers -------------------------------------------------------------------------------------------------------
# The arithmetic of each in place, one pass over memory: w weights, then the state, then g the gradient. Weight decay 0
# is no special case: the loops wait for memory anyway.


@part_of_kernel
def _sgd(w: Any, g: Any, rate: Any, decay: Any) -> None:
    for i in range(w.size):
        w[i] = w[i] - rate * (g[i] + decay * w[i])


@_fused(scalars=2)
def sgd(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, scalars: Any
) -> None:
    """Plain stochastic gradient descent."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k])
            _sgd(_at(arrays[k, 0], at, size), memory[:size], *scalars)


@part_of_kernel
def _sgd_momentum(w: Any, buffer: Any, g: Any, rate: Any, decay: Any, keep: Any, take: Any) -> None:
    for i in range(w.size):
        gradient = g[i] + decay * w[i]
        velocity = keep * buffer[i] + take * gradient
        buffer[i] = velocity
        w[i] = w[i] - rate * velocity


@_fused(scalars=4)
def sgd_momentum(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, scalars: Any
) -> None:
    """Heavy ball: buffer = keep * buffer + take * gradient."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k])
            _sgd_momentum(*_two(arrays[k], at, size), memory[:size], *scalars)


@part_of_kernel
def _sgd_nesterov(w: Any, buffer: Any, g: Any, rate: Any, decay: Any, keep: Any, take: Any) -> None:
    for i in range(w.size):
        gradient = g[i] + decay * w[i]
        velocity = keep * buffer[i] + take * gradient
        buffer[i] = velocity
        w[i] = w[i] - rate * (gradient + keep * velocity)


@_fused(scalars=4)
def sgd_nesterov(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, scalars: Any
) -> None:
    """Nesterov's momentum in torch's form."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k])
            _sgd_nesterov(*_two(arrays[k], at, size), memory[:size], *scalars)


@part_of_kernel
def _adam(
    w: Any, m: Any, v: Any, g: Any, decay: Any, take1: Any, keep2: Any, take2: Any, size: Any, root: Any, eps: Any
) -> None:
    for i in range(w.size):
        gradient = g[i] + decay * w[i]
        mean = m[i] + take1 * (gradient - m[i])
        square = keep2 * v[i] + take2 * gradient * gradient
        m[i] = mean
        v[i] = square
        w[i] = w[i] - size * mean / (np.sqrt(square) * root + eps)


@_fused(scalars=7)
def adam(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, scalars: Any
) -> None:
    """Adam, with L2 weight decay."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k])
            _adam(*_three(arrays[k], at, size), memory[:size], *scalars)


@part_of_kernel
def _adamw(
    w: Any, m: Any, v: Any, g: Any, shrink: Any, take1: Any, keep2: Any, take2: Any, size: Any, root: Any, eps: Any
) -> None:
    for i in range(w.size):
        mean = m[i] + take1 * (g[i] - m[i])
        square = keep2 * v[i] + take2 * g[i] * g[i]
        m[i] = mean
        v[i] = square
        w[i] = w[i] * shrink - size * mean / (np.sqrt(square) * root + eps)


@_fused(scalars=7)
def adamw(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, scalars: Any
) -> None:
    """Adam with decoupled weight decay: the weights shrink first."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k])
            _adamw(*_three(arrays[k], at, size), memory[:size], *scalars)


@part_of_kernel
def _adagrad(w: Any, total: Any, g: Any, rate: Any, decay: Any, eps: Any) -> None:
    for i in range(w.size):
        gradient = g[i] + decay * w[i]
        square = total[i] + gradient * gradient
        total[i] = square
        w[i] = w[i] - rate * gradient / (np.sqrt(square) + eps)


@_fused(scalars=3)
def adagrad(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, scalars: Any
) -> None:
    """Adagrad."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k])
            _adagrad(*_two(arrays[k], at, size), memory[:size], *scalars)


@part_of_kernel
def _rmsprop(w: Any, v: Any, g: Any, rate: Any, decay: Any, keep: Any, take: Any, eps: Any) -> None:
    for i in range(w.size):
        gradient = g[i] + decay * w[i]
        square = keep * v[i] + take * gradient * gradient
        v[i] = square
        w[i] = w[i] - rate * gradient / (np.sqrt(square) + eps)


@_fused(scalars=5)
def rmsprop(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, scalars: Any
) -> None:
    """RMSprop without momentum."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k])
            _rmsprop(*_two(arrays[k], at, size), memory[:size], *scalars)


@part_of_kernel
def _rmsprop_momentum(
    w: Any, v: Any, buffer: Any, g: Any, rate: Any, decay: Any, keep: Any, take: Any, eps: Any, momentum: Any
) -> None:
    for i in range(w.size):
        gradient = g[i] + decay * w[i]
        square = keep * v[i] + take * gradient * gradient
        v[i] = square
        velocity = momentum * buffer[i] + gradient / (np.sqrt(square) + eps)
        buffer[i] = velocity
        w[i] = w[i] - rate * velocity


@_fused(scalars=6)
def rmsprop_momentum(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, scalars: Any
) -> None:
    """RMSprop with momentum."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k])
            _rmsprop_momentum(*_three(arrays[k], at, size), memory[:size], *scalars)


@part_of_kernel
def _rmsprop_centered(w: Any, v: Any, mean: Any, g: Any, rate: Any, decay: Any, keep: Any, take: Any, eps: Any) -> None:
    for i in range(w.size):
        gradient = g[i] + decay * w[i]
        square = keep * v[i] + take * gradient * gradient
        v[i] = square
        average = mean[i] + take * (gradient - mean[i])
        mean[i] = average
        variance = square - average * average
        variance = np.float32(0.0) if variance < np.float32(0.0) else variance
        w[i] = w[i] - rate * gradient / (np.sqrt(variance) + eps)


@_fused(scalars=5)
def rmsprop_centered(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, scalars: Any
) -> None:
    """Centered RMSprop without momentum."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k])
            _rmsprop_centered(*_three(arrays[k], at, size), memory[:size], *scalars)


@part_of_kernel
def _rmsprop_centered_momentum(
    w: Any, v: Any, mean: Any, buffer: Any, g: Any, rate: Any, decay: Any, keep: Any, take: Any, eps: Any, momentum: Any
) -> None:
    for i in range(w.size):
        gradient = g[i] + decay * w[i]
        square = keep * v[i] + take * gradient * gradient
        v[i] = square
        average = mean[i] + take * (gradient - mean[i])
        mean[i] = average
        variance = square - average * average
        variance = np.float32(0.0) if variance < np.float32(0.0) else variance
        velocity = momentum * buffer[i] + gradient / (np.sqrt(variance) + eps)
        buffer[i] = velocity
        w[i] = w[i] - rate * velocity


@_fused(scalars=6)
def rmsprop_centered_momentum(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, scalars: Any
) -> None:
    """Centered RMSprop with momentum."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k])
            _rmsprop_centered_momentum(
                *_two(arrays[k], at, size), *_two(arrays[k, 2:], at, size), memory[:size], *scalars
            )


@part_of_kernel
def _lion(w: Any, m: Any, g: Any, rate: Any, decay: Any, keep1: Any, take1: Any, keep2: Any, take2: Any) -> None:
    zero, one = np.float32(0.0), np.float32(1.0)
    for i in range(w.size):
        mixed = keep1 * m[i] + take1 * g[i]
        sign = (one if mixed > zero else zero) - (one if mixed < zero else zero)
        w[i] = w[i] - rate * (sign + decay * w[i])
        m[i] = keep2 * m[i] + take2 * g[i]


@_fused(scalars=6)
def lion(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, scalars: Any
) -> None:
    """Lion: the weights move by the sign of an interpolation, the momentum follows by another."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k])
            _lion(*_two(arrays[k], at, size), memory[:size], *scalars)


@part_of_kernel
def _ftrl(w: Any, residual: Any, total: Any, g: Any, scale: Any, inverse: Any, beta: Any, l1: Any, l2: Any) -> None:
    for i in range(w.size):
        gradient = scale * g[i]
        square = total[i] + gradient * gradient
        total[i] = square
        curvature = (beta + np.sqrt(square)) * inverse + l2
        pull = residual[i] + gradient
        dual = pull - curvature * w[i]
        held = l1 if dual > l1 else (-l1 if dual < -l1 else dual)
        residual[i] = held
        moved = w[i] - (pull - held) / curvature if held != dual else np.float32(0.0)
        w[i] = moved if curvature > np.float32(0.0) else w[i]  # beta 0, and no gradient so far


@_fused(scalars=5)
def ftrl(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, scalars: Any
) -> None:
    """FTRL-Proximal in the form that ``optimizers`` derives: ``inverse`` is 1 / alpha, ``scale`` the gradient's."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = _mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k])
            _ftrl(*_three(arrays[k], at, size), memory[:size], *scalars)
