"""Fused updates without second moments: SGD, ASGD, Rprop, Lion, and the mean itself. See ``fused``."""

from __future__ import annotations

from typing import Any

from psdist.compression.compiled import part_of_kernel
from psdist_server.kernels.fused import ONE, ZERO, block_mean, floats_at, select, three_at, two_at, updates_by
from psdist_server.kernels.interpreted import BLOCK


@part_of_kernel
def _sgd(w: Any, g: Any, sign: Any, rate: Any, decay: Any) -> Any:
    return w - rate * select(decay != ZERO, sign * g + decay * w, sign * g)


@updates_by(_sgd, scalars=3)
def sgd(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Plain stochastic gradient descent."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w = floats_at(arrays[k, 0], at, size)
            for i in range(size):
                w[i] = _sgd(w[i], memory[i], *scalars)


@part_of_kernel
def _sgd_momentum(w: Any, buffer: Any, g: Any, sign: Any, rate: Any, decay: Any, keep: Any, take: Any) -> Any:
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    velocity = keep * buffer + take * gradient
    return w - rate * velocity, velocity


@updates_by(_sgd_momentum, scalars=5)
def sgd_momentum(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Heavy ball: buffer = keep * buffer + take * gradient."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, buffer = two_at(arrays[k], at, size)
            for i in range(size):
                w[i], buffer[i] = _sgd_momentum(w[i], buffer[i], memory[i], *scalars)


@part_of_kernel
def _sgd_nesterov(w: Any, buffer: Any, g: Any, sign: Any, rate: Any, decay: Any, keep: Any, take: Any) -> Any:
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    velocity = keep * buffer + take * gradient
    return w - rate * (gradient + keep * velocity), velocity


@updates_by(_sgd_nesterov, scalars=5)
def sgd_nesterov(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Nesterov's momentum in torch's form."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, buffer = two_at(arrays[k], at, size)
            for i in range(size):
                w[i], buffer[i] = _sgd_nesterov(w[i], buffer[i], memory[i], *scalars)


@part_of_kernel
def _asgd(w: Any, average: Any, g: Any, sign: Any, rate: Any, decay: Any, shrink: Any, take: Any) -> Any:
    gradient = select(decay != ZERO, sign * g + decay * w, sign * g)
    moved = w * shrink - rate * gradient
    return moved, select(take == ONE, moved, average + (moved - average) * take)


@updates_by(_asgd, scalars=5)
def asgd(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Averaged stochastic gradient descent: the average is only stored."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, average = two_at(arrays[k], at, size)
            for i in range(size):
                w[i], average[i] = _asgd(w[i], average[i], memory[i], *scalars)


@part_of_kernel
def _rprop(
    w: Any, previous: Any, step: Any, g: Any, sign: Any, rate: Any, minus: Any, plus: Any, low: Any, high: Any
) -> Any:
    gradient = sign * g
    product = gradient * previous
    begun = select(step == ZERO, rate, step)  # No step that was made is 0.
    scaled = begun * select(product > ZERO, plus, select(product < ZERO, minus, ONE))
    raised = select(scaled < low, low, scaled)
    size = select(raised > high, high, raised)
    held = select(product < ZERO, ZERO, gradient)
    direction = select(held > ZERO, ONE, ZERO) - select(held < ZERO, ONE, ZERO)
    return w - size * direction, held, size


@updates_by(_rprop, scalars=6)
def rprop(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Resilient backpropagation: ``rate`` is the step of an element before its first update."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, previous, step = three_at(arrays[k], at, size)
            for i in range(size):
                w[i], previous[i], step[i] = _rprop(w[i], previous[i], step[i], memory[i], *scalars)


@part_of_kernel
def _lion(w: Any, m: Any, g: Any, rate: Any, decay: Any, keep1: Any, take1: Any, keep2: Any, take2: Any) -> Any:
    mixed = keep1 * m + take1 * g
    sign = select(mixed > ZERO, ONE, ZERO) - select(mixed < ZERO, ONE, ZERO)
    return w - rate * select(decay != ZERO, sign + decay * w, sign), keep2 * m + take2 * g


@updates_by(_lion, scalars=6)
def lion(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Lion: the weights move by the sign of one interpolation, and the momentum follows another."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w, m = two_at(arrays[k], at, size)
            for i in range(size):
                w[i], m[i] = _lion(w[i], m[i], memory[i], *scalars)


@part_of_kernel
def _replace(w: Any, g: Any, rate: Any) -> Any:
    return rate * g


@updates_by(_replace, scalars=1)
def mean(
    arrays: Any, segments: Any, parts: Any, codes: Any, divisions: Any, memory: Any, bad: Any, means: Any, scalars: Any
) -> None:
    """Replace the weights by the mean itself."""
    for k in range(len(segments)):
        for at in range(0, segments[k, 0], BLOCK):
            size = block_mean(segments[k], at, parts[k], codes[k], divisions[k], memory, bad[k], means[k])
            w = floats_at(arrays[k, 0], at, size)
            for i in range(size):
                w[i] = _replace(w[i], memory[i], *scalars)
