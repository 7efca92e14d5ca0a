"""Runs of groups whose workers make steps by ``ElasticSteps``, with the faults of ``groups``.

Each worker gives a vector with its own element, so a mean shows which workers it contains. Checked: All workers have
the same mean of each step, and the same weights after it. A mean is that of the workers that contributed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psdist.collectives.elastic import ElasticSteps, StepArrays
from tests.simulation.groups import GroupWorld, _Life

#: Elements of a vector: more than there are ranks.
_ELEMENTS = 40


class _State:
    """Weights of one worker, after the number of the worker whose initial weights they come from."""

    def __init__(self, number: int) -> None:
        self.weights = np.array([float(number), *np.zeros(_ELEMENTS)])

    async def export(self) -> NDArray[np.uint8]:
        """See ElasticState."""
        return self.weights.copy().view(np.uint8)

    async def load(self, data: NDArray[np.uint8]) -> None:
        """See ElasticState."""
        self.weights = data.view(np.float64).copy()

    @property
    def origin(self) -> float:
        return float(self.weights[0])


class StepWorld(GroupWorld):
    """See the module."""

    def __init__(self, loop: Any, options: Any) -> None:
        super().__init__(loop, options)
        #: Mean and weights of each step, as the first worker knew them.
        self._means: dict[tuple[float, int], bytes] = {}
        self._weights: dict[tuple[float, int], bytes] = {}

    async def work(self, life: _Life) -> None:
        """Make steps, forever."""
        state = _State(life.number)
        steps = ElasticSteps(lambda: self.join(life), state)
        await steps.start()
        while True:
            life.group = steps.group
            await self.think(steps.group)
            await steps.begin_step()
            given, out = np.zeros(_ELEMENTS), np.zeros(_ELEMENTS)
            given[life.member.rank] = 1.0
            await steps.reduce(StepArrays([given, given[:2].copy()], [out, np.empty(2)], 1))
            self._check_mean(life, steps.step, state, out)
            state.weights[1:] = state.weights[1:] / 2 + out
            self._compare(self._weights, "weights", life, (state.origin, steps.step), state.weights)
            life.group = steps.group
            life.calls_at_end += self.is_healed
            self.counts["steps"] += 1

    def _check_mean(self, life: _Life, step: int, state: _State, mean: NDArray[np.float64]) -> None:
        count = np.count_nonzero(mean)
        if count and not np.allclose(mean[mean > 0], 1 / count):
            self.violations.append(f"{life.member}: step {step} has the mean {mean[mean > 0].tolist()}")
        self._compare(self._means, "mean", life, (state.origin, step), mean)

    def _compare(self, known: Any, what: str, life: _Life, key: tuple[float, int], array: NDArray[np.float64]) -> None:
        if known.setdefault(key, array.tobytes()) != array.tobytes():
            self.violations.append(f"{life.member}: another {what} of step {key[1]}")
