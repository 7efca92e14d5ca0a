"""Arithmetic of the optimizers: new weights and state of one element from old ones and the gradient.

Each function here is one optimizer, or one variant of it. The arguments are w (weights), the state in the optimizer's
order, g (gradient) and the scalars, as ``optimizers`` computes them; ``sign`` is -1 to maximize, else 1. Weight decay 0
adds nothing to the gradient, not even for infinite weights, as in torch. Choices are ``select``, which is vectorized.

It is written once for all: ``updates`` compiles it for single elements, numpy runs it on whole arrays of any float
dtype (``interpreted``, ``double``), and ``device_parameters`` translates it to CUDA C. After a change, run ``make
updates``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from psdist.compression.kernel_runtime import PartOfKernel, part_of_kernel

#: A float32, or an array of float32 or float64.
F = Any

ZERO, ONE = np.float32(0.0), np.float32(1.0)


def _choose(condition: Any, one: Any, other: Any) -> Any:
    return one if condition else other


#: ``one`` where the condition holds, else ``other``. It is vectorized; numba's own ``where`` is not.
select = PartOfKernel(_choose, np.where)


# --- without second moments -------------------------------------------------------------------------------------------


@part_of_kernel
def sgd(w: F, g: F, sign: F, rate: F, decay: F) -> Any:
    """Plain stochastic gradient descent."""
    return w - rate * select(decay != ZERO, sign * g + decay * w, sign * g)


@part_of_kernel
def sgd_momentum(w: F, buffer: F, g: F, sign: F, rate: F, decay: F, keep: F, take: F) -> Any:
    """Heavy ball: buffer = keep * buffer + take * gradient."""
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    velocity = keep * buffer + take * gradient
    return w - rate * velocity, velocity


@part_of_kernel
def sgd_nesterov(w: F, buffer: F, g: F, sign: F, rate: F, decay: F, keep: F, take: F) -> Any:
    """Nesterov's momentum in torch's form."""
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    velocity = keep * buffer + take * gradient
    return w - rate * (gradient + keep * velocity), velocity


@part_of_kernel
def asgd(w: F, average: F, g: F, sign: F, rate: F, decay: F, shrink: F, take: F) -> Any:
    """Averaged stochastic gradient descent: the average is only stored."""
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    moved = w * shrink - rate * gradient
    return moved, select(take == ONE, moved, average + (moved - average) * take)


@part_of_kernel
def rprop(w: F, previous: F, step: F, g: F, sign: F, rate: F, minus: F, plus: F, low: F, high: F) -> Any:
    """Resilient backpropagation: ``rate`` is the step of an element before its first update."""
    gradient = sign * g
    product = gradient * previous
    begun = select(step == ZERO, rate, step)  # No step that was made is 0.
    scaled = begun * select(product > ZERO, plus, select(product < ZERO, minus, ONE))
    raised = select(scaled < low, low, scaled)
    size = select(raised > high, high, raised)
    held = select(product < ZERO, ZERO, gradient)
    direction = select(held > ZERO, ONE, ZERO) - select(held < ZERO, ONE, ZERO)
    return w - size * direction, held, size


@part_of_kernel
def lion(w: F, m: F, g: F, rate: F, decay: F, keep1: F, take1: F, keep2: F, take2: F) -> Any:
    """Lion: the weights move by the sign of one interpolation, and the momentum follows another."""
    mixed = keep1 * m + take1 * g
    sign = select(mixed > ZERO, ONE, ZERO) - select(mixed < ZERO, ONE, ZERO)
    return w - rate * select(decay != ZERO, sign + decay * w, sign), keep2 * m + take2 * g


@part_of_kernel
def mean(w: F, g: F, rate: F) -> Any:
    """Replace the weights by the mean itself."""
    return rate * g


# --- Adam and its relatives -------------------------------------------------------------------------------------------


@part_of_kernel
def adam(w: F, m: F, v: F, g: F, sign: F, decay: F, take1: F, keep2: F, take2: F, size: F, root: F, eps: F) -> Any:
    """Adam, with L2 weight decay."""
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    mean = m + take1 * (gradient - m)
    square = keep2 * v + take2 * gradient * gradient
    return w - size * mean / (np.sqrt(square) * root + eps), mean, square


@part_of_kernel
def adam_amsgrad(
    w: F, m: F, v: F, top: F, g: F, sign: F, decay: F, take1: F, keep2: F, take2: F, size: F, root: F, eps: F
) -> Any:
    """Adam by the largest second moment so far."""
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    mean = m + take1 * (gradient - m)
    square = keep2 * v + take2 * gradient * gradient
    largest = select(square > top, square, top)
    return w - size * mean / (np.sqrt(largest) * root + eps), mean, square, largest


@part_of_kernel
def adamw(w: F, m: F, v: F, g: F, sign: F, shrink: F, take1: F, keep2: F, take2: F, size: F, root: F, eps: F) -> Any:
    """Adam with decoupled weight decay: the weights shrink first."""
    gradient = sign * g
    mean = m + take1 * (gradient - m)
    square = keep2 * v + take2 * gradient * gradient
    return w * shrink - size * mean / (np.sqrt(square) * root + eps), mean, square


@part_of_kernel
def adamw_amsgrad(
    w: F, m: F, v: F, top: F, g: F, sign: F, shrink: F, take1: F, keep2: F, take2: F, size: F, root: F, eps: F
) -> Any:
    """Adam with decoupled weight decay by the largest second moment so far."""
    gradient = sign * g
    mean = m + take1 * (gradient - m)
    square = keep2 * v + take2 * gradient * gradient
    largest = select(square > top, square, top)
    return w * shrink - size * mean / (np.sqrt(largest) * root + eps), mean, square, largest


@part_of_kernel
def adamax(w: F, m: F, top: F, g: F, sign: F, decay: F, take1: F, keep2: F, size: F, eps: F) -> Any:
    """Adamax: Adam with the infinity norm."""
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    mean = m + take1 * (gradient - m)
    kept = keep2 * top
    reached = np.abs(gradient) + eps
    largest = select(kept > reached, kept, reached)
    return w - size * mean / largest, mean, largest


@part_of_kernel
def nadam(
    w: F,
    m: F,
    v: F,
    g: F,
    sign: F,
    decay: F,
    shrink: F,
    take1: F,
    keep2: F,
    take2: F,
    now: F,
    later: F,
    root: F,
    eps: F,
) -> Any:
    """Adam with Nesterov's momentum: ``now`` and ``later`` are the rates of gradient and mean."""
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    mean = m + take1 * (gradient - m)
    square = keep2 * v + take2 * gradient * gradient
    inverse = ONE / (np.sqrt(square) * root + eps)
    moved = w * shrink - now * gradient * inverse  # As in torch, the weights are rounded twice.
    return moved - later * mean * inverse, mean, square


@part_of_kernel
def radam(
    w: F, m: F, v: F, g: F, sign: F, decay: F, shrink: F, take1: F, keep2: F, take2: F, size: F, rectified: F, eps: F
) -> Any:
    """Rectified Adam: while ``rectified`` is 0, the second moment has no effect yet."""
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    mean = m + take1 * (gradient - m)
    square = keep2 * v + take2 * gradient * gradient
    divisor = select(rectified > ZERO, np.sqrt(square) + eps, ONE)
    return w * shrink - size * mean / divisor, mean, square


# --- division by the root of squared gradients ------------------------------------------------------------------------


@part_of_kernel
def adagrad(w: F, total: F, g: F, sign: F, rate: F, decay: F, eps: F) -> Any:
    """Adagrad."""
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    square = total + gradient * gradient
    return w - rate * gradient / (np.sqrt(square) + eps), square


@part_of_kernel
def adadelta(w: F, v: F, moved: F, g: F, sign: F, rate: F, decay: F, keep: F, take: F, eps: F) -> Any:
    """Adadelta: ``moved`` is the mean square of the changes."""
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    square = keep * v + take * gradient * gradient
    delta = np.sqrt(moved + eps) / np.sqrt(square + eps) * gradient
    return w - rate * delta, square, keep * moved + take * delta * delta


@part_of_kernel
def rmsprop(w: F, v: F, g: F, sign: F, rate: F, decay: F, keep: F, take: F, eps: F) -> Any:
    """RMSprop without momentum."""
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    square = keep * v + take * gradient * gradient
    return w - rate * gradient / (np.sqrt(square) + eps), square


@part_of_kernel
def rmsprop_momentum(
    w: F, v: F, buffer: F, g: F, sign: F, rate: F, decay: F, keep: F, take: F, eps: F, momentum: F
) -> Any:
    """RMSprop with momentum."""
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    square = keep * v + take * gradient * gradient
    velocity = momentum * buffer + gradient / (np.sqrt(square) + eps)
    return w - rate * velocity, square, velocity


@part_of_kernel
def rmsprop_centered(w: F, v: F, mean: F, g: F, sign: F, rate: F, decay: F, keep: F, take: F, eps: F) -> Any:
    """Centered RMSprop without momentum."""
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    square = keep * v + take * gradient * gradient
    average = mean + take * (gradient - mean)
    variance = square - average * average
    variance = select(variance < ZERO, ZERO, variance)  # Rounding may make it negative.
    return w - rate * gradient / (np.sqrt(variance) + eps), square, average


@part_of_kernel
def rmsprop_centered_momentum(
    w: F, v: F, mean: F, buffer: F, g: F, sign: F, rate: F, decay: F, keep: F, take: F, eps: F, momentum: F
) -> Any:
    """Centered RMSprop with momentum."""
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    square = keep * v + take * gradient * gradient
    average = mean + take * (gradient - mean)
    variance = square - average * average
    variance = select(variance < ZERO, ZERO, variance)  # Rounding may make it negative.
    velocity = momentum * buffer + gradient / (np.sqrt(variance) + eps)
    return w - rate * velocity, square, average, velocity


@part_of_kernel
def ftrl(w: F, residual: F, total: F, g: F, scale: F, inverse: F, beta: F, l1: F, l2: F) -> Any:
    """FTRL-Proximal in the form that ``optimizers`` derives: ``inverse`` is 1 / alpha, ``scale`` the gradient's."""
    gradient = scale * g
    square = total + gradient * gradient
    curvature = (beta + np.sqrt(square)) * inverse + l2
    pull = residual + gradient
    dual = pull - curvature * w
    held = select(dual > l1, l1, select(dual < -l1, -l1, dual))
    moved = select(held != dual, w - (pull - held) / curvature, ZERO)
    # The curvature is 0 if beta is 0 and there was no gradient so far.
    return select(curvature > ZERO, moved, w), held, square
