"""Runs whose weights are known to the byte: gradients, initial values, and the reference of every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from psdist import optim
from psdist.optim import Optimizer
from psdist_server.kernels.optimizers import Rule, clip_factor
from tests.support import reference

STEPS = 5
SLICE = 4096
#: Eight slices and a bit, with tensors that start and end anywhere, including a scalar and an empty one.
SHAPES = {"embed": (101, 61), "w1": (17, 23, 41), "scale": (), "none": (0, 4), "w2": (9973,), "b": (7,), "w3": (1301,)}
TOTAL = sum(int(np.prod(shape)) for shape in SHAPES.values())
PLAIN: dict[str, Optimizer] = {
    "sgd": optim.SGD(lr=0.1, weight_decay=0.01),
    "momentum": optim.SGD(lr=0.1, momentum=0.9, dampening=0.1),
    "nesterov": optim.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": optim.Adam(lr=1e-2, weight_decay=0.1),
    "adamw": optim.AdamW(lr=1e-2),
    "adagrad": optim.Adagrad(lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    "rmsprop": optim.RMSprop(lr=1e-2),
    "rmsprop-full": optim.RMSprop(lr=1e-2, momentum=0.9, centered=True, weight_decay=0.01),
    "lion": optim.Lion(lr=1e-3, weight_decay=0.1),
    "ftrl": optim.FTRL(lr=0.1, l1=0.01, l2=0.1),
    "mean": optim.Mean(),
    "overrides": optim.Adam(overrides=(optim.override("w*", lr=0.1, beta1=0.5), optim.override("b", lr=0.0))),
}
WARM = optim.Cosine(20, warmup_steps=3)
#: Every optimizer by itself, and with warm-up and clipping.
OPTIMIZERS = PLAIN | {
    f"{name}-warm-clipped": replace(spec, schedule=WARM, max_grad_norm=1.0) for name, spec in PLAIN.items()
}


def initial() -> np.ndarray:
    return np.random.default_rng(7).standard_normal(TOTAL).astype(np.float32)


def gradient(step: int, rank: int) -> np.ndarray:
    return (np.random.default_rng([step, rank]).standard_normal(TOTAL) * 10.0 ** (rank - 1)).astype(np.float32)


def split(flat: np.ndarray) -> dict[str, np.ndarray]:
    sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}


def joined(values: dict[str, np.ndarray]) -> bytes:
    return b"".join(values[name].tobytes() for name in SHAPES)


class Reference:
    """Weights of a run, in one process with plain numpy, not cut into slices."""

    def __init__(self, spec: Optimizer, workers: int = 2) -> None:
        self.weights, self.step, self.workers = initial(), 0, workers
        self.begin(spec)

    def begin(self, spec: Optimizer) -> None:
        """Continue with another optimizer and fresh state."""
        self.since = self.step
        self.change(spec)
        self.states = tuple(np.zeros(TOTAL, np.float32) for _ in spec.state_names)
        Rule(spec).initialize(self.weights, self.states, self.ranges)

    def change(self, spec: Optimizer) -> None:
        """Continue with other settings and the current state."""
        self.spec, self.ranges = spec, group_ranges(spec)

    def train(
        self,
        pushed: Callable[[int, int], np.ndarray] = gradient,
        weights: Sequence[float] = (),
        written: Mapping[str, np.ndarray] | None = None,
        factor: float = 1.0,
        settings: Mapping[int, Mapping[str, float]] | None = None,
    ) -> bytes:
        """Make one step of all workers. Returns the weights after it.

        pushed: returns the gradient of a step and a rank, as servers have it.
        weights: those of the ranks; 0 contributes nothing.
        written: values that the tensors get before.
        factor: for the learning rate.
        settings: hyperparameters by group.
        """
        given = weights or [1.0] * self.workers
        step, self.step = self.step, self.step + 1
        for name, array in split(self.weights).items():
            if written and name in written:
                array[...] = written[name]
        parts = [np.float32(weight) * pushed(step, rank) for rank, weight in enumerate(given) if weight]
        if not parts:
            return self.weights.tobytes()
        mean = np.empty(TOTAL, np.float32)
        reference.combine(mean, parts, sum(given))
        if self.spec.max_grad_norm:
            squares = [reference.sum_squares(mean[at : at + SLICE]) for at in range(0, TOTAL, SLICE)]
            total = 0.0
            for square in squares:
                total += square
            reference.scale(mean, clip_factor(float(np.sqrt(total)), self.spec.max_grad_norm))
        for start, stop, group in self.ranges:
            part = slice(start, stop)
            values = self.spec.group_values(group)
            if settings is not None:
                values = self.spec.setting_defaults(group) | dict(settings.get(group, {}))
            states = tuple(state[part] for state in self.states)
            reference.update(self.spec, values, self.weights[part], states, mean[part], step, factor, self.since)
        return self.weights.tobytes()


def reference_run(spec: Optimizer, workers: int = 2, steps: int = STEPS, **pushes: Any) -> list[bytes]:
    """Return the weights after every step. pushes: what ``Reference.train`` takes, each as a list by step."""
    run = Reference(spec, workers)
    return [run.train(**{name: values[step] for name, values in pushes.items()}) for step in range(steps)]


def group_ranges(spec: Optimizer) -> tuple[tuple[int, int, int], ...]:
    ranges, start = [], 0
    for name, shape in SHAPES.items():
        stop = start + int(np.prod(shape))
        ranges.append((start, stop, optim.group_of(name, spec.overrides)))
        start = stop
    return tuple(ranges)
