"""Lower bounds of a step on this machine: its arithmetic alone, and a plain copy of the same bytes.

Role ``kernel``: the gradients of all workers are summed, divided, and Adam updates the weights, in one pass over memory
(each worker's gradient, both moments and the weights), by a thread for each core, in one process, without
communication. Role ``memcpy``: the bytes of one gradient are copied by a thread for each core.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numba
import numpy as np
from numpy.typing import NDArray

from benchmarks import turns

Floats = NDArray[np.float32]

LEARNING_RATE, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8
#: Largest number of elements of a thread's work: small enough to share the work evenly, large enough to hide the
#: threads' cost.
CHUNK_MAX = 1 << 20
_BLOCK = 2048  # the sum of a block stays in the first-level cache


def update(
    gradients: tuple[Floats, ...], weights: Floats, mean: Floats, square: Floats, step: int, start: int, stop: int
) -> None:
    """Apply Adam to the elements [start, stop) with the mean of the gradients; compiled by ``compiled``."""
    lr, beta1, beta2 = np.float32(LEARNING_RATE), np.float32(BETA1), np.float32(BETA2)
    eps, one = np.float32(EPSILON), np.float32(1)
    size, shrink = lr / (one - np.float32(BETA1**step)), one / (one - np.float32(BETA2**step))
    share = one / np.float32(len(gradients))
    several = np.float32(len(gradients) > 1)  # with one gradient, the first is also the last
    total = np.empty(_BLOCK, np.float32)
    for low in range(start, stop, _BLOCK):
        high = min(low + _BLOCK, stop)
        # Views let all loops count from 0, which the compiler turns into wide instructions.
        w, m, v, first = weights[low:high], mean[low:high], square[low:high], gradients[0][low:high]
        last = gradients[-1][low:high]
        for i in range(high - low):
            total[i] = first[i] * several
        for worker in range(1, len(gradients) - 1):
            gradient = gradients[worker][low:high]
            for i in range(high - low):
                total[i] += gradient[i]
        for i in range(high - low):
            g = (total[i] + last[i]) * share
            m[i] = beta1 * m[i] + (one - beta1) * g
            v[i] = beta2 * v[i] + (one - beta2) * g * g
            w[i] -= size * m[i] / (np.sqrt(v[i] * shrink) + eps)


def reference(
    gradients: tuple[Floats, ...], weights: Floats, mean: Floats, square: Floats, step: int, start: int, stop: int
) -> None:
    """Do the same in numpy."""
    part = slice(start, stop)
    g = np.sum([gradient[part] for gradient in gradients], axis=0, dtype=np.float32) / np.float32(len(gradients))
    mean[part] = BETA1 * mean[part] + (1 - BETA1) * g
    square[part] = BETA2 * square[part] + (1 - BETA2) * g * g
    corrected = np.sqrt(square[part] / (1 - BETA2**step)) + EPSILON
    weights[part] -= LEARNING_RATE * (mean[part] / (1 - BETA1**step)) / corrected


def compiled() -> Callable[..., None]:
    """Return the compiled ``update``, which runs without the interpreter's lock after its first call."""
    return numba.njit(nogil=True, error_model="numpy", fastmath=True)(update)


class LowerBound:
    """The arrays of one step, and the threads."""

    def __init__(self, params: int, workers: int) -> None:
        self.params, self.count = params, 0
        self.gradients = tuple(np.full(params, 1e-3, np.float32) for _ in range(workers))
        self.weights, self.mean, self.square = (np.full(params, value, np.float32) for value in (1.0, 0.0, 0.0))
        self._kernel = compiled()
        cores = len(os.sched_getaffinity(0))
        self._threads = ThreadPoolExecutor(cores)
        chunk = min(CHUNK_MAX, -(-params // (4 * cores)))
        self._chunks = [(start, min(start + chunk, params)) for start in range(0, params, chunk)]

    def step(self) -> None:
        """Update all elements once."""
        self.count += 1
        arrays = (self.gradients, self.weights, self.mean, self.square, self.count)
        list(self._threads.map(lambda chunk: self._kernel(*arrays, *chunk), self._chunks))

    def copy(self) -> None:
        """Copy one gradient."""

        def part(chunk: tuple[int, int]) -> None:
            np.copyto(self.weights[slice(*chunk)], self.gradients[0][slice(*chunk)])

        list(self._threads.map(part, self._chunks))


def main() -> None:
    """Take turns until the benchmark ends."""
    settings = turns.settings()
    bound = LowerBound(settings.params, 1 if settings.role == "memcpy" else settings.workers)
    turns.serve(partial(turns.timed, bound.copy if settings.role == "memcpy" else bound.step))


if __name__ == "__main__":
    main()
