"""Fused updates that divide by the root of squared gradients: Adagrad, Adadelta, RMSprop, FTRL. See ``fused``."""

from __future__ import annotations

from typing import Any

import numpy as np

from psdist.compression.compiled import part_of_kernel
from psdist_server.kernels.fused import ZERO, block_mean, four_at, select, three_at, two_at, updates_by
from psdist_server.kernels.interpreted import BLOCK


@part_of_kernel
def _adagrad(w: Any, total: Any, g: Any, sign: Any, rate: Any, decay: Any, eps: Any) -> Any:
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    square = total + gradient * gradient
    return w - rate * gradient / (np.sqrt(square) + eps), square


@updates_by(_adagrad, scalars=4)
def adagrad(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Adagrad."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, total = two_at(arrays[k], at, size)
            for i in range(size):
                w[i], total[i] = _adagrad(w[i], total[i], memory[i], *scalars)


@part_of_kernel
def _adadelta(
    w: Any, v: Any, moved: Any, g: Any, sign: Any, rate: Any, decay: Any, keep: Any, take: Any, eps: Any
) -> Any:
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    square = keep * v + take * gradient * gradient
    delta = np.sqrt(moved + eps) / np.sqrt(square + eps) * gradient
    return w - rate * delta, square, keep * moved + take * delta * delta


@updates_by(_adadelta, scalars=6)
def adadelta(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Adadelta: ``moved`` is the mean square of the changes."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, v, moved = three_at(arrays[k], at, size)
            for i in range(size):
                w[i], v[i], moved[i] = _adadelta(w[i], v[i], moved[i], memory[i], *scalars)


@part_of_kernel
def _rmsprop(w: Any, v: Any, g: Any, sign: Any, rate: Any, decay: Any, keep: Any, take: Any, eps: Any) -> Any:
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    square = keep * v + take * gradient * gradient
    return w - rate * gradient / (np.sqrt(square) + eps), square


@updates_by(_rmsprop, scalars=6)
def rmsprop(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """RMSprop without momentum."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, v = two_at(arrays[k], at, size)
            for i in range(size):
                w[i], v[i] = _rmsprop(w[i], v[i], memory[i], *scalars)


@part_of_kernel
def _rmsprop_momentum(
    w: Any, v: Any, buffer: Any, g: Any, sign: Any, rate: Any, decay: Any, keep: Any, take: Any, eps: Any, momentum: Any
) -> Any:
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    square = keep * v + take * gradient * gradient
    velocity = momentum * buffer + gradient / (np.sqrt(square) + eps)
    return w - rate * velocity, square, velocity


@updates_by(_rmsprop_momentum, scalars=7)
def rmsprop_momentum(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """RMSprop with momentum."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, v, buffer = three_at(arrays[k], at, size)
            for i in range(size):
                w[i], v[i], buffer[i] = _rmsprop_momentum(w[i], v[i], buffer[i], memory[i], *scalars)


@part_of_kernel
def _rmsprop_centered(
    w: Any, v: Any, mean: Any, g: Any, sign: Any, rate: Any, decay: Any, keep: Any, take: Any, eps: Any
) -> Any:
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    square = keep * v + take * gradient * gradient
    average = mean + take * (gradient - mean)
    variance = square - average * average
    variance = select(variance < ZERO, ZERO, variance)  # Rounding may make it negative.
    return w - rate * gradient / (np.sqrt(variance) + eps), square, average


@updates_by(_rmsprop_centered, scalars=6)
def rmsprop_centered(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Centered RMSprop without momentum."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, v, mean = three_at(arrays[k], at, size)
            for i in range(size):
                w[i], v[i], mean[i] = _rmsprop_centered(w[i], v[i], mean[i], memory[i], *scalars)


@part_of_kernel
def _rmsprop_centered_momentum(
    w: Any,
    v: Any,
    mean: Any,
    buffer: Any,
    g: Any,
    sign: Any,
    rate: Any,
    decay: Any,
    keep: Any,
    take: Any,
    eps: Any,
    momentum: Any,
) -> Any:
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    square = keep * v + take * gradient * gradient
    average = mean + take * (gradient - mean)
    variance = square - average * average
    variance = select(variance < ZERO, ZERO, variance)  # Rounding may make it negative.
    velocity = momentum * buffer + gradient / (np.sqrt(variance) + eps)
    return w - rate * velocity, square, average, velocity


@updates_by(_rmsprop_centered_momentum, scalars=7)
def rmsprop_centered_momentum(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Centered RMSprop with momentum."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, v, mean, buffer = four_at(arrays[k], at, size)
            for i in range(size):
                w[i], v[i], mean[i], buffer[i] = _rmsprop_centered_momentum(
                    w[i], v[i], mean[i], buffer[i], memory[i], *scalars
                )


@part_of_kernel
def _ftrl(w: Any, residual: Any, total: Any, g: Any, scale: Any, inverse: Any, beta: Any, l1: Any, l2: Any) -> Any:
    gradient = scale * g
    square = total + gradient * gradient
    curvature = (beta + np.sqrt(square)) * inverse + l2
    pull = residual + gradient
    dual = pull - curvature * w
    held = select(dual > l1, l1, select(dual < -l1, -l1, dual))
    moved = select(held != dual, w - (pull - held) / curvature, ZERO)
    # The curvature is 0 if beta is 0 and there was no gradient so far.
    return select(curvature > ZERO, moved, w), held, square


@updates_by(_ftrl, scalars=5)
def ftrl(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """FTRL-Proximal in the form that ``optimizers`` derives: ``inverse`` is 1 / alpha, ``scale`` the gradient's."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, residual, total = three_at(arrays[k], at, size)
            for i in range(size):
                w[i], residual[i], total[i] = _ftrl(w[i], residual[i], total[i], memory[i], *scalars)
