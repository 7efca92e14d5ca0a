"""Fused updates of Adam and its relatives. See ``fused``."""

from __future__ import annotations

from typing import Any

import numpy as np

from psdist.compression.compiled import part_of_kernel
from psdist_server.kernels.fused import ONE, ZERO, block_mean, four_at, select, three_at, updates_by
from psdist_server.kernels.interpreted import BLOCK


@part_of_kernel
def _adam(
    w: Any,
    m: Any,
    v: Any,
    g: Any,
    sign: Any,
    decay: Any,
    take1: Any,
    keep2: Any,
    take2: Any,
    size: Any,
    root: Any,
    eps: Any,
) -> Any:
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    mean = m + take1 * (gradient - m)
    square = keep2 * v + take2 * gradient * gradient
    return w - size * mean / (np.sqrt(square) * root + eps), mean, square


@updates_by(_adam, scalars=8)
def adam(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Adam, with L2 weight decay."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, m, v = three_at(arrays[k], at, size)
            for i in range(size):
                w[i], m[i], v[i] = _adam(w[i], m[i], v[i], memory[i], *scalars)


@part_of_kernel
def _adam_amsgrad(
    w: Any,
    m: Any,
    v: Any,
    top: Any,
    g: Any,
    sign: Any,
    decay: Any,
    take1: Any,
    keep2: Any,
    take2: Any,
    size: Any,
    root: Any,
    eps: Any,
) -> Any:
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    mean = m + take1 * (gradient - m)
    square = keep2 * v + take2 * gradient * gradient
    largest = select(square > top, square, top)
    return w - size * mean / (np.sqrt(largest) * root + eps), mean, square, largest


@updates_by(_adam_amsgrad, scalars=8)
def adam_amsgrad(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Adam by the largest second moment so far."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, m, v, top = four_at(arrays[k], at, size)
            for i in range(size):
                w[i], m[i], v[i], top[i] = _adam_amsgrad(w[i], m[i], v[i], top[i], memory[i], *scalars)


@part_of_kernel
def _adamw(
    w: Any,
    m: Any,
    v: Any,
    g: Any,
    sign: Any,
    shrink: Any,
    take1: Any,
    keep2: Any,
    take2: Any,
    size: Any,
    root: Any,
    eps: Any,
) -> Any:
    gradient = sign * g
    mean = m + take1 * (gradient - m)
    square = keep2 * v + take2 * gradient * gradient
    return w * shrink - size * mean / (np.sqrt(square) * root + eps), mean, square


@updates_by(_adamw, scalars=8)
def adamw(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Adam with decoupled weight decay: the weights shrink first."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, m, v = three_at(arrays[k], at, size)
            for i in range(size):
                w[i], m[i], v[i] = _adamw(w[i], m[i], v[i], memory[i], *scalars)


@part_of_kernel
def _adamw_amsgrad(
    w: Any,
    m: Any,
    v: Any,
    top: Any,
    g: Any,
    sign: Any,
    shrink: Any,
    take1: Any,
    keep2: Any,
    take2: Any,
    size: Any,
    root: Any,
    eps: Any,
) -> Any:
    gradient = sign * g
    mean = m + take1 * (gradient - m)
    square = keep2 * v + take2 * gradient * gradient
    largest = select(square > top, square, top)
    return w * shrink - size * mean / (np.sqrt(largest) * root + eps), mean, square, largest


@updates_by(_adamw_amsgrad, scalars=8)
def adamw_amsgrad(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Adam with decoupled weight decay by the largest second moment so far."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, m, v, top = four_at(arrays[k], at, size)
            for i in range(size):
                w[i], m[i], v[i], top[i] = _adamw_amsgrad(w[i], m[i], v[i], top[i], memory[i], *scalars)


@part_of_kernel
def _adamax(
    w: Any, m: Any, top: Any, g: Any, sign: Any, decay: Any, take1: Any, keep2: Any, size: Any, eps: Any
) -> Any:
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    mean = m + take1 * (gradient - m)
    kept = keep2 * top
    reached = np.abs(gradient) + eps
    largest = select(kept > reached, kept, reached)
    return w - size * mean / largest, mean, largest


@updates_by(_adamax, scalars=6)
def adamax(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Adamax: Adam with the infinity norm."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, m, top = three_at(arrays[k], at, size)
            for i in range(size):
                w[i], m[i], top[i] = _adamax(w[i], m[i], top[i], memory[i], *scalars)


@part_of_kernel
def _nadam(
    w: Any,
    m: Any,
    v: Any,
    g: Any,
    sign: Any,
    decay: Any,
    shrink: Any,
    take1: Any,
    keep2: Any,
    take2: Any,
    now: Any,
    later: Any,
    root: Any,
    eps: Any,
) -> Any:
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    mean = m + take1 * (gradient - m)
    square = keep2 * v + take2 * gradient * gradient
    inverse = ONE / (np.sqrt(square) * root + eps)
    moved = w * shrink - now * gradient * inverse  # As in torch, the weights are rounded twice.
    return moved - later * mean * inverse, mean, square


@updates_by(_nadam, scalars=10)
def nadam(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Adam with Nesterov's momentum: ``now`` and ``later`` are the rates of gradient and mean."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, m, v = three_at(arrays[k], at, size)
            for i in range(size):
                w[i], m[i], v[i] = _nadam(w[i], m[i], v[i], memory[i], *scalars)


@part_of_kernel
def _radam(
    w: Any,
    m: Any,
    v: Any,
    g: Any,
    sign: Any,
    decay: Any,
    shrink: Any,
    take1: Any,
    keep2: Any,
    take2: Any,
    size: Any,
    rectified: Any,
    eps: Any,
) -> Any:
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    mean = m + take1 * (gradient - m)
    square = keep2 * v + take2 * gradient * gradient
    divisor = select(rectified > ZERO, np.sqrt(square) + eps, ONE)
    return w * shrink - size * mean / divisor, mean, square


@updates_by(_radam, scalars=9)
def radam(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Rectified Adam: while ``rectified`` is 0, the second moment has no effect yet."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, m, v = three_at(arrays[k], at, size)
            for i in range(size):
                w[i], m[i], v[i] = _radam(w[i], m[i], v[i], memory[i], *scalars)
